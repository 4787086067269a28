"""A simulated request, and its attempts: which node each of them goes to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmroute.fleet.node import Node
from warmroute.replay.simulation.results import RequestResults
from warmroute.replay.simulation.simulated_node import SimulatedNode
from warmroute.replay.simulation.simulated_request import SimulatedRequest
from warmroute.replay.workloads.workload_prompt import WorkloadPrompt
from warmroute.routing.attempts import Attempts
from warmroute.routing.routing_errors import RoutingError

if TYPE_CHECKING:
    from warmroute.replay.simulation.request_flow import RequestFlow


class Leg:
    """One attempt of a simulated request: its way to one node and back."""

    __slots__ = ("flight", "flow", "live", "node", "prefill_leg", "prefills")

    def __init__(
        self, flight: Flight, node: SimulatedNode, prefills: bool = False, prefill_leg: Leg | None = None
    ) -> None:
        """`prefills`: the node only prefills, for another one. `prefill_leg`: whose KV cache the node fetches."""
        self.prefills = prefills
        self.prefill_leg = prefill_leg
        self.flight = flight
        self.flow = flight.flow
        self.node = node
        self.live = True
        """Cleared when the attempt has ended. What still comes back from the node is ignored."""


class Flight:
    """One simulated request, which drives its attempts in virtual time."""

    __slots__ = (
        "arrived_ms", "attempts", "cached_tokens", "first_ms", "flow", "hedge", "leg", "prefill", "prefill_cached",
        "prompt", "request", "request_id", "results",
    )  # fmt: skip

    def __init__(
        self, flow: RequestFlow, prompt: WorkloadPrompt, request: SimulatedRequest, results: RequestResults
    ) -> None:
        # for its whole life
        self.flow = flow
        self.prompt = prompt
        self.request = request
        self.request_id = str(request.number)
        self.arrived_ms = flow.calendar.now_ms
        self.results = results
        self.attempts = Attempts(flow.dispatcher, self, request, self.request_id.encode())
        # at the current node
        self.leg: Leg
        self.hedge: Leg | None = None
        self.prefill: Leg | None = None
        self.prefill_cached = 0
        """Tokens that the prefill node had cached."""
        self.first_ms: float | None = None
        self.cached_tokens = 0

    @property
    def node(self) -> SimulatedNode:
        return self.leg.node

    # The driver of its attempts.

    def send(self, node: Node) -> None:
        self.leg = self.flow.sent(self, node)

    def withdraw(self) -> None:
        self.flow.withdrawn(self.leg)

    def send_prefill(self, prefill_node: Node, node: Node) -> None:
        self.leg = self.prefill = self.flow.sent_prefill(self, prefill_node, node)

    def withdraw_prefill(self) -> None:
        prefill, self.prefill = self.prefill, None
        if prefill is not None:
            self.flow.withdrawn(prefill)

    def send_hedge(self, node: Node) -> None:
        self.hedge = self.flow.sent(self, node)

    def withdraw_hedge(self) -> None:
        hedge, self.hedge = self.hedge, None
        if hedge is not None:
            self.flow.withdrawn(hedge)

    def promote_hedge(self) -> None:
        assert self.hedge is not None
        self.leg, self.hedge = self.hedge, None

    def reject(self, why: RoutingError) -> int:
        self.flow.rejected(self, why)
        return 0

    def cut(self, why: RoutingError) -> bool:
        self.flow.withdrawn(self.leg)
        self.flow.rejected(self, why)
        return True

    def internal_error(self, error: Exception) -> None:
        raise error
