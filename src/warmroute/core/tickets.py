"""A dispatch: the ticket of a request whose prompt was looked up, with a prediction of what the node's cache holds.

opened         the router expects the node to hold the prompt's blocks soon
first token    the node holds them
usage          the response reports how many of them were cached
closed         without a first token, or rejected: the router withdraws the prediction

A response that is not streamed arrives all at once at its end. Its prefill counts as done when it is expected to be,
and of its whole time the router learns the part that took longer: the prefill or the decoding.

Where the node may have more of the prompt than the request's tenant may learn of, the router learns from the prefill
only once the usage reports what was cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from warmroute._kernel import TicketState
from warmroute.fleet.decode_speed import DecodeSpeed
from warmroute.fleet.node import Node, Outcome
from warmroute.fleet.prefill_work import work
from warmroute.fleet.ticket import Ticket
from warmroute.index.cache_view import CacheView
from warmroute.index.prediction import Prediction
from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing.output_length import OutputLengthEstimate


class OtherPrompts(NamedTuple):
    """The further prompts of a request that has several."""

    prompts: int
    """Number of the request's prompts, the first one included."""
    predictions: Sequence[Prediction]

    def work(self, new: float, cached: float) -> float:
        """Return the prefill work of all prompts together, as if they were equally long."""
        return work(new, cached, self.prompts)


class Dispatch(Ticket):
    __slots__ = (
        "_cache_view", "_decode_speed", "_others", "_output_lengths", "_streams_since_s", "_whole_work", "cached",
        "prediction", "request",
    )  # fmt: skip
    always_streams = False
    """Whether the node's work counts as that of a streamed response, whatever the client gets."""

    def __init__(
        self, request: RoutingRequest, node: Node, now_s: float, cache_view: CacheView,
        output_lengths: OutputLengthEstimate, decode_speed: DecodeSpeed, prediction: Prediction | None, tokens: int,
        new: int, work: float, cached: int, others: OtherPrompts | None = None,
    ) -> None:  # fmt: skip
        """Of the prompt's `tokens`, the node has to prefill `new` ones, which is this much `work`."""
        self.request = request
        self._cache_view = cache_view
        self._output_lengths = output_lengths
        self.prediction = prediction
        self.cached = cached
        """Prompt tokens that the node's cache should have. `new` counts them only as far as the router trusts this."""
        self._others = others
        self._decode_speed = decode_speed
        self._streams_since_s = 0.0
        """Since when `output_lengths` counts the response among the streams under way; 0: it does not."""
        streams = (request.streams or self.always_streams) and others is None
        waits = node.unstreamed_prefills
        self.open(node, now_s, decode_speed, streams, tokens, new, work)
        hides = prediction is not None and prediction.has_hidden_hits
        loads = prediction is not None and prediction.store_tokens > 0
        if hides or (others is not None and any(one.has_hidden_hits for one in others.predictions)):
            self.has_hidden_hits = True
        self._whole_work = 0.0
        """The prefill work of an answer that is not streamed, if it is known and no other prompt seems to wait."""
        if not streams and others is None and not (hides or loads or waits or node.waiting):
            self._whole_work = work
        groups = self._groups = node.groups
        for group in groups:
            group.inflight += 1

    def first_token(self, now_s: float, served: bool = True) -> None:
        others = self._others
        # The first token of several prompts says nothing about the prefill of the others.
        TicketState.first_token(self, now_s, served and others is None)
        prediction = self.prediction
        if (
            served and self.request.streams and others is None and not self._streams_since_s
            and self._output_lengths.stream_began(self.request.model, self._decode_speed, now_s)
        ):  # fmt: skip
            self._streams_since_s = now_s
        if served and prediction is not None:
            self._cache_view.first_token(prediction, now_s)
            for other in others.predictions if others is not None else ():
                self._cache_view.first_token(other, now_s)

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
            if self.has_hidden_hits:
                hit = prediction.reported_hit(cached_tokens, prompt_tokens)
                if hit is not None:
                    self.reveal_hits(work(prediction.prompt_tokens - hit, hit))
            prediction.check_cached_tokens(cached_tokens, now_s, prompt_tokens)
        each = output_tokens  # the output of one prompt: the node generates those of all prompts at the same time
        if each is not None and self._others is not None:
            each //= self._others.prompts
        if self._whole_work and each is not None and each > 0 and now_s >= self.node.whole_answer_times.next_s:
            self._learn_whole_answer(each, now_s)
        self.record_answer(each, now_s)
        if output_tokens is not None and each is not None:
            request = self.request
            self._output_lengths.record(request.model, request.tenant, each)
            prediction.record_output(output_tokens, now_s)

    def _learn_whole_answer(self, output_tokens: int, now_s: float) -> None:
        node = self.node
        took_ms = (now_s - self.opened_s) * 1000.0 - node.round_trip_ms
        if took_ms > 0.0:
            node.learn_whole_answer(self._whole_work, output_tokens, took_ms, now_s)

    def close(self, outcome: Outcome, now_s: float) -> None:
        if self.release(outcome, now_s):
            for group in self._groups:
                group.inflight -= 1
            if self._streams_since_s:
                self._output_lengths.stream_ended(self.request.model, self._streams_since_s, now_s)
            if self.prediction is not None and (not self.first_token_s or outcome is Outcome.REJECTED):
                self.prediction.withdraw()
                for other in self._others.predictions if self._others is not None else ():
                    other.withdraw()
