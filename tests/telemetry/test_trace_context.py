"""W3C trace context, compared with OpenTelemetry's own propagator, and whatever a client may send instead."""

from __future__ import annotations

import re
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from warmroute._kernel import RequestHead
from warmroute.config import Tracing as TracingConfig
from warmroute.edge.http1 import read_request_head
from warmroute.edge.trace_context import EdgeTrace, TraceSampling, read_context, read_traceparent

VALID = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = VALID[:-1] + "0"
NEW = re.compile(rb"traceparent: 00-([0-9a-f]{32})-([0-9a-f]{16})-(0[0-3])\r\n")

near_valid = st.builds(
    lambda text, at, put: text[:at] + put + text[at + len(put) :],
    st.sampled_from([VALID, UNSAMPLED, VALID + "-more", "01" + VALID[2:] + "-more", "ff" + VALID[2:]]),
    st.integers(0, 60),
    st.text("0123456789abcdefABCF-g ", max_size=3),
)


def head_with(*lines: str) -> RequestHead:
    data = "\r\n".join(["POST /v1/chat/completions HTTP/1.1", "Host: r", *lines, "", ""]).encode("latin-1")
    return read_request_head(data, data.index(b"\r\n\r\n"))


def fields_of(begun: EdgeTrace | bytes | None) -> bytes:
    """Return the header lines for a node."""
    assert begun is not None
    return begun if isinstance(begun, bytes) else begun.forwarded_fields(1)


def sdk_context(value: str) -> trace.SpanContext:
    context = TraceContextTextMapPropagator().extract({"traceparent": value})
    return trace.get_current_span(context).get_span_context()


@settings(max_examples=2000)
@given(near_valid)
@example(VALID)
@example("00-" + "0" * 32 + "-b7ad6b7169203331-01")
@example("00-0af7651916cd43dd8448eb211c80319c-" + "0" * 16 + "-01")
@example("cc" + VALID[2:] + "-what-the-future-will-be-like")
def test_traceparent_is_read_as_the_sdk_reads_it(value: str) -> None:
    ours, theirs = read_traceparent(value.strip().encode()), sdk_context(value.strip())
    if ours is None:
        # The SDK also takes what W3C's grammar does not allow: upper case, and a flag field of another length.
        assert not theirs.is_valid or re.search("[A-F]", value) or value[52:53] != "-" or value[55:56] not in ("", "-")
        return
    assert theirs.is_valid
    assert (int(ours.trace_id, 16), int(ours.span_id, 16)) == (theirs.trace_id, theirs.span_id)
    assert ours.sampled == theirs.trace_flags.sampled


class Clock:
    now_s = 100.0


def tracing_with(**config: float) -> tuple[TraceSampling, Clock]:
    clock = Clock()
    return TraceSampling(TracingConfig(**config), lambda: clock.now_s), clock  # type: ignore[arg-type]


fields = st.lists(
    st.tuples(
        st.sampled_from(["traceparent", "Traceparent", "tracestate", "TRACESTATE", "x-other", "trace-parent"]),
        st.one_of(near_valid, st.text("abc=,;\t \xff" + "0123", max_size=600)),
    ).map(lambda pair: f"{pair[0]}: {pair[1]}"),
    max_size=6,
)


@settings(max_examples=1000)
@given(fields, st.booleans())
def test_whatever_a_client_sends_the_node_gets_one_valid_context(lines: list[str], recorded: bool) -> None:
    tracing, _ = tracing_with(sample_ratio=1.0 if recorded else 0.0)
    head = head_with(*lines)
    begun = tracing.begin(head.forwarded_fields, b"/v1/chat/completions", 0.0)
    if begun is None:  # passes unchanged
        context = read_context(head.forwarded_fields)
        assert context is not None and not context.sampled
        return
    parent = read_context(head.forwarded_fields)
    told = fields_of(begun)
    found = NEW.findall(told)
    assert len(found) == 1 and told.lower().count(b"traceparent:") == 1
    assert read_context(told) is not None
    if parent is None:
        assert b"tracestate:" not in told.lower() and isinstance(begun, EdgeTrace if recorded else bytes)
    else:
        assert found[0][0] == parent.trace_id and found[0][1] != parent.span_id
    others = [line for line in told.split(b"\r\n") if not line.lower().startswith((b"traceparent:", b"tracestate:"))]
    kept = head.forwarded_fields.split(b"\r\n")
    assert others == [one for one in kept if not one.lower().startswith((b"traceparent:", b"tracestate:"))]


