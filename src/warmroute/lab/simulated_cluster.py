"""The network between several simulated routers: production's cluster state, with messages that take virtual time,
get lost, or do not pass during a partition.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from warmroute.core.cluster.cluster_state import ClusterState
from warmroute.core.cluster.messages import FULL_S
from warmroute.core.cluster.publish_timing import PublishTiming

if TYPE_CHECKING:
    from warmroute.lab.request_flow import RequestFlow
    from warmroute.lab.simulated_router import Replica
    from warmroute.lab.world import World


class SimulatedCluster:
    def __init__(self, world: World) -> None:
        self._calendar = world.calendar
        self._conditions = world.conditions
        self._random = Random(f"{world.conditions.seed} cluster")
        self._flows = [replica.requests for replica in world.replicas]
        self.sent = self.sent_bytes = 0
        self.states = [self._join(replica) for replica in world.replicas]

    def _join(self, replica: Replica) -> ClusterState:
        calendar, flow = self._calendar, replica.requests
        timing = PublishTiming(lambda: calendar.now_s, lambda delay_s: calendar.after(1000.0 * delay_s, publish))
        name = f"router-{replica.index}"
        state = ClusterState(name, flow.brain, replica.cache_view, timing.changed)
        link = _Link(self, state)

        def publish() -> None:
            timing.published()
            state.publish(link, calendar.now_s)
            flow.fleet_changed()

        def publish_regularly() -> None:
            timing.changed()
            calendar.after(1000.0 * FULL_S, publish_regularly)

        calendar.after(self._random.random() * 1000.0 * FULL_S, publish_regularly)
        return state

    def deliver(self, sender: ClusterState, message: bytes) -> None:
        """Send a message to all routers but its sender."""
        conditions, now_s = self._conditions, self._calendar.now_s
        self.sent += 1
        self.sent_bytes += len(message)
        if any(begin_s <= now_s < end_s for begin_s, end_s in conditions.partitions):
            return
        for flow, state in zip(self._flows, self.states, strict=True):
            if state is not sender and not (conditions.sync_loss and self._random.random() < conditions.sync_loss):
                self._calendar.after(conditions.sync_lag_ms, self._arrive, flow, state, message)

    def _arrive(self, flow: RequestFlow, state: ClusterState, message: bytes) -> None:
        state.receive(message, self._calendar.now_s)
        flow.fleet_changed()


class _Link:
    """The transport of one router."""

    def __init__(self, cluster: SimulatedCluster, state: ClusterState) -> None:
        self._cluster = cluster
        self._state = state

    def publish(self, message: bytes) -> None:
        self._cluster.deliver(self._state, message)
