"""OpenTelemetry traces: the spans of a request that has ended, and the thread that exports them.

    POST /v1/chat/completions     the request: SERVER
      read                        from the end of its head to the end of its body
      prompt                      until its prompt is read
      queue                       until it leaves the admission queue, if it was in it
      decide                      the decision, with the terms of the chosen node's price
      attempt                     on one node: CLIENT; several after a failure or with a hedge
        first_token               until the first token
        response                  from the first token to the end

Attributes are those of OpenTelemetry's conventions for HTTP and generative AI where they exist, else `warmroute.…`.
They are numbers, names and ids, never anything of a prompt.

While a request runs, edge and core only keep times. A thread builds the spans and sends them to the collector, in
batches (app/otlp.py). If the collector is slow, down or rejects them, the router drops traces, counts them, and logs
the first failure of a row. Requests never wait for it.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from random import Random
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol

from warmroute.config import Tracing as TracingConfig
from warmroute.config import missing_extra
from warmroute.config.routing import PRIORITY_NAMES
from warmroute.core.decision_record import TERMS, Price
from warmroute.core.messages import FAILURES, ClosedTry, Left, Outcome, Role, RoutingRequest, Usage
from warmroute.core.traffic import Counters
from warmroute.edge.trace_context import EdgeTrace, EndedEarly, RandomBits, TraceSampling, new_span_id
from warmroute.event_log import EventLog, where_it_failed

if TYPE_CHECKING:
    from warmroute.core.calls import Call

log = EventLog("warmroute.tracing")

MAX_REASON_CHARACTERS: Final = 200
_OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""`gen_ai.operation.name` by path."""
_ERRORS: Final = {
    Left.LEFT: (0, ""), Left.INTERNAL: (500, "internal_error"), Left.STOPPING: (503, "router_stopping"),
    Left.CUT: (0, "deadline_exceeded"), Left.LOST: (0, ""),
}  # fmt: skip
"""What the client got, by why the edge ended the call. The status counts where no response had begun."""
_TERM_NAMES: Final = [(term, f"warmroute.price.{term}_ms") for term in TERMS]

Attributes = dict[str, str | int | float | bool]


class TracedRequest(NamedTuple):
    request_id: bytes
    arrived_s: float
    """When its body was read and scanned."""
    model: str
    """The model; empty if no node serves it: then it is only what the client typed."""
    tenant: str
    route: str
    priority: int
    streams: bool
    max_output_tokens: int | None


class TracedDecision(NamedTuple):
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


class EndedTrace(NamedTuple):
    """All that the spans of a request are built from, in numbers and names: prompts and their blocks are not kept until
    the export. Times are on the router's clock."""

    edge: EdgeTrace
    wall_offset_s: float
    """What turns a time of the router's clock into Unix time."""
    ended_s: float
    status: int
    """Status of the response that the client got; 0 if it got none."""
    error: str
    """The code of the error that the client got."""
    client_left: bool
    request: TracedRequest | None
    """What the core knows of the request; None if the body was rejected."""
    entered_s: float = 0.0
    """When the prompt was read, and the request asked for a node; 0 if it never did."""
    queue_length: int = 0
    """Requests that waited in the admission queue when this one came."""
    queued: bool = False
    decision: TracedDecision | None = None
    tries: tuple[ClosedTry, ...] = ()
    """The tries in the order in which they were opened."""
    usage: Usage = (None, None, None)


def trace_of_call(edge: EdgeTrace, call: Call, is_served: bool, wall_offset_s: float) -> EndedTrace:
    """Return the trace of a call that has ended. `is_served`: whether a node serves its model."""
    history, record = call.history, call.record
    assert history is not None
    decision = None
    if record is not None:
        decision = TracedDecision(
            history.decided_s, record.policy, record.reason, record.node.name, record.node.island, record.considered,
            record.tokens, round(record.cached), record.price,
        )  # fmt: skip
    tries = tuple(sorted(history.tries, key=lambda one: one.opened_s))
    status, error = call.status, call.code
    if call.left is not None and not error:
        of_edge, error = _ERRORS[call.left]
        status = status or of_edge
    elif call.outcome is Outcome.BROKEN:
        error = "upstream_broken"
    return EndedTrace(
        edge, wall_offset_s, call.ended_s, status, error, call.left is Left.LEFT,
        _traced_request(call.request, call.request_id, is_served), call.entered_s, history.queue_length, history.queued,
        decision, tries, call.usage or (None, None, None),
    )  # fmt: skip


