"""session: a conversation stays on its node.

A session header identifies it, or `session_id`, `conversation_id`, `prompt_cache_key` or `user` in the body. It is
placed by rendezvous hashing with bounded load. Requests without a session go to the least loaded node.
"""

from __future__ import annotations

from warmroute.routing.decision import Decision
from warmroute.routing.policies.bounded_rendezvous import choose_by_hash
from warmroute.routing.policies.least_loaded import LeastLoaded
from warmroute.routing.query import Query


class Session:
    name = "session"
    wants_tokens = False
    queues_at_router = False

    def __init__(self, load_factor: float, without_session: LeastLoaded) -> None:
        self._load_factor = load_factor
        self._without_session = without_session

    def decide(self, query: Query) -> Decision:
        session = query.request.session()
        if not session:
            return self._without_session.decide(query)
        return choose_by_hash(session, query.candidates, query.group, self._load_factor, self.name)