def test_long_headers_take_linear_time() -> None:
    value = " " * 30_000 + "x"
    tracing, _ = tracing_with(sample_ratio=1.0)
    assert isinstance(
        tracing.begin(head_with(f"traceparent: {value}", f"tracestate: {value}").forwarded_fields, b"/", 0.0),
        EdgeTrace,
    )


def test_two_traceparents_count_as_none() -> None:
    assert read_context(head_with(f"traceparent: {VALID}", f"traceparent: {VALID}").forwarded_fields) is None


def test_a_client_without_the_flag_is_not_recorded_and_nothing_changes() -> None:
    tracing, _ = tracing_with(sample_ratio=1.0)
    assert tracing.begin(head_with(f"traceparent: {UNSAMPLED}").forwarded_fields, b"/", 0.0) is None


def test_nodes_are_told_that_a_request_is_not_recorded() -> None:
    tracing, _ = tracing_with(sample_ratio=0.0)
    told = tracing.begin(head_with().forwarded_fields, b"/", 0.0)
    assert isinstance(told, bytes)
    [found] = NEW.findall(told)
    assert found[2] == b"00"


def test_the_random_flag_passes_and_unknown_flags_do_not() -> None:
    tracing, _ = tracing_with()
    told = tracing.begin(head_with(f"traceparent: {VALID[:-2]}ff").forwarded_fields, b"/", 0.0)
    assert told is not None and NEW.findall(fields_of(told))[0][2] == b"03"


def sampled_requests(tracing: TraceSampling, count: int) -> Iterator[bool]:
    for _ in range(count):
        begun = tracing.begin(head_with(f"traceparent: {VALID}").forwarded_fields, b"/", 0.0)
        assert begun is not None
        yield isinstance(begun, EdgeTrace)
        flag = NEW.findall(fields_of(begun))[0][2]
        assert flag == (b"01" if isinstance(begun, EdgeTrace) else b"00")


def test_clients_cannot_force_more_traces_than_the_limit(caplog: pytest.LogCaptureFixture) -> None:
    tracing, clock = tracing_with(max_client_traces_per_s=10)
    assert sum(sampled_requests(tracing, 1000)) == 10
    assert tracing.limited == 990
    clock.now_s += 0.5
    assert sum(sampled_requests(tracing, 100)) == 5
    clock.now_s += 100.0
    assert sum(sampled_requests(tracing, 100)) == 10
    assert [record.getMessage().split()[0] for record in caplog.records] == ["client_traces_limited"], "logged once"


def test_a_limit_of_zero_ignores_the_clients_flag() -> None:
    tracing, _ = tracing_with(max_client_traces_per_s=0)
    assert sum(sampled_requests(tracing, 10)) == 0 and tracing.limited == 10


def test_the_ratio_applies_to_requests_without_context() -> None:
    tracing, _ = tracing_with(sample_ratio=0.1)
    tracing._random = Random(1).random
    recorded = sum(isinstance(tracing.begin(head_with().forwarded_fields, b"/", 0.0), EdgeTrace) for _ in range(5000))
    assert 400 < recorded < 600


@pytest.mark.parametrize("sample_ratio", [0.0, 1.0])
def test_ids_differ(sample_ratio: float) -> None:
    tracing, _ = tracing_with(sample_ratio=sample_ratio)
    told = [fields_of(tracing.begin(head_with().forwarded_fields, b"/", 0.0)) for _ in range(100)]
    assert len({NEW.findall(one)[0][0] for one in told}) == 100
