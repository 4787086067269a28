"""Tickets that also tell a meter, for routers whose fleet is scaled. Others pay nothing for it."""

from __future__ import annotations

from warmroute.fleet.demand import DemandMeter
from warmroute.fleet.node import Node, Outcome
from warmroute.fleet.ticket import Ticket
from warmroute.routing.dispatch import Dispatch

UNREAD_TOKENS = 100.0
"""A prompt that was not read is taken to be so long."""


class MeteredTicket(Ticket):
    """Of a prompt that was not read."""

    __slots__ = ("_arrived_s", "_meter")

    def __init__(self, node: Node, now_s: float, demand_meter: DemandMeter, arrived_s: float) -> None:
        super().__init__(node, now_s)
        self._meter = demand_meter
        self._arrived_s = arrived_s
        demand_meter.saw_sent(UNREAD_TOKENS, 0.0, UNREAD_TOKENS, node.speed.ms_per_token)

    def first_byte(self, now_s: float, served: bool = True) -> None:
        super().first_byte(now_s, served)
        if served:
            self._meter.saw_first_token((now_s - self._arrived_s) * 1000.0)

    def close(self, outcome: Outcome, now_s: float) -> None:
        if self._open and outcome is Outcome.OK:
            self._meter.saw_end((now_s - self._arrived_s) * 1000.0)
        super().close(outcome, now_s)


class MeteredDispatch(Dispatch):
    __slots__ = ("_arrived_s", "_meter")

    def begin(self, demand_meter: DemandMeter, arrived_s: float) -> MeteredDispatch:
        self._meter = demand_meter
        self._arrived_s = arrived_s
        demand_meter.saw_sent(self.tokens, self.cached, self._work, self.node.speed.ms_per_token)
        return self

    def first_byte(self, now_s: float, served: bool = True) -> None:
        super().first_byte(now_s, served)
        if served and self.request.streams:
            self._meter.saw_first_token((now_s - self._arrived_s) * 1000.0)

    def answered(
        self, prompt_tokens: int | None, cached_tokens: int | None, output_tokens: int | None, now_s: float
    ) -> None:
        super().answered(prompt_tokens, cached_tokens, output_tokens, now_s)
        if output_tokens is not None:
            self._meter.saw_answer(self.tokens, output_tokens)

    def close(self, outcome: Outcome, now_s: float) -> None:
        if self._open and outcome is Outcome.OK:
            self._meter.saw_end((now_s - self._arrived_s) * 1000.0)
        super().close(outcome, now_s)
