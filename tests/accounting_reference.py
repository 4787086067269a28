"""The kernel's accounting of nodes and tickets in plain Python, as simple as possible.

The kernel updates a node's counters, its speed and its model's decode speed when a request is sent, at its first token,
with its reported usage, and at its end. tests/routing/test_accounting.py compares the two.
"""

from __future__ import annotations

from bisect import bisect_left
from math import exp

from warmroute._kernel import (
    ARRIVAL_DECAY_S,
    CARRIED_MAX_FACTOR,
    DECODE_FACTOR_WEIGHT,
    DECODE_MAX_FACTOR,
    DECODE_MIN_SHARE,
    DECODE_WEIGHT,
    EARLY_MIN_STEPS,
    EARLY_STEPS,
    FIRST_TOKEN_STEPS,
    LATENCY_WEIGHT,
    LONG_PREFILL_WEIGHT,
    LONG_PREFILL_WORK,
    PREFILL_LATE,
    PREFILL_MIN_SHARE,
    PREFILLED_MAX_SHARE,
    REQUEST_CONTEXT,
    REVIEW_WEIGHT,
    SPEED_DECAY_S,
    SPEED_MAX_FACTOR,
    SPEED_MIN_KEPT,
    STEP_FALL,
    STEP_MAX_FACTOR,
    STEP_RISE,
    STEP_WORK,
    TTFT_BOUNDS_MS,
)
from warmroute.core.messages import Outcome
from warmroute.core.speeds import DecodeSpeed, NodeSpeed

MAX_OUTCOMES = 16


def own_prefill_ms(since_ms: float, token_ms: float) -> float:
    return max(since_ms - FIRST_TOKEN_STEPS * token_ms, PREFILL_MIN_SHARE * since_ms, 0.0)


def add_prefill(speed: NodeSpeed, work: float, took_ms: float, expected_ms: float, now_s: float) -> float:
    """Update the prefill speed, and return the time that is charged to the prompt."""
    charged_ms = min(took_ms, SPEED_MAX_FACTOR * expected_ms)
    if took_ms <= FIRST_TOKEN_STEPS * speed._step_ms:  # a whole step, however short it is: a lower estimate is right
        charged_ms = min(max(expected_ms, took_ms - speed._step_ms), charged_ms)
    kept = max(SPEED_MIN_KEPT, exp(min(0.0, speed._at_s - now_s) / SPEED_DECAY_S))
    speed._at_s = now_s
    weight = work / (work + STEP_WORK)
    speed._work = speed._work * kept + weight * work
    speed._ms = speed._ms * kept + weight * charged_ms
    speed.learned_ms_per_token = max(1e-4, speed._ms / max(1.0, speed._work))
    if not speed.is_replaced:
        speed.ms_per_token = speed.learned_ms_per_token
    speed.answers += 1
    return charged_ms


def record_first_token(speed: NodeSpeed, work: float, token_ms: float, sent_s: float, now_s: float) -> None:
    """Update the prefill speed. `work`: of the prompt; `token_ms`: time of a decode step on the node."""
    own_ms = own_prefill_ms((now_s - max(sent_s, speed._last_first_token_s)) * 1000.0, token_ms)
    ms_per_token = speed.learned_ms_per_token if speed.is_replaced else speed.ms_per_token
    expected_ms = work * ms_per_token
    carried_ms = speed._uncharged_ms if sent_s < speed._last_first_token_s else 0.0
    most_ms = CARRIED_MAX_FACTOR * work * speed._carried_ms_per_token
    if own_ms + carried_ms > most_ms and own_ms * SPEED_MAX_FACTOR >= expected_ms:
        carried_ms = 0.0
    if carried_ms == 0.0:
        speed._carried_ms_per_token = ms_per_token
    took_ms = own_ms + min(carried_ms, max(0.0, most_ms - own_ms))
    speed._last_first_token_s = now_s
    speed._uncharged_ms = own_ms + carried_ms - add_prefill(speed, work, took_ms, expected_ms, now_s)


def record_lone_prefill(speed: NodeSpeed, work: float, took_ms: float) -> None:
    """Update the regression of the time to the first token over the work, for prompts that waited alone."""
    speed.lone_prefills += 1
    weight = max(REVIEW_WEIGHT, 1.0 / speed.lone_prefills)
    dx, dy = work - speed.lone_work, took_ms - speed.lone_ms
    if speed.lone_prefills > 1:
        dy = min(dy, SPEED_MAX_FACTOR * speed.lone_ms)
    speed.lone_work += weight * dx
    speed.lone_ms += weight * dy
    speed.lone_xx = (1.0 - weight) * (speed.lone_xx + weight * dx * dx)
    speed.lone_xy = (1.0 - weight) * (speed.lone_xy + weight * dx * dy)


