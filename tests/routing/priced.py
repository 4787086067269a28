"""Small fleets for tests of prices and of admission: prompts by number and length, nodes that are warm or busy, a clock
that tests move on."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import count

import pytest

from warmroute.config import Admission as AdmissionConfig
from warmroute.config import Health, Index, NodeConfig, Pricing, Routing
from warmroute.fleet.fleet import Fleet
from warmroute.fleet.group import Group
from warmroute.fleet.node import Node, Outcome
from warmroute.fleet.ticket import Ticket
from warmroute.index.cache_view import CacheView
from warmroute.index.lookup import Lookup
from warmroute.prompt.routing_request import NORMAL, RoutingRequest
from warmroute.routing.admission import Admission
from warmroute.routing.decision import Decision
from warmroute.routing.price import Price
from warmroute.routing.refusals import Undecided
from warmroute.routing.router import Router

MODEL = "m"
_fresh: Iterator[int] = count(1_000_000)


def prompt(tokens: int, number: int | None = None) -> Lookup:
    """Prompts of one number begin alike; without one, it begins like no other."""
    number = next(_fresh) if number is None else number
    return Lookup(array("I", range(number << 8, (number << 8) + tokens)).tobytes(), tokens, 0, salt=str(number))


class World:
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

    def add(self, name: str, cache_tokens: int = 0) -> Node:
        node = self.fleet.add(NodeConfig(url=f"http://{name}:1", name=name, models=(MODEL,)))
        self.fleet.check_passed(node, 0.0)
        self.cache_view.join(name, [MODEL]).describe(16, cache_tokens)
        return node

    @property
    def nodes(self) -> list[Node]:
        return list(self.fleet)

    def later(self, seconds: float) -> None:
        self.now_s += seconds

    # Prices.

    def decide(self, lookup: Lookup | None = None, request: RoutingRequest | None = None) -> Decision:
        return self.router.decide(request or RoutingRequest(MODEL), self.now_s, lookup)

    def price(self, node: Node, lookup: Lookup | None = None) -> Price:
        """Of one node, as if there were no other."""
        others = [other for other in self.nodes if other is not node and not other.draining]
        for other in others:
            self.fleet.drain(other.name)
        price = self.decide(lookup).price
        for other in others:
            self.fleet.drain(other.name, False)
        assert price is not None
        return price

    def warm(self, node: Node, lookup: Lookup) -> None:
        """It was sent this prompt, and has prefilled it."""
        sent = self.cache_view.sent(MODEL, lookup, node.name, None, self.now_s)
        assert sent is not None
        self.cache_view.first_token(sent, self.now_s)

    def send(self, node: Node, lookup: Lookup | None = None) -> Ticket:
        """A request goes there, whatever that costs."""
        return self.router.dispatch(self.decide(lookup), node, self.now_s)

    def busy(self, node: Node, tokens: int = 8000) -> Ticket:
        """It prefills so many tokens for somebody: by default 460 ms of believed work."""
        return self.send(node, prompt(tokens))

    def close(self, ticket: Ticket, outcome: Outcome = Outcome.LEFT) -> None:
        """By default as if the client had left, so that nothing is learned of the node's speed."""
        self.fleet.close_ticket(ticket, outcome, self.now_s)

    # Guests.

    def free(self, ticket: Ticket) -> None:
        self.close(ticket)
        self.admission.freed(ticket.node, self.now_s)

    def tick(self) -> None:
        self.admission.tick(self.nodes, self.now_s)

    def enter(self, tokens: int = 8000, **more: object) -> PendingRequest:
        guest = PendingRequest(self, prompt(tokens), **more)  # type: ignore[arg-type]
        guest.enter()
        return guest

    def books_are_closed(self) -> None:
        assert self.admission.waiting == self.group.waiting == 0
        for node in self.nodes:
            assert (node.inflight, node.context, node.kv_new) == (0, 0, 0)
            assert node.pending_work == pytest.approx(0.0, abs=1e-3)


class PendingRequest:
    """A request by hand: notes what becomes of it."""

    def __init__(self, world: World, lookup: Lookup | None, tenant: str = "", priority: int = NORMAL) -> None:
        self.world = world
        self.request = RoutingRequest(MODEL)
        self.request.tenant = tenant
        self.request.priority = priority
        self.lookup = lookup
        self.arrived_s = world.now_s
        self.fates: list[str] = []
        self.decision: Decision
        self.ticket: Ticket
        self.why: Undecided

    def enter(self) -> None:
        self.world.admission.enter(self, self.world.now_s)

    @property
    def waits(self) -> bool:
        return not self.fates

    @property
    def node(self) -> Node:
        assert self.fates == ["went"]
        return self.decision.node

    def go(self, decision: Decision) -> None:
        self.fates.append("went")
        self.decision = decision
        self.ticket = self.world.router.dispatch(decision, decision.node, self.world.now_s)

    def refuse(self, why: Undecided) -> None:
        self.fates.append("refused")
        self.why = why

    def leave(self) -> None:
        self.fates.append("left")
        self.world.admission.leave(self)

    def finish(self) -> None:
        """It got its answer: its node has more room."""
        self.world.free(self.ticket)
