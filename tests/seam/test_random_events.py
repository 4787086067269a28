"""Random events, most of them legal, some that cannot happen, and all of them at any time.

Whatever an edge says, `handle` raises nothing, gives only commands that the specification of calls allows, and holds
tickets exactly for the tries that are open. When all calls have ended, nothing is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from hypothesis import given, settings
from hypothesis import strategies as st

from seam.core_stage import CoreStage, prompt
from seam.player import TENANT, Ledger
from seam.script import NodeSpec, Script, fleet, script
from warmroute.core import messages
from warmroute.core.messages import (
    CLOSED,
    DUE,
    LOCAL,
    NO_ENDPOINT,
    REFUSED,
    SILENT,
    TRANSIENT,
    UNKNOWN,
    Cut,
    Left,
    Reject,
    Role,
    RoutingRequest,
    Send,
    Withdraw,
)
from warmroute.core.node import Node

HEDGING: Final = {"max_ratio": 1.0, "min_delay_s": 1.0}
FLEETS: Final[dict[str, Script]] = {
    "plain": script(0, "three nodes", fleet("a b c"), hedging=HEDGING),
    "few tries": script(0, "three nodes, two tries", fleet("a b c"), hedging=HEDGING, upstream={"max_attempts": 2}),
    "narrow": script(
        0, "nodes with one place each", fleet("a b", max_inflight=1), hedging=HEDGING,
        admission={"max_waiting": 3, "max_wait_s": 5.0},
    ),
    "no queue": script(0, "nothing waits", fleet("a b c"), hedging=HEDGING, admission={"queue_at_router": False}),
    "vllm": script(0, "pairs", fleet("m", engine="vllm") | fleet(prefill="p q", decode="d e", engine="vllm")),
    "sglang": script(0, "pairs that need each other", fleet(prefill="p q", decode="d e", engine="sglang")),
    "sglang, few tries": script(
        0, "pairs that need each other, and a mixed node",
        fleet("m", engine="sglang") | fleet(prefill="p q", decode="d e", engine="sglang"), upstream={"max_attempts": 2},
    ),
}  # fmt: skip
STATUSES: Final = (500, 503, 429, CLOSED, REFUSED, TRANSIENT, SILENT, LOCAL, UNKNOWN, 502)
ANSWERS: Final = (200, 200, 200, 404)
PAUSES_S: Final = (0.01, 0.06, 0.3, 2.5, 12.0, 40.0)
TOKENS: Final = (100, 2000, 8000, 60_000)
MAX_CALLS: Final = 12
SHOWN: Final = (
    "id", "try_", "node", "role", "kv_from", "status", "code", "why", "broke", "served", "by_envoy", "envoy",
)  # fmt: skip

Op = tuple[int, int, int]
OPS: Final = st.lists(st.tuples(st.integers(0, 23), st.integers(0, 11), st.integers(0, 11)), max_size=70)


def short(message: Any) -> str:
    """Return a message without its long fields."""
    fields = ((name, getattr(message, name)) for name in message.__struct_fields__)
    shown = (f"{name}={int(value) if isinstance(value, int) else value}" for name, value in fields if name in SHOWN)
    return f"{type(message).__name__} {' '.join(shown)}"


@dataclass
class OpenTry:
    """A try as an edge sees it."""

    call: int
    number: int
    role: Role
    has_begun: bool = False
    has_token: bool = False
    is_asked_back: bool = False


@dataclass
class OpenCall:
    envoy: bool
    repeatable: bool
    tries: dict[int, OpenTry] = field(default_factory=dict)
    tried: set[int] = field(default_factory=set)
    """Numbers of the nodes that it was sent to."""
    sends: int = 0
    """Sendings that max_attempts counts at least: whole ones to another node than before."""
    answering: bool = False


class Edge:
    """Tells the core random events, and checks each command."""

    def __init__(self, of: Script) -> None:
        self.stage, self.script = CoreStage(), of
        self.ledger = Ledger()
        self.nodes: list[Node] = asyncio.run(self.stage.open(of))
        self.calls: dict[int, OpenCall] = {}
        self.last_id = 0
        self.counted = 0
        """Requests that the tenant is charged in the end."""
        self.joined = 0
        self.log: list[str] = []

    # What comes back.

    def tell(self, event: Any) -> None:
        self.log.append(f"{self.stage.now_s - 1000.0:.3f} {short(event)}")
        stage = self.stage
        for command in stage.brain.handle(event, stage.now_s):
            self.obey(command)
        self.check()

    def obey(self, command: Any) -> None:
        self.log.append(f"    {short(command)}")
        self.ledger.obey(command)
        call = self.calls.get(command.id)
        if isinstance(command, Send):
            assert call is not None, "a call that has ended is sent"
            assert not call.answering, "a call that is answered is sent again"
            node = next(node for node in self.nodes if node.number == command.node)
            # While a Withdraw is not answered, no other call leaves its node: one that will decode may be dead by then.
            waits = any(one.is_asked_back for each in self.calls.values() for one in each.tries.values())
            assert not node.health.confirmed_down or waits, "a dead node gets a call"
            assert not node.draining or node.number in call.tried, "a draining node gets a call"
            assert not any(one.is_asked_back for one in call.tries.values()), "a try was not given up yet"
            self._check_tries(call, command)
            call.tries[command.try_] = OpenTry(command.id, command.try_, command.role)
            call.tried |= {command.node, command.kv_from if command.role is Role.PREFILL else command.node}
        elif isinstance(command, Reject):
            assert call is not None
            # Nodes have worked for a call whose deadline passed, and for a response that breaks off.
            self.counted += call.answering or command.code == "deadline_exceeded"
            del self.calls[command.id]
        elif isinstance(command, Withdraw):
            if call is not None and command.try_ in call.tries:
                assert not call.envoy, "Envoy cannot give a call back"
                if call.tries[command.try_].role is Role.PREFILL:  # it needs no answer
                    del call.tries[command.try_]
                else:
                    call.tries[command.try_].is_asked_back = True
        else:
            assert isinstance(command, Cut)
            assert call is not None
            assert call.answering

    def _check_tries(self, call: OpenCall, command: Send) -> None:
        """Check which tries may be open beside a new one."""
        roles = [one.role for one in call.tries.values()]
        if command.role is Role.HEDGE:
            assert len(roles) == 1, "a hedge stands beside one try"
            assert call.repeatable
        elif command.role is Role.DECODE:
            assert all(role is Role.PREFILL for role in roles)
        elif command.role is Role.PREFILL:
            assert not roles
        else:
            assert not roles, "the call is at two nodes"
        if command.role is not Role.PREFILL and command.node not in call.tried:
            call.sends += 1
            limit = self.script.config.get("upstream", {}).get("max_attempts", 0)
            # A node that was not asked is no try, and the node of a reserved ticket may change.
            assert not limit or call.sends <= limit + self._unasked, "more tries than are allowed"

    _unasked = 0

    def check(self) -> None:
        stage, ledger = self.stage, self.ledger
        expected = len(ledger.open) + len(ledger.reserved)
        assert sum(node.inflight for node in self.nodes) == expected, "tickets are not those of the open tries"
        for node in self.nodes:
            fewest = list(ledger.open.values()).count(node.number)
            assert fewest <= node.inflight <= fewest + len(ledger.reserved), node.name
        assert stage.admission.queue.waiting == ledger.waiting, "another number of calls waits"
        assert not stage.brain.last_error, repr(stage.brain.last_error)

    # What an edge says.

    def play(self, ops: list[Op]) -> None:
        self.send_due()
        for kind, one, other in ops:
            self.OPS[kind](self, one, other)
            self.send_due()

    def send_due(self) -> None:
        for _ in range(1000):
            if not self.stage.brain.due_now:
                return
            self.tell(DUE)
        raise AssertionError("the core always wants Due")

    def arrive(self, one: int, other: int) -> None:
        if len(self.calls) >= MAX_CALLS:
            return
        self.last_id += 1
        number, now_s = self.last_id, self.stage.now_s
        envoy, repeatable = one == 3, one != 5
        deadline_s = now_s + 3.0 if other in (4, 5) else 0.0
        request = RoutingRequest(
            "m", tenant=TENANT, arrived_s=now_s, priority=other % 3, may_queue=other != 7, deadline_s=deadline_s,
            ends_late=other == 5, streams=one != 6, may_split=not envoy and one != 7,
            subset=frozenset([self.nodes[0].name, self.nodes[-1].name]) if one == 8 else None,
        )  # fmt: skip
        self.calls[number] = OpenCall(envoy, repeatable)
        self.ledger.tell("Charge", number, {})
        self.tell(messages.Charge(number, 100, True, request))
        if one == 9:
            return  # its prompt is being read
        self.ask(number, request, envoy, repeatable, TOKENS[other % 4])

    def ask(self, number: int, request: RoutingRequest, envoy: bool, repeatable: bool, tokens: int) -> None:
        self.ledger.tell("Arrive", number, {"envoy": envoy})
        lookup, kept = prompt(tokens, 1_000_000 + number), number if number % 2 else None
        event = messages.Arrive(
            number, b"%d" % number, request, lookup, tokens, envoy=envoy, repeatable=repeatable, kept=kept
        )  # fmt: skip
        self.tell(event)

    def _try(self, one: int, fits: Callable[[OpenTry], bool] = lambda _one: True) -> OpenTry | None:
        found = [one for call in self.calls.values() for one in call.tries.values() if fits(one)]
        return found[one % len(found)] if found else None

    def _end(self, call: int, charged: bool) -> None:
        self.calls.pop(call)
        self.counted += charged

    def started(self, one: int, other: int) -> None:
        self._answer("Started", one, other)

    def first_token(self, one: int, other: int) -> None:
        self._answer("FirstToken", one, other)

    def ended(self, one: int, other: int) -> None:
        self._answer("Ended", one, other)

    def _answer(self, message: str, one: int, other: int) -> None:
        def fits(each: OpenTry) -> bool:
            begun, token = each.has_begun, each.has_token
            is_new = message == "Ended" or (message == "FirstToken" and not token) or not begun
            return each.role is not Role.PREFILL and is_new

        found = self._try(one, fits)
        if found is None:
            return
        call = self.calls[found.call]
        status = 200 if found.has_begun else ANSWERS[other % 4]
        if found.role is Role.DECODE and status >= 400:
            return  # the edge tells what it means
        call.answering = found.has_begun = True
        found.is_asked_back = False
        found.has_token = found.has_token or message == "FirstToken"
        call.tries = {found.number: found}
        fields: dict[str, Any] = {"try_": found.number, "status": status}
        self.ledger.tell(message, found.call, fields)
        if message == "Ended":
            self._end(found.call, True)
            usage = (1000, 0, 10) if other % 2 else None
            self.tell(messages.Ended(found.call, found.number, status, self.stage.now_s, usage))
        else:
            self.tell(getattr(messages, message)(found.call, found.number, status))

    def envoy_fails(self, one: int, other: int) -> None:
        found = self._try(one, lambda each: self.calls[each.call].envoy and not each.has_begun)
        if found is None:
            return
        by_envoy, status = other % 2 == 1, STATUSES[other % 3]
        served = self.nodes[other % len(self.nodes)]
        fields = {"try_": found.number, "status": status, "by_envoy": by_envoy}
        self.ledger.tell("Started", found.call, fields)
        self._end(found.call, False)
        is_other = other > 5 and not by_envoy and self.stage.fleet.find(served.name) is served
        number = served.number if is_other else 0
        self.tell(messages.Started(found.call, found.number, status, by_envoy=by_envoy, served=number))

    def failed(self, one: int, other: int) -> None:
        found = self._try(one)
        if found is None:
            return
        call = self.calls[found.call]
        status = STATUSES[other % len(STATUSES)]
        if call.envoy and not found.has_begun:
            if other > 2:
                return
            status = NO_ENDPOINT
        if status in (UNKNOWN, NO_ENDPOINT):
            self._unasked += 1
        broke = found.has_begun
        fields = {"try_": found.number, "status": status, "broke": broke}
        self.ledger.tell("Failed", found.call, fields)
        if broke:
            self._end(found.call, True)
        else:
            del call.tries[found.number]
        retry_after_s = other if other % 3 else None
        self.tell(messages.Failed(found.call, found.number, status, "random", retry_after_s, broke=broke))

    def transfer_fails(self, one: int, other: int) -> None:
        """A decode node answers an error that is the transfer's fault, or the client's."""
        found = self._try(one, lambda each: each.role is Role.DECODE and not each.has_begun)
        if found is not None:
            self.ledger.tell("Failed", found.call, {"try_": found.number, "status": 500, "broke": False})
            del self.calls[found.call].tries[found.number]
            self.tell(messages.Failed(found.call, found.number, (500, 400)[other % 2], "random"))

    def prefilled(self, one: int, other: int) -> None:
        found = self._try(one, lambda each: each.role is Role.PREFILL)
        if found is not None:
            self.ledger.tell("Prefilled", found.call, {"try_": found.number})
            del self.calls[found.call].tries[found.number]
            usage = (1000, 100, 1) if other % 2 else None
            self.tell(messages.Prefilled(found.call, found.number, other % 4 > 0, other % 3 > 0, usage))

    def withdrawn(self, one: int, _other: int) -> None:
        found = self._try(one, lambda each: each.is_asked_back)
        if found is not None:
            self.ledger.tell("Withdrawn", found.call, {"try_": found.number})
            del self.calls[found.call].tries[found.number]
            self.tell(messages.Withdrawn(found.call, found.number))

    def cancel(self, one: int, other: int) -> None:
        if not self.calls:
            return
        number = sorted(self.calls)[one % len(self.calls)]
        call, why = self.calls[number], (Left.LEFT, Left.LEFT, Left.INTERNAL, Left.STOPPING)[other % 4]
        was_sent = number in self.ledger.sent
        keeps = was_sent and (why is Left.LEFT or call.answering or (call.envoy and why is Left.STOPPING))
        self.ledger.tell("Cancel", number, {})
        self._end(number, keeps)
        self.tell(messages.Cancel(number, why))

    def answer_now(self, one: int, _other: int) -> None:
        if self.calls:
            self.tell(messages.AnswerNow(sorted(self.calls)[one % len(self.calls)]))

    def pass_time(self, one: int, _other: int) -> None:
        stage = self.stage
        until_s = stage.now_s + PAUSES_S[one % len(PAUSES_S)]
        while stage.brain.next_due_s <= until_s:
            due_s = stage.brain.next_due_s
            asyncio.run(stage.step(max(stage.now_s, due_s), sends_due=False))
            self.tell(DUE)
            assert stage.brain.next_due_s > due_s or stage.brain.due_now, "the shell would send Due for ever"
            self.send_due()
        asyncio.run(stage.step(until_s, sends_due=False))

    # What happens to nodes.

    def node_event(self, one: int, other: int) -> None:
        stage, fleet = self.stage, self.stage.fleet
        node, now_s = self.nodes[one % len(self.nodes)], stage.now_s
        if fleet.find(node.name) is not node:
            if self.joined < 4:
                self.joined += 1
                self.nodes.append(stage.add(f"late{self.joined}", NodeSpec()))
        elif other == 0:
            fleet.remove(node.name)
        elif other in (1, 2):
            fleet.check_failed(node, now_s, "connection refused")
        elif other in (3, 4):
            for _ in range(3):
                fleet.check_timed_out(node, now_s)
        elif other in (5, 6):
            fleet.drain(node.name, other == 5)
        elif other == 7:
            node.update_load(5, one, one / 12, now_s)
        else:
            fleet.check_passed(node, now_s)
        self.log.append(f"{now_s - 1000.0:.3f} node event {other} of {node.name}")
        self.tell(DUE)

    # What cannot happen.

    def nonsense(self, one: int, other: int) -> None:
        """A message that no edge sends: for a call that has ended, for a try that there never was, in a wrong state."""
        number = (one * 7 + other) % (self.last_id + 2)
        call, try_ = self.calls.get(number), 1 + other % 4
        known = call.tries.get(try_) if call is not None else None
        Unsent = messages
        found: list[Any] = [
            Unsent.Withdrawn(number, try_), Unsent.Failed(number, try_, 500, "late"), Unsent.Cancel(number, Left.LEFT),
            Unsent.Started(number, try_, 200), Unsent.FirstToken(number, try_, 200),
            Unsent.Ended(number, try_, 200, self.stage.now_s, None), Unsent.Prefilled(number, try_, True, True, None),
        ]  # fmt: skip
        event = found[one % len(found)]
        kind = type(event).__name__
        if kind == "Cancel" and call is not None:
            return
        if known is not None:
            is_legal = (
                (kind == "Prefilled" and known.role is Role.PREFILL)
                or (kind == "Withdrawn" and known.is_asked_back)
                or kind == "Failed"
                or (kind in ("Started", "FirstToken", "Ended") and known.role is not Role.PREFILL)
            )
            if is_legal:
                return
        self.tell(event)

    def repeat(self, one: int, other: int) -> None:
        """The link repeats Arrive of a call that is open."""
        waiting = sorted(call for call in self.calls if call in self.ledger.arrived and call not in self.ledger.sent)
        if waiting:
            number = waiting[one % len(waiting)]
            request = RoutingRequest("m", tenant=TENANT, arrived_s=self.stage.now_s)
            self.tell(messages.Arrive(number, b"", request, prompt_tokens=other))

    OPS = (
        arrive, arrive, arrive, arrive, started, first_token, ended, ended, failed, failed, failed, transfer_fails,
        prefilled, prefilled, withdrawn, withdrawn, cancel, answer_now, pass_time, pass_time, node_event, nonsense,
        repeat, envoy_fails,
    )  # fmt: skip

    # The end.

    def finish(self) -> None:
        for number in sorted(self.calls):
            if number in self.calls:
                call = self.calls[number]
                self.ledger.tell("Cancel", number, {})
                self._end(number, number in self.ledger.sent or call.answering)
                self.tell(messages.Cancel(number, Left.LEFT))
                self.send_due()
                while self._try(0, lambda each: each.is_asked_back):
                    self.withdrawn(0, 0)
                    self.send_due()
        self.pass_time(2, 0)
        self.pass_time(3, 0)
        stage = self.stage
        for node in self.nodes:
            left = (node.inflight, node.context_tokens, node.kv_new, round(node.pending_work, 3), node.transfer_tokens)
            assert left == (0, 0, 0, 0.0, 0.0), (node.name, left)
        for group in stage.fleet.groups:
            assert (group.inflight, group.waiting) == (0, 0)
        stage.brain.ended.clear()
        assert not stage.unfinished()
        requests, *_ = stage.rate_limits.taken(stage.now_s)[TENANT]
        assert requests == self.counted, "another number of requests is charged"


def run(name: str, ops: list[Op]) -> list[str]:
    edge = Edge(FLEETS[name])
    try:
        edge.play(ops)
        edge.finish()
    except AssertionError as error:
        error.add_note("\n".join(edge.log))
        raise
    return edge.log


@settings(max_examples=400)
@given(st.sampled_from(sorted(FLEETS)), OPS)
def test_random_events_leave_nothing(name: str, ops: list[Op]) -> None:
    run(name, ops)


@settings(max_examples=25)
@given(st.sampled_from(sorted(FLEETS)), OPS)
def test_the_same_events_give_the_same_commands(name: str, ops: list[Op]) -> None:
    assert run(name, ops) == run(name, ops)
