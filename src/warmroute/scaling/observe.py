"""What the loop sees: samples of the meter, one for each interval, and the fleet's books as they stand.

    meter (only added to) ── read each interval ──> Sample ── the last so many ──> Seen (a window)
    fleet, beliefs        ── as they stand ───────> NodeView, one for each node

The same for the service and for the simulator: it asks the fleet's and the beliefs' books, and nobody else.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable
from math import inf

import msgspec

from warmroute.fleet.decode_speed import USUAL_SLOPE_MS
from warmroute.fleet.demand import TIME_BOUNDS_MS, DemandMeter, percentile_ms
from warmroute.fleet.fleet import Fleet
from warmroute.fleet.health import Standing
from warmroute.fleet.node import Node
from warmroute.fleet.speed import USUAL_MS_PER_TOKEN
from warmroute.index.cache_view import CacheView

SUMS = (
    "arrived", "shed", "sent", "prompt_tokens", "cached_tokens", "prefill_work", "prefill_squares",
    "prefill_ms", "answers", "decode_tokens", "decode_context",
)  # fmt: skip


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """One node, as its books say."""

    name: str
    island: str = "local"
    gpu: str = ""
    offer: tuple[str, str] | None = None
    """Where it came from; None for a node that somebody else put there, which is left alone."""
    usd_per_hour: float = 0.0
    endable: bool = True
    """Its cloud could end it now."""
    serving: bool = True
    """Takes requests; a draining node, and one that cannot be reached, does not."""
    draining: bool = False
    unchecked: bool = False
    """Nobody knows yet whether it answers: it counts as one that is on its way."""
    leaving: bool = False
    """Its cloud takes it back, whatever is done here."""
    load: int = 0
    queued: int = 0
    """Requests that wait there."""
    kv_usage: float = 0.0
    """Share of its KV memory that running requests hold."""
    ms_per_token: float = USUAL_MS_PER_TOKEN
    learned: bool = False
    """Its speed is its own, not a guess."""
    cache_blocks: int = 0
    """What its cache can hold; 0 where it has not said."""
    held_blocks: int = 0
    oldest_age_s: float = 0.0
    """How long ago what it would evict next was used."""


class Sample(msgspec.Struct):
    """What happened within one interval."""

    at_s: float
    span_s: float
    sums: list[float]
    """In the order of SUMS."""
    ttft: array[int]
    latency: array[int]
    waiting: int = 0
    """Requests that wait, here and on nodes, at its end."""
    kv_usage: float = 0.0
    """Share of the serving nodes' KV memory that running requests hold, at its end."""


class Seen(msgspec.Struct, kw_only=True):
    """What happened within a window. None where nothing tells."""

    span_s: float = 0.0
    arrivals_per_s: float = 0.0
    shed_per_s: float = 0.0
    hit_ratio: float | None = None
    work: float | None = None
    """Prefill work of a request, in tokens of a short prompt."""
    variation: float = 0.0
    """Of that work: variance by the mean's square."""
    decode_context: float | None = None
    """Tokens of an answer × what each looks back at, of a request."""
    decode_tokens: float | None = None
    ttft_p90_ms: float | None = None
    ttft_p99_ms: float | None = None
    latency_p99_ms: float | None = None
    first_tokens: int = 0
    arrivals: int = 0
    waiting: float = 0.0
    """Requests that wait, here and on nodes: the mean."""
    kv_usage: float = 0.0
    """Share of the serving nodes' KV memory that running requests hold: the mean."""


class FleetView(msgspec.Struct, kw_only=True):
    """All that a decision is made from."""

    now_s: float
    stable: Seen
    panic: Seen
    nodes: tuple[NodeView, ...] = ()
    waiting: int = 0
    """Requests that wait here, now; for a first node, too."""
    slope_ms: float = USUAL_SLOPE_MS
    """What a token of an answer takes longer for each token of context (see fleet/decode_speed.py)."""
    idle_s: float = 0.0
    """Time since a request was last here, or since somebody began to look."""
    reuse_within: Callable[[float], float] = lambda _age_s: 0.0
    """Of all uses of blocks, the share that was used before within so many seconds (see index/reuse.py)."""
    reuse_chance: Callable[[float], float] = lambda _age_s: 0.0
    """That a block unused for so many seconds is used again."""
    growth_per_s: float = 0.0
    """How fast the load grows, as a share of it; below 0 where it falls."""


