"""Tickets that also report to the demand meter. The router uses them only if the fleet is autoscaled."""

from __future__ import annotations

from warmroute.fleet.demand import DemandMeter
from warmroute.fleet.node import Node, Outcome
from warmroute.fleet.ticket import Ticket
from warmroute.routing.dispatch import Dispatch
from warmroute.routing.price import ASSUMED_PROMPT_TOKENS


class MeteredTicket(Ticket):
    """The ticket of a request whose prompt was not looked up."""

    __slots__ = ("_arrived_s", "_demand_meter")

    def __init__(self, node: Node, now_s: float, demand_meter: DemandMeter, arrived_s: float) -> None:
        super().__init__(node, now_s)
        self._demand_meter = demand_meter
        self._arrived_s = arrived_s
        demand_meter.record_sent(ASSUMED_PROMPT_TOKENS, 0.0, ASSUMED_PROMPT_TOKENS)

    def first_byte(self, now_s: float, served: bool = True) -> None:
        super().first_byte(now_s, served)
        if served:
            self._demand_meter.record_ttft((now_s - self._arrived_s) * 1000.0)

    def close(self, outcome: Outcome, now_s: float) -> None:
        if self._is_open and outcome is Outcome.OK:
            self._demand_meter.record_latency((now_s - self._arrived_s) * 1000.0)
        super().close(outcome, now_s)


class MeteredDispatch(Dispatch):
    __slots__ = ("_arrived_s", "_demand_meter")

    def start(self, demand_meter: DemandMeter, arrived_s: float) -> None:
        self._demand_meter = demand_meter
        self._arrived_s = arrived_s
        demand_meter.record_sent(self.tokens, self.cached, self._pending_work)

    def first_byte(self, now_s: float, served: bool = True) -> None:
        super().first_byte(now_s, served)
        if served and self.request.streams:
            self._demand_meter.record_ttft((now_s - self._arrived_s) * 1000.0)

    def record_usage(
        self, prompt_tokens: int | None, cached_tokens: int | None, output_tokens: int | None, now_s: float
    ) -> None:
        super().record_usage(prompt_tokens, cached_tokens, output_tokens, now_s)
        if output_tokens is not None:
            self._demand_meter.record_output(self.tokens, output_tokens)

    def close(self, outcome: Outcome, now_s: float) -> None:
        if self._is_open and outcome is Outcome.OK:
            self._demand_meter.record_latency((now_s - self._arrived_s) * 1000.0)
        super().close(outcome, now_s)
