"""A ticket: one request's entry in the books of one node. Opened at dispatch, always closed, closed once."""

from __future__ import annotations

from types import TracebackType

from warmroute._kernel._books import TicketState
from warmroute.fleet.node import Node, Outcome


class Ticket(TicketState):
    """What it has in its node's books lies in TicketState, which knows what a first byte and an answer change there."""

    node: Node
    __slots__ = ("_groups",)

    def __init__(self, node: Node, now_s: float) -> None:
        self.enter(node, now_s)
        groups = self._groups = node.groups
        for group in groups:
            group.inflight += 1

    def close(self, outcome: Outcome, now_s: float) -> None:
        if self.leave(outcome, now_s):
            for group in self._groups:
                group.inflight -= 1

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(Outcome.LEFT, self.opened_s)
