"""Drives the cluster state of this process in its event loop: publishes when something changed, and regularly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from warmroute.app.replicas.cluster_metrics import ClusterFigures
from warmroute.core.cluster.cluster_state import ClusterState
from warmroute.core.cluster.messages import FULL_S, NodeChange
from warmroute.core.cluster.publish_timing import PublishTiming
from warmroute.core.cluster.shared_demand import SharedDemand
from warmroute.core.cluster.shared_nodes import encode_change
from warmroute.core.cluster.transport import LinkStatus, ReplicaTransport
from warmroute.event_log import EventLog

if TYPE_CHECKING:
    from warmroute.app.service import Service


log = EventLog("warmroute.cluster")

SNAPSHOT_S: Final = 0.01
"""Time between two messages of a snapshot."""


CONFIRM_S: Final = 0.8
"""How long the admin API waits until all replicas have confirmed a change of a node. It answers within a second."""
CONFIRM_ALONE_S: Final = 0.1
"""The same without a connection to other replicas: other workers of this router can still confirm it."""


class ClusterMember:
    def __init__(self, sender: str, service: Service, transport: ReplicaTransport) -> None:
        loop = asyncio.get_running_loop()
        self._transport = transport
        self._wake = service.wake
        self._timing = PublishTiming(time.monotonic, lambda delay_s: loop.call_later(delay_s, self._publish))
        scaling, queue = service.scaling, service.admission.queue
        demand = SharedDemand(scaling.demand_meter, lambda: queue.waiting) if scaling is not None else None
        if scaling is not None and demand is not None:
            scaling.set_waiting(lambda: demand.waiting)
        self.nodes = service.shared_nodes
        self.state = ClusterState(
            sender, service.brain, service.cache_view, self._timing.changed, service.rate_limits,
            self.nodes, demand, asks_snapshot=True,
        )  # fmt: skip
        self.nodes.join(sender, self._node_changed)
        self.read_status: Callable[[], LinkStatus | None] = lambda: None
        """Returns the state of the link to other replicas; None if there is none."""
        self._publishing = loop.create_task(self._publish_regularly())
        self._sending: asyncio.Task[None] | None = None
        """Sends snapshots, while there are some to send."""

    def _node_changed(self, change: NodeChange) -> None:
        """Publish a change of a node as soon as this call has ended, not with the next regular message."""
        self._transport.store(change.name, encode_change(change))
        asyncio.get_running_loop().call_soon(self._publish)

    async def confirm_changes(self) -> dict[str, Any]:
        """Wait until all peers know the changes of nodes. Return who has confirmed them."""
        state, started_s = self.state, time.monotonic()
        asked = list(state.peers.values())
        while state.without_changes() and time.monotonic() < started_s + (  # noqa: ASYNC110
            CONFIRM_S if state.connected else CONFIRM_ALONE_S
        ):
            await asyncio.sleep(0.002)
        asked = [peer for peer in asked if not peer.left]  # one that fell silent may still send requests
        missing = [peer.sender for peer in asked if peer.changes_digest != self.nodes.digest]
        return {"connected": state.connected, "confirmed": len(asked) - len(missing), "unconfirmed": missing}

    def _publish(self) -> None:
        self._timing.published()
        try:
            self.state.publish(self._transport, time.monotonic())
            self._wake()
        except Exception:
            log.exception("publish_failed", "The process tries again.")

    async def _publish_regularly(self) -> None:
        while True:
            self._timing.changed()
            await asyncio.sleep(FULL_S)

    async def _send_snapshots(self) -> None:
        """Send the snapshots that peers have asked for."""
        try:
            while (found := self.state.next_snapshot_message()) is not None:
                self._transport.send(*found)
                await asyncio.sleep(SNAPSHOT_S)
        except Exception:
            log.exception("snapshot_failed", "The peer asks another process.")

    def receive(self, message: bytes) -> None:
        """Take a message of another process. Never raises."""
        try:
            self.state.receive(message, time.monotonic())
            self._wake()
        except Exception:
            log.exception("receive_failed", "The process ignores the message.")
        if self.state.has_unsent_snapshot and (self._sending is None or self._sending.done()):
            self._sending = asyncio.get_running_loop().create_task(self._send_snapshots())

    def receive_stored(self, values: list[bytes]) -> None:
        """Take the changes of nodes that the server has, and store those that it lacks. Never raises."""
        try:
            for change in self.nodes.merge_stored(values):
                self._transport.store(change.name, encode_change(change))
        except Exception:
            log.exception("receive_failed", "The process ignores the message.")

    def link_changed(self) -> None:
        status = self.read_status()
        self.state.set_connected(status is None or status.connected)

    @property
    def starts(self) -> bool:
        """Whether this process waits for a peer's snapshot."""
        snapshot = self.state.snapshot
        return snapshot is not None and not snapshot.complete

    def figures(self) -> ClusterFigures:
        """Return the figures for the metrics."""
        state, status = self.state, self.read_status()
        messages = {
            "sent": state.publisher.sequence,
            "received": state.received,
            "lost": state.lost,
            "rejected": state.rejected,
        }
        link = None if status is None else (status.connected, status.writable, status.delay_s)
        limits = state.shared_limits
        return ClusterFigures(len(state.peers), messages, limits.fraction if limits is not None else 1.0, link)

    def describe(self) -> dict[str, Any]:
        """Return the state for the admin API."""
        now_s, state, status = time.monotonic(), self.state, self.read_status()
        link: dict[str, Any] | None = None
        if status is not None:
            link = {
                "address": status.address,
                "connected": status.connected,
                "writable": status.writable,
                "reason": status.reason,
                "since_s": round(now_s - status.changed_s, 1),
                "delay_ms": round(1000.0 * status.delay_s, 1),
                "lost_messages": status.lost,
                "disconnects": status.disconnects,
            }
        limits = state.shared_limits
        return {
            "enabled": True,
            "process": state.sender,
            "redis": link,
            "rate_limit_fraction": round(limits.fraction, 3) if limits is not None else 1.0,
            "peers": [
                {"process": peer.sender, "heard_ms_ago": round(1000.0 * (now_s - peer.heard_s)), "lost": peer.lost}
                for peer in state.peers.values()
            ],
            "node_changes": [
                {"node": change.name, "removed": change.removed, "draining": change.draining, "by": change.sender}
                for change in self.nodes.changes
            ],
        }

    def leave(self) -> None:
        """Tell the others that this process ends."""
        self.state.leave(self._transport, time.monotonic())

    def close(self) -> None:
        self._publishing.cancel()
        if self._sending is not None:
            self._sending.cancel()
        self.state.close()
