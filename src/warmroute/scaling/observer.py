"""What a decision is made from: samples of the fleet, their windows, and impossible values removed."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable
from math import inf, isfinite
from typing import Any, Final, TypeVar

import msgspec

from warmroute.config import Scaling
from warmroute.config.nodes import Role
from warmroute.config.scaling import Pool
from warmroute.core.cache_view import CacheView
from warmroute.core.demand import COUNTERS, DemandMeter, good_ttft_ms, percentile_ms, share_within
from warmroute.core.fleet import Fleet
from warmroute.core.health import HealthState
from warmroute.core.node import Node
from warmroute.core.speeds import DEFAULT_BASE_MS, DEFAULT_MS_PER_TOKEN, DEFAULT_SLOPE_MS
from warmroute.scaling.node_lifecycle import LifecycleState, ManagedNode
from warmroute.scaling.offers import OfferKey, is_quantity

# Collects what a scaling decision is made from: the demand meter once an interval, and the fleet's current state.
#
#     DemandMeter (only grows)  ── read once an interval ──> Sample ── the samples of a window ──> WindowMetrics
#     Fleet, CacheView          ── current state ──────────> NodeView, one for each node
#
# The service and replay both use it.

ROUNDING: Final = 1e-6
"""A difference of two sums below this fraction of the larger one is a rounding error."""


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one node."""

    name: str
    role: Role = "mixed"
    switchable: bool = False
    """Whether the node could have another role."""
    island: str = "local"
    gpu: str = ""
    offer: OfferKey | None = None
    """The offer that the node came from; None for a node that somebody else added, which the autoscaler never
    removes."""
    usd_per_hour: float = 0.0
    removable: bool = True
    """Whether the node's provisioner could terminate it now."""
    serving: bool = True
    """Whether the node accepts requests. A draining or unreachable node does not."""
    draining: bool = False
    unchecked: bool = False
    """Whether no health check of the node has ended yet. It counts as a pending node."""
    reclaimed: bool = False
    """Whether the cloud takes the machine back, whatever the autoscaler does."""
    load: int = 0
    queued: int = 0
    """Requests that wait at the node."""
    kv_usage: float = 0.0
    """Fraction of the node's KV memory that running requests hold."""
    ms_per_token: float = DEFAULT_MS_PER_TOKEN
    learned: bool = False
    """Whether the node's speed was measured."""
    long_ms_per_token: float = DEFAULT_MS_PER_TOKEN
    """Prefill time per token of long prompts, in which the time of a step does not count."""
    step_ms: float = 0.0
    """Time of a decode step that no prefill interrupts; 0 if unknown."""
    cache_blocks: int = 0
    """Capacity of the node's cache in blocks; 0 if unknown."""
    kv_tokens: int = 0
    """Capacity of the node's cache in tokens; 0 if unknown."""
    held_blocks: int = 0
    oldest_age_s: float = 0.0
    """Time since the last use of the block that the node would evict next."""


def pool_of(role: Role) -> Pool:
    """Return the pool of nodes with this role. A mixed node serves requests, as a decode node does."""
    return "prefill" if role == "prefill" else "decode"


class PoolSample(msgspec.Struct):
    """The state of the nodes of one pool at the end of an interval."""

    waiting: int = 0
    """Requests that wait at the nodes."""
    kv_usage: float = 0.0


class Sample(msgspec.Struct):
    """What happened within one interval."""

    at_s: float
    span_s: float
    counts: list[float]
    """By how much each counter of COUNTERS rose in the interval."""
    ttft: array[int]
    latency: array[int]
    waiting: int = 0
    """Requests that wait at the router or at nodes, at the end of the interval."""
    kv_usage: float = 0.0
    """Fraction of the serving nodes' KV memory that running requests hold, at the end of the interval."""
    inter_token: array[int] = array("q")
    pools: dict[Pool, PoolSample] = {}
    """Empty where no node has a role."""


