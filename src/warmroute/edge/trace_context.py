"""W3C trace context, which requests are traced, and what the router keeps of a traced one until its end."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Final, NamedTuple

from warmroute.config import Tracing as TracingConfig
from warmroute.core.calls import Attempts, Usage
from warmroute.core.decision_record import DecisionRecord, Price
from warmroute.core.messages import Outcome
from warmroute.core.node import Ticket
from warmroute.core.tickets import AttemptHistory, Dispatch
from warmroute.core.traffic import Counters
from warmroute.event_log import EventLog

# W3C trace context (https://www.w3.org/TR/trace-context/): the `traceparent` header, read strictly.
#
# A client's header counts only if it is valid and given once. Else the request starts a trace of its own, and neither
# its `traceparent` nor its `tracestate` reaches a node. A valid `tracestate` is not the router's to change.

SAMPLED: Final = 1
_RANDOM_TRACE_ID: Final = 2
"""Flags of `traceparent` that the router passes on. It drops others, which it does not know."""
_TRACEPARENT: Final = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_NO_TRACE: Final = b"0" * 32
_NO_SPAN: Final = b"0" * 16
MAX_TRACESTATE_BYTES: Final = 512
_TRACEPARENT_LINES: Final = re.compile(rb"(?im)^traceparent:([^\r\n]*)\r\n")
_TRACESTATE_LINES: Final = re.compile(rb"(?im)^tracestate:([^\r\n]*)\r\n")

RandomBits = Callable[[int], int]
"""Returns a random number of this many bits."""


class TraceContext(NamedTuple):
    """Ids are in hexadecimal."""

    trace_id: bytes
    span_id: bytes
    flags: int

    @property
    def sampled(self) -> bool:
        return bool(self.flags & SAMPLED)

    def header_line(self) -> bytes:
        return b"traceparent: 00-%b-%b-%02x\r\n" % (self.trace_id, self.span_id, self.flags)

    def child(self, span_id: bytes, sampled: bool) -> TraceContext:
        return TraceContext(self.trace_id, span_id, (self.flags & _RANDOM_TRACE_ID) | (SAMPLED if sampled else 0))


def new_trace(random_bits: RandomBits) -> TraceContext:
    """Return the context of a trace that begins here and is recorded."""
    return TraceContext(b"%032x" % (random_bits(128) | 1), new_span_id(random_bits), SAMPLED)


def new_unsampled_context(random_bits: RandomBits, fields: bytes) -> bytes:
    """Return the header lines with a new trace that is not recorded. Without it, each node would decide for itself."""
    return b"%btraceparent: 00-%032x-%016x-00\r\n" % (fields, random_bits(128) | 1, random_bits(64) | 1)


def new_span_id(random_bits: RandomBits) -> bytes:
    return b"%016x" % (random_bits(64) | 1)  # ids of zeros are invalid


def read_traceparent(value: bytes) -> TraceContext | None:
    """Return None if the header's value is invalid."""
    match = _TRACEPARENT.fullmatch(value)
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == b"ff" or (version == b"00" and more is not None) or trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    return TraceContext(trace_id, span_id, int(flags, 16))


def read_context(fields: bytes) -> TraceContext | None:
    """Return the trace context in header lines; None if there is none, or if it is invalid."""
    values = _TRACEPARENT_LINES.findall(fields)
    return read_traceparent(values[0].strip(b" \t")) if len(values) == 1 else None


def read_tracestate(fields: bytes) -> bytes:
    """Return the `tracestate` in header lines, unchecked; empty if it is too long to be passed on."""
    value = b",".join([one.strip(b" \t") for one in _TRACESTATE_LINES.findall(fields)])
    return value if len(value) <= MAX_TRACESTATE_BYTES else b""


def without_traceparent(fields: bytes) -> bytes:
    return _TRACEPARENT_LINES.sub(b"", fields)


def without_context(fields: bytes) -> bytes:
    return _TRACESTATE_LINES.sub(b"", without_traceparent(fields))


# A request's trace: what it keeps while the request runs, and what remains of it at the end.
#
# A recorded request keeps the ids that nodes were told and the times that nothing else keeps. At its end, `end` copies
# from its attempts what the spans need, in numbers and names: prompts and their blocks are not kept until the export.