def trace_of_request(ended: EndedEarly, edge: EdgeTrace, is_served: bool, wall_offset_s: float) -> EndedTrace:
    """Return the trace of a request that ended before it asked for a node. `is_served`: as above."""
    request = ended.request
    traced = _traced_request(request, ended.request_id, is_served) if request is not None else None
    return EndedTrace(edge, wall_offset_s, ended.ended_s, ended.status, ended.error, ended.client_left, traced)


def _traced_request(request: RoutingRequest, request_id: bytes, is_served: bool) -> TracedRequest:
    return TracedRequest(
        request_id, request.arrived_s, request.model if is_served else "", request.tenant, request.route,
        request.priority, request.streams, request.max_output_tokens,
    )  # fmt: skip


# Spans.


class Span(NamedTuple):
    name: str
    kind: Literal["internal", "server", "client"]
    span_id: bytes
    parent_id: bytes
    """Id of the parent span; empty if the trace begins with this span."""
    start_s: float
    end_s: float
    attributes: Attributes
    error: str = ""
    """What went wrong, where the span has the status ERROR."""


def build_spans(trace: EndedTrace, random_bits: RandomBits) -> Iterator[Span]:
    edge = trace.edge
    root_id = edge.context.span_id
    yield _request_span(trace)

    def stage(name: str, start_s: float, end_s: float, attributes: Attributes, parent_id: bytes = root_id) -> Span:
        return Span(name, "internal", new_span_id(random_bits), parent_id, start_s, max(start_s, end_s), attributes)

    request, decision, entered_s = trace.request, trace.decision, trace.entered_s
    read_s = request.arrived_s if request is not None else trace.ended_s
    yield stage("read", edge.started_s, read_s, {})
    if request is not None:
        yield stage("prompt", read_s, entered_s or trace.ended_s, {})
    if entered_s:
        decided_s = trace.tries[0].opened_s if trace.tries else trace.ended_s
        deciding_s = entered_s
        if trace.queued:
            again_s = decision.decided_s if decision is not None else 0.0
            deciding_s = again_s if again_s > entered_s else decided_s
            yield stage("queue", entered_s, deciding_s, {"warmroute.queue.waiting": trace.queue_length})
        if decision is not None:
            yield stage("decide", deciding_s, decided_s, _decision_attributes(decision))
        elif not trace.queued:  # rejected at once
            yield stage("decide", deciding_s, decided_s, _given({"error.type": trace.error or None}))
    for at, one in enumerate(trace.tries):
        # Where Envoy used a fallback, the try on that node has the number of the one before it.
        is_fallback = at > 0 and trace.tries[at - 1].try_ == one.try_
        span_id = edge.span_id(-one.try_ if is_fallback else one.try_)
        yield _try_span(trace, one, span_id)
        if one.first_token_s:
            yield stage("first_token", one.opened_s, one.first_token_s, {}, span_id)
            if one.closed_s > one.first_token_s:
                yield stage("response", one.first_token_s, one.closed_s, {}, span_id)


