"""The language of the scripts: what edges tell the core, what happens to the fleet, and which commands follow.

    Script(
        47, "a refused connection takes every request off the node",
        fleet("a b"),
        at(0, arrive("x"), send("x", 1, "a")),
        at(0, arrive("y", on="a"), send("y", 1, "a")),
        at(5, failed("x", 1, REFUSED), withdraw("y", 1), send("x", 2, "b"), send("y", 2, "b")),
        outcomes={"a": "FAILED FAILED", "b": ""},
        counters={"retries": 2},
    )

Calls and nodes have names. Nodes that `fleet` describes in the same way are interchangeable, and chance decides which
of them the router takes first. So a name means the node that the script names by it first: above, "a" is the node that
gets x. Times are milliseconds since the script's beginning; what `before` lists happens earlier.

Each line has one event and the commands that follow from it, in their order for each call. A driver sends Due whenever
the core asks for it, and answers each Withdraw at once, unless the line says otherwise: what follows from that belongs
to the line, too. `until` lets time pass. At the end, whatever a script does not mention has to be zero (player.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from warmroute.config.nodes import Role as NodeRole
from warmroute.core.messages import Role, Usage

Fields = Mapping[str, Any]
Engine = Literal["auto", "vllm", "sglang", "trtllm"]

# What a script needs of the stage that plays it. Those of the second part follow from its lines.

RETRIES_ITSELF: Final = "retries_itself"
"""The edge sends a call to another node when the core says so. Envoy does that by itself."""
IS_ENVOY: Final = "is_envoy"
HAS_SOCKETS: Final = "has_sockets"
"""Nodes can do with a connection whatever a process can: close it, say nothing, send what is not HTTP."""
SETS_THE_CLOCK: Final = "sets_the_clock"
"""The script decides when something happens, to the millisecond."""
FAULTS: Final = "faults"
"""The core itself can be made to fail."""
NAMES_NODES: Final = "names_nodes"
"""The edge passes nodes' addresses on, and passes over a node that has none."""
LATE_ANSWERS: Final = "late_answers"
"""Messages can cross: an event arrives after the command that makes it void."""

TAKES_SUBSETS: Final = "takes_subsets"
"""A request can name the nodes that may serve it."""
STATES_WISHES: Final = "states_wishes"
"""A request can state what headers and bodies can say: deadlines, no queue, another model, a limit of the output."""
HAS_LIMITS: Final = "has_limits"
"""Tenants have limits."""
SHOWS_STATUS: Final = "shows_status"
"""A node can answer 4xx, with Retry-After, or without a KV transfer."""
SHOWS_ROLES: Final = "shows_roles"
"""An answer can begin before its first token."""
ENDS_CALLS: Final = "ends_calls"
"""The edge can end a call by itself, and a client can leave in the middle of an answer."""
ANY_ENGINE: Final = "any_engine"
"""Nodes can be of any engine, and serve any model."""
EVERY_REQUEST: Final = frozenset({STATES_WISHES, HAS_LIMITS, SHOWS_STATUS, SHOWS_ROLES, ENDS_CALLS, ANY_ENGINE})
"""What any edge for real clients has."""
_WISHES: Final = frozenset(
    {"deadline_ms", "total_ms", "may_queue", "repeatable", "model", "max_output_tokens", "ends_late"}
)

# Nodes.


@dataclass(frozen=True)
class NodeSpec:
    """Nodes whose specifications are equal are interchangeable."""

    role: NodeRole = "mixed"
    engine: Engine = "auto"
    model: str = "m"
    island: str = "local"
    state: str = "up"
    """"up", "unknown" (no health check has ended), or "down" (confirmed)."""
    max_inflight: int = 0
    cache_tokens: int = 0
    kv_connector: bool = False
    has_address: bool = True
    """Whether the name in its URL can be resolved."""


def fleet(
    names: str = "", *, prefill: str = "", decode: str = "", engine: Engine = "auto", **more: Any
) -> dict[str, NodeSpec]:
    """Describe nodes: those of `names` serve whole requests, or both prefill and decode."""
    nodes = {name: NodeSpec(engine=engine, **more) for name in names.split()}
    nodes |= {name: NodeSpec("prefill", engine, cache_tokens=400_000, **more) for name in prefill.split()}
    nodes |= {name: NodeSpec("decode", engine, cache_tokens=400_000, **more) for name in decode.split()}
    return nodes


