"""The books of a node in plain Python: what `_kernel/_books.c` does, said as simply as can be."""

from __future__ import annotations

from bisect import bisect_left
from math import exp

from warmroute.fleet.arrivals import KEPT_S
from warmroute.fleet.decode_speed import DecodeSpeed
from warmroute.fleet.node import FIRST_BYTE_BOUNDS_MS, LATENCY_WEIGHT, Outcome
from warmroute.fleet.speed import Speed


class PlainNode:
    def __init__(self, round_trip_ms: float, other_load: int) -> None:
        self.speed = Speed()
        self.round_trip_ms = round_trip_ms
        self.other_load = other_load
        self.pending_work = self.kv_delta = 0.0
        self.context = self.kv_new = self.inflight = self.unstarted = self.polls = 0
        self.arrival_rate = self.arrival_s = self.latency_ms = self.first_byte_sum_ms = 0.0
        self.polled_s = self.last_ticket_s = -1e9
        self.outcomes = [0] * len(Outcome)
        self.first_byte_counts = [0] * (len(FIRST_BYTE_BOUNDS_MS) + 1)
        self.row: dict[PlainTicket, float] = {}
        """Of tickets whose first token nobody sees: when their prefill should be done."""

    @property
    def unseen(self) -> int:
        return len(self.row)

    def polled(self, now_s: float) -> None:
        self.polls += 1
        self.polled_s = now_s
        self.unstarted = 0
        self.kv_delta = 0.0

    def expect_prefilled(self, now_s: float) -> None:
        while self.row:
            ticket, due_s = next(iter(self.row.items()))
            if due_s > now_s:
                return
            ticket.prefilled()


class PlainTicket:
    """Of a prompt that was looked up, where there is a pace."""

    def __init__(
        self,
        node: PlainNode,
        now_s: float,
        pace: DecodeSpeed | None,
        streams: bool,
        tokens: int,
        new: int,
        prefill: float,
    ) -> None:
        self.node, self.opened_s, self.first_byte_s, self.open, self.polls = node, now_s, 0.0, True, node.polls
        self.pace, self.streams, self.tokens, self.new, self.output = pace, streams, tokens, new, 0
        self.prefill = self.work = prefill
        node.inflight += 1
        node.unstarted += 1
        node.arrival_rate = node.arrival_rate * exp((node.arrival_s - now_s) / KEPT_S) + 0.001 / KEPT_S
        node.arrival_s = node.last_ticket_s = now_s
        if pace is None:
            return
        node.pending_work += prefill
        node.kv_delta += new
        node.kv_new += new
        node.context += tokens
        if not streams:
            node.expect_prefilled(now_s)
            self.due_s = now_s + (node.pending_work * node.speed.ms_per_token + node.round_trip_ms) / 1000.0
            node.row[self] = self.due_s

    def prefilled(self) -> None:
        self.node.pending_work -= self.work
        self.work = 0.0
        self.node.row.pop(self, None)

    def first_byte(self, now_s: float, served: bool) -> None:
        node = self.node
        if not self.first_byte_s and self.polls == node.polls:
            node.unstarted -= 1
        self.first_byte_s = now_s
        after_ms = (now_s - self.opened_s) * 1000.0
        node.first_byte_counts[bisect_left(FIRST_BYTE_BOUNDS_MS, after_ms)] += 1
        node.first_byte_sum_ms += after_ms
        if self.pace is None:
            return
        self.prefilled()
        if served and (self.streams or after_ms < self.prefill * node.speed.ms_per_token):
            self._saw_first_token(self.pace, now_s)
            self.prefill = 0.0

    def _saw_first_token(self, pace: DecodeSpeed, now_s: float) -> None:
        node = self.node
        step_ms = pace.token_ms(node.context) * node.speed.factor if node.inflight + node.other_load > 1 else 0.0
        there_s = self.opened_s + node.round_trip_ms / 1000.0
        if there_s >= now_s:
            there_s = self.opened_s
        node.speed.saw_first_token(self.prefill, step_ms, there_s, now_s)

    def _saw_flow(self, pace: DecodeSpeed, took_ms: float, steps: int) -> None:
        node = self.node
        speed, token_ms = node.speed, took_ms / steps
        speed.saw_answer(token_ms / pace.token_ms(node.context))
        pace.saw_answer(token_ms / speed.factor, node.context)

    def learn(self, output: int | None, now_s: float) -> None:
        pace, speed = self.pace, self.node.speed
        if output is not None:
            self.output = output
        if not self.first_byte_s or pace is None:
            return
        steps = max(0, (output or 0) - 1)
        if self.streams:
            if steps:
                self._saw_flow(pace, (now_s - self.first_byte_s) * 1000.0, steps)
            return
        flowed_ms = steps * pace.token_ms(self.node.context) * speed.factor
        if flowed_ms > self.prefill * speed.ms_per_token and now_s > self.due_s:
            self._saw_flow(pace, (now_s - self.due_s) * 1000.0, steps)
        elif self.prefill:
            self._saw_first_token(pace, max(self.opened_s, now_s - flowed_ms / 1000.0))

    def leave(self, outcome: Outcome, now_s: float) -> bool:
        if not self.open:
            return False
        self.open = False
        node = self.node
        if self.pace is not None:
            if not self.first_byte_s:
                self.prefilled()
            node.kv_delta -= self.new
            if node.polled_s > self.opened_s:
                node.kv_delta -= self.output
            node.kv_new -= self.new
            node.context -= self.tokens
        node.inflight -= 1
        if not node.inflight:
            node.pending_work = 0.0
        if not self.first_byte_s and self.polls == node.polls:
            node.unstarted -= 1
        node.outcomes[outcome] += 1
        if outcome is Outcome.OK:
            mean_ms, took_ms = node.latency_ms, (now_s - self.opened_s) * 1000.0
            node.latency_ms = mean_ms + (took_ms - mean_ms) * LATENCY_WEIGHT if mean_ms else took_ms
        return True
