"""A small fleet with a whole core: numbered prompts, nodes with a cache or a load, requests, a manual clock."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from warmroute.config import Admission, Health, Hedging, Index, NodeConfig, Pricing, Routing
from warmroute.config.routing import NORMAL
from warmroute.core.admission import Admitter
from warmroute.core.brain import Brain
from warmroute.core.cache_view import CacheView
from warmroute.core.calls import ANSWERING, TRYING, Call, Split, Try
from warmroute.core.decision import Decision
from warmroute.core.decision_record import Price, explain_decision
from warmroute.core.fleet import Fleet
from warmroute.core.group import Group
from warmroute.core.messages import (
    MOVES,
    OVERDUE,
    QUEUE,
    Arrive,
    Cancel,
    Command,
    Cut,
    Due,
    Ended,
    Event,
    Failed,
    FirstToken,
    Left,
    Lookup,
    Outcome,
    Prefilled,
    Reject,
    Role,
    RoutingRequest,
    Send,
    Started,
    Usage,
    Withdraw,
    Withdrawn,
)
from warmroute.core.node import Node, Ticket
from warmroute.core.rejections import (
    AllNodesBusy,
    Displaced,
    HeldTooLong,
    NodeQueuesFull,
    NodesFull,
    QueueFull,
    rejection,
)
from warmroute.core.router import Router
from warmroute.core.traffic import Counters

MODEL = "m"
REASONS = {
    rejection(why(1), 0, RoutingRequest("")).message: why.reason
    for why in (QueueFull, Displaced, NodeQueuesFull, NodesFull, AllNodesBusy, HeldTooLong)
}
"""Why a request is rejected with the code `overloaded`, by the error's message."""
OF_ARRIVE = frozenset(Arrive.__struct_fields__)
_new_prompts: Iterator[int] = count(1_000_000)
_new_numbers: Iterator[int] = count(1)


def prompt(tokens: int, number: int | None = None) -> Lookup:
    """Return a prompt. Prompts with the same number share a prefix; one without a number shares it with no other."""
    number = next(_new_prompts) if number is None else number
    return Lookup(array("I", range(number << 8, (number << 8) + tokens)).tobytes(), tokens, 0, salt=str(number))


def explained(decision: Decision) -> str:
    return explain_decision(decision.record())


