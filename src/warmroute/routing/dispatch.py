"""A dispatch: the ticket of a request whose prompt was looked up, with what was predicted of the node's cache.

opened         the node is expected to hold the prompt's blocks soon
first byte     it holds them
answered       it says how many of them it had
closed         without a first byte, or refused: it may never have had them

An answer that is not streamed comes at its end. Its prefill is taken to be done when it should be, and of the whole
time that part is learned from which took longer: the prefill or the answer.
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
    __slots__ = (
        "_beliefs",
        "_context",
        "_due_s",
        "_new",
        "_output",
        "_outputs",
        "_pace",
        "_prefill",
        "_work",
        "ask",
        "prediction",
    )

    def __init__(
        self, ask: Ask, node: Node, now_s: float, beliefs: Beliefs, outputs: OutputLengths, pace: Pace,
        prediction: Prediction | None, tokens: int, new: int, prefill: float,
    ) -> None:  # fmt: skip
        """Of its `tokens` the node has to compute `new` ones, which is so much `prefill` work."""
        Ticket.__init__(self, node, now_s)
        self.ask = ask
        self._pace = pace
        self._beliefs = beliefs
        self._outputs = outputs
        self.prediction = prediction
        self._new = new
        self._output = 0
        self._prefill = self._work = prefill
        """`_work`: what is believed to be left of it; `_prefill`: what its time was not learned from."""
        node.pending_work += prefill
        node.kv_delta += new
        node.kv_new += new
        self._context = tokens
        node.context += tokens

        if not ask.streams:
            if node.unseen:
                node.expect_prefilled(now_s)
            self._due_s = now_s + (node.pending_work * node.speed.ms_per_token + node.round_trip_ms) / 1000.0
            node.unseen[self] = self._due_s

    def prefilled(self) -> None:
        """Nothing of its prefill is left, as far as anybody knows."""
        node = self.node
        node.pending_work -= self._work
        self._work = 0.0
        if not self.ask.streams:
            node.unseen.pop(self, None)

    def first_byte(self, now_s: float, served: bool = True) -> None:
        Ticket.first_byte(self, now_s, served)
        self.prefilled()
        if not served:
            return
        # An answer that comes at its end bounds the prefill: it took no longer.
        if self.ask.streams or (now_s - self.opened_s) * 1000.0 < self._prefill * self.node.speed.ms_per_token:
            self._saw_first_token(now_s)
            self._prefill = 0.0
        prediction = self.prediction
        if prediction is not None:
            self._beliefs.first_token(prediction, now_s)

    def _saw_first_token(self, now_s: float) -> None:
        node = self.node
        step_ms = self._pace.token_ms(node.context) * node.speed.factor if node.load > 1 else 0.0
        there_s = self.opened_s + node.round_trip_ms / 1000.0  # the way is not the node's work
        if there_s >= now_s:  # then it can't be as far as that
            there_s = self.opened_s
        node.speed.saw_first_token(self._prefill, step_ms, there_s, now_s)

    def _saw_flow(self, took_ms: float, steps: int, usual_ms: float) -> None:
        """So many steps after the first took so long; one takes `usual_ms` on a node like the others."""
        node = self.node
        speed, token_ms = node.speed, took_ms / steps
        speed.saw_answer(token_ms / usual_ms)
        self._pace.saw_answer(token_ms / speed.factor, node.context)

    def _saw_whole(self, output_tokens: int, now_s: float) -> None:
        """All that is seen of it is when it ended."""
        node = self.node
        speed = node.speed
        steps = output_tokens - 1 if output_tokens > 1 else 0
        usual_ms = self._pace.token_ms(node.context)
        flowed_ms = steps * usual_ms * speed.factor
        if flowed_ms > self._prefill * speed.ms_per_token and now_s > self._due_s:
            self._saw_flow((now_s - self._due_s) * 1000.0, steps, usual_ms)
        elif self._prefill:
            self._saw_first_token(max(self.opened_s, now_s - flowed_ms / 1000.0))

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
        ask, first_s = self.ask, self.first_byte_s
        if first_s and not ask.streams:
            self._saw_whole(output_tokens or 0, now_s)
        if output_tokens is None:
            return
        self._output = output_tokens
        self._outputs.saw(ask.model, ask.tenant, output_tokens)
        if first_s and ask.streams and output_tokens > 1:
            usual_ms = self._pace.token_ms(self.node.context)
            self._saw_flow((now_s - first_s) * 1000.0, output_tokens - 1, usual_ms)
        prediction.answered(output_tokens, now_s)

    def close(self, outcome: Outcome, now_s: float) -> None:
        if self._open:
            node, new = self.node, self._new
            if not self.first_byte_s:
                self.prefilled()
            if self.prediction is not None and (not self.first_byte_s or outcome is Outcome.REJECTED):
                self.prediction.withdraw()
            node.kv_delta -= new
            if node.polled_s > self.opened_s:  # the poll has seen something of its answer, too
                node.kv_delta -= self._output
            node.kv_new -= new
            node.context -= self._context
        Ticket.close(self, outcome, now_s)
