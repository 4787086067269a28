"""How much of a fleet's time its work takes, for the present fleet and for any other one.

    load(fleet)   = (arrivals + waiting / window) · (prefill(fleet) + decode)    [node seconds a second]
    prefill       = work · (1 − hit(fleet)) / (1 − hit now) · ms_per_token       of a request
    decode        = tokens · context · slope                                     of a request: what it adds to steps
    utilisation   = load / weight;  weight: nodes, each by its speed against the usual one
    wait          = P(wait) · (1 + variation) / 2 · service / (weight · (1 − utilisation))           Allen and Cunneen's
                    P(wait) = utilisation ^ (√(2 · (weight + 1)) − 1)                                 and Sakasegawa's
    kv(fleet)     = kv now · (weight − load) now / (weight − load)               share of KV memory that runs
    keeps(fleet)  = blocks / inflow                                              [s] how old a block gets in its caches
    hit(fleet)    = hit now · reused within keeps(fleet) / reused within keeps now

A request holds its KV memory for as long as its answer takes; steps take longer the more there is to look back at, and
the more of the time goes into prefills. In the line of fleet/decode_speed.py what a node holds is then arrivals · tokens ·
context · base / (weight − load), which has its pole where the work takes all of the time.

The last two tell thrashing from plain unique traffic. A larger cache keeps blocks longer; whether anybody would have
used them is what index/reuse.py has seen. Where nothing is reused later than it is kept already, no cache helps, and a
low hit ratio is how the traffic is. The same line says what a smaller fleet would lose: its warm set.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite, sqrt
from statistics import median
from typing import Final

import msgspec

from warmroute.fleet.speed import USUAL_MS_PER_TOKEN
from warmroute.scaling.observe import FleetView, NodeView, Seen

LEAST_MS: Final = 1e-6
MOST_MS: Final = 1e6
"""No node takes less for a token of prefill, or more: a speed beyond is none."""
MOST_KEPT_S: Final = 86_400.0
LEAST_MISSED: Final = 0.02
"""Of a prompt, so much is taken to be computed anew in any case."""

LEAST_SPARE: Final = 0.05
"""Of a fleet's time, so much is taken to be left: beyond, the formula says nothing any more."""

MOST_USED: Final = 0.98
MOST_VARIATION: Final = 25.0
"""A window has few requests: one giant among them says little of the next."""


class Size(msgspec.Struct, frozen=True):
    """A fleet as far as its capacity goes."""

    weight: float
    """Nodes, each by its speed."""
    blocks: float
    """What its caches hold together."""

    def plus(self, weight: float, blocks: float) -> Size:
        return Size(self.weight + weight, self.blocks + blocks)


class Speeds:
    """What nodes of each kind are worth, as learned from those that are there."""

    def __init__(self, nodes: Sequence[NodeView]) -> None:
        by_gpu: dict[str, list[NodeView]] = {}
        for node in nodes:
            by_gpu.setdefault(node.gpu, []).append(node)
        self._ms: dict[str, float] = {}
        self._blocks: dict[str, float] = {}
        for gpu, alike in by_gpu.items():
            learned = [node.ms_per_token for node in alike if node.learned and _good(node.ms_per_token)]
            if learned:
                self._ms[gpu] = median(learned)
            known = [node.cache_blocks for node in alike if node.cache_blocks > 0]
            if known:
                self._blocks[gpu] = float(median(known))
        learned = [node.ms_per_token for node in nodes if node.learned and _good(node.ms_per_token)]
        self.usual_ms = median(learned) if learned else USUAL_MS_PER_TOKEN
        """A node of weight 1 takes so long for a token of prefill."""
        self._usual_blocks = float(median(self._blocks.values())) if self._blocks else 0.0

    def ms_per_token(self, gpu: str) -> float | None:
        """Where such a node has shown its speed."""
        return self._ms.get(gpu)

    def weight(self, gpu: str) -> float:
        """What nobody knows yet counts as the usual."""
        return self.usual_ms / self._ms.get(gpu, self.usual_ms)

    def blocks(self, gpu: str) -> float:
        return self._blocks.get(gpu, self._usual_blocks)