class EndedAttempt(NamedTuple):
    span_id: bytes
    node: str
    island: str
    engine: str
    host: str
    port: int
    opened_s: float
    first_token_s: float
    """0 without a first token."""
    closed_s: float
    status: int
    """0 without a response."""
    outcome: Outcome
    reason: str
    hedge: bool
    prompt_tokens: int
    """0 if the prompt was not looked up."""
    cached_tokens: int
    """Predicted."""
    rank: int | None
    expected_ttft_ms: float


class EndedDecision(NamedTuple):
    decided_s: float
    """When the router began to decide: at once, or when the request left the queue."""
    policy: str
    reason: str
    node: str
    island: str
    candidates: int
    prompt_tokens: int
    cached_tokens: int
    price: Price | None


class EndedRequest(NamedTuple):
    request_id: bytes
    arrived_s: float
    """When its body was read and scanned."""
    model: str
    """Empty if no node serves it: then it is only what the client typed."""
    tenant: str
    route: str
    priority: int
    streams: bool
    max_output_tokens: int | None


class EndedTrace(NamedTuple):
    """All that the spans of a request are built from. Times are on the router's clock."""

    context: TraceContext
    """Of the request's own span."""
    parent_id: bytes
    """Empty if the trace begins here."""
    tracestate: bytes
    wall_offset_s: float
    """What turns a time of the router's clock into Unix time."""
    path: str
    started_s: float
    entered_s: float
    """When the prompt was read, and the request asked for a node; 0 if it never did."""
    queue_length: int
    """Requests that waited in the admission queue when this one came."""
    queued: bool
    ended_s: float
    status: int
    error: str
    client_left: bool
    request: EndedRequest | None
    """None if the body was rejected."""
    decision: EndedDecision | None
    attempts: tuple[EndedAttempt, ...]
    usage: Usage


@dataclass(slots=True, eq=False)
class RequestTrace:
    """A recorded request."""

    _export: Callable[[EndedTrace], object]
    _random_bits: RandomBits
    _is_served: Callable[[str], bool]
    """Whether a node serves this model."""
    _context: TraceContext
    _parent_id: bytes
    _tracestate: bytes
    _fields: bytes
    """The header lines for nodes, without `traceparent`."""
    _path: bytes
    _started_s: float
    _attempts: Attempts | None = None
    _span_ids: dict[Ticket, bytes] = field(default_factory=dict)
    _statuses: dict[Ticket, int] = field(default_factory=dict)
    _ended: bool = False

    def begin(self, attempts: Attempts) -> None:
        """The request was read."""
        self._attempts = attempts
        attempts.history = AttemptHistory()

    def forwarded_fields(self, ticket: Ticket) -> bytes:
        """Return the header lines for a node."""
        return self._fields + self._context.child(self._span_id(ticket), sampled=True).header_line()

    def _span_id(self, ticket: Ticket) -> bytes:
        span_id = self._span_ids.get(ticket)
        if span_id is None:
            span_id = self._span_ids[ticket] = new_span_id(self._random_bits)
        return span_id

    def node_answered(self, ticket: Ticket, status: int) -> None:
        self._statuses[ticket] = status

    def end(self, now_s: float, status: int = 0, error: str = "", *, client_left: bool = False) -> None:
        """The request has ended: with this status, if the client received one. `error`: the error's code. Only the
        first call counts."""
        if self._ended:
            return
        self._ended = True
        attempts, self._attempts = self._attempts, None
        if attempts is None:
            entered_s, history, request, decision, usage = 0.0, AttemptHistory(), None, None, None
        else:
            entered_s = getattr(attempts, "entered_s", 0.0)  # unset until the request asks for a node
            history = attempts.history or AttemptHistory()
            request, decision = self._ended_request(attempts), _ended_decision(attempts, entered_s)
            usage = attempts.reported
        self._export(
            EndedTrace(
                self._context, self._parent_id, self._tracestate, time.time() - now_s, self._path.decode(),
                self._started_s,
                entered_s, history.queue_length, history.queued, now_s, status, error, client_left, request, decision,
                self._ended_attempts(history), usage or (None, None, None),
            )
        )  # fmt: skip
        self._span_ids = {}
        self._statuses = {}

    def _ended_request(self, attempts: Attempts) -> EndedRequest:
        request = attempts.request
        return EndedRequest(
            attempts.request_id, request.arrived_s, request.model if self._is_served(request.model) else "",
            request.tenant, request.route, request.priority, request.streams, request.max_output_tokens,
        )  # fmt: skip

    def _ended_attempts(self, history: AttemptHistory) -> tuple[EndedAttempt, ...]:
        ended: list[EndedAttempt] = []
        for ticket, outcome, closed_s, reason in sorted(history.closed, key=lambda one: one.ticket.opened_s):
            node, dispatch = ticket.node, ticket if isinstance(ticket, Dispatch) else None
            ended.append(
                EndedAttempt(
                    self._span_id(ticket), node.name, node.island, node.engine, node.host, node.port, ticket.opened_s,
                    ticket.first_token_s, closed_s, self._statuses.get(ticket, 0), outcome, reason,
                    any(ticket.opened_s < other.closed_s for other in ended),
                    dispatch.tokens if dispatch is not None else 0, dispatch.cached if dispatch is not None else 0,
                    dispatch.rank if dispatch is not None else None, ticket.expected_ttft_ms,
                )
            )  # fmt: skip
        return tuple(ended)


