"""A ticket: one request's entry in a node's accounting. Opened at dispatch, and closed exactly once."""

from __future__ import annotations

from warmroute._kernel import TicketState
from warmroute.fleet.node import Node, Outcome


class Ticket(TicketState):
    """The kernel's TicketState updates the node's counters at dispatch, first token and end."""

    node: Node
    __slots__ = ("_groups",)

    def __init__(self, node: Node, now_s: float) -> None:
        self.open(node, now_s)
        groups = self._groups = node.groups
        for group in groups:
            group.inflight += 1

    def close(self, outcome: Outcome, now_s: float) -> None:
        if self.release(outcome, now_s):
            for group in self._groups:
                group.inflight -= 1
