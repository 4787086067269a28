"""Estimates the utilisation of the current fleet, and of any other fleet, under the current demand.

    load(fleet)      = (arrivals + waiting / window) · (prefill(fleet) + decode)    [node seconds per second]
    prefill          = prefill work · (1 − hit(fleet)) / (1 − hit now) · ms_per_token   per request
    decode           = tokens · context · slope                                     per request: what it adds to steps
    utilisation      = load / weight;  weight: number of nodes, each by its speed relative to the usual one
    wait             = P(wait) · (1 + variation) / 2 · service / (weight · (1 − utilisation))   Allen and Cunneen
                       P(wait) = utilisation ^ (√(2 · (weight + 1)) − 1)                        Sakasegawa
    kv(fleet)        = kv now · (weight − load) now / (weight − load)               fraction of KV memory in use
    retention(fleet) = blocks / inflow                                              [s] age of a block at its eviction
    hit(fleet)       = hit now · reused within retention(fleet) / reused within retention now

A request holds its KV memory for as long as its response takes. Decode steps take longer with more context, and with
more time spent on prefills. By the line of core/speeds.py a node then holds arrivals · tokens · context · base /
(weight − load) tokens, which grows without limit as the load approaches the weight.

The last two formulas tell thrashing from unique traffic. A larger cache retains blocks longer; core/reuse.py
measures whether that gets them used. If no block is reused later than it is retained now, a larger cache does not help,
and the low hit ratio is a property of the traffic. The same formulas say what a smaller fleet would lose.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite, sqrt
from statistics import median
from typing import Final

import msgspec

from warmroute.config import Scaling
from warmroute.core.speeds import DEFAULT_MS_PER_TOKEN
from warmroute.scaling.observer import FleetView, NodeView, WindowMetrics
from warmroute.scaling.scaling_decision import PaidNode

MAX_RETENTION_S: Final = 86_400.0
"""A day. Without evictions a block would stay for ever."""
MIN_MISS_RATIO: Final = 0.02
"""Fraction of a prompt that is assumed to be computed in any case."""
MIN_SPARE: Final = 0.05
"""Fraction of a fleet's time that is assumed to be spare; the formula for KV memory fails below it."""
MAX_UTILISATION: Final = 0.98
"""Above this utilisation the estimated wait is infinite."""
MAX_VARIATION: Final = 25.0
"""The variance of the prefill work counts up to this multiple of its squared mean. A window has few requests, and one
very long prompt among them says little about the next."""
WAIT_SHARE: Final = 0.3
"""Requests may wait for `max_mean_wait_ms`, or for this fraction of their own service time if that is longer."""


class FleetSize(msgspec.Struct, frozen=True):
    """The capacity of a fleet."""

    weight: float
    """Number of nodes, each by its speed."""
    blocks: float
    """Capacity of all its caches."""

    def plus(self, weight: float, blocks: float) -> FleetSize:
        return FleetSize(self.weight + weight, self.blocks + blocks)


class GpuSpeeds:
    """The speed and the cache size of nodes by GPU, learned from the current nodes."""

    def __init__(self, nodes: Sequence[NodeView]) -> None:
        by_gpu: dict[str, list[NodeView]] = {}
        for node in nodes:
            by_gpu.setdefault(node.gpu, []).append(node)
        self._ms: dict[str, float] = {}
        self._blocks: dict[str, float] = {}
        for gpu, same_gpu in by_gpu.items():
            # The median: one node with a throttled clock must not make all nodes of its kind look slow.
            learned = [node.ms_per_token for node in same_gpu if node.learned]
            if learned:
                self._ms[gpu] = median(learned)
            known = [node.cache_blocks for node in same_gpu if node.cache_blocks > 0]
            if known:
                self._blocks[gpu] = float(median(known))
        learned = [node.ms_per_token for node in nodes if node.learned]
        self.usual_ms = median(learned) if learned else DEFAULT_MS_PER_TOKEN
        """Prefill time per token of a node of weight 1."""
        self._usual_blocks = float(median(self._blocks.values())) if self._blocks else 0.0

    def ms_per_token(self, gpu: str) -> float | None:
        """Return the learned prefill time per token, or None."""
        return self._ms.get(gpu)

    def weight(self, gpu: str) -> float:
        """Return the speed relative to the usual one; 1 for a GPU without a learned speed."""
        return self.usual_ms / self._ms.get(gpu, self.usual_ms)

    def blocks(self, gpu: str) -> float:
        return self._blocks.get(gpu, self._usual_blocks)


