"""session: a conversation stays on its node, placed by rendezvous hashing with bounded load.

A session header identifies it, or `session_id`, `conversation_id`, `prompt_cache_key` or `user` in the body. A request
that names no session goes to the least loaded node; with `routing.prefix_key` = `system` or `start`, it is placed by
that key, as `prefix_hash` does.
"""

from __future__ import annotations

from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing.policies.prefix_hash import PrefixHash


class Session(PrefixHash):
    name = "session"

    def key(self, request: RoutingRequest) -> bytes | None:
        session = request.session_key()
        return session if session or self._kind == "system_and_user" else super().key(request)