def _request_span(trace: EndedTrace) -> Span:
    edge, path = trace.edge, trace.edge.path.decode()
    attributes: dict[str, Any] = {
        "http.request.method": "POST",
        "http.route": path,
        "http.response.status_code": trace.status or None,
        "gen_ai.operation.name": _OPERATIONS.get(path),
        "error.type": trace.error or None,
    }
    if trace.client_left:
        attributes["warmroute.client_left"] = True
    request = trace.request
    if request is not None:
        prompt_tokens, cached_tokens, output_tokens = trace.usage
        attributes |= {
            "gen_ai.request.model": request.model or None,
            "gen_ai.request.stream": request.streams,
            "gen_ai.request.max_tokens": request.max_output_tokens,
            "gen_ai.usage.input_tokens": prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": cached_tokens,
            "gen_ai.usage.output_tokens": output_tokens,
            "warmroute.request_id": request.request_id.decode("ascii", "replace"),
            "warmroute.tenant": request.tenant or None,
            "warmroute.route": request.route or None,
            "warmroute.priority": PRIORITY_NAMES[request.priority],
            "warmroute.attempts": len(trace.tries),
        }
        answered = next((one for one in trace.tries if one.first_token_s), None)
        if answered is not None:
            ttft_s = answered.first_token_s - request.arrived_s
            attributes["gen_ai.response.time_to_first_chunk"] = round(ttft_s, 6)
            attributes["warmroute.node"] = answered.node
            attributes["warmroute.island"] = answered.island
    error = ""  # a client's mistake is no error of the server, nor is a client that leaves
    if trace.status >= 500 or (trace.error and trace.status < 400):
        error = trace.error or f"HTTP status {trace.status}"
    return Span(
        f"POST {path}", "server", edge.context.span_id, edge.parent_id, edge.started_s, trace.ended_s,
        _given(attributes), error,
    )  # fmt: skip


def _decision_attributes(decision: TracedDecision) -> Attributes:
    """Terms of the price that are 0 are left out."""
    attributes: Attributes = {
        "warmroute.policy": decision.policy,
        "warmroute.reason": decision.reason[:MAX_REASON_CHARACTERS],
        "warmroute.node": decision.node,
        "warmroute.island": decision.island,
        "warmroute.candidates": decision.candidates,
    }
    if decision.prompt_tokens:
        attributes["warmroute.prompt_tokens"] = decision.prompt_tokens
        attributes["warmroute.cached_tokens"] = decision.cached_tokens
    price = decision.price
    if price is not None:
        attributes["warmroute.price.total_ms"] = round(price.total, 3)
        for term, name in _TERM_NAMES:
            cost = getattr(price, term)
            if cost:
                attributes[name] = round(cost, 3)
    return attributes


def _try_span(trace: EndedTrace, one: ClosedTry, span_id: bytes) -> Span:
    outcome, status = one.outcome, one.status
    failed = outcome in FAILURES
    attributes: dict[str, Any] = {
        "http.request.method": "POST",
        "http.response.status_code": status or None,
        "server.address": one.host,
        "server.port": one.port,
        "gen_ai.operation.name": _OPERATIONS.get(trace.edge.path.decode()),
        "gen_ai.provider.name": one.engine if one.engine != "auto" else None,
        "gen_ai.request.model": trace.request.model or None if trace.request is not None else None,
        "warmroute.node": one.node,
        "warmroute.island": one.island,
        "warmroute.outcome": outcome.name.lower(),
        "warmroute.hedge": one.role is Role.HEDGE or None,
        "warmroute.data_parallel_rank": one.rank,
        "warmroute.expected_ttft_ms": round(one.expected_ttft_ms, 3) or None,
    }
    if one.prompt_tokens:
        attributes["warmroute.prompt_tokens"] = one.prompt_tokens
        attributes["warmroute.cached_tokens"] = one.cached_tokens
    error = ""
    if failed or status >= 400:
        attributes["error.type"] = str(status) if status >= 400 else outcome.name.lower()
        error = (one.reason or f"HTTP status {status}")[:MAX_REASON_CHARACTERS]
    return Span(
        "attempt", "client", span_id, trace.edge.context.span_id, one.opened_s, one.closed_s,
        _given(attributes), error,
    )  # fmt: skip


def _given(attributes: dict[str, Any]) -> Attributes:
    return {name: value for name, value in attributes.items() if value is not None}


