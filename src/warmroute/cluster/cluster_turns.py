"""The order of requests that wait in the queues of several processes for the same node (see routing/turns.py).

Each process publishes, by node, the priority and the prefill time of its first request. A process leaves a node's room
to a peer whose first request comes before its own, but not for longer than MAX_YIELD_S: the peer's request may have
gone elsewhere meanwhile. It does not leave an idle node to a peer, nor the turn of an overdue request: each process
keeps the guarantee of its own requests. The order between tenants is kept within each process only.

Two processes can still send to a node at the same time: each knows only what the other published. `work_left` assumes
that each peer has sent the node as much since its last message as this process has. So all processes together exceed
the limit of a node by at most one prompt each. Only the process that sent a node's first prompt can tell how much of it
is prefilled. If it always used that, it would be the first to see that the node has room, each time. So all of the
prompt counts until its first token comes if a peer has prompts there, or requests that wait for the node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from warmroute.cluster.peer import Peer
from warmroute.fleet.node import Node

MAX_YIELD_S: Final = 0.1
FORGET_AFTER_S: Final = 10.0
"""After this time a node at which this process yields no more is forgotten: it may have left."""


class ClusterTurns:
    def __init__(self, peers: Mapping[str, Peer], changed: Callable[[], object]) -> None:
        self._peers = peers
        self._changed = changed
        self._yields_since_s: dict[str, float] = {}
        self._forget_at = 64
        """Number of nodes in `_yields_since_s` at which old ones are forgotten."""

    def is_ours(self, node: Node, priority: int, work_ms: float, now_s: float) -> bool:
        if not node.inflight:  # the peer's request is not waiting for this node, or goes there at once, too
            return True
        name = node.name
        for peer in self._peers.values():
            head = peer.heads.get(name)
            if head is None:
                continue
            if head < (priority, work_ms):
                since_s = self._yields_since_s.get(name)
                if since_s is None:
                    since_s = self._yields_since_s[name] = now_s
                    self._forget_old_yields(now_s)
                if now_s - since_s <= MAX_YIELD_S:
                    return False
        self._yields_since_s.pop(name, None)
        return True

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
        peers, name = self._peers, node.name
        if not peers:
            return node.remaining_work(now_s)
        is_shared = node.peer_pending_work >= 1.0 or any(name in peer.heads for peer in peers.values())
        work = node.pending_work if is_shared else node.remaining_work(now_s)
        return work + len(peers) * max(0.0, node.own_pending_work - node.published_work)
