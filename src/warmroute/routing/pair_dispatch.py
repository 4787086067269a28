"""The tickets of a request that two nodes serve: one prefills its prompt, the other one decodes its answer.

The prefill node answers with one token, so its whole response comes when the prompt is prefilled, and the router learns
the node's speed from it. Only its report of cached tokens counts: the decode node reports what it had before the
transfer. The decode node does no prefill work, so its first token says nothing about its prefill speed.

Also the ticket of a request that a prefill node serves alone (routing/idle_prefill_nodes.py).
"""

from __future__ import annotations

from typing import Any

from warmroute._kernel import TicketState
from warmroute.fleet.node import Outcome
from warmroute.routing.dispatch import Dispatch
from warmroute.routing.idle_prefill_nodes import PATIENCE


class PrefillDispatch(Dispatch):
    __slots__ = ()
    always_streams = True


class WholeDispatch(Dispatch):
    """Of a request that a prefill node serves alone although other nodes could. The node prefills for no other one
    until the answer ends, or takes much longer than expected."""

    __slots__ = ("_counted",)

    def __init__(self, *arguments: Any) -> None:
        Dispatch.__init__(self, *arguments)
        node, request, decode_speed = self.node, self.request, arguments[5]
        self._counted = True
        node.whole_answers += 1
        output = self._output_lengths.expected(request.model, request.tenant, request.max_output_tokens)
        answer_ms = output * decode_speed.token_ms(self.tokens) * node.speed.factor
        until_s = self.opened_s + PATIENCE * (self.expected_ttft_ms + answer_ms) / 1000.0
        node.blocked_until_s = max(node.blocked_until_s, until_s)

    def close(self, outcome: Outcome, now_s: float) -> None:
        if self._counted:
            self._counted = False
            self.node.whole_answers -= 1
        Dispatch.close(self, outcome, now_s)

    def first_token(self, now_s: float, served: bool = True) -> None:
        if self.prediction is not None and self.prediction.store_tokens:  # loading says nothing about prefilling
            TicketState.first_token(self, now_s, False)
            if served:
                self._cache_view.first_token(self.prediction, now_s)
        else:
            Dispatch.first_token(self, now_s, served)


class DecodeDispatch(Dispatch):
    """Its memory is taken from the beginning. Its context slows down the node's batch only once it decodes."""

    __slots__ = ("_held_tokens",)
    always_streams = True

    def __init__(self, *arguments: Any) -> None:
        self._held_tokens = 0
        Dispatch.__init__(self, *arguments)

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

    def take_counts(self, before: DecodeDispatch) -> None:
        """Take over what was counted for the request when its ticket was on another node."""
        ours, theirs = self.prediction, before.prediction
        if ours is not None and theirs is not None:
            ours.sampled_blocks, ours.known_blocks = theirs.sampled_blocks, theirs.known_blocks

    def close(self, outcome: Outcome, now_s: float) -> None:
        self._end_hold()
        Dispatch.close(self, outcome, now_s)

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
