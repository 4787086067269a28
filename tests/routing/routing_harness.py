"""A small fleet with router and admission for tests: numbered prompts, nodes with a cache or a load, a manual clock."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from warmroute.config import Admission as AdmissionConfig
from warmroute.config import Health, Index, NodeConfig, Pricing, Routing
from warmroute.config.routing import NORMAL
from warmroute.core.admission import Admission
from warmroute.core.cache_view import CacheView
from warmroute.core.decision import Decision
from warmroute.core.decision_record import Price, explain_decision
from warmroute.core.fleet import Fleet
from warmroute.core.group import Group
from warmroute.core.messages import Lookup, Outcome, RoutingRequest
from warmroute.core.node import Node, Ticket
from warmroute.core.rejections import RoutingError
from warmroute.core.router import Router

MODEL = "m"
_new_prompts: Iterator[int] = count(1_000_000)


def prompt(tokens: int, number: int | None = None) -> Lookup:
    """Return a prompt. Prompts with the same number share a prefix; one without a number shares it with no other."""
    number = next(_new_prompts) if number is None else number
    return Lookup(array("I", range(number << 8, (number << 8) + tokens)).tobytes(), tokens, 0, salt=str(number))


def explained(decision: Decision) -> str:
    return explain_decision(decision.record())


class RoutingHarness:
    """Nodes n0, n1… that are up, with the policy `price`."""

    def __init__(
        self, count: int = 2, *, admission: AdmissionConfig | None = None, pricing: Pricing | None = None,
        cache_tokens: int = 0, slow_start_s: float = 0.0, index: Index | None = None,
    ) -> None:  # fmt: skip
        self.now_s = 1000.0
        self.fleet = Fleet(Health(slow_start_s=slow_start_s))
        self.cache_view = CacheView(index or Index())
        for number in range(count):
            self.add(f"n{number}", cache_tokens)
        self.group = self.fleet.group(MODEL) or Group(MODEL)
        self.router = Router(self.fleet, self.cache_view, Routing(policy="price", seed=3), pricing)
        self.admission = Admission(self.router, admission or AdmissionConfig())

    def add(self, name: str, cache_tokens: int = 0, island: str = "local", **fields: Any) -> Node:
        node = self.fleet.add(NodeConfig(url=f"http://{name}:1", name=name, models=(MODEL,), island=island, **fields))
        self.fleet.check_passed(node, 0.0)
        self.cache_view.add_node(name, [MODEL]).set_size(16, cache_tokens)
        return node

    @property
    def nodes(self) -> list[Node]:
        return list(self.fleet)

    def advance(self, seconds: float) -> None:
        self.now_s += seconds

    # Prices and tickets.

    def decide(self, lookup: Lookup | None = None, **fields: Any) -> Decision:
        return self.router.decide(RoutingRequest(MODEL, **fields), self.now_s, lookup)

    def price(self, node: Node, lookup: Lookup | None = None) -> Price:
        """Return the price of one node as if it were the only one."""
        others = [other for other in self.nodes if other is not node and not other.draining]
        for other in others:
            self.fleet.drain(other.name)
        price = self.decide(lookup).price
        for other in others:
            self.fleet.drain(other.name, False)
        assert price is not None
        return price

    def warm(self, node: Node, lookup: Lookup) -> None:
        """Put a prompt into a node's cache."""
        prediction = self.cache_view.record_routed(MODEL, lookup, node.name, None, self.now_s)
        assert prediction is not None
        self.cache_view.first_token(prediction, self.now_s)

    def use_regularly(self, node: Node, lookup: Lookup, interval_s: float) -> None:
        """Send a prompt that the node has cached there again and again."""
        for _ in range(20):
            hit = self.cache_view.hits(MODEL, lookup, self.now_s)[node.name]
            self.cache_view.record_routed(MODEL, lookup, node.name, hit, self.now_s)
            self.advance(interval_s)

    def send(self, node: Node, lookup: Lookup | None = None) -> Ticket:
        """Send a request to this node, whatever it costs."""
        return self.router.dispatch(self.decide(lookup), node, self.now_s)

    def busy(self, node: Node, tokens: int = 8000) -> Ticket:
        """Give a node a prompt to prefill: by default 460 ms of expected work."""
        return self.send(node, prompt(tokens))

    def close(self, ticket: Ticket, outcome: Outcome = Outcome.CANCELLED) -> None:
        """Close a ticket. By default the client disconnected, so that nothing is learned about the node's speed."""
        self.fleet.close_ticket(ticket, outcome, self.now_s)

    # Admission.

    def free(self, ticket: Ticket) -> None:
        self.close(ticket)
        self.admission.node_freed(ticket.node, self.now_s)

    def tick(self) -> None:
        self.admission.tick(self.nodes, self.now_s)

    def submit(self, tokens: int = 8000, **fields: Any) -> FakeRequest:
        """Submit a request with a prompt of its own."""
        pending = FakeRequest(self, prompt(tokens), **fields)
        pending.submit()
        return pending

    def assert_all_counters_are_zero(self) -> None:
        assert self.admission.queue.waiting == self.group.waiting == 0 == len(self.admission.queue.waiting_for)
        for node in self.nodes:
            assert (node.inflight, node.context_tokens, node.kv_new) == (0, 0, 0)
            assert node.pending_work == pytest.approx(0.0, abs=1e-3)


class FakeRequest:
    """A pending request that records what happens to it. `fields` are those of RoutingRequest."""

    def __init__(
        self, harness: RoutingHarness, lookup: Lookup | None, model: str = MODEL, priority: int = NORMAL, **fields: Any
    ) -> None:
        self.harness = harness
        self.request = RoutingRequest(model, arrived_s=harness.now_s, priority=priority, **fields)
        self.lookup = lookup
        self.events: list[str] = []
        self.decision: Decision
        self.ticket: Ticket
        self.error: RoutingError

    def submit(self) -> None:
        self.harness.admission.submit(self, self.harness.now_s)

    @property
    def queued(self) -> bool:
        return not self.events

    @property
    def node(self) -> Node:
        assert self.events == ["admitted"]
        return self.decision.node

    def on_admitted(self, decision: Decision) -> None:
        self.events.append("admitted")
        self.decision = decision
        self.ticket = self.harness.router.dispatch(decision, decision.node, self.harness.now_s)

    def on_rejected(self, error: RoutingError) -> None:
        self.events.append("rejected")
        self.error = error

    def cancel(self) -> None:
        self.events.append("cancelled")
        self.harness.admission.queue.cancel(self)

    def finish(self) -> None:
        """The response has ended, so the node has more room."""
        self.harness.free(self.ticket)


def one_busy_node(**admission: Any) -> tuple[RoutingHarness, Ticket]:
    """Return a fleet of one node that prefills 8,000 tokens, and the ticket of that request."""
    harness = RoutingHarness(1, admission=AdmissionConfig(**admission))
    return harness, harness.busy(harness.nodes[0])
