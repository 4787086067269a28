"""session: a conversation stays on its node, placed by rendezvous hashing with bounded load.

A session header identifies it, or `session_id`, `conversation_id`, `prompt_cache_key` or `user` in the body. A request
that names no session is placed by its prefix, as `prefix_hash` does.
"""

from __future__ import annotations

from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing.policies.prefix_hash import PrefixHash


class Session(PrefixHash):
    name = "session"

    def key(self, request: RoutingRequest) -> bytes | None:
        return request.session_key() or super().key(request)
