"""KubeAI's PrefixHash, as of KubeAI 0.22.1 (internal/loadbalancer/balance_chwbl.go, October 2025): consistent hashing
with bounded load.

The hash of the first 100 characters of the first user message is a point on a ring with 256 virtual nodes for each
node. From there on, the first node takes the request for which

    load + 1 ≤ 1.25 × (total load + 1) / nodes

or the first node of all if there is none, or if nothing is in flight. The load is the number of requests in flight.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from random import Random

from warmroute.fake_engine.core.block_content import seed64
from warmroute.fleet.group import Candidates
from warmroute.fleet.node import Node
from warmroute.replay.peers.peer_policy import simulated
from warmroute.replay.simulation.policy_listener import PolicyListener
from warmroute.routing.decision import Decision
from warmroute.routing.query import Query

KEY_CHARACTERS = 100


class Kubeai(PolicyListener):
    name = "kubeai"
    wants_tokens = False
    queues_at_router = False

    def __init__(self, random: Random, *, load_factor: float = 1.25, replication: int = 256) -> None:
        self._load_factor = load_factor
        self._replication = replication
        self._ring_of: Candidates | None = None
        self._points: list[int] = []
        self._owners: list[Node] = []

    def decide(self, query: Query) -> Decision:
        candidates = query.candidates
        nodes = candidates.nodes
        key = simulated(query.request).first_user_text()[:KEY_CHARACTERS]
        if candidates is not self._ring_of:
            self._make_ring(candidates)
        total = sum(node.inflight for node in nodes)
        room = self._load_factor * (total + 1) / len(nodes)
        first: Node | None = None
        for node in self._walk(key):
            first = first or node
            if not total or node.inflight + 1 <= room:
                reason = "first on the ring" if node is first else "first is full"
                return Decision(node, self.name, reason, lambda: list(self._walk(key)))
        assert first is not None
        return Decision(first, self.name, "all are full", lambda: list(self._walk(key)))

    def _make_ring(self, candidates: Candidates) -> None:
        ring = sorted(
            (seed64(f"{node.name}{replica}"), at)
            for at, node in enumerate(candidates.nodes)
            for replica in range(self._replication)
        )
        self._ring_of = candidates
        self._points = [point for point, _ in ring]
        self._owners = [candidates.nodes[at] for _, at in ring]

    def _walk(self, key: bytes) -> Iterator[Node]:
        """Return each node once, in the order of the ring from the key's point on."""
        start = bisect_left(self._points, seed64(key.hex()))
        seen: set[str] = set()
        for owners in (self._owners[start:], self._owners[:start]):
            for node in owners:
                if node.name not in seen:
                    seen.add(node.name)
                    yield node
