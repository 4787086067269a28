"""prefix_hash: requests with the same prefix go to the same node, without knowledge of its cache.

The key is model + first 256 characters of the system prompt + first 256 of the first user message, hashed by FNV-1a and
Murmur3's finalizer, placed by rendezvous hashing with bounded load.
"""

from __future__ import annotations

from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing.policies.bounded_rendezvous import BoundedRendezvous


class PrefixHash(BoundedRendezvous):
    name = "prefix_hash"

    def key(self, request: RoutingRequest) -> bytes | None:
        return request.prefix_key()
