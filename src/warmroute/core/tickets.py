"""A try's entry in the accounting of its node, and the prediction for its cache: opened and closed once, remembered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from warmroute._kernel import TicketState
from warmroute.core.cache_view import CacheView
from warmroute.core.group import MAX_RATIO_TO_EXPECTED, Group
from warmroute.core.messages import Outcome, RoutingRequest
from warmroute.core.node import Node, Ticket
from warmroute.core.output_length import OutputLengthEstimate
from warmroute.core.prediction import Prediction
from warmroute.core.prefill_work import work
from warmroute.core.speeds import LATENCY_MS, DecodeSpeed, TransferSpeed

# The ticket of a request whose prompt was looked up, with a prediction of what the node's cache holds.
#
# opened         the router expects the node to hold the prompt's blocks soon
# first token    the node holds them
# usage          the response reports how many of them were cached
# closed         without a first token, or rejected: the router withdraws the prediction
#
# A response that is not streamed arrives all at once at its end. Its prefill counts as done when it is expected to be,
# and of its whole time the router learns the part that took longer: the prefill or the decoding.
#
# Where the node may have more of the prompt than the request's tenant may learn of, the router learns from the prefill
# only once the usage reports what was cached.


class OtherPrompts(NamedTuple):
    """The further prompts of a request that has several."""

    prompts: int
    """Number of the request's prompts, the first one included."""
    predictions: Sequence[Prediction]

    def work(self, new: float, cached: float) -> float:
        """Return the prefill work of all prompts together, as if they were equally long."""
        return work(new, cached, self.prompts)


class PromptTicket(Ticket):
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
        self.rank = -1
        if prediction is not None and prediction.rank >= 0 and len(prediction.cache.ranks) > 1:
            self.rank = prediction.rank
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


# The ticket of a request whose node loads a part of the prompt's KV cache from a shared KV store.
#
# Its time to first token contains the loading, so it says nothing about the node's prefill speed. The router learns
# from it how fast the store is: by how much the first token came later than expected, if the node had no other request.


class StoreTicket(PromptTicket):
    __slots__ = ("_expected_load_ms", "_load_speed")

    def __init__(
        self, request: RoutingRequest, node: Node, now_s: float, cache_view: CacheView,
        output_lengths: OutputLengthEstimate, group: Group, prediction: Prediction, tokens: int, new: int, work: float,
    ) -> None:  # fmt: skip
        PromptTicket.__init__(
            self, request, node, now_s, cache_view, output_lengths, group.decode_speed, prediction, tokens, new, work,
            prediction.tokens,
        )  # fmt: skip
        store = prediction.cache.store
        self._load_speed: TransferSpeed | None = None
        self._expected_load_ms = 0.0
        if store is not None and node.load == 1 and request.streams and not prediction.has_hidden_hits:
            self._load_speed = group.transfer_speeds.from_store(store.name, node.island)
            # What is expected of the node does not exceed a prefill, even if it loads more slowly.
            ms_per_token = min(self._load_speed.ms_per_token(now_s), node.speed.ms_per_token)
            self._expected_load_ms = prediction.store_tokens * ms_per_token

    def first_token(self, now_s: float, served: bool = True) -> None:
        TicketState.first_token(self, now_s, False)
        prediction = self.prediction
        if not served or prediction is None:
            return
        self._cache_view.first_token(prediction, now_s)
        if self._load_speed is not None:
            late_ms = (now_s - self.opened_s) * 1000.0 - self.expected_ttft_ms
            self._load_speed.learn(prediction.store_tokens, LATENCY_MS + self._expected_load_ms + late_ms, now_s)


# The tickets of a request that two nodes serve: one prefills its prompt, the other one decodes its answer.
#
# The prefill node answers with one token, so its whole response comes when the prompt is prefilled, and the router
# learns the node's speed from it. Only its report of cached tokens counts: the decode node reports what it had before
# the transfer. The decode node does no prefill work, so its first token says nothing about its prefill speed.
#
# Also the ticket of a request that a prefill node serves alone (core/group.py).


