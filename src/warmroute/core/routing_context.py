"""A query: one request before its decision, with its candidates and the cached prefix of its prompt on each of them."""

from __future__ import annotations

from warmroute._kernel import TOKEN_BYTES
from warmroute.fleet.group import Candidates, Group
from warmroute.index.cache_view import CacheView, Hit
from warmroute.index.lookup import Lookup as Lookup
from warmroute.index.lookup import SpecialPrompt
from warmroute.prompt.prompt import Prompt
from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing.conversation_affinity import ConversationIslands


class Query:
    request: RoutingRequest
    candidates: Candidates
    group: Group
    now_s: float
    lookup: Lookup | None
    """The prompt's blocks; None if the prompt was not tokenized or is too short to matter."""
    cache_view: CacheView
    looked_up_s: float
    """When the hits were looked up."""
    conversation: ConversationIslands | None
    """The islands of a known conversation; None for a new one, or if the group is on one island."""
    move_reason: str | None
    """Why the request leaves its conversation's island; empty if it stays, None if islands do not matter."""
    known_hits: dict[str, Hit] | None
    """The result of `hits`."""

    def __init__(
        self,
        request: RoutingRequest,
        candidates: Candidates,
        group: Group,
        now_s: float,
        lookup: Lookup | None,
        cache_view: CacheView,
        looked_up_s: float = 0.0,
        conversation: ConversationIslands | None = None,
        move_reason: str | None = None,
        known_hits: dict[str, Hit] | None = None,
    ) -> None:
        self.request = request
        self.candidates = candidates
        self.group = group
        self.now_s = now_s
        self.lookup = lookup
        self.cache_view = cache_view
        self.looked_up_s = looked_up_s
        self.conversation = conversation
        self.move_reason = move_reason
        self.known_hits = known_hits

    def repeat(self, now_s: float) -> Query:
        """Return the same query for a later decision. The hits are not looked up again."""
        return Query(
            self.request, self.candidates, self.group, now_s, self.lookup, self.cache_view, self.looked_up_s,
            self.conversation, self.move_reason, self.hits(),
        )  # fmt: skip

    def hits(self) -> dict[str, Hit]:
        """Return the cached prefix of the prompt by node name, for nodes that have any. Looked up once."""
        hits = self.known_hits
        if hits is None:
            lookup = self.lookup
            hits = self.cache_view.hits(self.group.model, lookup, self.now_s) if lookup is not None else {}
            self.known_hits = hits
        return hits


def lookup_of(prompt: Prompt, cache_group: str) -> Lookup:
    """Return the lookup of a tokenized prompt. `cache_group`: the tenant, or the tenants it shares caches with."""
    tokens, exact, truncated = prompt.tokens, prompt.exact, prompt.truncated
    lookup = Lookup(
        tokens, len(tokens) // TOKEN_BYTES, prompt.exact_tokens if exact else 0, prompt.cache_salt, cache_group,
        prompt.media, truncated or not exact,
    )  # fmt: skip
    if truncated or prompt.skips_cache or prompt.others:
        others = tuple([lookup_of(other, cache_group) for other in prompt.others])
        prompts = 1 + len(others) + prompt.unread_prompts
        lookup.special = SpecialPrompt(prompt.skips_cache, others, prompts, prompt.total_tokens)
        for other in others:
            other.special = SpecialPrompt(prompt.skips_cache, total_tokens=other.token_count)
    return lookup
