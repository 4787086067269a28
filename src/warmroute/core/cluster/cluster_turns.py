"""The order of requests that wait in the queues of several processes for the same node (see core/cluster/turns.py).

Each process publishes, by node, its first request; and, by model, its first request that would go to any node with
room. A process leaves a node's room to the peers whose first request comes before its own. If they have the same
priority, it does so only if the node has no room for its own request and theirs. A peer's request may go elsewhere, so
each process waits for its turn: TURN_S for each peer that comes before it. If all waited for the same time, all would
send at once. A process does not leave an idle node to a peer, nor the turn of an overdue request: each process keeps
the guarantee of its own requests. The order between tenants is kept within each process only.

All processes know when the node's first prompt reached it, whichever process sent that (_kernel/peer_load.c). So they
see room before the prompt's first token at about the same time, and agree on the next request while the node is busy.

Two processes can still send to a node at the same time: each knows only what the other published. `work_left` assumes
that each peer has sent the node as much since this process's last message as this process has. So between two messages
all processes together exceed the limit of a node by at most one prompt each. If messages are lost, each process keeps
the limit with what it knows, so N processes send at most N times as much.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from warmroute.core.cluster.peer import Peer
from warmroute.core.cluster.turns import Head
from warmroute.core.node import Node

TURN_S: Final = 0.05
"""How long a process leaves a node's room to one peer: until it would know that the peer has taken it."""
MAX_YIELD_S: Final = 0.4
"""How long it leaves the room to all of them."""
OLD_YIELD_S: Final = 1.0
"""A yield that began before this time belongs to another room: since then no peer had a waiting request."""
FORGET_AFTER_S: Final = 10.0
"""After this time a node at which this process yields no more is forgotten: it may have left."""


class ClusterTurns:
    def __init__(self, peers: Mapping[str, Peer], changed: Callable[[], object]) -> None:
        self._peers = peers
        self._changed = changed
        self._yields_since_s: dict[str, float] = {}
        self._forget_at = 64
        """Number of nodes in `_yields_since_s` at which old ones are forgotten."""

    @property
    def is_contended(self) -> bool:
        for peer in self._peers.values():  # noqa: SIM110 - on the way of each request
            if peer.heads or peer.firsts:
                return True
        return False

    def is_ours(self, node: Node, own: Head, limit_ms: float, now_s: float) -> bool:
        if not node.inflight:  # the peer's request is not waiting for this node, or goes there at once, too
            return True
        name, ahead, work_ms, same_priority = node.name, 0, own[2], True
        for peer in self._peers.values():
            first = _first_before(peer, node, own)
            if first is not None:
                ahead += 1
                work_ms += first[2]
                same_priority = same_priority and first[0] == own[0]
        if not ahead:
            self._yields_since_s.pop(name, None)
            return True
        # The peer may have many urgent requests behind its first one.
        if same_priority and self.work_left(node, now_s) * node.speed.ms_per_token + work_ms <= limit_ms:
            return True
        since_s = self._yields_since_s.get(name)
        if since_s is None or now_s - since_s > OLD_YIELD_S:
            since_s = self._yields_since_s[name] = now_s
            self._forget_old_yields(now_s)
        if now_s - since_s <= min(MAX_YIELD_S, TURN_S * ahead):
            return False
        del self._yields_since_s[name]
        return True

    def no_room(self, node: Node) -> None:
        self._yields_since_s.pop(node.name, None)

    def _forget_old_yields(self, now_s: float) -> None:
        if len(self._yields_since_s) >= self._forget_at:
            after_s = now_s - FORGET_AFTER_S
            self._yields_since_s = {
                name: since_s for name, since_s in self._yields_since_s.items() if since_s > after_s
            }
            self._forget_at = 64 + 2 * len(self._yields_since_s)

    def queued(self) -> None:
        self._changed()

    def work_left(self, node: Node, now_s: float) -> float:
        work = node.remaining_work(now_s)
        return work + len(self._peers) * max(0.0, node.own_pending_work - node.published_work)


def _first_before(peer: Peer, node: Node, own: Head) -> Head | None:
    """Return the request of the peer that comes before this process's; None if none does."""
    head = peer.heads.get(node.name)
    if head is not None and head < own:
        return head
    if peer.firsts:
        for group in node.groups:
            head = peer.firsts.get(group.model)
            if head is not None and head < own:
                return head
    return None
