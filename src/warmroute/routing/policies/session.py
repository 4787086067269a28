"""session: a conversation stays on its node, placed by rendezvous hashing with bounded load.

A session header identifies it, or `session_id`, `conversation_id`, `prompt_cache_key` or `user` in the body.
"""

from __future__ import annotations

from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing.policies.bounded_rendezvous import BoundedRendezvous


class Session(BoundedRendezvous):
    name = "session"

    def key(self, request: RoutingRequest) -> bytes | None:
        return request.session_key()
