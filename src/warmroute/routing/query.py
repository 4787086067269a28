"""A query: one request before its decision. What it asks for, who could serve it, and what each of them holds of it."""

from __future__ import annotations

import msgspec

from warmroute.fleet.group import Candidates, Group
from warmroute.index.cache_view import CacheView, Hit
from warmroute.index.lookup import Lookup
from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing.conversation_affinity import Stay


class Query(msgspec.Struct, eq=False):
    request: RoutingRequest
    candidates: Candidates
    group: Group
    now_s: float
    lookup: Lookup | None
    """The prompt in blocks; None where it was not read, or is too short to matter."""
    cache_view: CacheView
    looked_up_s: float = 0.0
    """When what nodes hold was asked for."""
    stay: Stay | None = None
    """The island where its conversation lives; None for a new one, or where there is only one island."""
    crossing: str | None = None
    """Why it leaves that island, in a word, where it does; None where islands have no say."""
    known_hits: dict[str, Hit] | None = None
    """What `hits` has worked out."""

    def again(self, now_s: float) -> Query:
        """The same a moment later. When it was looked up stays."""
        return Query(
            self.request, self.candidates, self.group, now_s, self.lookup, self.cache_view, self.looked_up_s,
            self.stay, self.crossing, self.hits(),
        )  # fmt: skip

    def hits(self) -> dict[str, Hit]:
        """By the node's name, for those that hold the beginning of the prompt. Worked out once."""
        hits = self.known_hits
        if hits is None:
            lookup = self.lookup
            hits = self.cache_view.hits(self.request.model, lookup, self.now_s) if lookup is not None else {}
            self.known_hits = hits
        return hits