class WindowMetrics(msgspec.Struct, kw_only=True):
    """What happened within a window; None for unknown values."""

    span_s: float = 0.0
    arrivals_per_s: float = 0.0
    shed_per_s: float = 0.0
    hit_ratio: float | None = None
    prefill_work: float | None = None
    """Mean prefill work of a request, in tokens of a short prompt."""
    variation: float = 0.0
    """Variance of the prefill work divided by the square of its mean."""
    decode_context: float | None = None
    """Mean of output tokens × context of a request."""
    ttft_p90_ms: float | None = None
    ttft_p99_ms: float | None = None
    latency_p99_ms: float | None = None
    inter_token_p90_ms: float | None = None
    """P90 over streamed responses of their mean time between tokens."""
    good_ratio: float | None = None
    """Fraction of first tokens within the time of goodput, for a prompt of the mean length."""
    first_tokens: int = 0
    inter_token_samples: int = 0
    """Streamed responses whose time between tokens was measured."""
    arrivals: int = 0
    waiting: float = 0.0
    """Mean number of requests that wait at the router or at nodes."""
    kv_usage: float = 0.0
    """Mean fraction of the serving nodes' KV memory that running requests hold."""


class FleetView(msgspec.Struct, kw_only=True):
    """Everything that a decision is made from."""

    now_s: float
    stable: WindowMetrics
    panic: WindowMetrics
    nodes: tuple[NodeView, ...] = ()
    waiting: int = 0
    """Requests that wait at the router now, also for the first node."""
    slope_ms: float = DEFAULT_SLOPE_MS
    """Additional decode time per output token for each token of context (core/speeds.py)."""
    decode_base_ms: float = DEFAULT_BASE_MS
    """Decode time per output token over an empty context."""
    idle_s: float = 0.0
    """Time since the last request, or since the autoscaler started."""
    reuse_within: Callable[[float], float] = lambda _age_s: 0.0
    """Fraction of block uses that follow an earlier use within this many seconds (core/reuse.py)."""
    reuse_chance: Callable[[float], float] = lambda _age_s: 0.0
    """Probability that a block unused for this many seconds is used again."""
    growth_per_s: float = 0.0
    """Relative growth of the load per second; negative if it falls."""


def summarize(samples: Iterable[Sample], pool: Pool | None = None) -> WindowMetrics:
    """Return the metrics of a window. With `pool`, only what the nodes of one pool had to do."""
    window = list(samples)
    span_s = sum(sample.span_s for sample in window)
    if span_s <= 0:
        return WindowMetrics()
    totals = [sum(column) for column in zip(*(sample.counts for sample in window), strict=True)]
    total = dict(zip(COUNTERS, totals, strict=True))
    if pool is not None:
        _keep_pool(total, pool)
    ttft, latency, inter_token = (
        [sum(column) for column in zip(*(getattr(sample, name) for sample in window), strict=True)]
        for name in ("ttft", "latency", "inter_token")
    )
    # Prefill nodes return no answer: times between tokens and latencies are those of the decode pool.
    if pool == "prefill":
        latency = inter_token = []
    states = [(_state(sample, pool), sample.span_s) for sample in window]
    sent, responses = total["sent"], total["responses"]
    work = total["prefill_work"] / sent if sent > 0 else 0.0
    good_ms = good_ttft_ms(total["prompt_tokens"] / sent if sent > 0 else 0.0)
    return WindowMetrics(
        span_s=span_s,
        arrivals=int(total["arrived"]),
        arrivals_per_s=total["arrived"] / span_s,
        shed_per_s=total["shed"] / span_s,
        hit_ratio=total["cached_tokens"] / total["prompt_tokens"] if total["prompt_tokens"] > 0 else None,
        prefill_work=work if sent > 0 else None,
        variation=max(0.0, total["prefill_squares"] / sent / work**2 - 1.0) if work > 0 else 0.0,
        decode_context=total["decode_context"] / responses if responses > 0 else None,
        ttft_p90_ms=percentile_ms(ttft, 0.9),
        ttft_p99_ms=percentile_ms(ttft, 0.99),
        latency_p99_ms=percentile_ms(latency, 0.99),
        inter_token_p90_ms=percentile_ms(inter_token, 0.9),
        good_ratio=share_within(ttft, good_ms),
        first_tokens=sum(ttft),
        inter_token_samples=sum(inter_token),
        waiting=sum(state.waiting * part_s for state, part_s in states) / span_s,
        kv_usage=sum(state.kv_usage * part_s for state, part_s in states) / span_s,
    )


