"""The cluster as one process sees it: publishes what this process does, and counts what its peers published in the
fleet, the cache index and the conversations that routing uses. Takes messages and a clock; no I/O.

A process decides alone. Nothing here is awaited on the way of a request: `publish` and `receive` run between requests,
and a decision reads the same fields as without peers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from warmroute.core.brain import Brain
from warmroute.core.cache_view import CacheView
from warmroute.core.cluster.cluster_turns import ClusterTurns
from warmroute.core.cluster.messages import FULL_S, PEER_TTL_S, BadMessage, Update, decode, encode
from warmroute.core.cluster.peer import Peer
from warmroute.core.cluster.publisher import Publisher
from warmroute.core.cluster.shared_demand import SharedDemand
from warmroute.core.cluster.shared_limits import SharedLimits
from warmroute.core.cluster.shared_nodes import SharedNodes
from warmroute.core.cluster.shared_speeds import SharedSpeeds
from warmroute.core.cluster.snapshots import MARK, SnapshotAnswers, SnapshotRequest, decode_snapshot, snapshot_messages
from warmroute.core.cluster.transport import Transport
from warmroute.core.rate_limits import RateLimits
from warmroute.event_log import EventLog

log = EventLog("warmroute.cluster")

Changed = Callable[[], object]

MAX_PEERS: Final = 256
"""Processes whose messages count. A cluster has fewer; a flood of made-up senders stays harmless."""
MAX_HELD: Final = 1024
"""Updates that may wait for a snapshot."""


class ClusterState:
    def __init__(
        self,
        sender: str,
        brain: Brain,
        cache_view: CacheView,
        changed: Changed,
        limits: RateLimits | None = None,
        nodes: SharedNodes | None = None,
        demand: SharedDemand | None = None,
        asks_snapshot: bool = False,
    ) -> None:
        """`sender` identifies this process. `changed` is called when there is something to publish. `nodes`: changes of
        nodes at run time, and `demand`, if they are shared. `asks_snapshot`: this process has just started."""
        self.sender = sender
        self._brain = brain
        self._changed = changed
        self._limits = limits
        self._fleet = fleet = brain.fleet
        self._cache_view = cache_view
        self._affinity = affinity = brain.router.island_choice.affinity
        self._speeds = SharedSpeeds(fleet)
        queue = brain.admission.queue
        self.publisher = Publisher(sender, fleet, cache_view, affinity, queue, self._speeds, limits)
        self.peers: dict[str, Peer] = {}
        self.nodes = nodes
        self._demand = demand
        self.shared_limits = SharedLimits(limits, self.peers) if limits is not None else None
        self._applied_nodes_s = 0.0
        self.connected = True
        """Whether messages of all other processes can arrive."""
        self.snapshot = SnapshotRequest(self.peers, fleet, cache_view, affinity) if asks_snapshot else None
        self._answers = SnapshotAnswers()
        self._held: list[Update] = []
        """Updates whose routed prompts wait until the snapshot has arrived."""

        brain.calls.on_freed = changed
        brain.router.on_dispatch = changed
        brain.admission.turns = ClusterTurns(self.peers, changed)
        self.received = self.rejected = 0
        self._lost = 0
        """Messages of peers that are gone which did not arrive."""
        self._logged: set[str] = set()

    def publish(self, transport: Transport, now_s: float) -> None:
        """Publish what has changed. Call it every PUBLISH_S."""
        self._forget_silent(now_s)
        if self.nodes is not None and now_s - self._applied_nodes_s >= FULL_S:
            self._applied_nodes_s = now_s
            self.nodes.apply_again()
        asks = self._ask_snapshot(now_s)
        update = self.publisher.next_update(now_s, self.nodes, self._demand, asks)
        if update is not None:
            transport.publish(encode(update))
        self._speeds.learn(now_s)
        if self.shared_limits is not None:
            self.shared_limits.update(now_s)

    def leave(self, transport: Transport, now_s: float) -> None:
        """Tell the others that this process ends."""
        transport.publish(encode(self.publisher.last_update(now_s)))

    def set_connected(self, connected: bool) -> None:
        """Messages of all other processes can arrive, or not."""
        self.connected = connected
        if self.shared_limits is not None:
            self.shared_limits.connected = connected

    def receive(self, message: bytes, now_s: float) -> None:
        """Take a message of another process. Never raises."""
        try:
            if message.startswith(MARK):
                snapshot = decode_snapshot(message)
                if self.snapshot is not None and snapshot.to == self.sender:
                    self.snapshot.receive(snapshot, now_s)
                    self._release_held(now_s)
                return
            update = decode(message)
        except BadMessage as error:
            self._reject(str(error))
            return
        if update.sender == self.publisher.sender:
            return
        peer = self.peers.get(update.sender)
        if update.leaving:
            self.received += 1
            self.forget(update.sender, now_s, left=True)
            return
        if peer is None:
            if len(self.peers) >= MAX_PEERS:
                self._reject("there are too many processes")
                return
            peer = self.peers[update.sender] = Peer(update.sender, self._fleet, self._cache_view, self._limits)
            log.info("peer_joined", peer=update.sender)
        self.received += 1
        if peer.is_old(update):
            peer.lost += 1
        else:
            freed = peer.apply(update, now_s)
            self._speeds.add(update, peer.clock_offset_s, now_s)
            if self.snapshot is not None and not self.snapshot.done and update.routed and len(self._held) < MAX_HELD:
                self._held.append(update)
            else:
                self._apply_routed(update, now_s)
            for key, home, last in update.homes:
                self._affinity.remember(key, (home, last), now_s)
            self._apply_shared(update, now_s)
            for node in freed:
                self._brain.node_freed(node)
            if self.shared_limits is not None:
                self.shared_limits.update(now_s)

    def _apply_shared(self, update: Update, now_s: float) -> None:
        """Apply what only replicas share."""
        if self.nodes is not None:
            before = self.nodes.digest
            self.nodes.merge(update.changes)
            self.nodes.compare(update.changes_digest, now_s)
            if self.nodes.has_unpublished or self.nodes.digest != before:  # the new digest confirms the changes
                self._changed()
        if self._demand is not None and update.demand is not None:
            self._demand.apply(update.sender, update.demand)
        if update.asks == self.sender and self._answers.may_answer(update.sender, now_s):
            messages = snapshot_messages(
                self.sender, update.sender, self._fleet, self._cache_view, self._affinity, now_s
            )
            self._answers.add(update.sender, messages)

    def without_changes(self) -> list[str]:
        """Return the peers that have not confirmed all changes of nodes that this process knows."""
        digest = self.nodes.digest if self.nodes is not None else 0
        return [peer.sender for peer in self.peers.values() if peer.changes_digest != digest]

    @property
    def has_unsent_snapshot(self) -> bool:
        """Whether a peer has asked for a snapshot that is not sent completely."""
        return self._answers.has_unsent

    def next_snapshot_message(self) -> tuple[str, bytes] | None:
        """Return the receiver and the next message of a snapshot that a peer has asked for."""
        return self._answers.next_message()

    def _ask_snapshot(self, now_s: float) -> str:
        """Return the peer that should send this process a snapshot."""
        request = self.snapshot
        if request is None:
            return ""
        request.update(self.connected, now_s)
        self._release_held(now_s)
        return request.asks

    def _release_held(self, now_s: float) -> None:
        if self._held and self.snapshot is not None and self.snapshot.done:
            held, self._held = self._held, []
            for update in held:
                self._apply_routed(update, now_s)

    def _apply_routed(self, update: Update, now_s: float) -> None:
        if update.routed and self.snapshot is not None:
            self.snapshot.apply_waiting(now_s)
        hot = self._brain.router.hot
        for prompt in update.routed:
            name, chain, _, _ = prompt
            node = self._fleet.find(name)
            if node is None:
                continue
            backlog_s = node.pending_work * node.speed.ms_per_token / 1000.0
            self._cache_view.record_peer_routed(prompt, now_s + backlog_s, now_s)
            if hot is not None and (cache := self._cache_view.cache(name)) is not None:
                hot.record_peer(chain, cache.block_size, now_s)

    @property
    def lost(self) -> int:
        """Messages of peers that did not arrive, or not in order."""
        return self._lost + sum(peer.lost for peer in list(self.peers.values()))

    def _reject(self, reason: str) -> None:
        self.rejected += 1
        if reason not in self._logged and len(self._logged) < 32:
            self._logged.add(reason)
            log.warning("message_rejected", "The process ignores such messages of its peers.", reason=reason)

    def _forget_silent(self, now_s: float) -> None:
        silent = [peer for peer in self.peers.values() if now_s - peer.heard_s > PEER_TTL_S]
        for peer in silent:
            self.forget(peer.sender, now_s)

    def forget(self, sender: str, now_s: float, left: bool = False) -> None:
        """Count nothing of a process any more: it is silent, or it has ended. `left`: it has said so."""
        peer = self.peers.pop(sender, None)
        if peer is not None:
            self._lost += peer.lost
            peer.left = left
            if left:
                log.info("peer_left", peer=sender)
            else:
                log.warning("peer_lost", "Its requests no longer count in the load of nodes.", peer=sender)
            if self._demand is not None:
                self._demand.forget(sender)
            for node in peer.forget():
                self._brain.node_freed(node)

    def close(self) -> None:
        brain = self._brain
        brain.calls.on_freed = brain.router.on_dispatch = None
        brain.admission.turns = None
        self.publisher.close()
        self._speeds.close()
        if self._demand is not None:
            self._demand.close()
        for peer in self.peers.values():
            peer.forget()
        self.peers.clear()
