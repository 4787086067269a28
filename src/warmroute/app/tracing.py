"""Builds the spans of a request that has ended.

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
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal, NamedTuple

from warmroute.config.priority import PRIORITY_NAMES
from warmroute.fleet.node import Outcome
from warmroute.routing.price_terms import TERMS
from warmroute.telemetry.tracing.request_trace import EndedAttempt, EndedDecision, EndedTrace
from warmroute.telemetry.tracing.trace_context import RandomBits, new_span_id

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
