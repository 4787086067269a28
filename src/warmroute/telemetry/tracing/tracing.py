"""Decides which requests are traced, and begins their traces.

    no valid `traceparent`     recorded with the probability `sample_ratio`
    with the sampled flag      recorded, up to `max_client_traces_per_s`; above, nodes get it without the flag
    without the flag           not recorded; the header passes unchanged

So a client that sets the flag on every request cannot overload the exporter, the engines' exporters or the collector.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random

from warmroute.config import Tracing as TracingConfig
from warmroute.event_log import EventLog
from warmroute.telemetry.counters import Counters
from warmroute.telemetry.tracing.request_trace import EndedTrace, RequestTrace
from warmroute.telemetry.tracing.trace_context import (
    TraceContext,
    new_span_id,
    new_trace,
    new_unsampled_context,
    read_context,
    read_tracestate,
    without_context,
    without_traceparent,
)

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
