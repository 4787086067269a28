"""Puts the parts of tracing together. OpenTelemetry is imported only if tracing is on."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from random import Random
from typing import Any

from warmroute.config import Tracing as TracingConfig
from warmroute.config import missing_extra
from warmroute.event_log import EventLog
from warmroute.telemetry.counters import Counters
from warmroute.telemetry.tracing.trace_exporter import TraceExporter
from warmroute.telemetry.tracing.tracing import Tracing

log = EventLog("warmroute.tracing")


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
        return import_module("warmroute.telemetry.tracing.otlp")
    except ImportError as error:
        if (error.name or "").startswith("warmroute"):
            raise
        raise missing_extra("tracing.enabled", error, "otel") from None
