"""The demand of all processes, for the one that scales the fleet: each publishes the totals of its own demand meter,
and adds the increase of its peers' totals to `DemandMeter.peers`.
"""

from __future__ import annotations

from collections.abc import Callable

from warmroute.core.cluster.messages import Demand
from warmroute.core.demand import COUNTERS, DemandMeter


class SharedDemand:
    def __init__(self, meter: DemandMeter, waiting: Callable[[], int]) -> None:
        """`waiting`: requests that wait at this process."""
        self._meter = meter
        self._waiting = waiting
        self._totals = meter.peers = DemandMeter()
        self._peers: dict[str, Demand] = {}

    @property
    def waiting(self) -> int:
        """Requests that wait at all processes."""
        return self._waiting() + sum(demand.waiting for demand in self._peers.values())

    def own(self) -> Demand:
        meter = self._meter
        ttft, latency, inter_token = (tuple(counts) for counts in meter.own_times)
        return Demand(self._waiting(), tuple(meter.own_counts()), ttft, latency, inter_token)

    def apply(self, sender: str, demand: Demand) -> None:
        totals = self._totals
        times = (demand.ttft, demand.latency, demand.inter_token)
        if (len(demand.counts), *map(len, times)) != (len(COUNTERS), *map(len, totals.own_times)):
            return  # another version counts otherwise
        before = self._peers.get(sender, demand)  # what it counted before this process heard from it does not count
        self._peers[sender] = demand
        for name, now, earlier in zip(COUNTERS, demand.counts, before.counts, strict=True):
            setattr(totals, name, getattr(totals, name) + max(0.0, now - earlier))
        times_before = (before.ttft, before.latency, before.inter_token)
        for counts, now_times, earlier_times in zip(totals.own_times, times, times_before, strict=True):
            for at, (after, earlier) in enumerate(zip(now_times, earlier_times, strict=True)):
                if after > earlier:
                    counts[at] += after - earlier

    def forget(self, sender: str) -> None:
        self._peers.pop(sender, None)

    def close(self) -> None:
        self._meter.peers = None