# Events of an edge.


@dataclass(frozen=True)
class Arrive:
    call: str
    on: str = ""
    """Node that gets the call: the others are drained while it arrives."""
    tokens: int = 1000
    prompt: int | None = None
    """Prompts of the same number share a prefix."""
    fields: Fields = field(default_factory=dict)


@dataclass(frozen=True)
class Tell:
    """Any other event: a message of this name, without `id`."""

    message: str
    call: str
    fields: Fields = field(default_factory=dict)
    how: str = ""
    """What a node or a client does that causes it, where a status says too little (http_stage.py)."""


@dataclass(frozen=True)
class Happens:
    """An event of the fleet, or of the configuration."""

    what: str
    node: str = ""
    fields: Fields = field(default_factory=dict)


@dataclass(frozen=True)
class Expected:
    """A command. The fields that are not named may have any value."""

    command: str
    call: str
    try_: int = 0
    fields: Fields = field(default_factory=dict)
    answered: bool = True
    """Of a Withdraw or a Cut: whether the edge answers it at once."""
    is_connecting: bool = False
    """Of a Send: whether the connection is not made before the edge gives the try up."""


Event = Arrive | Tell | Happens | None


@dataclass(frozen=True)
class Line:
    at_ms: float | None
    """None: at the time of the line before."""
    event: Event
    expected: tuple[Expected, ...] = ()
    within_ms: float = 0.0
    """Time in which the commands may come."""
    sends_due: bool = True
    """Whether Due follows at once where the core asks for it."""
    stalls: bool = False
    """The process stands still until the event: no Due comes before it."""


def at(ms: float, event: Event, *expected: Expected, **more: Any) -> Line:
    return Line(ms, event, expected, **more)


def then(event: Event, *expected: Expected, **more: Any) -> Line:
    """At the time of the line before."""
    return Line(None, event, expected, **more)


def until(ms: float, *expected: Expected) -> Line:
    """Time passes. The commands may come at any time until then."""
    return Line(ms, None, expected)


def charge(call: str, **fields: Any) -> Tell:
    """The head of a request of a tenant with limits has arrived. `arrive` sends it where a script does not."""
    return Tell("Charge", call, fields)


def arrive(call: str, on: str = "", tokens: int = 1000, prompt: int | None = None, **fields: Any) -> Arrive:
    """`fields`: those of Arrive and of its RoutingRequest. `deadline_ms` and `total_ms` count from now on, `subset`
    lists nodes. `priority` may be a name."""
    return Arrive(call, on, tokens, prompt, fields)


def answer_now(call: str) -> Tell:
    return Tell("AnswerNow", call)


def started(call: str, try_: int, status: int = 200, **fields: Any) -> Tell:
    """`served`: the name of the node that answers, where Envoy has chosen another one."""
    return Tell("Started", call, {"try_": try_, "status": status, **fields})


def first_token(call: str, try_: int, status: int = 200) -> Tell:
    return Tell("FirstToken", call, {"try_": try_, "status": status})


def ended(
    call: str, try_: int, status: int = 200, usage: Usage | None = None, how: str = ""
) -> Tell:  # fmt: skip
    return Tell("Ended", call, {"try_": try_, "status": status, "usage": usage}, how)


def prefilled(
    call: str, try_: int, has_transfer: bool = True, *, is_unfinished: bool = True, usage: Usage | None = None
) -> Tell:  # fmt: skip
    return Tell(
        "Prefilled", call, {"try_": try_, "has_transfer": has_transfer, "is_unfinished": is_unfinished, "usage": usage}
    )  # fmt: skip


def failed(
    call: str, try_: int, status: int, retry_after_s: int | None = None, broke: bool = False, how: str = ""
) -> Tell:
    fields = {"try_": try_, "status": status, "retry_after_s": retry_after_s, "broke": broke}
    return Tell("Failed", call, fields, how)


