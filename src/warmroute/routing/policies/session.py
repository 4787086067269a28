"""session: a conversation stays on its node. What names it: a session header, or `session_id`, `conversation_id`,
`prompt_cache_key` or `user` in the body. Placed by rendezvous with bounded load; without a name, the least loaded node.
"""

from __future__ import annotations

from warmroute.fleet.group import Candidates, Group
from warmroute.prompt.ask import Ask
from warmroute.routing.decision import Decision
from warmroute.routing.policies.bounded_rendezvous import place
from warmroute.routing.policies.least_loaded import LeastLoaded


class Session:
    name = "session"

    def __init__(self, load_factor: float, without_session: LeastLoaded) -> None:
        self._load_factor = load_factor
        self._without_session = without_session

    def decide(self, ask: Ask, candidates: Candidates, group: Group) -> Decision:
        session = ask.session()
        if not session:
            return self._without_session.decide(ask, candidates, group)
        return place(session, candidates, group, self._load_factor, self.name)
