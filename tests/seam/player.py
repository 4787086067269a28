"""Plays a script on a stage, and checks after each line what must be true whatever the script says.

A stage is one way to run the core: alone, behind an edge with sockets, behind Envoy's protocol, in virtual time. The
player tells it what happens, and compares the commands that the core has given.

Checked after each line:
1. Each node has as many tickets open as calls have tries on it (`Ledger` counts them by messages alone).
2. The queue holds the calls that have arrived, have no node and no error.

At the end:
3. Counters, outcomes of tickets, ends of calls and the tenants' limits are those that the script lists; what it does
   not list is zero.
4. When the calls that are left have been cancelled, nothing is left: no ticket, no call, no pending work, no entry of
   the journal that still runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final, Protocol

from seam.script import Arrive, End, Expected, Happens, Line, NodeSpec, Script, Serve, Tell, cancel
from warmroute.core import messages
from warmroute.core.messages import Cut, Outcome, Reader, Reject, Role, Send, Verdict, Withdraw, outcome_of
from warmroute.core.node import Node

TENANT: Final = "t"
"""Of calls for which a script names no other one. Its limits are never reached."""
PLAIN_COUNTERS: Final = (
    "interrupted", "disconnects", "retries", "hedges", "hedges_won", "protocol_errors", "cut_off", "shed",
)  # fmt: skip
WHERE_LISTED: Final = ("protocol_errors", "shed")
"""Counters that are compared only where a script lists them: messages of ended calls may change the first one, and
only an autoscaled fleet has the second one."""


class Stage(Protocol):
    """One way to run the core."""

    can: frozenset[str]
    """Capabilities that scripts may need (script.py)."""
    is_envoy: bool
    """Whether each call is Envoy's, whatever the script says."""
    fleet: Any
    admission: Any
    rate_limits: Any
    counters: Any

    async def open(self, script: Script) -> list[Node]:
        """Start, with these nodes in this order."""

    async def close(self) -> None: ...

    @property
    def now_s(self) -> float: ...

    async def step(self, until_s: float, sends_due: bool = True) -> bool:
        """Let time pass until then, or until the core wants Due, and send Due. Return whether time is left."""

    async def arrive(self, play: Play, event: Arrive, on: Node | None) -> None:
        """`on`: the node that gets the call."""

    async def tell(self, play: Play, event: Tell) -> None: ...

    async def happen(self, play: Play, event: Happens) -> None: ...

    async def send_due(self) -> None:
        """Let the core do what it has left over."""

    async def commands(self) -> list[Any]:
        """Return the commands since the last call."""

    async def check_answers(self, play: Play) -> None:
        """Check what clients and nodes have got."""

    def answers_withdraw(self) -> bool:
        """Whether the player has to answer a Withdraw."""

    def given_up(self) -> list[tuple[str, int, int]]:
        """Return what the edge has told since the last call without an event of the script: the message, call and try
        (0: the whole call)."""

    def ended(self) -> dict[int, Any]:
        """Return the calls that have ended, by number."""

    def unfinished(self) -> list[str]:
        """Describe what is left in the core, besides nodes, queue and limits."""


class Ledger:
    """Which tries are open, as far as messages say."""

    def __init__(self) -> None:
        self.open: dict[tuple[int, int], int] = {}
        """Numbers of nodes by call and try."""
        self.prefills: set[tuple[int, int]] = set()
        self.reserved: dict[int, int] = {}
        """Nodes that will decode what others prefill now, by call."""
        self.charged: set[int] = set()
        self.arrived: set[int] = set()
        self.sent: set[int] = set()
        self.done: set[int] = set()
        self.is_envoy: set[int] = set()

    @property
    def waiting(self) -> int:
        return len(self.arrived - self.sent - self.done)

    def on(self, node: Node) -> int:
        return [*self.open.values(), *self.reserved.values()].count(node.number)

    def end(self, call: int) -> None:
        self.done.add(call)
        self.reserved.pop(call, None)
        for key in [key for key in self.open if key[0] == call]:
            del self.open[key]

    def obey(self, command: Any) -> None:
        if isinstance(command, Send):
            assert command.id not in self.done, "a call that has ended is sent"
            assert (command.id, command.try_) not in self.open, "a try is sent twice"
            self.sent.add(command.id)
            self.open[command.id, command.try_] = command.node
            if command.role is Role.PREFILL:
                self.prefills.add((command.id, command.try_))
                self.reserved[command.id] = command.kv_from
            elif command.role is not Role.HEDGE:
                self.reserved.pop(command.id, None)
        elif isinstance(command, Withdraw):
            if (command.id, command.try_) in self.prefills:  # it needs no answer
                self.open.pop((command.id, command.try_), None)
        elif isinstance(command, Reject):
            assert command.id not in self.done, "a call ends twice"
            self.end(command.id)

    def tell(self, kind: str, call: int, fields: dict[str, Any]) -> None:
        if kind == "Arrive":
            self.arrived.add(call)
            if fields["envoy"]:
                self.is_envoy.add(call)
        if kind == "Charge":
            self.charged.add(call)
        if kind == "Cancel" and call in self.charged:
            self.end(call)
        if call in self.done or call not in self.arrived:
            return
        try_ = fields.get("try_", 0)
        key = (call, try_)
        if kind == "Cancel" or (kind == "Failed" and fields["broke"] and key in self.open):
            self.end(call)
        elif kind in ("Failed", "Withdrawn", "Prefilled"):
            self.open.pop(key, None)
        elif kind in ("Started", "FirstToken", "Ended") and key in self.open:
            reader = Reader.WHOLE
            if call in self.is_envoy:
                reader = Reader.ENVOY_ITSELF if fields.get("by_envoy") else Reader.ENVOY
            node = fields.get("served") or self.open[key]
            if kind == "Ended" or outcome_of(fields["status"], reader)[0] is Verdict.END:
                self.end(call)
            else:
                self.reserved.pop(call, None)
                for other in [other for other in self.open if other[0] == call]:
                    del self.open[other]
                self.open[key] = node