def seen(samples: Iterable[Sample]) -> Seen:
    """Sums up a window."""
    found = list(samples)
    span_s = sum(sample.span_s for sample in found)
    if span_s <= 0:
        return Seen()
    total = [sum(column) for column in zip(*(sample.sums for sample in found), strict=True)]
    of = dict(zip(SUMS, total, strict=True))
    ttft, latency = (
        [sum(column) for column in zip(*(getattr(sample, name) for sample in found), strict=True)]
        for name in ("ttft", "latency")
    )
    sent, answers = of["sent"], of["answers"]
    work = of["prefill_work"] / sent if sent > 0 else 0.0
    return Seen(
        span_s=span_s,
        arrivals=int(of["arrived"]),
        arrivals_per_s=of["arrived"] / span_s,
        shed_per_s=of["shed"] / span_s,
        hit_ratio=of["cached_tokens"] / of["prompt_tokens"] if of["prompt_tokens"] > 0 else None,
        work=work if sent > 0 else None,
        variation=max(0.0, of["prefill_squares"] / sent / work**2 - 1.0) if work > 0 else 0.0,
        decode_context=of["decode_context"] / answers if answers > 0 else None,
        decode_tokens=of["decode_tokens"] / answers if answers > 0 else None,
        ttft_p90_ms=percentile_ms(ttft, 0.9),
        ttft_p99_ms=percentile_ms(ttft, 0.99),
        latency_p99_ms=percentile_ms(latency, 0.99),
        first_tokens=sum(ttft),
        waiting=sum(sample.waiting * sample.span_s for sample in found) / span_s,
        kv_usage=sum(sample.kv_usage * sample.span_s for sample in found) / span_s,
    )


class Observer:
    """Reads the books once an interval."""

    def __init__(
        self, fleet: Fleet, cache_view: CacheView, demand_meter: DemandMeter, waiting: Callable[[], int]
    ) -> None:
        self._fleet = fleet
        self._cache_view = cache_view
        self._meter = demand_meter
        self._waiting = waiting
        """Requests that wait at the router now."""
        self._sums = self._read()
        self._ttft, self._latency = demand_meter.ttft_counts[:], demand_meter.latency_counts[:]
        self._read_s: float | None = None
        self._busy_s = inf
        """When a request was last here. Before the first sample nobody knows: idle time begins with that."""

    def _read(self) -> list[float]:
        return [float(getattr(self._meter, name)) for name in SUMS]

    def sample(self, now_s: float) -> Sample:
        """What happened since the last one."""
        demand_meter, fleet = self._meter, self._fleet
        sums, ttft, latency = self._read(), demand_meter.ttft_counts[:], demand_meter.latency_counts[:]
        span_s = max(0.0, now_s - self._read_s) if self._read_s is not None else 0.0
        waiting = self._waiting()
        usages = [node.kv_usage for node in fleet if not node.draining and node.health.standing is Standing.UP]
        found = Sample(
            now_s,
            span_s,
            [after - before for after, before in zip(sums, self._sums, strict=True)],
            _difference(ttft, self._ttft),
            _difference(latency, self._latency),
            waiting + sum(node.queued for node in fleet),
            sum(usages) / len(usages) if usages else 0.0,
        )
        if self._read_s is None or found.sums[0] or waiting or any(node.load for node in fleet):
            self._busy_s = now_s
        self._sums, self._ttft, self._latency, self._read_s = sums, ttft, latency, now_s
        return found

    def view(
        self,
        now_s: float,
        stable: Seen,
        panic: Seen,
        growth_per_s: float,
        ours: Callable[[Node], tuple[str, str] | None],
        without: Collection[str] = (),
        kept: Collection[str] = (),
    ) -> FleetView:
        """`ours` tells which offer a node came from. `without`: nodes that are still warming. `kept`: those that
        can't be ended now."""
        fleet = self._fleet
        slopes = [group.pace.slope_ms for group in fleet.groups]
        return FleetView(
            now_s=now_s,
            stable=stable,
            panic=panic,
            nodes=tuple(
                self._node(node, now_s, ours(node), node.name not in kept) for node in fleet if node.name not in without
            ),
            waiting=self._waiting(),
            slope_ms=slopes[0] if slopes else USUAL_SLOPE_MS,
            idle_s=max(0.0, now_s - self._busy_s),
            reuse_within=self._cache_view.reuse.share_within,
            reuse_chance=self._cache_view.reuse.chance,
            growth_per_s=growth_per_s,
        )

    def _node(self, node: Node, now_s: float, offer: tuple[str, str] | None, endable: bool) -> NodeView:
        cache = self._cache_view.cache(node.name)
        capacity = cache.capacity_blocks if cache is not None else 0
        held = max(0, cache.recency.capacity - cache.free_blocks) if cache is not None else 0
        oldest_s = cache.oldest_s if cache is not None else now_s
        return NodeView(
            name=node.name,
            island=node.island,
            gpu=node.config.gpu,
            offer=offer,
            usd_per_hour=node.config.usd_per_hour,
            endable=endable,
            serving=not node.draining and node.health.standing is Standing.UP,
            draining=node.draining,
            unchecked=not node.draining and node.health.standing is Standing.UNKNOWN,
            load=node.load,
            queued=node.queued,
            kv_usage=node.kv_usage,
            ms_per_token=node.speed.ms_per_token,
            learned=node.speed.answers > 0,
            cache_blocks=capacity,
            held_blocks=held,
            oldest_age_s=max(0.0, now_s - oldest_s) if oldest_s == oldest_s else 0.0,
        )


def _difference(after: array[int], before: array[int]) -> array[int]:
    return array("q", [a - b for a, b in zip(after, before, strict=True)])


def no_times() -> array[int]:
    return array("q", bytes(8 * (len(TIME_BOUNDS_MS) + 1)))
