"""What the router keeps of its traffic: journal, captures, traces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from msgspec import Meta

from warmroute.config.section import REMOVED, Bytes, Section

# Settings of the decision journal.


class Journal(Section, frozen=True):
    """Recent routing decisions and their reasons, for `warmroute explain`. It never contains user text, except, with
    `error_text`, what engines repeat of it in errors."""

    max_decisions: Annotated[int, Meta(ge=0, le=1000000), REMOVED] = 1000
    """Decisions kept in memory, 1 to 15 KB each: at 100 requests per second those of the last ten seconds. 0: none."""
    file: Annotated[str, Meta(description="File for finished requests, one JSON object per line. Empty: no file.")] = ""
    sample_ratio: Annotated[float, Meta(ge=0, le=1), REMOVED] = 1.0
    """Fraction of the finished requests that the router writes to the file: all, so that a report finds each one."""
    file_max_bytes: Annotated[Bytes, REMOVED] = 67_108_864
    """Size at which the router renames the file to `FILE.1` and starts a new one: at most 128 MiB on disk."""
    error_text: Annotated[
        bool,
        Meta(
            description="Keep the first 1,000 characters of what a node says in an error response. Engines repeat "
            "parts of prompts in them."
        ),
    ] = False
    response_headers: Annotated[
        Literal["off", "on_request", "always"],
        Meta(
            description="When responses carry `X-Warmroute-Node` and `X-Warmroute-Hit`. `on_request`: if the request "
            "has `X-Warmroute-Explain: 1`. A node without a configured name appears with its address."
        ),
    ] = "off"


# Settings of captures: traces of live traffic.


class Capture(Section, frozen=True):
    """A trace of all requests for `warmroute replay` and `warmroute plan`: lengths, times, and hashes of prompts under
    a random key. It never contains user text."""

    directory: Annotated[
        str, Meta(description="Directory for the trace. The router creates it if its parent exists. Empty: no trace.")
    ] = ""
    file_max_bytes: Annotated[Bytes, REMOVED] = 67_108_864
    """Size at which the router begins another file: small enough to be copied while the next one is written."""
    max_files: Annotated[int, Meta(ge=1, le=10000), REMOVED] = 16
    """Files kept in the directory. The router removes the oldest ones: at most 1 GiB on disk."""
    block_size: Annotated[int, Meta(ge=1, le=1024), REMOVED] = 16
    """Tokens for each hash of a prompt, a power of two: the block size of most engines. A larger one makes the trace
    smaller; replay then misses hits that end within a block."""


# Settings of OpenTelemetry traces.


class Tracing(Section, frozen=True):
    """OpenTelemetry traces, sent to a collector as OTLP over HTTP. Needs the extra `otel`: `pip install '.[otel]'`."""

    removed: ClassVar = {
        "max_client_traces_per_s": "100",
        "headers_env": "OTEL_EXPORTER_OTLP_HEADERS",
        "service_name": "OTEL_SERVICE_NAME, or `warmroute`",
    }

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
    max_client_traces_per_s: Annotated[float, Meta(ge=0), REMOVED] = 100.0
    """Maximum number of traces per second that clients start by a `traceparent` with the sampled flag. Above: the
    request is not traced, and its `traceparent` loses the flag. 0: none. A client must not decide how much CPU traces
    take."""
    headers_env: Annotated[str, REMOVED] = ""
    """Environment variable with headers for the collector, such as its API key: `name=value,name=value`. Empty: the
    standard variable `OTEL_EXPORTER_OTLP_HEADERS`."""
    service_name: Annotated[str, REMOVED] = ""
    """`service.name` of the traces. Empty: as the standard variable `OTEL_SERVICE_NAME` says, else `warmroute`."""


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
