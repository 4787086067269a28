"""How many nodes a workload needs: the smallest fleet whose replay meets the limits, found by doubling and halving.

More nodes are taken to be no worse, which replay bears out but for noise: the size that is named has been replayed and
meets the limits, and the one below it has been replayed and does not.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from warmroute.replay.contenders import Contender
from warmroute.replay.run import Progress, Setup, replay
from warmroute.replay.summary import Run

HELPS = 0.01
"""Twice the nodes that make times shorter by less than this share have not helped."""


class Limits(msgspec.Struct, frozen=True):
    """What first tokens may take; None: whatever."""

    ttft_p50_ms: float | None = None
    ttft_p90_ms: float | None = None
    ttft_p99_ms: float | None = None

    def met(self, run: Run) -> bool:
        """Whoever was refused has had no first token: they all have to be answered."""
        if run["rejected"] or run["failed"]:
            return False
        times = run["ttft_ms"]
        return all(times[key] is not None and times[key] <= limit for key, limit in self.wanted)

    @property
    def wanted(self) -> list[tuple[str, float]]:
        wanted = (("p50", self.ttft_p50_ms), ("p90", self.ttft_p90_ms), ("p99", self.ttft_p99_ms))
        return [(key, limit) for key, limit in wanted if limit is not None]


class Beyond(msgspec.Struct, frozen=True):
    """A limit that is broken whatever the size of the fleet."""

    percent: str
    limit_ms: float
    took_ms: float
    fewer: int
    most: int
    """Of so many nodes the times were hardly shorter than of so few."""


class Needed(msgspec.Struct):
    policy: str
    nodes: int | None
    """None where `most` are not enough."""
    runs: dict[int, Run]
    """By the size of the fleet: all that were replayed."""

    def without_help(self, limits: Limits) -> Beyond | None:
        """The time that no number of nodes makes short enough; None where more of them may help."""
        most = max(self.runs)
        fewer = max((nodes for nodes in self.runs if 2 * nodes <= most), default=None)
        if self.nodes is not None or fewer is None or self.runs[most]["rejected"] or self.runs[most]["failed"]:
            return None
        for key, limit in limits.wanted:
            before, after = self.runs[fewer]["ttft_ms"][key], self.runs[most]["ttft_ms"][key]
            if before is not None and after is not None and after > limit and before - after < HELPS * before:
                return Beyond(key, limit, after, fewer, most)
        return None


def nodes_needed(
    setup: Setup, contender: Contender, limits: Limits, most: int,
    tried: Callable[[int, Run | None], Progress | None] = lambda _nodes, _run: None,
    first: int = 1,
) -> Needed:  # fmt: skip
    """`setup` has one node, which all are like. `tried` is told of each size before (None) and after its replay."""
    runs: dict[int, Run] = {}

    def enough(nodes: int) -> bool:
        if nodes not in runs:
            fleet = tuple(msgspec.structs.replace(setup.nodes[0], name=f"node-{at}") for at in range(nodes))
            progress = tried(nodes, None)
            runs[nodes] = replay(msgspec.structs.replace(setup, nodes=fleet, contender=contender), progress)
            tried(nodes, runs[nodes])
        return limits.met(runs[nodes])

    low, high = 0, min(max(1, first), most)
    while not enough(high):
        if high >= most:
            return Needed(contender.text, None, runs)
        low, high = high, min(most, 2 * high)
    while high - low > 1:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle
    return Needed(contender.text, high, runs)