def _state(sample: Sample, pool: Pool | None) -> PoolSample | Sample:
    return sample if pool is None else sample.pools.get(pool) or PoolSample()


def _keep_pool(total: dict[str, float], pool: Pool) -> None:
    """Keep what counts for one pool. Requests that the router rejects count for none: the router does not know which
    pool would have had to be larger."""
    on_prefill = {
        "prompt_tokens": total["prefill_pool_tokens"],
        "cached_tokens": total["prefill_pool_cached"],
        "prefill_work": total["prefill_pool_work"],
        "prefill_squares": total["prefill_pool_squares"],
    }
    if pool == "decode":  # its nodes decode every request, also those that prefill nodes prefill
        for name, value in on_prefill.items():
            # Sums of floats that should cancel leave 1e-12. That would be a window with work and without requests.
            rest = total[name] - value
            total[name] = rest if rest > ROUNDING * total[name] else 0.0
        total["cached_tokens"] = min(total["cached_tokens"], total["prompt_tokens"])
        return
    total.update(on_prefill, sent=total["prefill_pool_sent"], arrived=total["prefill_pool_sent"])
    total.update(shed=0.0, responses=0.0, decode_context=0.0)


class FleetObserver:
    def __init__(
        self, fleet: Fleet, cache_view: CacheView, demand_meter: DemandMeter, waiting: Callable[[], int]
    ) -> None:
        """`waiting` returns the number of requests that wait at the router."""
        self._fleet = fleet
        self._cache_view = cache_view
        self._meter = demand_meter
        self._waiting = waiting
        self._counts = demand_meter.counts()
        self._times = demand_meter.times()
        self._read_s: float | None = None
        self._busy_s = inf
        """Time of the last request. Before the first one, idle time counts from the first sample."""

    def sample(self, now_s: float) -> Sample:
        """Return what happened since the last sample."""
        meter, fleet = self._meter, self._fleet
        counts, times = meter.counts(), meter.times()
        span_s = max(0.0, now_s - self._read_s) if self._read_s is not None else 0.0
        waiting = self._waiting()
        usages = [node.kv_usage for node in fleet if not node.draining and node.health.state is HealthState.UP]
        sample = Sample(
            now_s,
            span_s,
            [after - before for after, before in zip(counts, self._counts, strict=True)],
            _difference(times[0], self._times[0]),
            _difference(times[1], self._times[1]),
            waiting + sum(node.queued for node in fleet),
            sum(usages) / len(usages) if usages else 0.0,
            _difference(times[2], self._times[2]),
            self._pools() if fleet.has_roles else {},
        )
        # A long answer keeps its fleet from scaling to zero, although no request arrives.
        if self._read_s is None or sample.counts[0] or waiting or any(node.load for node in fleet):
            self._busy_s = now_s
        self._counts, self._times, self._read_s = counts, times, now_s
        return sample

    def _pools(self) -> dict[Pool, PoolSample]:
        pools: dict[Pool, PoolSample] = {}
        up: dict[Pool, list[float]] = {}
        for node in self._fleet:
            pool = pool_of(node.role)
            pools.setdefault(pool, PoolSample()).waiting += node.queued
            if not node.draining and node.health.state is HealthState.UP:
                up.setdefault(pool, []).append(node.kv_usage)
        for pool, usages in up.items():
            pools[pool].kv_usage = sum(usages) / len(usages)
        return pools

    def view(
        self, now_s: float, stable: WindowMetrics, panic: WindowMetrics, growth_per_s: float = 0.0,
        managed: Iterable[ManagedNode] = (),
    ) -> FleetView:  # fmt: skip
        """Return the fleet's current state, without nodes that do not serve yet."""
        fleet = self._fleet
        decode_speeds = [group.decode_speed for group in fleet.groups]
        by_name: dict[str, ManagedNode] = {}
        for one in managed:
            by_name.setdefault(one.name, one)
        managed_nodes = [(node, by_name.get(node.name)) for node in fleet]
        return FleetView(
            now_s=now_s,
            stable=stable,
            panic=panic,
            nodes=tuple(self._node(node, one, now_s) for node, one in managed_nodes if one is None or not one.pending),
            waiting=self._waiting(),
            slope_ms=decode_speeds[0].slope_ms if decode_speeds else DEFAULT_SLOPE_MS,
            decode_base_ms=decode_speeds[0].token_ms(0.0) if decode_speeds else DEFAULT_BASE_MS,
            idle_s=max(0.0, now_s - self._busy_s),
            reuse_within=self._cache_view.reuse.share_within,
            reuse_chance=self._cache_view.reuse.chance,
            growth_per_s=growth_per_s,
        )

    def _node(self, node: Node, managed: ManagedNode | None, now_s: float) -> NodeView:
        cache = self._cache_view.cache(node.name)
        capacity = cache.capacity_blocks if cache is not None else 0
        held = max(0, cache.recency.capacity - cache.free_blocks) if cache is not None else 0
        oldest_s = cache.oldest_s if cache is not None else now_s
        # A node that is to be removed still accepts requests until its hot prefixes are on another node.
        leaving = managed is not None and managed.state is LifecycleState.DRAINING
        return NodeView(
            name=node.name,
            role=node.role,
            switchable=not node.obstacle_to("decode" if node.role == "prefill" else "prefill"),
            island=node.island,
            gpu=node.config.gpu,
            offer=managed.offer.key if managed is not None else None,
            usd_per_hour=node.config.usd_per_hour,
            removable=managed is None or managed.removable,
            serving=not node.draining and not leaving and node.health.state is HealthState.UP,
            draining=node.draining or leaving,
            unchecked=not node.draining and node.health.state is HealthState.UNKNOWN,
            reclaimed=managed is not None and managed.reclaimed,
            load=node.load,
            queued=node.queued,
            kv_usage=node.kv_usage,
            ms_per_token=node.speed.ms_per_token,
            learned=node.speed.answers > 0,
            long_ms_per_token=node.speed.long_ms_per_token,
            step_ms=node.speed.step_ms,
            cache_blocks=capacity,
            kv_tokens=capacity * cache.block_size if cache is not None else 0,
            held_blocks=held,
            oldest_age_s=max(0.0, now_s - oldest_s) if oldest_s == oldest_s else 0.0,
        )


