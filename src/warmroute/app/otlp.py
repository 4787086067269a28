"""Sends spans with OpenTelemetry's SDK: OTLP over HTTP, as protobuf. Needs the extra `otel`.

The only file that imports OpenTelemetry, and itself imported only if tracing is on.

The SDK's exporter reads the standard variables: OTEL_EXPORTER_OTLP_ENDPOINT, …_HEADERS, …_TIMEOUT, …_COMPRESSION and
…_CERTIFICATE, each also for traces alone, OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState
from opentelemetry.util.re import parse_env_headers

from warmroute import __version__
from warmroute.app.tracing import MAX_REASON_CHARACTERS, EndedTrace, Span, build_spans
from warmroute.config import Tracing as TracingConfig
from warmroute.edge.trace_context import RandomBits

TRACES_PATH: Final = "/v1/traces"
_KINDS: Final = {"internal": SpanKind.INTERNAL, "server": SpanKind.SERVER, "client": SpanKind.CLIENT}
_UNSET: Final = Status(StatusCode.UNSET)


class _LastMessage(logging.Handler):
    """Keeps the SDK's last log record instead of printing it: the exporter logs a failure once, with this reason."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()[:MAX_REASON_CHARACTERS]


class OtlpSender:
    """Implements tracing.SpanSender."""

    def __init__(self, config: TracingConfig, random_bits: RandomBits) -> None:
        self._random_bits = random_bits
        self._log = _LastMessage(logging.WARNING)
        logger = logging.getLogger("opentelemetry")
        logger.handlers[:] = [self._log]
        logger.propagate = False
        value = os.environ.get(config.headers_env, "") if config.headers_env else ""
        headers = parse_env_headers(value, liberal=True) if value else None
        self._exporter = OTLPSpanExporter(endpoint=_endpoint(config.endpoint), headers=headers)
        self._resource = _resource(config.service_name)
        self._scope = InstrumentationScope("warmroute", __version__)

    def send(self, traces: Sequence[EndedTrace]) -> str:
        spans = [
            self._readable(trace, span, state)
            for trace in traces
            for state in (_trace_state(trace.edge.tracestate),)
            for span in build_spans(trace, self._random_bits)
        ]
        self._log.text = ""
        if self._exporter.export(spans) is SpanExportResult.SUCCESS:
            return ""
        return self._log.text or "the exporter does not say why"

    def stop(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _readable(self, trace: EndedTrace, span: Span, state: TraceState | None) -> ReadableSpan:
        edge = trace.edge
        trace_id, flags = int(edge.context.trace_id, 16), TraceFlags(edge.context.flags)
        context = SpanContext(trace_id, int(span.span_id, 16), False, flags, state)
        parent = None
        if span.parent_id:
            parent = SpanContext(trace_id, int(span.parent_id, 16), span.parent_id == edge.parent_id, flags, state)
        offset_s = trace.wall_offset_s
        return ReadableSpan(
            name=span.name,
            context=context,
            parent=parent,
            resource=self._resource,
            attributes=span.attributes,
            kind=_KINDS[span.kind],
            status=Status(StatusCode.ERROR, span.error) if span.error else _UNSET,
            start_time=int((span.start_s + offset_s) * 1e9),
            end_time=int((span.end_s + offset_s) * 1e9),
            instrumentation_scope=self._scope,
        )


def _endpoint(url: str) -> str | None:
    """Return the collector's URL for traces; None if the environment names it."""
    if not url:
        return None
    return url.rstrip("/") + TRACES_PATH if urlsplit(url).path in ("", "/") else url


def _resource(service_name: str) -> Resource:
    """`OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` apply where the configuration does not say otherwise."""
    resource = Resource.create({"service.version": __version__})
    named = str(resource.attributes.get("service.name", "")).partition(":")[0] != "unknown_service"
    if service_name or not named:
        resource = resource.merge(Resource({"service.name": service_name or "warmroute"}))
    if "service.instance.id" not in resource.attributes:
        resource = resource.merge(Resource({"service.instance.id": str(uuid.uuid4())}))
    return resource


def _trace_state(value: bytes) -> TraceState | None:
    """Return None for a malformed header."""
    if not value:
        return None
    try:
        state = TraceState.from_header([value.decode("ascii")])
    except ValueError:
        return None
    return state or None