def withdrawn(call: str, try_: int) -> Tell:
    return Tell("Withdrawn", call, {"try_": try_})


def cancel(call: str, why: str = "LEFT") -> Tell:
    return Tell("Cancel", call, {"why": why})


# Events of the fleet.


def suspected(node: str) -> Happens:
    """Its health checks time out until it is down."""
    return Happens("suspected", node)


def refuses(node: str) -> Happens:
    """A health check is refused: the node is confirmed down."""
    return Happens("refuses", node)


def check_times_out(node: str) -> Happens:
    """One health check times out: the node stays up."""
    return Happens("check_times_out", node)


def comes_up(node: str) -> Happens:
    """A health check passes."""
    return Happens("comes_up", node)


def removed(node: str) -> Happens:
    return Happens("removed", node)


def drained(node: str) -> Happens:
    return Happens("drained", node)


def undrained(node: str) -> Happens:
    return Happens("undrained", node)


def joins(node: str, **spec: Any) -> Happens:
    """A new node joins the fleet, and its first health check passes if its state is "up"."""
    return Happens("joins", node, {"spec": NodeSpec(**spec)})


def reports(node: str, running: int, waiting: int, kv_usage: float) -> Happens:
    """Its metrics are read."""
    return Happens("reports", node, {"running": running, "waiting": waiting, "kv_usage": kv_usage})


def reloads(**admission: Any) -> Happens:
    """The configuration is loaded again, with these settings of admission."""
    return Happens("reloads", "", admission)


def stops() -> Happens:
    """The process stops: it accepts no further requests, and serves those that it has."""
    return Happens("stops")


def breaks(what: str) -> Happens:
    """From now on a part of the core raises exceptions: "journal", "router" or "demand_meter"."""
    return Happens("breaks", what)


def mended(what: str) -> Happens:
    """It works again."""
    return Happens("mended", what)


# Commands.


def send(
    call: str, try_: int, node: str, role: Role | None = None, *, is_connecting: bool = False, **fields: Any
) -> Expected:
    """`node`: one name, several ("a|b": one of them), or "?" for any node. Without a role: FIRST for the first try,
    else MOVE. `kv_from`: of a prefill, the name of its decode node. `fallbacks` and `prefill_node` are names, too."""
    if role is None:
        role = Role.FIRST if try_ == 1 else Role.MOVE
    return Expected("Send", call, try_, {"node": node, "role": role, **fields}, is_connecting=is_connecting)


def withdraw(call: str, try_: int, answered: bool = True) -> Expected:
    return Expected("Withdraw", call, try_, answered=answered)


def reject(call: str, status: int, code: str, says: str = "", **fields: Any) -> Expected:
    """`says`: a part of the message. `retry_after_s` may be a range."""
    return Expected("Reject", call, 0, {"status": status, "code": code, "says": says, **fields})


def cut(call: str, answered: bool = True) -> Expected:
    return Expected("Cut", call, answered=answered)


def reserve(call: str, try_: int, node: str) -> Expected:
    """No command: from now on the node that will decode the call has its ticket."""
    return Expected("Reserve", call, try_, {"node": node})


# A whole script.


@dataclass(frozen=True)
class Serve:
    """Before a script begins, a node serves one request, alone."""

    node: str = "*"
    """"*": each node serves one."""
    tokens: int = 1000
    prompt: int | None = None
    took_ms: float = 100.0
    output: int | None = None


@dataclass(frozen=True)
class End:
    """How a call ended. `charge` says what its tenant is charged in the end: "settled" (the usage that the response
    reported), "request" (the request, and no tokens), "estimate" (what was taken when it arrived), or "nothing"."""

    outcome: str | None
    """Name of the outcome; None if no node got the call."""
    status: int = 0
    charge: str = ""
    tried: int | None = None
    code: str | None = None
    reported: tuple[int | None, int | None, int | None] | None = None
    left: str | None = None
    first_token_ms: float | None = None


def answered(status: int = 200, **more: Any) -> End:
    """The client has the whole response."""
    ok = status < 400
    charge = ("settled" if more.get("reported") is not None else "estimate") if ok else "request"
    return End("OK" if ok else "REJECTED", status, charge, **more)