class RoutingHarness:
    """Nodes n0, n1… that are up, with the policy `price`."""

    def __init__(
        self, count: int = 2, *, admission: Admission | None = None, pricing: Pricing | None = None,
        cache_tokens: int = 0, slow_start_s: float = 0.0, index: Index | None = None, max_attempts: int = 0,
        hedging: Hedging | None = None,
    ) -> None:  # fmt: skip
        self.now_s = 1000.0
        self.fleet = Fleet(Health(slow_start_s=slow_start_s))
        self.cache_view = CacheView(index or Index())
        for number in range(count):
            self.add(f"n{number}", cache_tokens)
        self.group = self.fleet.group(MODEL) or Group(MODEL)
        self.router = Router(self.fleet, self.cache_view, Routing(policy="price", seed=3), pricing)
        self.admission = Admitter(self.router, admission or Admission())
        self.counters = Counters()
        self.brain = Brain(
            self.fleet, self.router, self.admission, self.counters, max_attempts=max_attempts, hedging=hedging,
            ticks_always=True,
        )  # fmt: skip
        self.requests: dict[int, FakeRequest] = {}
        """By the number of their call."""

    def add(self, name: str, cache_tokens: int = 0, island: str = "local", **fields: Any) -> Node:
        node = self.fleet.add(NodeConfig(url=f"http://{name}:1", name=name, models=(MODEL,), island=island, **fields))
        self.fleet.check_passed(node, 0.0)
        self.cache_view.add_node(name, [MODEL]).set_size(16, cache_tokens)
        return node

    @property
    def nodes(self) -> list[Node]:
        return list(self.fleet)

    def node(self, name: str) -> Node:
        return self.fleet.node(name)

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
        return self.router.open_ticket(self.decide(lookup), node, self.now_s)

    def busy(self, node: Node, tokens: int = 8000) -> Ticket:
        """Give a node a prompt to prefill: by default 460 ms of expected work."""
        return self.send(node, prompt(tokens))

    def close(self, ticket: Ticket, outcome: Outcome = Outcome.CANCELLED) -> None:
        """Close a ticket. By default the client disconnected, so that nothing is learned about the node's speed."""
        self.fleet.close_ticket(ticket, outcome, self.now_s)

    # Requests.

    def tell(self, *events: Event) -> None:
        """Tell the core what happened, and obey its commands as an edge in the same process does."""
        for event in events:
            commands = self.brain.handle(event, self.now_s)
            assert self.brain.last_error is None and not self.counters.protocol_errors
            for command in commands:
                self.requests[command.id].obey(command)

    def freed(self, node: Node) -> None:
        """The node may have room."""
        self.brain.node_freed(node)
        self.settle()

    def free(self, ticket: Ticket) -> None:
        self.close(ticket)
        self.freed(ticket.node)

    def settle(self) -> None:
        """Nodes have changed: requests leave them, or take them."""
        self.tell(Due(MOVES))

    def tick(self) -> None:
        """Look at the queue and the deadlines."""
        self.tell(Due(QUEUE))

    def look(self) -> None:
        """Look at the requests that have no first byte."""
        self.tell(Due(OVERDUE))

    def submit(self, tokens: int | Lookup = 8000, **fields: Any) -> FakeRequest:
        """Submit a request with a prompt, by default one of its own."""
        request = FakeRequest(self, tokens if isinstance(tokens, Lookup) else prompt(tokens), **fields)
        request.submit()
        return request

    def submit_to(self, node: Node, tokens: int = 1000, **fields: Any) -> FakeRequest:
        """Submit a request while the other nodes drain."""
        others = [other for other in self.nodes if other is not node and not other.draining]
        for other in others:
            self.fleet.drain(other.name)
        request = self.submit(tokens, **fields)
        for other in others:
            self.fleet.drain(other.name, False)
        assert request.node is node
        return request

    def warm_up(self) -> None:
        """Let every node answer once, so that speeds and latencies are known."""
        for node in self.nodes:
            request = self.submit_to(node)
            self.advance(0.1)
            request.answer()

    def assert_all_counters_are_zero(self) -> None:
        assert self.admission.queue.waiting == self.group.waiting == 0 == len(self.admission.queue.waiting_for)
        assert not self.brain.waiting and not self.brain.calls.checked
        for node in self.nodes:
            assert (node.inflight, node.context_tokens, node.kv_new) == (0, 0, 0)
            assert node.pending_work == pytest.approx(0.0, abs=1e-3)