def _ended_decision(attempts: Attempts, entered_s: float) -> EndedDecision | None:
    decision = getattr(attempts, "decision", None)  # unset until the request is admitted
    if decision is None:
        return None
    record: DecisionRecord = decision.record()
    query = decision.query
    return EndedDecision(
        query.now_s if query is not None else entered_s, record.policy, record.reason, record.node.name,
        record.node.island, record.considered, record.tokens, round(record.cached), record.price,
    )  # fmt: skip


# Decides which requests are traced, and begins their traces.
#
#     no valid `traceparent`     recorded with the probability `sample_ratio`
#     with the sampled flag      recorded, up to `max_client_traces_per_s`; above, nodes get it without the flag
#     without the flag           not recorded; the header passes unchanged
#
# So a client that sets the flag on every request cannot overload the exporter, the engines' exporters or the collector.

log = EventLog("warmroute.tracing")


class Tracing:
    def __init__(
        self,
        config: TracingConfig,
        counters: Counters,
        export: Callable[[EndedTrace], object],
        is_served: Callable[[str], bool],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`export` takes over a trace that has ended. `is_served`: whether a node serves this model."""
        self._counters = counters
        self._export = export
        self._is_served = is_served
        self._now = now
        random = Random()
        self._random, self.random_bits = random.random, random.getrandbits
        self.reconfigure(config)

    def reconfigure(self, config: TracingConfig) -> None:
        self._sample_ratio = config.sample_ratio
        self._client_traces_per_s = config.max_client_traces_per_s
        self._client_traces_left = max(1.0, config.max_client_traces_per_s) if config.max_client_traces_per_s else 0.0
        self._refilled_s = self._now()
        self._limit_logged = False

    def begin(self, fields: bytes, path: bytes, started_s: float) -> RequestTrace | bytes | None:
        """Return the trace of a request, if it is recorded, else the header lines for its node; None if they are still
        `fields`, those of the client."""
        may_have_context = b"trace" in fields.lower()
        parent = read_context(fields) if may_have_context else None
        if parent is None:
            if may_have_context:
                fields = without_context(fields)
            if self._random() >= self._sample_ratio:
                return new_unsampled_context(self.random_bits, fields)
            return self._record(new_trace(self.random_bits), b"", b"", fields, path, started_s)
        if not parent.sampled:
            return None
        recorded = self._take_client_trace()
        own, tracestate = parent.child(new_span_id(self.random_bits), recorded), read_tracestate(fields)
        fields = without_traceparent(fields)
        if recorded:
            return self._record(own, parent.span_id, tracestate, fields, path, started_s)
        return fields + own.header_line()

    def _record(
        self, own: TraceContext, parent_id: bytes, tracestate: bytes, fields: bytes, path: bytes, started_s: float
    ) -> RequestTrace:
        return RequestTrace(
            self._export, self.random_bits, self._is_served, own, parent_id, tracestate, fields, path, started_s
        )

    def _take_client_trace(self) -> bool:
        """Return whether clients may start another trace now: a token bucket that holds one second's traces."""
        per_s, now_s = self._client_traces_per_s, self._now()
        full = max(1.0, per_s) if per_s else 0.0
        self._client_traces_left = min(full, self._client_traces_left + (now_s - self._refilled_s) * per_s)
        self._refilled_s = now_s
        if self._client_traces_left >= 1.0:
            self._client_traces_left -= 1.0
            return True
        self._counters.traces_limited += 1
        if not self._limit_logged and per_s:
            self._limit_logged = True
            log.warning(
                "client_traces_limited",
                "Clients ask for more traces than tracing.max_client_traces_per_s. The others are not recorded.",
                limit=per_s,
            )
        return False
