"""A dispatch: the ticket of a request whose prompt was looked up, with what was predicted of the node's cache.

opened         the node is expected to hold the prompt's blocks soon
first byte     it holds them
answered       it says how many of them it had
closed         without a first byte, or refused: it may never have had them
"""

from __future__ import annotations

from warmroute.fleet.node import Node, Outcome
from warmroute.fleet.pace import Pace
from warmroute.fleet.ticket import Ticket
from warmroute.index.beliefs import Beliefs
from warmroute.index.prediction import Prediction
from warmroute.prompt.ask import Ask
from warmroute.routing.outputs import OutputLengths


class Dispatch(Ticket):
    __slots__ = ("_beliefs", "_context", "_new", "_output", "_outputs", "_pace", "_work", "ask", "prediction")

    def __init__(
        self, ask: Ask, node: Node, now_s: float, beliefs: Beliefs, outputs: OutputLengths, pace: Pace,
        prediction: Prediction | None, tokens: int, new: int, prefill: float,
    ) -> None:  # fmt: skip
        """Of its `tokens` the node has to compute `new` ones, which is so much `prefill` work."""
        super().__init__(node, now_s)
        self.ask = ask
        self._pace = pace
        self._beliefs = beliefs
        self._outputs = outputs
        self.prediction = prediction
        self._new = new
        self._output = 0
        self._work = prefill
        node.pending_work += prefill
        node.kv_delta += new
        node.kv_new += new
        self._context = tokens
        node.context += tokens

    def first_byte(self, now_s: float) -> None:
        super().first_byte(now_s)
        node = self.node
        node.pending_work -= self._work
        step_ms = self._pace.token_ms(node.context) * node.speed.factor if node.load > 1 else 0.0
        there_s = self.opened_s + node.round_trip_ms / 1000.0  # the way is not the node's work
        node.speed.saw_first_token(self._work, step_ms, there_s, now_s)
        self._work = 0.0
        if self.prediction is not None:
            self._beliefs.first_token(self.prediction, now_s)

    @property
    def tokens(self) -> int:
        """Of the prompt."""
        return self._context

    @property
    def cached(self) -> int:
        """Of these, expected to be cached on the node."""
        return self._context - self._new

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
            self._outputs.saw(self.ask.model, self.ask.tenant, output_tokens)
            if self.first_byte_s and output_tokens > 1:
                node, pace = self.node, self._pace
                token_ms = (now_s - self.first_byte_s) * 1000.0 / (output_tokens - 1)
                node.speed.saw_answer(token_ms / pace.token_ms(node.context))
                pace.saw_answer(token_ms / node.speed.factor, node.context)
        if output_tokens is not None and prediction.stands:
            prediction.cache.keep_answer(output_tokens, now_s)

    def close(self, outcome: Outcome, now_s: float) -> None:
        if self._open and self.prediction is not None and (not self.first_byte_s or outcome is Outcome.REJECTED):
            self.prediction.withdraw()
        if self._open:
            node = self.node
            node.pending_work -= self._work
            node.kv_delta -= self._new
            if node.polled_s > self.opened_s:  # the poll has seen something of its answer, too
                node.kv_delta -= self._output
            node.kv_new -= self._new
            node.context -= self._context
        super().close(outcome, now_s)
        if not self.node.inflight:
            self.node.pending_work = 0.0  # what sums of fractions leave behind
