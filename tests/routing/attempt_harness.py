"""Attempts over a RoutingHarness, with a driver that only notes what it is told to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from routing_harness import MODEL, RoutingHarness, prompt

from warmroute.config import Hedging
from warmroute.core.brain import Dispatcher
from warmroute.core.calls import Attempts
from warmroute.core.messages import Outcome, RoutingRequest
from warmroute.core.node import Node
from warmroute.core.rejections import RoutingError
from warmroute.core.traffic import Counters


class NotingDriver:
    def __init__(self) -> None:
        self.sent: list[str] = []
        """Names of the nodes that the request was sent to."""
        self.events: list[str] = []
        """What else it was told."""
        self.error: RoutingError | None = None

    def send(self, node: Node) -> None:
        self.sent.append(node.name)

    def withdraw(self) -> None:
        self.events.append("withdraw")

    def send_prefill(self, prefill_node: Node, node: Node) -> None:
        self.events.append(f"prefill {prefill_node.name} for {node.name}")

    def withdraw_prefill(self) -> None:
        self.events.append("withdraw prefill")

    def send_hedge(self, node: Node) -> None:
        self.events.append(f"hedge {node.name}")

    def withdraw_hedge(self) -> None:
        self.events.append("withdraw hedge")

    def promote_hedge(self) -> None:
        self.events.append("promote")

    def reject(self, why: RoutingError) -> int:
        self.error = why
        return 502

    def cut(self, why: RoutingError) -> bool:
        self.events.append("cut")
        self.error = why
        return True

    def internal_error(self, error: Exception) -> None:
        raise error


class AttemptHarness(RoutingHarness):
    """Nodes n0, n1… that are up, with the policy `price`, and requests in flight on them."""

    def __init__(
        self,
        count: int = 2,
        *,
        max_attempts: int = 0,
        hedging: Hedging | None = None,
        call_soon: Callable[[Callable[[], None]], object] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(count, **more)
        self.counters = Counters()
        self.dispatcher = Dispatcher(
            self.fleet, self.router, self.admission, self.counters, None, max_attempts, lambda: self.now_s,
            self.admission.node_freed, hedging=hedging, call_soon=call_soon,
        )  # fmt: skip

    def start(self, tokens: int = 1000, model: str = MODEL, **fields: Any) -> tuple[Attempts, NotingDriver]:
        """Send a request to the node that the policy chooses."""
        driver = NotingDriver()
        request = RoutingRequest(model, arrived_s=self.now_s, **{"streams": True, **fields})
        attempts = Attempts(self.dispatcher, driver, request, b"")
        attempts.enter(prompt(tokens), tokens, self.now_s)
        return attempts, driver

    def answer(self, attempts: Attempts) -> None:
        """Its current node answers completely."""
        assert attempts.response_started(200, None, self.now_s)
        attempts.first_token(self.now_s)
        attempts.response_ended(None, self.now_s)

    def warm_up(self) -> None:
        """Let every node answer once, so that speeds and latencies are known."""
        for node in self.nodes:
            for other in self.nodes:
                self.fleet.drain(other.name, other is not node)
            attempts, _driver = self.start()
            self.advance(0.1)
            self.answer(attempts)
        for node in self.nodes:
            self.fleet.drain(node.name, False)

    def assert_all_counters_are_zero(self) -> None:
        super().assert_all_counters_are_zero()
        assert not self.dispatcher.waiting and not self.dispatcher.splits

    def fail(self, attempts: Attempts) -> None:
        """Its current node answers 500."""
        attempts.node_failed(Outcome.FAILED, "HTTP status 500", self.now_s)

    def is_busy(self, attempts: Attempts, retry_after_s: int | None = 1, status: int = 429) -> None:
        """Its current node answers that it is busy."""
        assert not attempts.response_started(status, retry_after_s, self.now_s)
