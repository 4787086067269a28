"""A flight: one request on its way, from its arrival at the router to its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from warmroute.fleet.node import Node
from warmroute.fleet.ticket import Ticket
from warmroute.index.lookup import Lookup
from warmroute.replay.workloads.prompt import Prompt
from warmroute.replay.world.simulated_request import SimulatedRequest
from warmroute.replay.world.tally import Tally
from warmroute.routing.decision import Decision
from warmroute.routing.refusals import Undecided

if TYPE_CHECKING:
    from warmroute.replay.world.node import SimNode


class Flight:
    __slots__ = (
        "_go",
        "_refuse",
        "arrived_ms",
        "arrived_s",
        "cached_tokens",
        "decision",
        "done",
        "fallbacks",
        "first_ms",
        "lookup",
        "node",
        "prompt",
        "request",
        "request_id",
        "tally",
        "ticket",
        "tried",
    )

    def __init__(
        self,
        prompt: Prompt,
        request: SimulatedRequest,
        lookup: Lookup | None,
        arrived_ms: float,
        tally: Tally,
        go: Callable[[Flight, Decision], None],
        refuse: Callable[[Flight], None],
    ) -> None:
        # for its whole life
        self.prompt = prompt
        self.request = request
        self.request_id = str(request.number)
        self.lookup = lookup
        self.arrived_ms = arrived_ms
        self.arrived_s = arrived_ms / 1000.0
        self._go = go
        self._refuse = refuse
        self.tally = tally
        self.decision: Decision
        self.fallbacks: list[Node] | None = None
        self.tried = 0
        """Nodes tried so far; also tells what still comes back from an earlier one apart."""
        self.done = False
        # at the present node
        self.node: SimNode
        self.ticket: Ticket
        self.first_ms: float | None = None
        self.cached_tokens = 0

    def go(self, decision: Decision) -> None:
        """Admission lets it through."""
        self._go(self, decision)

    def refuse(self, why: Undecided) -> None:
        self._refuse(self)
