"""KubeAI's PrefixHash: consistent hashing with bounded load. The first 100 characters of the first user message have a
place on a ring with 256 virtual nodes for each node; the first node from there on with

    load + 1 ≤ 1.25 × (all load + 1) / nodes

takes it (any, while nothing is in flight); where none does, the first. Load is requests in flight.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from random import Random

from warmroute.fake_engine.core.content import seed64
from warmroute.fleet.group import Candidates
from warmroute.fleet.node import Node
from warmroute.replay.peers.choice import sim
from warmroute.replay.world.listener import Listener
from warmroute.routing.decision import Decision
from warmroute.routing.query import Query

KEY_CHARACTERS = 100


class Kubeai(Listener):
    name = "kubeai"
    wants_tokens = False
    holds = False

    def __init__(self, random: Random, *, load_factor: float = 1.25, replication: int = 256) -> None:
        self._load_factor = load_factor
        self._replication = replication
        self._ring_of: Candidates | None = None
        self._places: list[int] = []
        self._owners: list[Node] = []

    def decide(self, query: Query) -> Decision:
        candidates = query.candidates
        nodes = candidates.nodes
        key = sim(query.request).first_words()[:KEY_CHARACTERS]
        if candidates is not self._ring_of:
            self._make_ring(candidates)
        total = sum(node.inflight for node in nodes)
        room = self._load_factor * (total + 1) / len(nodes)
        first: Node | None = None
        for node in self._from(key):
            first = first or node
            if not total or node.inflight + 1 <= room:
                return Decision(
                    node, self.name, "home" if node is first else "home is full", lambda: list(self._from(key))
                )
        assert first is not None
        return Decision(first, self.name, "all are full: home", lambda: list(self._from(key)))

    def _make_ring(self, candidates: Candidates) -> None:
        ring = sorted(
            (seed64(f"{node.name}{replica}"), at)
            for at, node in enumerate(candidates.nodes)
            for replica in range(self._replication)
        )
        self._ring_of = candidates
        self._places = [place for place, _ in ring]
        self._owners = [candidates.nodes[at] for _, at in ring]

    def _from(self, key: bytes) -> Iterator[Node]:
        """The nodes in the order of the ring from the key's place on, each once."""
        start = bisect_left(self._places, seed64(key.hex()))
        seen: set[str] = set()
        for owners in (self._owners[start:], self._owners[:start]):
            for node in owners:
                if node.name not in seen:
                    seen.add(node.name)
                    yield node