def record_long_prefill(speed: NodeSpeed, work: float, took_ms: float) -> None:
    """Update the mean work and time of lone prompts whose prefill takes several steps."""
    long_ms_per_token = max(1e-4, speed.long_ms / speed.long_work) if speed.long_prefills else None
    estimate_ms = work * (speed.learned_ms_per_token if long_ms_per_token is None else long_ms_per_token)
    speed.long_prefills += 1
    weight = max(LONG_PREFILL_WEIGHT, 1.0 / speed.long_prefills)
    took_ms = min(took_ms, SPEED_MAX_FACTOR * estimate_ms)
    speed.long_work += weight * (work - speed.long_work)
    speed.long_ms += weight * (took_ms - speed.long_ms)


def record_step(speed: NodeSpeed, token_ms: float) -> None:
    """Update the time of a decode step that no prefill interrupts: a low quantile of the time per token."""
    step_ms = speed._step_ms
    if step_ms == 0.0:
        speed._step_ms = token_ms
    else:
        weight = STEP_FALL if token_ms < step_ms else STEP_RISE
        speed._step_ms += weight * (min(token_ms, 2.0 * step_ms) - step_ms)


def record_times(speed: NodeSpeed, ttft_ms: float, token_ms: float) -> None:
    """Update the share of responses whose first token came sooner than a step of the engine takes."""
    speed.timed_answers += 1
    weight = max(REVIEW_WEIGHT, 1.0 / speed.timed_answers)
    early = 1.0 if ttft_ms < EARLY_STEPS * token_ms else 0.0
    speed.early_share += weight * (early - speed.early_share)


def record_decode_factor(speed: NodeSpeed, factor: float, answers: int) -> None:
    """Update the node's decode factor. `factor`: how much slower a response was than the model's decode speed, which
    was learned from `answers` responses: at first, a deviation from it says little about the node."""
    before = speed.factor
    limit = SPEED_MAX_FACTOR * before
    trust = DECODE_FACTOR_WEIGHT * min(1.0, DECODE_WEIGHT * answers)
    speed.factor = before + trust * ((factor if factor < limit else limit) - before)


def record_token_ms(decode_speed: DecodeSpeed, token_ms: float, context: float) -> None:
    """Update the model's decode speed with the time per token on a node with factor 1 and this much context."""
    decode_speed.answers += 1
    weight = max(DECODE_WEIGHT, 1.0 / (decode_speed.answers + 1))
    limit_ms = DECODE_MAX_FACTOR * decode_speed.token_ms(context)
    dx = context - decode_speed.mean_context
    dy = (token_ms if token_ms < limit_ms else limit_ms) - decode_speed.mean_ms
    decode_speed.mean_context += weight * dx
    decode_speed.mean_ms += weight * dy
    xx = decode_speed._xx = decode_speed._xx + DECODE_WEIGHT * (dx * dx - decode_speed._xx)
    xy = decode_speed._xy = decode_speed._xy + DECODE_WEIGHT * (dx * dy - decode_speed._xy)
    slope_ms = xy / (xx if xx > 1.0 else 1.0)
    decode_speed.slope_ms = slope_ms if slope_ms > 0.0 else 0.0
    decode_speed.least_ms = DECODE_MIN_SHARE * decode_speed.mean_ms


class ReferenceNode:
    def __init__(self, round_trip_ms: float, other_load: int) -> None:
        self.speed = NodeSpeed()
        self.round_trip_ms = round_trip_ms
        self.other_load = other_load
        self.pending_work = self.kv_delta = 0.0
        self.context_tokens = self.kv_new = self.inflight = self.unstarted = self.polls = 0
        self.arrival_rate = self.arrival_s = self.latency_ms = self.ttft_sum_ms = 0.0
        self.polled_s = self.last_ticket_s = -1e9
        self.outcomes = [0] * MAX_OUTCOMES
        self.ttft_counts = [0] * (len(TTFT_BOUNDS_MS) + 1)
        self.unstreamed: dict[ReferenceTicket, float] = {}
        """When the prefill of requests without streaming is expected to be done: their first token is not visible."""
        self.prefilling: list[ReferenceTicket] = []
        """Requests whose prefill has not ended, in the order they were sent."""
        self.prefill_ended_s = 0.0

    @property
    def unstreamed_prefills(self) -> int:
        return len(self.unstreamed)

    def polled(self, now_s: float) -> None:
        self.polls += 1
        self.polled_s = now_s
        self.unstarted = 0
        self.kv_delta = 0.0

    def assume_prefilled(self, now_s: float) -> None:
        while self.unstreamed:
            ticket, due_s = next(iter(self.unstreamed.items()))
            if due_s > now_s:
                return
            ticket.prefilled(now_s)

    def remaining_work(self, now_s: float) -> float:
        pending = max(0.0, self.pending_work)
        if not self.prefilling:
            return pending
        first = self.prefilling[0]
        began_s = max(first.opened_s + self.round_trip_ms / 1000.0, self.prefill_ended_s)
        done = max(0.0, now_s - began_s) * 1000.0 / self.speed.ms_per_token
        if done > PREFILL_LATE * first.work:
            return pending
        return max(0.0, pending - min(done, PREFILLED_MAX_SHARE * first.work))


