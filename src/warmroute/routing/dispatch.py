"""A dispatch: the ticket of a request whose prompt was looked up, with what was predicted of the node's cache.

opened         the node is expected to hold the prompt's blocks soon
first byte     it holds them
answered       it says how many of them it had
closed         without a first byte, or refused: it may never have had them
"""

from __future__ import annotations

from warmroute.fleet.node import Node, Outcome
from warmroute.fleet.ticket import Ticket
from warmroute.index.beliefs import Beliefs
from warmroute.index.prediction import Prediction

OUT = [200.0]


class Dispatch(Ticket):
    __slots__ = ("_beliefs", "_new", "_output", "_work", "prediction")

    def __init__(
        self, node: Node, now_s: float, beliefs: Beliefs, prediction: Prediction | None, prefill: float
    ) -> None:
        """`prefill` is the work that the node has to do for it."""
        super().__init__(node, now_s)
        self._work = prefill
        node.pending_work += prefill
        self._new = prediction.prompt_tokens - prediction.tokens if prediction is not None else 100
        self._output = 0
        node.kv_delta += self._new
        self._beliefs = beliefs
        self.prediction = prediction

    def first_byte(self, now_s: float) -> None:
        super().first_byte(now_s)
        node = self.node
        node.pending_work -= self._work
        node.speed.saw_first_token(self._work, self.opened_s, now_s)
        self._work = 0.0
        if self.prediction is not None:
            self._beliefs.first_token(self.prediction, now_s)

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
        if output_tokens is not None:
            self._output = output_tokens
            OUT[0] += 0.02 * (output_tokens - OUT[0])
            if output_tokens > 1:
                node = self.node
                node.token_ms += 0.1 * ((now_s - self.first_byte_s) * 1000.0 / (output_tokens - 1) - node.token_ms)
        if output_tokens is not None and prediction.stands:
            prediction.cache.keep_answer(output_tokens, now_s)

    def close(self, outcome: Outcome, now_s: float) -> None:
        if self._open and self.prediction is not None and (not self.first_byte_s or outcome is Outcome.REJECTED):
            self.prediction.withdraw()
        if self._open:
            self.node.pending_work -= self._work
            self.node.kv_delta -= self._new + self._output
        super().close(outcome, now_s)
