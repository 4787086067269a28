"""Which candidates can hold a request in their context window. Asked only where the nodes of a model differ in it.

    length       a node is a candidate if                      if none is, the candidates are
    ---------    ------------------------------------------    --------------------------------------------------
    exact        its window holds the prompt and the output    those with the longest window that hold the prompt
                                                               (engines may shorten the output)
    estimated    the same, with an estimate that is rather     those with the longest window (the estimate may be
                 too high                                      wrong)

The output is what the request allows, else the expected one. A prompt that is longer than every window is rejected only
if its length is exact.
"""

from __future__ import annotations

from warmroute.fleet.context_windows import ContextWindows
from warmroute.fleet.group import Candidates, Group
from warmroute.index.cache_view import CacheView
from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing.output_length import OutputLengthEstimate
from warmroute.routing.routing_errors import ContextTooLong


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