class ReferenceTicket:
    """`decode_speed` is None for a prompt that was not looked up."""

    due_s: float = 0.0
    """When the prefill should be done, if the response is not streamed."""

    def __init__(
        self,
        node: ReferenceNode,
        now_s: float,
        decode_speed: DecodeSpeed | None,
        streams: bool,
        tokens: int,
        new: int,
        prefill: float,
    ) -> None:
        self.node, self.opened_s, self.first_token_s, self.open, self.polls = node, now_s, 0.0, True, node.polls
        self.decode_speed, self.streams, self.tokens, self.new, self.output = decode_speed, streams, tokens, new, 0
        self.prefill = self.work = prefill
        self.has_hidden_hits = False
        self.hidden_prefill_ms = 0.0
        node.inflight += 1
        node.unstarted += 1
        node.arrival_rate = (
            node.arrival_rate * exp((node.arrival_s - now_s) / ARRIVAL_DECAY_S) + 0.001 / ARRIVAL_DECAY_S
        )
        node.arrival_s = node.last_ticket_s = now_s
        node.context_tokens += tokens + int(REQUEST_CONTEXT)
        if decode_speed is None:
            return
        self.was_alone = node.pending_work < 1.0
        if prefill > 0.0:
            node.prefilling.append(self)
        node.pending_work += prefill
        node.kv_delta += new
        node.kv_new += new
        if not streams:
            node.assume_prefilled(now_s)
            ahead = [one for one in node.prefilling if one is not self]
            arrives_s, ms_per_token = now_s + node.round_trip_ms / 1000.0, node.speed.ms_per_token
            if ahead and ahead[-1] in node.unstreamed:
                self.due_s = max(arrives_s, ahead[-1].due_s) + prefill * ms_per_token / 1000.0
            else:
                self.due_s = arrives_s + node.remaining_work(now_s) * ms_per_token / 1000.0
            self.due_s = min(self.due_s, arrives_s + max(0.0, node.pending_work) * ms_per_token / 1000.0)
            for before in node.unstreamed:  # work ahead may have ended early
                before.due_s = node.unstreamed[before] = min(before.due_s, self.due_s)
            node.unstreamed[self] = self.due_s

    def prefilled(self, now_s: float) -> None:
        if self in self.node.prefilling:
            if self is self.node.prefilling[0]:
                self.node.prefill_ended_s = now_s
            self.node.prefilling.remove(self)
        self.node.pending_work -= self.work
        self.work = 0.0
        self.node.unstreamed.pop(self, None)

    def first_token(self, now_s: float, served: bool) -> None:
        node = self.node
        if not self.first_token_s and self.polls == node.polls:
            node.unstarted -= 1
        self.first_token_s = now_s
        after_ms = (now_s - self.opened_s) * 1000.0
        node.ttft_counts[bisect_left(TTFT_BOUNDS_MS, after_ms)] += 1
        node.ttft_sum_ms += after_ms
        if self.decode_speed is None:
            return
        self.prefilled(now_s)
        if self.has_hidden_hits:
            if served and self.streams:
                speed, sent_s = node.speed, self._arrived_s(now_s)
                since_ms = (now_s - max(sent_s, speed._last_first_token_s)) * 1000.0
                self.hidden_prefill_ms = own_prefill_ms(since_ms, self._step_ms(self.decode_speed))
                speed._last_first_token_s = max(now_s, speed._last_first_token_s)
                speed._uncharged_ms = 0.0
            return
        if served and (self.streams or after_ms < self.prefill * node.speed.ms_per_token):
            self._record_first_token(self.decode_speed, now_s)
            self.prefill = 0.0

    def _arrived_s(self, now_s: float) -> float:
        arrived_s = self.opened_s + self.node.round_trip_ms / 1000.0
        return arrived_s if arrived_s < now_s else self.opened_s

    def _step_ms(self, decode_speed: DecodeSpeed) -> float:
        node = self.node
        busy = node.inflight + node.other_load > 1
        step_ms = decode_speed.token_ms(node.context_tokens) * node.speed.factor if busy else 0.0
        if node.speed._step_ms > 0.0:
            step_ms = min(step_ms, STEP_MAX_FACTOR * node.speed._step_ms)
        return step_ms

    def _record_first_token(self, decode_speed: DecodeSpeed, now_s: float) -> None:
        node, step_ms, arrived_s = self.node, self._step_ms(decode_speed), self._arrived_s(now_s)
        if self.streams and arrived_s >= node.speed._last_first_token_s and self.was_alone and self._is_alone(now_s):
            took_ms = (now_s - arrived_s) * 1000.0
            record_lone_prefill(node.speed, self.prefill, took_ms)
            if self.prefill >= LONG_PREFILL_WORK:
                record_long_prefill(node.speed, self.prefill, max(0.0, took_ms - 0.5 * step_ms))
        record_first_token(node.speed, self.prefill, step_ms, arrived_s, now_s)

    def reveal_hits(self, work: float) -> None:
        """The engine reports what it had of a prompt with hidden hits: its prefill was this much work."""
        speed = self.node.speed
        if not self.has_hidden_hits or self.decode_speed is None or not self.first_token_s:
            return
        self.has_hidden_hits = False
        if not self.streams:
            self.due_s = max(self.opened_s, self.due_s - max(0.0, self.prefill - work) * speed.ms_per_token / 1000.0)
            self.prefill = work
        elif self.hidden_prefill_ms > 0.0:
            ms_per_token = speed.learned_ms_per_token if speed.is_replaced else speed.ms_per_token
            at_s = max(self.first_token_s, speed._at_s)
            add_prefill(speed, work, self.hidden_prefill_ms, work * ms_per_token, at_s)
            self.prefill = 0.0

    def _is_alone(self, now_s: float) -> bool:
        if self.node.pending_work < 1.0:
            return True
        others = self.node.prefilling
        return bool(others) and others[0].opened_s - self.opened_s >= 0.5 * (now_s - self.opened_s)

    def _record_decode(self, decode_speed: DecodeSpeed, took_ms: float, steps: int) -> None:
        node = self.node
        token_ms = took_ms / steps
        record_step(node.speed, token_ms)
        usual_ms = decode_speed.token_ms(node.context_tokens)
        record_decode_factor(node.speed, token_ms / usual_ms, decode_speed.answers)
        record_token_ms(decode_speed, token_ms / node.speed.factor, node.context_tokens)

    def record_answer(self, output: int | None, now_s: float) -> None:
        decode_speed, speed = self.decode_speed, self.node.speed
        if output is not None:
            self.output = output
        if not self.first_token_s or decode_speed is None:
            return
        steps = max(0, (output or 0) - 1)
        if self.streams:
            if steps and now_s > self.first_token_s:
                took_ms = (now_s - self.first_token_s) * 1000.0
                if steps >= EARLY_MIN_STEPS:
                    record_times(speed, (self.first_token_s - self.opened_s) * 1000.0, took_ms / steps)
                if not speed.is_replaced:
                    self._record_decode(decode_speed, took_ms, steps)
            return
        if self.has_hidden_hits:
            return
        decode_ms = steps * decode_speed.token_ms(self.node.context_tokens) * speed.factor
        if decode_ms > self.prefill * speed.ms_per_token and now_s > self.due_s:
            self._record_decode(decode_speed, (now_s - self.due_s) * 1000.0, steps)
        elif self.prefill:
            self._record_first_token(decode_speed, max(self.opened_s, now_s - decode_ms / 1000.0))

    def release(self, outcome: Outcome, now_s: float) -> bool:
        if not self.open:
            return False
        self.open = False
        node = self.node
        if self.decode_speed is not None:
            if not self.first_token_s:
                self.prefilled(now_s)
            node.kv_delta -= self.new
            if node.polled_s > self.opened_s:
                node.kv_delta -= self.output
            node.kv_new -= self.new
        node.context_tokens -= self.tokens + int(REQUEST_CONTEXT)
        node.inflight -= 1
        if not node.inflight:
            node.pending_work = 0.0
        if not self.first_token_s and self.polls == node.polls:
            node.unstarted -= 1
        node.outcomes[outcome] += 1
        if outcome is Outcome.OK:
            mean_ms, took_ms = node.latency_ms, (now_s - self.opened_s) * 1000.0
            node.latency_ms = mean_ms + (took_ms - mean_ms) * LATENCY_WEIGHT if mean_ms else took_ms
        return True
