"""A flight: one simulated request, which drives its attempts (routing/attempts.py) in virtual time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmroute.fleet.node import Node
from warmroute.replay.simulation.results import RequestResults
from warmroute.replay.simulation.simulated_request import SimulatedRequest
from warmroute.replay.workloads.workload_prompt import WorkloadPrompt
from warmroute.routing.attempts import Attempts
from warmroute.routing.routing_errors import RoutingError

if TYPE_CHECKING:
    from warmroute.replay.simulation.request_flow import RequestFlow
    from warmroute.replay.simulation.simulated_node import SimulatedNode


class Flight:
    __slots__ = (
        "_flow", "arrived_ms", "attempts", "cached_tokens", "first_ms", "node", "prompt", "request", "request_id",
        "results",
    )  # fmt: skip

    def __init__(
        self, flow: RequestFlow, prompt: WorkloadPrompt, request: SimulatedRequest, results: RequestResults
    ) -> None:
        # for its whole life
        self._flow = flow
        self.prompt = prompt
        self.request = request
        self.request_id = str(request.number)
        self.arrived_ms = flow.calendar.now_ms
        self.results = results
        self.attempts = Attempts(flow.dispatcher, self, request, self.request_id.encode())
        # at the current node
        self.node: SimulatedNode
        self.first_ms: float | None = None
        self.cached_tokens = 0

    def is_at(self, attempt: int) -> bool:
        """Whether this attempt is still the current one. What comes back from an earlier node is ignored."""
        return not self.attempts.done and self.attempts.tried == attempt

    # The driver of its attempts.

    def send(self, node: Node) -> None:
        self._flow.sent(self, node)

    def reject(self, why: RoutingError) -> int:
        self._flow.rejected(self, why)
        return 0

    def internal_error(self, error: Exception) -> None:
        raise error