# The export.

EXPORT_INTERVAL_S: Final = 5.0
"""Longest time until a trace is sent. A full batch is sent within CHECK_S."""
CHECK_S: Final = 1.0
MAX_QUEUED: Final = 4096
"""Traces that may wait for the collector, about 3 KB each."""
BATCH_TRACES: Final = 64
"""Traces that are sent at once. More would keep the interpreter lock for too long."""
CLOSE_TIMEOUT_S: Final = 2.0


class SpanSender(Protocol):
    """Sends the spans of traces. Called in a thread."""

    def send(self, traces: Sequence[EndedTrace]) -> str:
        """Return why the collector did not take them; empty if it did."""

    def stop(self) -> None:
        """End a `send` that waits to try again. Called from another thread."""


class TraceExporter:
    def __init__(self, create_sender: Callable[[], SpanSender], counters: Counters) -> None:
        self._sender = create_sender()
        self._counters = counters
        self._queue: deque[EndedTrace] = deque()
        self._stopping = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="warmroute-traces", daemon=True)

    def add(self, trace: EndedTrace) -> None:
        if len(self._queue) < MAX_QUEUED:
            self._queue.append(trace)
        else:
            self._counters.traces_dropped["queue_full"] += 1

    def start(self) -> None:
        self._thread.start()

    async def close(self) -> None:
        """Send the remaining traces, or drop them after CLOSE_TIMEOUT_S."""
        self._stopping.set()
        until_s = time.monotonic() + CLOSE_TIMEOUT_S
        while self._thread.is_alive():
            if time.monotonic() >= until_s:
                self._sender.stop()
                dropped = len(self._queue)
                self._counters.traces_dropped["shutdown"] += dropped
                log.error(
                    "trace_export_timed_out", "The collector is too slow; the remaining traces are lost.",
                    dropped=dropped,
                )  # fmt: skip
                return
            await asyncio.sleep(0.01)

    # In the thread.

    def _run(self) -> None:
        due_s = 0.0
        while not self._stopping.wait(min(CHECK_S, EXPORT_INTERVAL_S)):
            now_s = time.monotonic()
            if now_s >= due_s or len(self._queue) >= BATCH_TRACES:
                self._send_queued()
                due_s = now_s + EXPORT_INTERVAL_S
        self._send_queued()

    def _send_queued(self) -> None:
        while batch := [self._queue.popleft() for _ in range(min(BATCH_TRACES, len(self._queue)))]:
            try:
                reason = self._sender.send(batch)
            except Exception as error:  # a bug must not end the thread
                reason = where_it_failed(error)
            self._sent(len(batch), reason)

    def _sent(self, count: int, failure: str) -> None:
        counters = self._counters
        if not failure:
            counters.traces_exported += count
            if self._failing:
                self._failing = False
                log.info("trace_export_recovered", dropped=counters.traces_dropped.total())
            return
        counters.traces_dropped["export_failed"] += count
        if not self._failing:
            self._failing = True
            log.warning(
                "trace_export_failed", "The router drops traces until the collector takes them.", reason=failure
            )


def create_tracing(config: TracingConfig, counters: Counters) -> tuple[TraceSampling, TraceExporter] | None:
    """Return None if tracing is off. Raises ConfigError if OpenTelemetry is not installed."""
    if not config.enabled:
        return None
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        log.warning("tracing_disabled", "OTEL_SDK_DISABLED is true in the environment.")
        return None
    otlp = import_opentelemetry()
    exporter = TraceExporter(lambda: otlp.OtlpSender(config, Random().getrandbits), counters)
    return TraceSampling(config), exporter


def import_opentelemetry() -> Any:
    """Return otlp.py. Raises ConfigError if OpenTelemetry is not installed."""
    try:
        return import_module("warmroute.app.otlp")
    except ImportError as error:
        if (error.name or "").startswith("warmroute"):
            raise
        raise missing_extra("tracing.enabled", error, "otel") from None
