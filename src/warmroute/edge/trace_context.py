"""A request's trace: what it keeps while the request runs, and what remains of it at the end.

A recorded request keeps the ids that nodes were told and the times that nothing else keeps. At its end, `end` copies
from its attempts what the spans need, in numbers and names: prompts and their blocks are not kept until the export.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from warmroute.fleet.node import Outcome
from warmroute.fleet.ticket import Ticket
from warmroute.routing.attempt_history import AttemptHistory
from warmroute.routing.attempts import Attempts, Usage
from warmroute.routing.decision_record import DecisionRecord
from warmroute.routing.dispatch import Dispatch
from warmroute.routing.price_terms import Price
from warmroute.telemetry.tracing.trace_context import RandomBits, TraceContext, new_span_id


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
