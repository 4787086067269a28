"""W3C trace context, which requests are traced, and what the router keeps of a traced one until its end."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Final, NamedTuple

from warmroute.config import Tracing as TracingConfig
from warmroute.core.messages import RoutingRequest
from warmroute.event_log import EventLog

if TYPE_CHECKING:
    from warmroute.edge.arrival import Kept

# W3C trace context (https://www.w3.org/TR/trace-context/): the `traceparent` header, read strictly.
#
# A client's header counts only if it is valid and given once. Else the request starts a trace of its own, and neither
# its `traceparent` nor its `tracestate` reaches a node. A valid `tracestate` is not the router's to change.

log = EventLog("warmroute.tracing")

SAMPLED: Final = 1
_RANDOM_TRACE_ID: Final = 2
"""Flags of `traceparent` that the router passes on. It drops others, which it does not know."""
_TRACEPARENT: Final = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_NO_TRACE: Final = b"0" * 32
_NO_SPAN: Final = b"0" * 16
MAX_TRACESTATE_BYTES: Final = 512
_TRACEPARENT_LINES: Final = re.compile(rb"(?im)^traceparent:([^\r\n]*)\r\n")
_TRACESTATE_LINES: Final = re.compile(rb"(?im)^tracestate:([^\r\n]*)\r\n")

_SPAN_STEP: Final = 0x9E3779B97F4A7C16
"""Between the ids of two tries. It is even, so that the last bit, which is set, makes no two of them equal."""

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


class EdgeTrace:
    """What the edge keeps of a request that is traced. The core keeps the rest: its tries, its decision, its end."""

    __slots__ = ("_fields", "context", "parent_id", "path", "span_seed", "started_s", "tracestate")

    def __init__(
        self, random_bits: RandomBits, context: TraceContext, parent_id: bytes, tracestate: bytes, fields: bytes,
        path: bytes, started_s: float,
    ) -> None:  # fmt: skip
        self.span_seed = random_bits(64)
        self._fields = fields
        """The header lines for nodes, without `traceparent`."""
        self.context = context
        """Of the request's own span."""
        self.parent_id = parent_id
        """Empty if the trace begins here."""
        self.tracestate = tracestate
        self.path = path
        self.started_s = started_s

    def forwarded_fields(self, try_: int) -> bytes:
        """Return the header lines for the node of this try."""
        return self._fields + self.context.child(self.span_id(try_), sampled=True).header_line()

    def span_id(self, try_: int) -> bytes:
        """Return the id of a try's span. Whoever has the trace computes the same: the edge for the node, the core for
        the export."""
        return b"%016x" % ((self.span_seed + try_ * _SPAN_STEP & (1 << 64) - 1) | 1)


class EndedEarly(NamedTuple):
    """A request that ended before it asked the core for a node. The core gives the others back."""

    trace: EdgeTrace | None
    """None if it is not traced."""
    kept: Kept | None
    ended_s: float
    status: int
    """What the client received; 0: nothing."""
    error: str
    """The error's code."""
    client_left: bool
    request: RoutingRequest | None
    """None if the body was rejected."""
    request_id: bytes


class TraceSampling:
    """Decides which requests are traced, and begins their traces.

    no valid `traceparent`     recorded with the probability `sample_ratio`
    with the sampled flag      recorded, up to `max_client_traces_per_s`; above, nodes get it without the flag
    without the flag           not recorded; the header passes unchanged

    So a client that sets the flag on every request cannot overload the exporter, the engines' exporters or the
    collector.
    """

    def __init__(self, config: TracingConfig, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        random = Random()
        self._random, self.random_bits = random.random, random.getrandbits
        self.limited = 0
        """Requests that were not traced although their client asked for it."""
        self.reconfigure(config)

    def reconfigure(self, config: TracingConfig) -> None:
        self._sample_ratio = config.sample_ratio
        self._client_traces_per_s = config.max_client_traces_per_s
        self._client_traces_left = max(1.0, config.max_client_traces_per_s) if config.max_client_traces_per_s else 0.0
        self._refilled_s = self._now()
        self._limit_logged = False

    def begin(self, fields: bytes, path: bytes, started_s: float) -> EdgeTrace | bytes | None:
        """Return the trace of a request, if it is recorded, else the header lines for its node; None if they are still
        `fields`, those of the client."""
        may_have_context = b"trace" in fields.lower()
        parent = read_context(fields) if may_have_context else None
        if parent is None:
            if may_have_context:
                fields = without_context(fields)
            if self._random() >= self._sample_ratio:
                return new_unsampled_context(self.random_bits, fields)
            return EdgeTrace(self.random_bits, new_trace(self.random_bits), b"", b"", fields, path, started_s)
        if not parent.sampled:
            return None
        recorded = self._take_client_trace()
        own, tracestate = parent.child(new_span_id(self.random_bits), recorded), read_tracestate(fields)
        fields = without_traceparent(fields)
        if recorded:
            return EdgeTrace(self.random_bits, own, parent.span_id, tracestate, fields, path, started_s)
        return fields + own.header_line()

    def _take_client_trace(self) -> bool:
        """Return whether clients may start another trace now: a token bucket that holds one second's traces."""
        per_s, now_s = self._client_traces_per_s, self._now()
        full = max(1.0, per_s) if per_s else 0.0
        self._client_traces_left = min(full, self._client_traces_left + (now_s - self._refilled_s) * per_s)
        self._refilled_s = now_s
        if self._client_traces_left >= 1.0:
            self._client_traces_left -= 1.0
            return True
        self.limited += 1
        if not self._limit_logged and per_s:
            self._limit_logged = True
            log.warning(
                "client_traces_limited",
                "Clients ask for more traces than the router records for them. The others are not recorded.",
                limit=per_s,
            )
        return False