class Play:
    """One run of a script."""

    def __init__(self, script: Script, stage: Stage) -> None:
        self.script, self.stage = script, stage
        self.ledger = Ledger()
        self.ids: dict[str, int] = {}
        self.tenants: dict[str, str] = {}
        self.bound: dict[str, Node] = {}
        self._free: list[tuple[NodeSpec, Node]] = []
        self._specs: dict[str, NodeSpec] = dict(script.nodes)
        self._estimates: dict[str, float] = {}
        self._usage: dict[str, Any] = {}
        self._before: dict[str, Any] = {}
        self._started_s = 0.0

    # Names.

    def id_of(self, call: str) -> int:
        return self.ids.setdefault(call, len(self.ids) + 1)

    def name_of(self, call_id: int) -> str:
        return next((name for name, one in self.ids.items() if one == call_id), f"call {call_id}")

    def node(self, name: str) -> Node:
        """Return the node of this name: one of those that have none yet, if the script names it for the first time."""
        if name not in self.bound:
            self._bind(name, next(node for spec, node in self._free if spec == self._specs[name]))
        return self.bound[name]

    def _bind(self, name: str, node: Node) -> None:
        self.bound[name] = node
        self._free = [(spec, other) for spec, other in self._free if other is not node]

    def joined(self, name: str, spec: NodeSpec, node: Node) -> None:
        self._specs[name] = spec
        self.bound[name] = node

    def is_node(self, name: str, number: int) -> bool:
        """Whether the node of this number has the name. If both are free, it gets it."""
        if name == "?":
            return True
        if "|" in name:
            return any(self.is_node(one, number) for one in name.split("|"))
        if name in self.bound:
            return self.bound[name].number == number
        for spec, node in self._free:
            if node.number == number and spec == self._specs[name]:
                self._bind(name, node)
                return True
        return False

    def is_connecting(self, command: Send) -> bool:
        """Whether the connection of this try is not made before the edge gives it up."""
        return any(
            one.is_connecting and self.ids.get(one.call) == command.id and one.try_ == command.try_
            for line in self.script.lines
            for one in line.expected
        )

    def node_name(self, number: int) -> str:
        known = next((name for name, node in self.bound.items() if node.number == number), None)
        return known or f"node {number}"

    @property
    def nodes(self) -> list[Node]:
        return [*self.bound.values(), *(node for _, node in self._free)]

    # The run.

    async def run(self) -> None:
        script, stage = self.script, self.stage
        nodes = await stage.open(script)
        self._free = list(zip(script.nodes.values(), nodes, strict=True))
        try:
            for serve in script.before:
                for node in self.nodes if serve.node == "*" else [self.node(serve.node)]:
                    await self._serve(serve, node)
            self._before = self._counted()
            started_s = self._started_s = stage.now_s
            for number, line in enumerate(script.lines):
                at_s = stage.now_s if line.at_ms is None else started_s + line.at_ms / 1000.0
                await self._line(number, line, at_s)
            await self._check_end()
        finally:
            await stage.close()

    async def _serve(self, serve: Serve, node: Node) -> None:
        """A node serves one request, alone."""
        stage, name = self.stage, f"before {len(self.ids)}"
        self.ledger.tell("Arrive", self.id_of(name), {"envoy": self.stage.is_envoy})
        await stage.arrive(self, Arrive(name, tokens=serve.tokens, prompt=serve.prompt), node)
        commands = await self._obeyed()
        assert [(type(one), one.node) for one in commands] == [(Send, node.number)], commands
        until_s = stage.now_s + serve.took_ms / 1000.0
        while await stage.step(until_s):
            assert not await self._obeyed()
        usage = None if serve.output is None else (serve.tokens, 0, serve.output)
        for message in ("Started", "FirstToken", "Ended"):
            fields: dict[str, Any] = {"try_": 1, "status": 200}
            await stage.tell(self, Tell(message, name, fields | ({"usage": usage} if message == "Ended" else {})))
        self.ledger.end(self.id_of(name))
        assert not await self._obeyed()

    async def _obeyed(self) -> list[Any]:
        commands = await self.stage.commands()
        for command in commands:
            self.ledger.obey(command)
        for message, call, try_ in self.stage.given_up():
            self.ledger.tell(message, call, {"try_": try_})
        return commands

    async def _line(self, number: int, line: Line, at_s: float) -> None:
        stage, event = self.stage, line.event
        got: list[Any] = []
        while not line.stalls and await stage.step(at_s):
            got += await self._answered(line)
        await stage.step(at_s, sends_due=False)
        got += await self._obeyed()
        if event is not None and got:
            raise AssertionError(self._difference(number, line, got, "before the line's event"))
        if isinstance(event, Arrive):
            await self._arrive(event)
        elif isinstance(event, Tell):
            await self._tell(event)
        elif isinstance(event, Happens):
            await stage.happen(self, event)
        got += await self._answered(line)
        until_s = stage.now_s + line.within_ms / 1000.0
        while line.within_ms and await stage.step(until_s):
            got += await self._answered(line)
        got += await self._answered(line)
        self._compare(number, line, got)
        self._check_tickets(number, line)

    async def _arrive(self, event: Arrive) -> None:
        tenant = self.tenants[event.call] = event.fields.get("tenant", TENANT)
        _, before = self._taken(tenant)
        envoy = event.fields.get("envoy", self.stage.is_envoy)
        self.ledger.tell("Arrive", self.id_of(event.call), {"envoy": envoy})
        await self.stage.arrive(self, event, self.node(event.on) if event.on else None)
        self._estimates[event.call] = self._taken(tenant)[1] - before

    async def _tell(self, event: Tell) -> None:
        fields = dict(event.fields)
        if event.message == "Charge":
            self.tenants[event.call] = fields.get("tenant", TENANT)
        if fields.get("served"):
            fields["served"] = self.node(fields["served"]).number
        self.ledger.tell(event.message, self.id_of(event.call), fields)
        if event.message == "Ended":
            self._usage[event.call] = fields["usage"]
        await self.stage.tell(self, event)

    async def _answered(self, line: Line) -> list[Any]:
        """Return the commands that have come, and those that follow from them: each Withdraw is answered."""
        got: list[Any] = []
        while new := await self._obeyed() or await self._due(line):
            got += new
            if self.stage.answers_withdraw():
                for command in new:
                    if isinstance(command, (Withdraw, Cut)) and self._is_answered(line, command):
                        await self._tell(self._answer(command))
        return got

    async def _due(self, line: Line) -> list[Any]:
        if not line.sends_due:
            return []
        await self.stage.send_due()
        return await self._obeyed()

    def _answer(self, command: Withdraw | Cut) -> Tell:
        name = self.name_of(command.id)
        return Tell("Withdrawn", name, {"try_": command.try_}) if isinstance(command, Withdraw) else cancel(name, "CUT")

    def _is_answered(self, line: Line, command: Withdraw | Cut) -> bool:
        return all(
            one.answered
            for one in line.expected
            if one.command == type(command).__name__
            and self.id_of(one.call) == command.id
            and one.try_ == getattr(command, "try_", 0)
        )

    # Comparing.

    def _compare(self, number: int, line: Line, got: list[Any]) -> None:
        commands = [one for one in line.expected if one.command != "Reserve"]
        for call in dict.fromkeys([one.call for one in commands] + [self.name_of(one.id) for one in got]):
            found = [one for one in got if self.name_of(one.id) == call]
            wanted = [one for one in commands if one.call == call]
            if len(wanted) != len(found):
                raise AssertionError(self._difference(number, line, got, call))
            for expected, command in zip(wanted, found, strict=True):
                wrong = self._differs(expected, command)
                if wrong:
                    raise AssertionError(self._difference(number, line, got, f"{call}: {wrong}"))
        for one in line.expected:
            if one.command == "Reserve":
                self.ledger.reserved[self.id_of(one.call)] = self.node(one.fields["node"]).number

    def _differs(self, expected: Expected, command: Any) -> str:
        """Return which field differs; empty if none does."""
        if type(command).__name__ != expected.command:
            return "another command"
        if expected.try_ and command.try_ != expected.try_:
            return "try_"
        for name, value in expected.fields.items():
            if name == "says":
                same = value in command.message
            elif name in ("node", "prefill_node") or (name == "kv_from" and isinstance(value, str)):
                same = self.is_node(value, getattr(command, name))
            elif name == "fallbacks":
                same = len(value) == len(command.fallbacks) and all(
                    self.is_node(one, found) for one, found in zip(value, command.fallbacks, strict=True)
                )
            elif isinstance(value, range):
                same = getattr(command, name) in value
            else:
                same = getattr(command, name) == value
            if not same:
                return f"{name} is not {value!r}"
        return ""

    def _difference(self, number: int, line: Line, got: Iterable[Any], what: str) -> str:
        expected = "\n".join(f"    {self._show_expected(one)}" for one in line.expected) or "    nothing"
        found = "\n".join(f"    {self._show(one)}" for one in got) or "    nothing"
        where = f"{self.script}\nline {number} at {line.at_ms} ms: {line.event}\n{what}"
        return f"{where}\nexpected:\n{expected}\ngot:\n{found}"

    @staticmethod
    def _show_expected(one: Expected) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in one.fields.items())
        return f"{one.command} {one.call}{one.try_ or ''} {fields}"

    def _show(self, command: Any) -> str:
        shown = f"{type(command).__name__} {self.name_of(command.id)}"
        if isinstance(command, Send):
            shown += f"{command.try_} {self.node_name(command.node)} {command.role.name} kv_from={command.kv_from}"
        elif isinstance(command, Withdraw):
            shown += f"{command.try_}"
        elif isinstance(command, Reject):
            shown += f" {command.status} {command.code} retry_after_s={command.retry_after_s}: {command.message}"
        return shown

    def _check_tickets(self, number: int, line: Line) -> None:
        for node in self.nodes:
            expected, found = self.ledger.on(node), node.inflight
            assert expected == found, (
                f"{self.script}\nline {number} at {line.at_ms} ms: {line.event}\n"
                f"{self.node_name(node.number)} has {found} tickets, and {expected} tries"
            )
        waiting = self.stage.admission.queue.waiting
        assert waiting == self.ledger.waiting, (
            f"{self.script}\nline {number} at {line.at_ms} ms: {line.event}\n"
            f"{waiting} calls in the queue, and {self.ledger.waiting} wait"
        )

    # The end.

    def _taken(self, tenant: str) -> tuple[float, float]:
        """Return the requests and tokens that are charged to a tenant by now."""
        requests, tokens, *_ = self.stage.rate_limits.taken(self.stage.now_s).get(tenant, (0.0, 0.0))
        return requests, tokens

    def _counted(self) -> dict[str, Any]:
        counters = self.stage.counters
        found: dict[str, Any] = {name: getattr(counters, name, 0) for name in PLAIN_COUNTERS}
        found["responses"] = Counter(counters.responses)
        found["split_requests"] = Counter(counters.split_requests)
        found["rejected"] = Counter[str]()
        for (reason, _priority), count in counters.rejected.items():
            found["rejected"][reason] += count
        found["outcomes"] = {node: list(node.outcomes) for node in self.nodes}
        found["taken"] = {tenant: self._taken(tenant) for tenant in self.stage.rate_limits.taken(self.stage.now_s)}
        return found

    async def _check_end(self) -> None:
        script, ledger = self.script, self.ledger
        self._check_counters()
        self._check_outcomes()
        self._check_ends()
        self._check_charges()
        for name, wanted in script.states.items():
            node = self.bound[name]
            state = {one: node.health.state.value if one == "health" else getattr(node, one) for one in wanted}
            assert state == wanted, f"{script}\n{name}: expected {wanted}, got {state}"
        for call in sorted((ledger.arrived | ledger.charged) - ledger.done):
            await self._tell(cancel(self.name_of(call)))
            await self._answered(Line(None, None))
        until_s = self.stage.now_s + 1.0
        while await self.stage.step(until_s):
            assert not await self._obeyed(), f"{script}\ncommands after the end"
        self._check_tickets(len(script.lines), Line(None, None))
        for node in self.nodes:
            left = (node.inflight, node.context_tokens, node.kv_new, round(node.pending_work, 3))
            assert left == (0, 0, 0, 0.0), f"{script}\n{self.node_name(node.number)} is left with {left}"
        for group in self.stage.fleet.groups:
            assert (group.inflight, group.waiting) == (0, 0), f"{script}\ngroup {group.model}"
        await self.stage.check_answers(self)
        unfinished = self.stage.unfinished()
        assert not unfinished, f"{script}\nleft over: {unfinished}"

    def _check_counters(self) -> None:
        now, before, listed = self._counted(), self._before, self.script.counters
        found = {
            name: now[name] - before[name]
            for name in PLAIN_COUNTERS
            if now[name] != before[name] and (name in listed or name not in WHERE_LISTED)
        }
        for name in ("responses", "split_requests", "rejected"):
            if difference := now[name] - before[name]:
                found[name] = dict(difference)
        assert found == dict(listed), f"{self.script}\ncounters: expected {dict(listed)}, got {found}"

    def _check_outcomes(self) -> None:
        if self.script.outcomes is None:
            return
        found = {}
        for node in self.nodes:
            before = self._before["outcomes"].get(node, [0] * len(Outcome))
            names = [one.name for one in Outcome for _ in range(node.outcomes[one] - before[one])]
            if names:
                found[self.node_name(node.number)] = sorted(names)
        wanted = {name: sorted(names.split()) for name, names in self.script.outcomes.items() if names}
        assert found == wanted, f"{self.script}\noutcomes: expected {wanted}, got {found}"

    def _check_ends(self) -> None:
        calls = self.stage.ended()
        for name, end in self.script.ends.items():
            if self.id_of(name) not in self.ledger.arrived:
                continue  # the core has no call of a request whose prompt was not read
            call = calls.get(self.id_of(name))
            assert call is not None, f"{self.script}\n{name} has not ended"
            found = self._end_of(call, end)
            first_ms = end.first_token_ms
            wanted = (end.outcome, end.status, end.tried, end.code, end.reported, end.left, first_ms)
            assert found == wanted, f"{self.script}\nend of {name}: expected {wanted}, got {found}"

    def _end_of(self, call: Any, end: End) -> tuple[Any, ...]:
        first_ms = None
        if end.first_token_ms is not None:
            first_ms = round((call.end[4] - self._started_s) * 1000.0, 3)
        return (
            call.outcome.name if call.outcome is not None else None,
            call.status,
            call.tried if end.tried is not None else None,
            call.code if end.code is not None else None,
            call.usage if end.reported is not None else None,
            call.left.name if call.left is not None else None,
            first_ms,
        )

    def _check_charges(self) -> None:
        """Compare the limits of the tenants whose calls all have a listed end."""
        ends = self.script.ends
        for tenant in set(self.tenants.values()):
            calls = [call for call, one in self.tenants.items() if one == tenant]
            if not all(call in ends and ends[call].charge for call in calls):
                continue
            requests = sum(ends[call].charge != "nothing" for call in calls)
            tokens = 0.0
            for call in calls:
                if ends[call].charge == "settled":
                    prompt, _cached, output = self._usage[call]
                    tokens += (prompt or 0) + (output or 0)
                elif ends[call].charge == "estimate":
                    tokens += self._estimates[call]
            if tenant not in self.stage.rate_limits.taken(self.stage.now_s):
                continue
            before = self._before["taken"].get(tenant, (0.0, 0.0))
            now = self._taken(tenant)
            found = (now[0] - before[0], round(now[1] - before[1], 3))
            wanted = (requests, round(tokens, 3))
            assert found == wanted, f"{self.script}\ncharged to {tenant}: expected {wanted}, got {found}"


async def play(script: Script, stage: Stage) -> None:
    await Play(script, stage).run()


def missing(script: Script, stage: Stage) -> frozenset[str]:
    """Return the capabilities that the script needs and the stage does not have."""
    return script.needs - stage.can


def message_of(play: Play, event: Tell) -> Any:
    """Return the message of an event, with the call's number and the nodes' numbers."""
    fields: dict[str, Any] = dict(event.fields)
    if fields.get("served"):
        fields["served"] = play.node(fields["served"]).number
    if event.message == "Ended":
        fields = {"first_s": play.stage.now_s, "usage": None} | fields
    elif event.message == "Failed":
        fields = {"reason": f"status {fields['status']}"} | fields
    elif event.message == "Cancel":
        fields["why"] = messages.Left[fields["why"]]
    return getattr(messages, event.message)(play.id_of(event.call), **fields)