class PrefillTicket(PromptTicket):
    __slots__ = ()
    always_streams = True


class WholeAnswerTicket(PromptTicket):
    """The ticket of a request that a prefill node serves alone although other nodes could. The node prefills for no
    other one until the answer ends, or takes much longer than expected."""

    __slots__ = ("_counted",)

    def __init__(self, *arguments: Any) -> None:
        PromptTicket.__init__(self, *arguments)
        node, request, decode_speed = self.node, self.request, arguments[5]
        self._counted = True
        node.whole_answers += 1
        output = self._output_lengths.expected(request.model, request.tenant, request.max_output_tokens)
        answer_ms = output * decode_speed.token_ms(self.tokens) * node.speed.factor
        until_s = self.opened_s + MAX_RATIO_TO_EXPECTED * (self.expected_ttft_ms + answer_ms) / 1000.0
        node.blocked_until_s = max(node.blocked_until_s, until_s)

    def close(self, outcome: Outcome, now_s: float) -> None:
        if self._counted:
            self._counted = False
            self.node.whole_answers -= 1
        PromptTicket.close(self, outcome, now_s)

    def first_token(self, now_s: float, served: bool = True) -> None:
        if self.prediction is not None and self.prediction.store_tokens:  # loading says nothing about prefilling
            TicketState.first_token(self, now_s, False)
            if served:
                self._cache_view.first_token(self.prediction, now_s)
        else:
            PromptTicket.first_token(self, now_s, served)


class DecodeTicket(PromptTicket):
    """The ticket on the decode node of a pair. It takes the node's KV memory from the beginning. Its context slows down
    the node's batch only once the node decodes."""

    __slots__ = ("_held_tokens",)
    always_streams = True

    def __init__(self, *arguments: Any) -> None:
        self._held_tokens = 0
        PromptTicket.__init__(self, *arguments)

    def hold(self) -> None:
        """The node has to wait for the KV cache."""
        self._held_tokens = self.tokens
        self.node.add_context(-self.tokens)

    def begin_decode(self, cache_group: str) -> None:
        """The node gets the KV cache. Only now the peers learn of it: until then, the request may move."""
        self._end_hold()
        if self.prediction is not None:
            self._cache_view.tell_peers(self.prediction, cache_group)

    def _end_hold(self) -> None:
        held, self._held_tokens = self._held_tokens, 0
        if held:
            self.node.add_context(held)

    @property
    def missing_tokens(self) -> int:
        """KV tokens that the node is expected to lack."""
        return self._new_tokens

    def take_counts(self, before: DecodeTicket) -> None:
        """Take over what was counted for the request when its ticket was on another node."""
        ours, theirs = self.prediction, before.prediction
        if ours is not None and theirs is not None:
            ours.sampled_blocks, ours.known_blocks = theirs.sampled_blocks, theirs.known_blocks

    def close(self, outcome: Outcome, now_s: float) -> None:
        self._end_hold()
        PromptTicket.close(self, outcome, now_s)

    def first_token(self, now_s: float, served: bool = True) -> None:
        TicketState.first_token(self, now_s, False)
        if served and self.prediction is not None:
            self._cache_view.first_token(self.prediction, now_s)

    def record_usage(
        self, prompt_tokens: int | None, cached_tokens: int | None, output_tokens: int | None, now_s: float
    ) -> None:
        prediction, request = self.prediction, self.request
        if prediction is not None and prompt_tokens is not None:
            prediction.check_prompt_tokens(prompt_tokens)
        if output_tokens is None:
            return
        if request.streams:  # else only the end of the response was seen, and its start depended on the other node
            self.record_answer(output_tokens, now_s)
        self._output_lengths.record(request.model, request.tenant, output_tokens)
        if prediction is not None:
            prediction.record_output(output_tokens, now_s)


# What is kept of a traced request's attempts. Other requests forget an attempt when its ticket closes.