class Demand:
    """The demand of a window, relative to the fleet that served it."""

    def __init__(self, view: FleetView, window: WindowMetrics, speeds: GpuSpeeds) -> None:
        serving = [node for node in view.nodes if node.serving]
        self.size = size_of(serving, speeds)
        self._window = window
        self._waiting = view.waiting
        """The requests that wait now. They are assumed to be served within one window, beside new arrivals."""
        self._usual_ms = speeds.usual_ms
        self._reuse_within = view.reuse_within
        self._inflow = sum(
            node.held_blocks / max(1.0, node.oldest_age_s) for node in serving if node.held_blocks > 0
        )  # blocks per second
        self._slope_ms = view.slope_ms if isfinite(view.slope_ms) and view.slope_ms > 0 else 0.0

    @property
    def known(self) -> bool:
        """Whether the window has requests that tell how much work one is."""
        return self._window.prefill_work is not None

    def retention_s(self, size: FleetSize) -> float:
        """Return how long an unused block stays in the caches of such a fleet."""
        return min(MAX_RETENTION_S, size.blocks / self._inflow) if self._inflow > 0 else MAX_RETENTION_S

    def hit_ratio(self, size: FleetSize) -> float | None:
        """Return the hit ratio of such a fleet, or None if it is unknown."""
        now = self._window.hit_ratio
        if now is None or self.size.blocks <= 0:
            return now
        reused = self._reuse_within(self.retention_s(self.size))
        if reused <= 0:
            return now
        then = self._reuse_within(self.retention_s(size))
        return min(1.0 - MIN_MISS_RATIO, max(0.0, now * then / reused))

    def load(self, size: FleetSize) -> float:
        """Return the load in node seconds per second, on nodes of weight 1."""
        window = self._window
        work = window.prefill_work or 0.0
        now, then = window.hit_ratio, self.hit_ratio(size)
        if now is not None and then is not None:
            # `work` is what the current caches left to compute. With the other fleet's caches it shrinks or grows with
            # the misses.
            work *= (1.0 - then) / max(MIN_MISS_RATIO, 1.0 - now)
        decode_ms = (window.decode_context or 0.0) * self._slope_ms
        waiting_per_s = self._waiting / max(1.0, window.span_s)
        return (window.arrivals_per_s + waiting_per_s) * (work * self._usual_ms + decode_ms) / 1000.0

    def utilisation(self, size: FleetSize, growth: float = 1.0) -> float:
        """Return the fraction of such a fleet's time that the load takes, with `growth` times the arrivals."""
        load = self.load(size) * growth
        return load / size.weight if size.weight > 0 else (float("inf") if load > 0 else 0.0)

    def service_ms(self, size: FleetSize) -> float:
        """Return the time that a request takes of a node."""
        arrivals = self._window.arrivals_per_s + self._waiting / max(1.0, self._window.span_s)
        return 1000.0 * self.load(size) / arrivals if arrivals > 0 else 0.0

    def wait_ms(self, size: FleetSize, growth: float = 1.0) -> float:
        """Return the mean time that requests wait for a node. With few nodes and uneven prompts they wait long before
        the nodes are fully busy."""
        used = self.utilisation(size, growth)
        if used <= 0:
            return 0.0
        # The formula diverges at 1, and its inputs are estimates: just below it, it would return seconds or hours by
        # rounding.
        if used >= MAX_UTILISATION:
            return inf
        service_ms = self.service_ms(size)
        waits: float = used ** (sqrt(2.0 * (size.weight + 1.0)) - 1.0)
        uneven = 0.5 * (1.0 + min(MAX_VARIATION, self._window.variation))
        return waits * uneven * service_ms / (size.weight * (1.0 - used))

    def kv_usage(self, size: FleetSize) -> float:
        """Return the fraction of such a fleet's KV memory that running requests hold."""
        now = self._window.kv_usage
        spare_now = max(MIN_SPARE * self.size.weight, self.size.weight - self.load(self.size))
        spare_then = max(MIN_SPARE * size.weight, size.weight - self.load(size))
        return now * spare_now / spare_then if spare_then > 0 else now


def size_of(nodes: Sequence[NodeView], speeds: GpuSpeeds) -> FleetSize:
    weight = sum(speeds.weight(node.gpu) for node in nodes)
    return FleetSize(weight, sum(node.cache_blocks or speeds.blocks(node.gpu) for node in nodes))


class ScalingInputs:
    """The inputs of one scaling decision: the fleet view with the demand and the fleet sizes that follow from it."""

    def __init__(self, config: Scaling, view: FleetView, pending: Sequence[PaidNode], growth: float) -> None:
        """`growth`: load when a node that is requested now would serve, relative to the current load."""
        self.config = config
        self.view = view
        self.growth = growth
        self.panicking = False
        self.speeds = speeds = GpuSpeeds(view.nodes)
        self.serving = [node for node in view.nodes if node.serving]
        unchecked = [node for node in view.nodes if node.unchecked]
        self.pending = [*pending, *(PaidNode(one.offer, one.island, one.usd_per_hour, one.gpu) for one in unchecked)]
        self.demand = Demand(view, view.stable, speeds)
        self.panic_demand = Demand(view, view.panic, speeds)
        self.serving_size = size_of(self.serving, speeds)
        self.size = self.serving_size
        """The fleet's size once the pending nodes serve."""
        for one in self.pending:
            self.size = self.size.plus(speeds.weight(one.gpu), speeds.blocks(one.gpu))

    @property
    def node_count(self) -> int:
        return len(self.serving) + len(self.pending)

    def max_wait_ms(self, demand: Demand, size: FleetSize) -> float:
        return max(self.config.max_mean_wait_ms, WAIT_SHARE * demand.service_ms(size))