def _difference(after: array[int], before: array[int]) -> array[int]:
    return array("q", [a - b for a, b in zip(after, before, strict=True)])


# The last samples in two windows: a stable one for decisions and a short one that detects a panic. A longer window
# measures the trend of the load, so that nodes that take minutes to start are requested early enough.

MAX_SAMPLES: Final = 2048
"""Bounds memory: at an interval of 5 s, samples of almost three hours."""
MIN_TREND_SAMPLES: Final = 12
"""A line through fewer samples says too little."""
STANDARD_ERRORS: Final = 1.0
"""A trend counts minus this many standard errors, so that noise is no trend."""
_ARRIVED: Final = COUNTERS.index("arrived")


class MetricWindows:
    def __init__(self, config: Scaling) -> None:
        self.config = config
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)

    def add(self, sample: Sample) -> None:
        samples, config = self._samples, self.config
        if sample.span_s > 0:
            samples.append(sample)
        longest_s = max(config.stable_window_s, config.trend_window_s)
        while len(samples) > 1 and samples[0].at_s <= sample.at_s - longest_s:
            samples.popleft()

    def _last(self, window_s: float, pool: Pool | None = None) -> WindowMetrics:
        if not self._samples:
            return WindowMetrics()
        since_s = self._samples[-1].at_s - window_s
        return summarize((sample for sample in self._samples if sample.at_s > since_s + 1e-6), pool)

    @property
    def stable(self) -> WindowMetrics:
        return self._last(self.config.stable_window_s)

    @property
    def panic(self) -> WindowMetrics:
        return self._last(self.config.panic_window_s)

    def of_pool(self, pool: Pool) -> tuple[WindowMetrics, WindowMetrics]:
        """Return the stable window and the panic window of one pool."""
        return self._last(self.config.stable_window_s, pool), self._last(self.config.panic_window_s, pool)

    @property
    def growth_per_s(self) -> float:
        """The relative growth of the load per second: the slope of a line through the arrivals of `trend_window_s`. 0
        if chance alone could explain it."""
        config, samples = self.config, self._samples
        if not config.trend_window_s or not samples:
            return 0.0
        since_s = samples[-1].at_s - config.trend_window_s
        points = [(s.at_s, s.counts[_ARRIVED] / s.span_s) for s in samples if s.at_s > since_s]
        count = len(points)
        # A short piece of a wave looks like a trend. Half of the window has to be there.
        if count < MIN_TREND_SAMPLES or points[-1][0] - points[0][0] < 0.5 * config.trend_window_s:
            return 0.0
        mean_t = sum(t for t, _ in points) / count
        mean_y = sum(y for _, y in points) / count
        spread = sum((t - mean_t) ** 2 for t, _ in points)
        slope = sum((t - mean_t) * (y - mean_y) for t, y in points) / spread
        residual = sum((y - mean_y - slope * (t - mean_t)) ** 2 for t, y in points)
        margin = STANDARD_ERRORS * (residual / (count - 2) / spread) ** 0.5
        certain = max(0.0, slope - margin) if slope > 0 else min(0.0, slope + margin)
        # Growth is relative to the load at the end of the line, where the forecast begins.
        level = mean_y + slope * (points[-1][0] - mean_t)
        return certain / level if level > 0 else 0.0