def rejected(status: int, code: str, outcome: str | None = None, **more: Any) -> End:
    """The client has an error of the router."""
    return End(outcome, status, "nothing", code=code, **more)


def left(status: int = 0, *, was_sent: bool = True, **more: Any) -> End:
    """The client left. `was_sent`: a node had the call."""
    return End("CANCELLED", status, "estimate" if was_sent else "nothing", left="LEFT", **more)


@dataclass(frozen=True)
class Script:
    number: str
    """With a letter where one scenario is several scripts."""
    title: str
    nodes: Mapping[str, NodeSpec]
    lines: tuple[Line, ...]
    before: Sequence[Serve]
    needs: frozenset[str]
    config: Mapping[str, Mapping[str, Any]]
    """Tables `admission`, `pricing`, `hedging`, `routing`, `health`, `upstream`, and `limits`: a tenant's requests and
    tokens a minute."""
    ends: Mapping[str, End]
    outcomes: Mapping[str, str] | None
    """Outcomes of each node's tickets, by names; nodes that are not listed have none. None: not compared."""
    counters: Mapping[str, Any]
    states: Mapping[str, Mapping[str, Any]]
    """What is known of nodes at the end: `health`, or an attribute of Node."""
    first_node_wait_s: float
    """How long a call waits for the first node of an autoscaled fleet; 0: the fleet is not autoscaled."""

    def __str__(self) -> str:
        return f"{self.number} {self.title}"

    @property
    def times_ms(self) -> list[float]:
        """When each line comes."""
        times: list[float] = []
        for line in self.lines:
            times.append(line.at_ms if line.at_ms is not None else times[-1])
        return times


def _needs(nodes: Mapping[str, NodeSpec], lines: Sequence[Line], limits: Fields | None) -> Iterator[str]:
    """Find what a script needs of its stage, by its lines."""
    if limits is not None:
        yield HAS_LIMITS
    if any(spec.engine == "sglang" or spec.model != "m" for spec in nodes.values()):
        yield ANY_ENGINE
    begun: dict[str, float] = {}
    at_ms = 0.0
    for line in lines:
        at_ms = at_ms if line.at_ms is None else line.at_ms
        event = line.event
        if isinstance(event, Arrive):
            if "subset" in event.fields:
                yield TAKES_SUBSETS
            if not _WISHES.isdisjoint(event.fields):
                yield STATES_WISHES
        elif isinstance(event, Tell):
            yield from _needs_of(event, at_ms, begun)


def _needs_of(event: Tell, at_ms: float, begun: dict[str, float]) -> Iterator[str]:
    kind, fields = event.message, event.fields
    if kind == "Charge":
        yield HAS_LIMITS
    elif kind == "Cancel" and (fields["why"] != "LEFT" or event.call in begun):
        yield ENDS_CALLS
    elif (kind == "Prefilled" and not fields["has_transfer"]) or (
        kind == "Failed" and fields["retry_after_s"] is not None
    ):
        yield SHOWS_STATUS
    elif kind in ("Started", "FirstToken", "Ended"):
        if fields["status"] >= 400:
            yield SHOWS_STATUS
        if kind == "FirstToken" and begun.get(event.call, at_ms) < at_ms:
            yield SHOWS_ROLES
        begun.setdefault(event.call, at_ms)


def script(
    number: int | str, title: str, nodes: Mapping[str, NodeSpec], *lines: Line,
    before: Sequence[Serve] = (), needs: str = "", ends: Mapping[str, End] | None = None,
    outcomes: Mapping[str, str] | None = None, counters: Mapping[str, Any] | None = None,
    states: Mapping[str, Mapping[str, Any]] | None = None, first_node_wait_s: float = 0.0, **config: Mapping[str, Any],
) -> Script:  # fmt: skip
    all_needs = frozenset([*needs.split(), *_needs(nodes, lines, config.get("limits"))])
    return Script(
        str(number), title, nodes, lines, before, all_needs, config,
        ends or {}, outcomes, counters or {}, states or {}, first_node_wait_s,
    )  # fmt: skip