def _good(ms_per_token: float) -> bool:
    return LEAST_MS <= ms_per_token <= MOST_MS


class Demand:
    """What a window asks for, set against the fleet that was there."""

    def __init__(self, view: FleetView, window: Seen, speeds: Speeds) -> None:
        serving = [node for node in view.nodes if node.serving]
        self.size = size_of(serving, speeds)
        self._window = window
        self._waiting = view.waiting
        """To be worked off within a window, beside what arrives."""
        self._usual_ms = speeds.usual_ms
        self._reuse_within = view.reuse_within
        self._inflow = sum(
            node.held_blocks / max(1.0, node.oldest_age_s) for node in serving if node.held_blocks > 0
        )  # blocks a second
        self._slope_ms = view.slope_ms if isfinite(view.slope_ms) and view.slope_ms > 0 else 0.0

    @property
    def known(self) -> bool:
        """Whether anything was sent that tells how much work a request is."""
        return self._window.work is not None

    def kept_s(self, size: Size) -> float:
        """How long a block that nobody uses stays in the caches of such a fleet."""
        return min(MOST_KEPT_S, size.blocks / self._inflow) if self._inflow > 0 else MOST_KEPT_S

    def hit(self, size: Size) -> float | None:
        """The hit ratio that such a fleet would have; None where nothing tells."""
        now = self._window.hit_ratio
        if now is None or self.size.blocks <= 0:
            return now
        reused = self._reuse_within(self.kept_s(self.size))
        if reused <= 0:
            return now
        then = self._reuse_within(self.kept_s(size))
        return min(1.0 - LEAST_MISSED, max(0.0, now * then / reused))

    def load(self, size: Size) -> float:
        """Node seconds a second, on nodes of weight 1."""
        window = self._window
        work = window.work or 0.0
        now, then = window.hit_ratio, self.hit(size)
        if now is not None and then is not None:
            work *= (1.0 - then) / max(LEAST_MISSED, 1.0 - now)
        decode_ms = (window.decode_context or 0.0) * self._slope_ms
        waiting_per_s = self._waiting / max(1.0, window.span_s)
        return (window.arrivals_per_s + waiting_per_s) * (work * self._usual_ms + decode_ms) / 1000.0

    def utilisation(self, size: Size, growth: float = 1.0) -> float:
        """Share of such a fleet's time; `growth`: with so many times the arrivals."""
        load = self.load(size) * growth
        return load / size.weight if size.weight > 0 else (float("inf") if load > 0 else 0.0)

    def service_ms(self, size: Size) -> float:
        """What a request takes of a node's time."""
        arrivals = self._window.arrivals_per_s + self._waiting / max(1.0, self._window.span_s)
        return 1000.0 * self.load(size) / arrivals if arrivals > 0 else 0.0

    def wait_ms(self, size: Size, growth: float = 1.0) -> float:
        """How long requests would wait for a node, on average: few nodes with uneven prompts wait long before they are
        busy all the time, many do not."""
        used = self.utilisation(size, growth)
        if used <= 0:
            return 0.0
        if used >= MOST_USED:
            return inf
        service_ms = self.service_ms(size)
        waits: float = used ** (sqrt(2.0 * (size.weight + 1.0)) - 1.0)
        uneven = 0.5 * (1.0 + min(MOST_VARIATION, self._window.variation))
        return waits * uneven * service_ms / (size.weight * (1.0 - used))

    def kv_usage(self, size: Size) -> float:
        """Share of such a fleet's KV memory that running requests would hold."""
        now = self._window.kv_usage
        spare_now = max(LEAST_SPARE * self.size.weight, self.size.weight - self.load(self.size))
        spare_then = max(LEAST_SPARE * size.weight, size.weight - self.load(size))
        return now * spare_now / spare_then if spare_then > 0 else now


def size_of(nodes: Sequence[NodeView], speeds: Speeds) -> Size:
    weight = sum(speeds.weight(node.gpu) for node in nodes)
    return Size(weight, sum(node.cache_blocks or speeds.blocks(node.gpu) for node in nodes))
