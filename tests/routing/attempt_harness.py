"""Attempts over a RoutingHarness, with a driver that only notes what it is told to do."""

from __future__ import annotations

from typing import Any

from routing_harness import MODEL, RoutingHarness, prompt

from warmroute.fleet.node import Node, Outcome
from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing.attempts import Attempts, Dispatcher
from warmroute.routing.routing_errors import RoutingError
from warmroute.telemetry.counters import Counters


class NotingDriver:
    def __init__(self) -> None:
        self.sent: list[str] = []
        """Names of the nodes that the request was sent to."""
        self.error: RoutingError | None = None

    def send(self, node: Node) -> None:
        self.sent.append(node.name)

    def reject(self, why: RoutingError) -> int:
        self.error = why
        return 502

    def internal_error(self, error: Exception) -> None:
        raise error


class AttemptHarness(RoutingHarness):
    """Nodes n0, n1… that are up, with the policy `price`, and requests in flight on them."""

    def __init__(self, count: int = 2, *, max_attempts: int = 0, **more: Any) -> None:
        super().__init__(count, **more)
        self.counters = Counters()
        self.dispatcher = Dispatcher(
            self.fleet, self.router, self.admission, self.counters, None, max_attempts, lambda: self.now_s,
            self.admission.node_freed,
        )  # fmt: skip

    def start(self, tokens: int = 1000, **fields: Any) -> tuple[Attempts, NotingDriver]:
        """Send a request to the node that the policy chooses."""
        driver = NotingDriver()
        request = RoutingRequest(MODEL, arrived_s=self.now_s, **{"streams": True, **fields})
        attempts = Attempts(self.dispatcher, driver, request, b"")
        attempts.enter(prompt(tokens), tokens, self.now_s)
        return attempts, driver

    def fail(self, attempts: Attempts) -> None:
        """Its current node answers 500."""
        attempts.node_failed(Outcome.FAILED, "HTTP status 500", self.now_s)

    def is_busy(self, attempts: Attempts, retry_after_s: int | None = 1, status: int = 429) -> None:
        """Its current node answers that it is busy."""
        assert not attempts.response_started(status, retry_after_s, self.now_s)
