"""How many nodes a workload needs: the smallest fleet whose replay meets the limits, found by doubling and halving.

More nodes are taken to be no worse, which replay bears out but for noise: the size that is named has been replayed and
meets the limits, and the one below it has been replayed and does not.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from warmroute.sim.replay.contenders import Contender
from warmroute.sim.replay.run import Progress, Setup, replay
from warmroute.sim.replay.summary import Run


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
        wanted = (("p50", self.ttft_p50_ms), ("p90", self.ttft_p90_ms), ("p99", self.ttft_p99_ms))
        return all(limit is None or (times[key] is not None and times[key] <= limit) for key, limit in wanted)


class Needed(msgspec.Struct):
    policy: str
    nodes: int | None
    """None where `most` are not enough."""
    runs: dict[int, Run]
    """By the size of the fleet: all that were replayed."""


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
