"""session: a conversation stays on its node. What names it: a session header, or `session_id`, `conversation_id`,
`prompt_cache_key` or `user` in the body. Placed by rendezvous with bounded load; without a name, the least loaded node.
"""

from __future__ import annotations

from warmroute.routing.decision import Decision
from warmroute.routing.policies.bounded_rendezvous import place
from warmroute.routing.policies.least_loaded import LeastLoaded
from warmroute.routing.query import Query


class Session:
    name = "session"
    wants_tokens = False
    holds = False

    def __init__(self, load_factor: float, without_session: LeastLoaded) -> None:
        self._load_factor = load_factor
        self._without_session = without_session

    def decide(self, query: Query) -> Decision:
        session = query.request.session()
        if not session:
            return self._without_session.decide(query)
        return place(session, query.candidates, query.group, self._load_factor, self.name)
