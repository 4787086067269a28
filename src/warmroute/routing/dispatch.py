"""A dispatch: the ticket of a request whose prompt was looked up, with what was predicted of the node's cache.

opened         the node is expected to hold the prompt's blocks soon
first byte     it holds them
answered       it says how many of them it had
closed         without a first byte, or refused: it may never have had them

An answer that is not streamed comes at its end. Its prefill is taken to be done when it should be, and of the whole
time that part is learned from which took longer: the prefill or the answer.
"""

from __future__ import annotations

from warmroute._kernel._books import TicketState
from warmroute.fleet.decode_speed import DecodeSpeed
from warmroute.fleet.node import Node, Outcome
from warmroute.fleet.ticket import Ticket
from warmroute.index.cache_view import CacheView
from warmroute.index.prediction import Prediction
from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing.outputs import OutputLengths


class Dispatch(Ticket):
    __slots__ = ("_cache_view", "_outputs", "prediction", "request")

    def __init__(
        self, request: RoutingRequest, node: Node, now_s: float, cache_view: CacheView, outputs: OutputLengths, pace: DecodeSpeed,
        prediction: Prediction | None, tokens: int, new: int, prefill: float,
    ) -> None:  # fmt: skip
        """Of its `tokens` the node has to compute `new` ones, which is so much `prefill` work."""
        self.request = request
        self._cache_view = cache_view
        self._outputs = outputs
        self.prediction = prediction
        self.enter(node, now_s, pace, request.streams, tokens, new, prefill)
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
        """Of these, expected to be cached on the node."""
        return self.tokens - self._new

    @property
    def rank(self) -> int | None:
        """The data-parallel rank that holds the prompt, where the node has several."""
        prediction = self.prediction
        if prediction is None or prediction.rank < 0 or len(prediction.cache.ranks) < 2:
            return None
        return prediction.rank

    def answered(
        self, prompt_tokens: int | None, cached_tokens: int | None, output_tokens: int | None, now_s: float
    ) -> None:
        """What the answer says of its tokens, as far as it does."""
        prediction = self.prediction
        if prediction is None:
            return
        if prompt_tokens is not None:
            prediction.counted(prompt_tokens)
        if cached_tokens is not None:
            prediction.reported(cached_tokens, now_s)
        self.learn(output_tokens, now_s)
        if output_tokens is not None:
            request = self.request
            self._outputs.saw(request.model, request.tenant, output_tokens)
            prediction.answered(output_tokens, now_s)

    def close(self, outcome: Outcome, now_s: float) -> None:
        if self.leave(outcome, now_s):
            for group in self._groups:
                group.inflight -= 1
            if self.prediction is not None and (not self.first_byte_s or outcome is Outcome.REJECTED):
                self.prediction.withdraw()