class FakeRequest:
    """A request as an edge has it: what the core commanded, and what the nodes and the client do."""

    call: Call
    """Set unless it was rejected at once."""
    cut: Reject | None = None
    reject: Reject | None = None

    def __init__(
        self, harness: RoutingHarness, lookup: Lookup | None, model: str = MODEL, priority: int = NORMAL, **fields: Any
    ) -> None:
        """`fields`: those of RoutingRequest and Arrive."""
        self.harness = harness
        self.id = next(_new_numbers)
        self.lookup = lookup
        self._node: Node | None = None
        self._of_arrive = {name: fields.pop(name) for name in OF_ARRIVE & fields.keys()}
        self.request = RoutingRequest(model, arrived_s=harness.now_s, priority=priority, **fields)
        self.sends: list[Send] = []
        self.sent: list[str] = []
        """Names of the nodes that were asked for its answer, hedges excluded."""
        self.events: list[str] = []
        """What else was commanded."""
        self.cancelled = False

    def submit(self) -> None:
        self.harness.requests[self.id] = self
        self.harness.tell(Arrive(self.id, b"", self.request, self.lookup, **self._of_arrive))
        call = self.harness.brain.open.get(self.id)
        if call is not None:
            self.call = call

    # What the core commanded.

    def obey(self, command: Command) -> None:
        assert self.reject is None and not self.cancelled, "the call has ended"
        if isinstance(command, Send):
            self._sent_to(command)
        elif isinstance(command, Withdraw):
            role = next(send.role for send in self.sends if send.try_ == command.try_)
            self.events.append({Role.PREFILL: "withdraw prefill", Role.HEDGE: "withdraw hedge"}.get(role, "withdraw"))
            self.harness.tell(Withdrawn(self.id, command.try_))
        elif isinstance(command, Reject):
            self.reject = command
        elif isinstance(command, Cut):
            self.cut = command.error
            self.harness.tell(Cancel(self.id, Left.CUT))

    def _sent_to(self, send: Send) -> None:
        assert send.role is not Role.FIRST or not self.sends
        self.sends.append(send)
        node = self._numbered(send.node)
        if send.role is Role.PREFILL:
            self.events.append(f"prefill {node.name} for {self._numbered(send.kv_from).name}")
        elif send.role is Role.HEDGE:
            self.events.append(f"hedge {node.name}")
        else:
            self._node = node
            self.sent.append(node.name)

    def _numbered(self, number: int) -> Node:
        node = self.harness.fleet.numbered(number)
        assert node is not None
        return node

    @property
    def why(self) -> str:
        """Why it was rejected: the reason in the metrics, or the error's code. Empty if it was not."""
        if self.reject is None:
            return ""
        code, message = self.reject.code, self.reject.message
        if code == "deadline_unreachable":
            return "deadline_ttft" if "first token" in message else "deadline_total"
        return REASONS.get(message, code)

    @property
    def message(self) -> str:
        assert self.reject is not None
        return self.reject.message

    @property
    def milliseconds(self) -> list[float]:
        """The numbers of milliseconds that its error names."""
        return [float(number.replace(",", "")) for number in re.findall(r"([\d,]+) ms", self.message)]

    @property
    def retry_after_s(self) -> int:
        assert self.reject is not None and self.reject.retry_after_s is not None
        return self.reject.retry_after_s

    @property
    def queued(self) -> bool:
        return not (self.sends or self.reject or self.cancelled)

    @property
    def admitted(self) -> bool:
        return bool(self.sends)

    @property
    def is_open(self) -> bool:
        """Whether a node has it."""
        return self.admitted and self.call.state in (TRYING, ANSWERING)

    @property
    def done(self) -> bool:
        return self.id not in self.harness.brain.open

    @property
    def node(self) -> Node:
        """The node that it was sent to last."""
        assert self._node is not None, self.why
        return self._node

    # What the core knows of it.

    @property
    def decision(self) -> Decision:
        """The first one."""
        assert self.call.decision is not None
        return self.call.decision

    @property
    def main(self) -> Try:
        assert self.call.main is not None
        return self.call.main

    @property
    def ticket(self) -> Ticket:
        return self.main.ticket

    @property
    def split(self) -> Split:
        assert self.call.split is not None
        return self.call.split

    # What happens to it.

    def cancel(self) -> None:
        """The client disconnects."""
        self.cancelled = True
        self.harness.tell(Cancel(self.id, Left.LEFT))

    def finish(self) -> None:
        """It ends, so the node has more room. Nothing is learned about the node's speed."""
        self.cancel()

    def start(self) -> None:
        """The first byte of the response comes."""
        self.harness.tell(Started(self.id, self.main.number, 200))

    def first_token(self) -> None:
        self.harness.tell(FirstToken(self.id, self.main.number, 200))

    def answer(self, usage: Usage | None = None, status: int = 200) -> None:
        """The response comes as a whole, or its rest does."""
        self.harness.tell(Ended(self.id, self.main.number, status, self.harness.now_s, usage))

    def fail(self, status: int = 500, try_: Try | None = None) -> None:
        """A node answers with an error, or fails before it answers: by default that of the main try."""
        self.harness.tell(Failed(self.id, (try_ or self.main).number, status, f"status {status}"))

    def prefilled(self, usage: Usage | None = None) -> None:
        self.harness.tell(Prefilled(self.id, self.split.prefill.number, True, True, usage))

    def prefill_fails(self, status: int = 500) -> None:
        self.fail(status, self.split.prefill)


def one_busy_node(**admission: Any) -> tuple[RoutingHarness, Ticket]:
    """Return a fleet of one node that prefills 8,000 tokens, and the ticket of that request."""
    harness = RoutingHarness(1, admission=Admission(**admission))
    return harness, harness.busy(harness.nodes[0])
