"""OpenTelemetry traces: the spans of requests that have ended, sent by OTLP.

While a request runs, the router only keeps times (edge/trace_context.py). Spans are built after its end, in the
exporter's thread.
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
from typing import Any, Final, Literal, NamedTuple, Protocol

from warmroute.config import Tracing as TracingConfig
from warmroute.config import missing_extra
from warmroute.config.routing import PRIORITY_NAMES
from warmroute.core.decision_record import TERMS
from warmroute.core.messages import Outcome
from warmroute.core.traffic import Counters
from warmroute.edge.trace_context import EndedAttempt, EndedDecision, EndedTrace, RandomBits, Tracing, new_span_id
from warmroute.event_log import EventLog, where_it_failed

# Builds the spans of a request that has ended.
#
#     POST /v1/chat/completions     the request: SERVER
#       read                        from the end of its head to the end of its body
#       prompt                      until its prompt is read
#       queue                       until it leaves the admission queue, if it was in it
#       decide                      the decision, with the terms of the chosen node's price
#       attempt                     on one node: CLIENT; several after a failure or with a hedge
#         first_token               until the first token
#         response                  from the first token to the end
#
# Attributes are those of OpenTelemetry's conventions for HTTP and generative AI where they exist, else `warmroute.…`.
# They are numbers, names and ids, never anything of a prompt.

MAX_REASON_CHARACTERS: Final = 200
_OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""`gen_ai.operation.name` by path."""
_TERM_NAMES: Final = [(term, f"warmroute.price.{term}_ms") for term in TERMS]

Attributes = dict[str, str | int | float | bool]


class Span(NamedTuple):
    name: str
    kind: Literal["internal", "server", "client"]
    span_id: bytes
    parent_id: bytes
    """Empty if the trace begins with this span."""
    start_s: float
    end_s: float
    attributes: Attributes
    error: str = ""
    """What went wrong, where the span has the status ERROR."""


def build_spans(trace: EndedTrace, random_bits: RandomBits) -> Iterator[Span]:
    root_id = trace.context.span_id
    yield _request_span(trace)

    def stage(name: str, start_s: float, end_s: float, attributes: Attributes, parent_id: bytes = root_id) -> Span:
        return Span(name, "internal", new_span_id(random_bits), parent_id, start_s, max(start_s, end_s), attributes)

    request, decision, entered_s = trace.request, trace.decision, trace.entered_s
    read_s = request.arrived_s if request is not None else trace.ended_s
    yield stage("read", trace.started_s, read_s, {})
    if request is not None:
        yield stage("prompt", read_s, entered_s or trace.ended_s, {})
    if entered_s:
        decided_s = trace.attempts[0].opened_s if trace.attempts else trace.ended_s
        deciding_s = entered_s
        if trace.queued:
            again_s = decision.decided_s if decision is not None else 0.0
            deciding_s = again_s if again_s > entered_s else decided_s
            yield stage("queue", entered_s, deciding_s, {"warmroute.queue.waiting": trace.queue_length})
        if decision is not None:
            yield stage("decide", deciding_s, decided_s, _decision_attributes(decision))
        elif not trace.queued:  # rejected at once
            yield stage("decide", deciding_s, decided_s, _given({"error.type": trace.error or None}))
    for attempt in trace.attempts:
        yield _attempt_span(trace, attempt)
        if attempt.first_token_s:
            yield stage("first_token", attempt.opened_s, attempt.first_token_s, {}, attempt.span_id)
            if attempt.closed_s > attempt.first_token_s:
                yield stage("response", attempt.first_token_s, attempt.closed_s, {}, attempt.span_id)


