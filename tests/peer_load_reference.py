"""The kernel's counting of peers' load (peer_load.c, first_token_order.c) in plain Python, as simple as
possible. tests/cluster/test_peer_load.py compares the two."""

from __future__ import annotations

from heapq import heappop, heappush
from math import exp
from typing import Any, NamedTuple

from warmroute._kernel import ARRIVAL_DECAY_S
from warmroute.core.speeds import NodeSpeed


class Row(NamedTuple):
    """In the order of the message."""

    inflight: int = 0
    pending_work: float = 0.0
    context_tokens: int = 0
    kv_new: int = 0
    kv_sum: float = 0.0
    opened: int = 0
    output_tokens: int = 0
    ms_per_token: float = 0.0
    speed_factor: float = 0.0
    answers: int = 0
    prefill_work: float = 0.0
    prefill_s: float = 0.0


class Figures:
    """A node's figures that peers change, and the sum of what is theirs."""

    def __init__(self) -> None:
        self.inflight = self.context_tokens = self.kv_new = self.group_inflight = 0
        self.pending_work = self.kv_delta = self.arrival_rate = self.arrival_s = 0.0
        self.peer_inflight = self.peer_context_tokens = self.peer_kv_new = self.output_tokens = 0
        self.peer_pending_work = 0.0

    def change(self, before: Row, now: Row) -> None:
        requests = now.inflight - before.inflight
        self.inflight += requests
        self.peer_inflight += requests
        self.group_inflight += requests
        work = now.pending_work - before.pending_work
        self.peer_pending_work = self.peer_pending_work + work if self.peer_inflight else 0.0
        self.pending_work = max(0.0, self.pending_work + work) if self.inflight else 0.0
        tokens = now.context_tokens - before.context_tokens
        self.context_tokens += tokens
        self.peer_context_tokens += tokens
        new = now.kv_new - before.kv_new
        self.kv_new += new
        self.peer_kv_new += new

    def apply(self, before: Row, now: Row, now_s: float) -> bool:
        """Return whether the node has less work than before."""
        self.change(before, now)
        self.kv_delta += now.kv_sum - before.kv_sum
        if now.opened > before.opened:
            rate = self.arrival_rate * exp(min(0.0, self.arrival_s - now_s) / ARRIVAL_DECAY_S)
            self.arrival_rate = rate + (now.opened - before.opened) * 0.001 / ARRIVAL_DECAY_S
            self.arrival_s = now_s
        self.output_tokens += max(0, now.output_tokens - before.output_tokens)
        return now.inflight < before.inflight or now.pending_work < before.pending_work


class LearnedInOrder:
    """First tokens of all processes, learned in the order of time."""

    def __init__(self, speeds: dict[str, NodeSpeed]) -> None:
        self._speeds = speeds
        self._held: list[Any] = []

    def add(self, node: str, work: float, step_ms: float, sent_s: float, at_s: float, lone: bool) -> None:
        heappush(self._held, (at_s, work, step_ms, sent_s, lone, node))

    def learn(self, until_s: float) -> None:
        while self._held and self._held[0][0] <= until_s:
            at_s, work, step_ms, sent_s, lone, node = heappop(self._held)
            speed = self._speeds[node]
            speed.learn(work, step_ms, sent_s, max(at_s, speed._last_first_token_s), lone)
