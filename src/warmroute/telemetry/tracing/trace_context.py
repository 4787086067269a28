"""W3C trace context (https://www.w3.org/TR/trace-context/): the `traceparent` header, read strictly.

A client's header counts only if it is valid and given once. Else the request starts a trace of its own, and neither its
`traceparent` nor its `tracestate` reaches a node. A valid `tracestate` is not the router's to change.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, NamedTuple

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