# Replaces impossible metrics in a fleet view: not a number, below 0, or a speed that no hardware has. The autoscaler
# treats such a value as unknown and reports it.

T = TypeVar("T", WindowMetrics, NodeView)

_LIMITS: Final = {
    "hit_ratio": (0.0, 1.0),
    "good_ratio": (0.0, 1.0),
    "ms_per_token": (1e-6, 1e6),
    "long_ms_per_token": (1e-6, 1e6),
}
"""The possible range of a field, where 0 to infinity is too wide."""
_NODE_FIELDS: Final = (
    "usd_per_hour", "kv_usage", "ms_per_token", "long_ms_per_token", "step_ms", "cache_blocks", "kv_tokens",
    "held_blocks", "oldest_age_s", "queued",
)  # fmt: skip


def sanitize(view: FleetView, problems: list[str]) -> FleetView:
    """Return the view without impossible values, and append a sentence to `problems` for each of them."""
    return msgspec.structs.replace(
        view,
        stable=_window(view.stable, problems),
        panic=_window(view.panic, problems),
        growth_per_s=view.growth_per_s if isfinite(view.growth_per_s) else 0.0,
        nodes=tuple(_node(node, problems) for node in view.nodes),
        waiting=max(0, view.waiting),
    )


def _window(window: WindowMetrics, problems: list[str]) -> WindowMetrics:
    return _replace_impossible(window, WindowMetrics(), WindowMetrics.__struct_fields__, "", problems)


def _node(node: NodeView, problems: list[str]) -> NodeView:
    sanitized = _replace_impossible(node, NodeView(name=""), _NODE_FIELDS, f" of node {node.name}", problems)
    if (sanitized.ms_per_token, sanitized.long_ms_per_token) != (node.ms_per_token, node.long_ms_per_token):
        return msgspec.structs.replace(sanitized, learned=False)
    return sanitized


def _replace_impossible(values: T, unknown: T, fields: Iterable[str], whose: str, problems: list[str]) -> T:
    changed: dict[str, Any] = {}
    for field in fields:
        value = getattr(values, field)
        least, most = _LIMITS.get(field, (0.0, inf))
        if value is None or (is_quantity(value) and least <= value <= most):
            continue
        changed[field] = getattr(unknown, field)
        problems.append(f"ignoring {field} {value}{whose}")
    return msgspec.structs.replace(values, **changed) if changed else values
