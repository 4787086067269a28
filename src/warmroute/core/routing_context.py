"""One request before its decision: the candidates that can hold it, and the prefix of its prompt that each has
cached.
"""

from __future__ import annotations

from warmroute._kernel import Hit
from warmroute.core.cache_view import CacheView
from warmroute.core.context_windows import ContextWindows
from warmroute.core.group import Candidates, Group
from warmroute.core.islands import ConversationIslands
from warmroute.core.messages import Lookup, RoutingRequest
from warmroute.core.output_length import OutputLengthEstimate
from warmroute.core.rejections import ContextTooLong

# A query: one request before its decision, with its candidates and the cached prefix of its prompt on each of them.


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


# Which candidates can hold a request in their context window. Asked only where the nodes of a model differ in it.
#
#     length       a node is a candidate if                      if none is, the candidates are
#     ---------    ------------------------------------------    --------------------------------------------------
#     exact        its window holds the prompt and the output    those with the longest window that hold the prompt
#                                                                (engines may shorten the output)
#     estimated    the same, with an estimate that is rather     those with the longest window (the estimate may be
#                  too high                                      wrong)
#
# The output is what the request allows, else the expected one. A prompt that is longer than every window is rejected
# only if its length is exact.


class ContextFit:
    def __init__(self, cache_view: CacheView, output_lengths: OutputLengthEstimate) -> None:
        self._cache_view = cache_view
        self._output_lengths = output_lengths

    def needed(self, request: RoutingRequest) -> float:
        """Return the tokens of the longest prompt and its output; 0 if the prompt's length is unknown."""
        if not request.input_tokens:
            return 0.0
        output = request.max_output_tokens or self._output_lengths.expected(request.model, request.tenant)
        return request.input_tokens + output

    def candidates(
        self, request: RoutingRequest, group: Group, windows: ContextWindows, candidates: Candidates
    ) -> Candidates:
        """Return the candidates that the table above names; none if only nodes that are down hold the prompt. Raises
        ContextTooLong."""
        tokens = request.input_tokens
        found = windows.fitting(candidates, self.needed(request))
        if found.nodes:
            return found
        if request.input_exact:
            if tokens <= windows.largest:
                return windows.widest(windows.fitting(candidates, tokens))
            if not self._tokens_differ(group):
                raise ContextTooLong(tokens, windows.largest)
        return windows.widest(candidates)

    def _tokens_differ(self, group: Group) -> bool:
        """Return whether a node's tokens are known to differ from the router's, so that no length is exact."""
        caches = (self._cache_view.cache(node.name) for node in group.members)
        return any(cache is not None and cache.token_mismatch for cache in caches)
