"""The order of requests that wait in the queues of several processes for the same node (see routing/turns.py).

Each process publishes, by node, the priority and the score of its first request. The score is the prefill time minus a
bonus for waiting, and a score falls with time, equally in all processes. A process leaves a node's room to a peer whose
first request comes before its own, but not for longer than MAX_YIELD_S: the peer's request may have gone elsewhere
meanwhile. It does not leave an idle node to a peer. The order between tenants is kept within each process only.

Two processes can still send to a node at the same time: each knows only what the other published. `unseen_work` assumes
that each peer has sent the node as much since its last message as this process has. So all processes together exceed
the limit of a node by at most one prompt each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from warmroute.cluster.peer import Peer
from warmroute.fleet.node import Node
from warmroute.fleet.peer_load import own_load
from warmroute.routing.queued_request import AGE_BONUS

MAX_YIELD_S: Final = 0.1


class ClusterTurns:
    def __init__(self, peers: Mapping[str, Peer], changed: Callable[[], object]) -> None:
        self._peers = peers
        self._changed = changed
        self._yields_since_s: dict[str, float] = {}
        self.published_work: dict[str, float] = {}
        """By node: this process's pending work when it last published."""

    def is_ours(self, node: Node, priority: int, score: float, now_s: float) -> bool:
        if not node.inflight:  # the peer's request is not waiting for this node, or goes there at once, too
            return True
        name = node.name
        for peer in self._peers.values():
            head = peer.heads.get(name)
            if head is None:
                continue
            peer_score = head[1] - AGE_BONUS * (now_s - peer.heard_s) * 1000.0
            if (head[0], peer_score) < (priority, score):
                since_s = self._yields_since_s.setdefault(name, now_s)
                if now_s - since_s <= MAX_YIELD_S:
                    return False
        self._yields_since_s.pop(name, None)
        return True

    def queued(self) -> None:
        self._changed()

    def unseen_work(self, node: Node) -> float:
        peers = len(self._peers)
        if not peers:
            return 0.0
        return peers * max(0.0, own_load(node).pending_work - self.published_work.get(node.name, 0.0))