def _request_span(trace: EndedTrace) -> Span:
    attributes: dict[str, Any] = {
        "http.request.method": "POST",
        "http.route": trace.path,
        "http.response.status_code": trace.status or None,
        "gen_ai.operation.name": _OPERATIONS.get(trace.path),
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
            "warmroute.attempts": len(trace.attempts),
        }
        answered = next((one for one in trace.attempts if one.first_token_s), None)
        if answered is not None:
            ttft_s = answered.first_token_s - request.arrived_s
            attributes["gen_ai.response.time_to_first_chunk"] = round(ttft_s, 6)
            attributes["warmroute.node"] = answered.node
            attributes["warmroute.island"] = answered.island
    error = ""  # a client's mistake is no error of the server, nor is a client that leaves
    if trace.status >= 500 or (trace.error and trace.status < 400):
        error = trace.error or f"HTTP status {trace.status}"
    return Span(
        f"POST {trace.path}", "server", trace.context.span_id, trace.parent_id, trace.started_s, trace.ended_s,
        _given(attributes), error,
    )  # fmt: skip


def _decision_attributes(decision: EndedDecision) -> Attributes:
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


def _attempt_span(trace: EndedTrace, attempt: EndedAttempt) -> Span:
    outcome, status = attempt.outcome, attempt.status
    failed = outcome in (Outcome.BUSY, Outcome.FAILED, Outcome.BROKEN)
    attributes: dict[str, Any] = {
        "http.request.method": "POST",
        "http.response.status_code": status or None,
        "server.address": attempt.host,
        "server.port": attempt.port,
        "gen_ai.operation.name": _OPERATIONS.get(trace.path),
        "gen_ai.provider.name": attempt.engine if attempt.engine != "auto" else None,
        "gen_ai.request.model": trace.request.model or None if trace.request is not None else None,
        "warmroute.node": attempt.node,
        "warmroute.island": attempt.island,
        "warmroute.outcome": outcome.name.lower(),
        "warmroute.hedge": attempt.hedge or None,
        "warmroute.data_parallel_rank": attempt.rank,
        "warmroute.expected_ttft_ms": round(attempt.expected_ttft_ms, 3) or None,
    }
    if attempt.prompt_tokens:
        attributes["warmroute.prompt_tokens"] = attempt.prompt_tokens
        attributes["warmroute.cached_tokens"] = attempt.cached_tokens
    error = ""
    if failed or status >= 400:
        attributes["error.type"] = str(status) if status >= 400 else outcome.name.lower()
        error = (attempt.reason or f"HTTP status {status}")[:MAX_REASON_CHARACTERS]
    return Span(
        "attempt", "client", attempt.span_id, trace.context.span_id, attempt.opened_s, attempt.closed_s,
        _given(attributes), error,
    )  # fmt: skip


def _given(attributes: dict[str, Any]) -> Attributes:
    return {name: value for name, value in attributes.items() if value is not None}


# Sends finished traces to the collector, in batches, in a thread of its own.
#
# A request only appends its trace to a queue of bounded length. If the collector is slow, down or rejects the spans,
# the exporter drops traces, counts them, and logs the first failure of a row. Requests never wait for it.

log = EventLog("warmroute.tracing")

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


# Puts the parts of tracing together. OpenTelemetry is imported only if tracing is on.


def create_tracing(
    config: TracingConfig, counters: Counters, is_served: Callable[[str], bool]
) -> tuple[Tracing, TraceExporter] | None:
    """Return None if tracing is off. Raises ConfigError if OpenTelemetry is not installed."""
    if not config.enabled:
        return None
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        log.warning("tracing_disabled", "OTEL_SDK_DISABLED is true in the environment.")
        return None
    otlp = import_opentelemetry()
    exporter = TraceExporter(lambda: otlp.OtlpSender(config, Random().getrandbits), counters)
    return Tracing(config, counters, exporter.add, is_served), exporter


def import_opentelemetry() -> Any:
    """Return otlp.py. Raises ConfigError if OpenTelemetry is not installed."""
    try:
        return import_module("warmroute.app.otlp")
    except ImportError as error:
        if (error.name or "").startswith("warmroute"):
            raise
        raise missing_extra("tracing.enabled", error, "otel") from None
