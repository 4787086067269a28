"""Settings of OpenTelemetry traces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta

from warmroute.config.section import Section


class Tracing(Section, frozen=True):
    """OpenTelemetry traces, sent to a collector as OTLP over HTTP. Needs the extra `otel`: `pip install '.[otel]'`."""

    enabled: Annotated[bool, Meta(description="Record traces, and set `traceparent` in requests to nodes.")] = False
    endpoint: Annotated[
        str,
        Meta(
            description="URL of the collector, for example `http://otel-collector:4318`. Without a path, the router "
            "adds `/v1/traces`. Empty: as `OTEL_EXPORTER_OTLP_ENDPOINT` says, else `http://localhost:4318`."
        ),
    ] = ""
    sample_ratio: Annotated[
        float, Meta(ge=0, le=1, description="Fraction of the requests without a `traceparent` that are traced.")
    ] = 0.01
    max_client_traces_per_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Maximum number of traces per second that clients start by a `traceparent` with the sampled "
            "flag. Above: the request is not traced, and its `traceparent` loses the flag. 0: none.",
        ),
    ] = 100.0
    headers_env: Annotated[
        str,
        Meta(
            description="Environment variable with headers for the collector, such as its API key: "
            "`name=value,name=value`. Empty: `OTEL_EXPORTER_OTLP_HEADERS`."
        ),
    ] = ""
    service_name: Annotated[
        str, Meta(description="`service.name` of the traces. Empty: as `OTEL_SERVICE_NAME` says, else `warmroute`.")
    ] = ""


def tracing_problems(tracing: Tracing) -> Iterator[str]:
    if not tracing.endpoint:
        return
    try:
        parts = urlsplit(tracing.endpoint)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or not tracing.endpoint.isprintable() or " " in tracing.endpoint:
        yield f"tracing.endpoint: {tracing.endpoint!r} does not look like http://host:4318"
