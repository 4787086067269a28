"""prefix_hash: requests with the same prefix go to the same node, without knowledge of its cache.

The key is model + first 256 characters of the system prompt + first 256 of the first user message, hashed by FNV-1a and
Murmur3's finalizer, placed by rendezvous hashing with bounded load. Requests without either message go to the least
loaded node.
"""

from __future__ import annotations

from warmroute.routing.decision import Decision
from warmroute.routing.policies.bounded_rendezvous import choose_by_hash
from warmroute.routing.policies.least_loaded import LeastLoaded
from warmroute.routing.query import Query


class PrefixHash:
    name = "prefix_hash"
    wants_tokens = False
    queues_at_router = False

    def __init__(self, load_factor: float, without_key: LeastLoaded) -> None:
        self._load_factor = load_factor
        self._without_key = without_key

    def decide(self, query: Query) -> Decision:
        key = query.request.prefix_key()
        if key is None:
            return self._without_key.decide(query)
        return choose_by_hash(key, query.candidates, query.group, self._load_factor, self.name)
