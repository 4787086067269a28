"""A ticket: one request's entry in the books of one node. Opened at dispatch, always closed, closed once."""

from __future__ import annotations

from types import TracebackType

from warmroute.fleet.node import Node, Outcome


class Ticket:
    __slots__ = ("_groups", "_open", "_polls", "first_byte_s", "node", "opened_s")

    def __init__(self, node: Node, now_s: float) -> None:
        self.node = node
        self.opened_s = now_s
        self.first_byte_s = 0.0
        self._open = True
        self._polls = node.polls
        node.inflight += 1
        node.unbegun += 1
        node.saw_arrival(now_s)
        groups = self._groups = node.groups
        for group in groups:
            group.inflight += 1

    def first_byte(self, now_s: float, served: bool = True) -> None:
        """The node has begun its answer, and it is one that goes to the client. `served`: it is not a refusal."""
        node = self.node
        if not self.first_byte_s and self._polls == node.polls:
            node.unbegun -= 1
        self.first_byte_s = now_s
        node.saw_first_byte((now_s - self.opened_s) * 1000.0)

    def close(self, outcome: Outcome, now_s: float) -> None:
        if not self._open:
            return
        self._open = False
        node = self.node
        inflight = node.inflight = node.inflight - 1
        if not inflight:
            node.pending_work = 0.0  # what sums of fractions leave behind
        if not self.first_byte_s and self._polls == node.polls:
            node.unbegun -= 1
        for group in self._groups:
            group.inflight -= 1
        node.outcomes[outcome] += 1
        if outcome is Outcome.OK:
            node.saw_latency((now_s - self.opened_s) * 1000.0)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(Outcome.LEFT, self.opened_s)
