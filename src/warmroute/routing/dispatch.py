"""A dispatch: the ticket of a request whose prompt was looked up, with a prediction of what the node's cache holds.

opened         the router expects the node to hold the prompt's blocks soon
first byte     the node holds them
usage          the response reports how many of them were cached
closed         without a first byte, or rejected: the router withdraws the prediction

A response that is not streamed arrives all at once at its end. Its prefill counts as done when it is expected to be,
and of its whole time the router learns the part that took longer: the prefill or the decoding.
"""

from __future__ import annotations

from warmroute._kernel import TicketState
from warmroute.fleet.decode_speed import DecodeSpeed
from warmroute.fleet.node import Node, Outcome
from warmroute.fleet.ticket import Ticket
from warmroute.index.cache_view import CacheView
from warmroute.index.prediction import Prediction
from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing.output_length import OutputLengthEstimate


class Dispatch(Ticket):
    __slots__ = ("_cache_view", "_output_lengths", "prediction", "request")

    def __init__(
        self, request: RoutingRequest, node: Node, now_s: float, cache_view: CacheView,
        output_lengths: OutputLengthEstimate, decode_speed: DecodeSpeed, prediction: Prediction | None, tokens: int,
        new: int, work: float,
    ) -> None:  # fmt: skip
        """Of the prompt's `tokens`, the node has to prefill `new` ones, which is this much `work`."""
        self.request = request
        self._cache_view = cache_view
        self._output_lengths = output_lengths
        self.prediction = prediction
        self.open(node, now_s, decode_speed, request.streams, tokens, new, work)
        groups = self._groups = node.groups
        for group in groups:
            group.inflight += 1

    def first_byte(self, now_s: float, served: bool = True) -> None:
        TicketState.first_byte(self, now_s, served)
        prediction = self.prediction
        if served and prediction is not None:
            self._cache_view.first_token(prediction, now_s)

    @property
    def cached(self) -> int:
        """Prompt tokens that the router expects to be cached on the node."""
        return self.tokens - self._new_tokens

    @property
    def rank(self) -> int | None:
        """The data-parallel rank that holds the prompt's prefix; None if the node has only one."""
        prediction = self.prediction
        if prediction is None or prediction.rank < 0 or len(prediction.cache.ranks) < 2:
            return None
        return prediction.rank

    def record_usage(
        self, prompt_tokens: int | None, cached_tokens: int | None, output_tokens: int | None, now_s: float
    ) -> None:
        """Take over the token counts that the response reports; None for those it does not report."""
        prediction = self.prediction
        if prediction is None:
            return
        if prompt_tokens is not None:
            prediction.check_prompt_tokens(prompt_tokens)
        if cached_tokens is not None:
            prediction.check_cached_tokens(cached_tokens, now_s)
        self.record_answer(output_tokens, now_s)
        if output_tokens is not None:
            request = self.request
            self._output_lengths.record(request.model, request.tenant, output_tokens)
            prediction.record_output(output_tokens, now_s)

    def close(self, outcome: Outcome, now_s: float) -> None:
        if self.release(outcome, now_s):
            for group in self._groups:
                group.inflight -= 1
            if self.prediction is not None and (not self.first_byte_s or outcome is Outcome.REJECTED):
                self.prediction.withdraw()
