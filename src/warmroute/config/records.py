"""What the router keeps of its traffic: journal, captures, traces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal
from urllib.parse import urlsplit

from msgspec import Meta

from warmroute.config.section import Bytes, Section

# Settings of the decision journal.


class Journal(Section, frozen=True):
    """Recent routing decisions and their reasons, for `warmroute explain`. It never contains user text, except, with
    `error_text`, what engines repeat of it in errors."""

    max_decisions: Annotated[
        int, Meta(ge=0, le=1_000_000, description="Decisions kept in memory, 1 to 15 KB each. 0: none.")
    ] = 1000
    file: Annotated[str, Meta(description="File for finished requests, one JSON object per line. Empty: no file.")] = ""
    sample_ratio: Annotated[
        float, Meta(ge=0, le=1, description="Fraction of the finished requests that the router writes to the file.")
    ] = 1.0
    file_max_bytes: Annotated[
        Bytes, Meta(description="Size at which the router renames the file to `FILE.1` and starts a new one.")
    ] = 67_108_864
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
    file_max_bytes: Annotated[Bytes, Meta(description="Size at which the router begins another file.")] = 67_108_864
    max_files: Annotated[
        int,
        Meta(ge=1, le=10_000, description="Files kept in the directory. The router removes the oldest ones."),
    ] = 16
    block_size: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="Tokens for each hash of a prompt, a power of two; best the engines' block size. A larger one "
            "makes the trace smaller; replay then misses hits that end within a block.",
        ),
    ] = 16


# Settings of OpenTelemetry traces.


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
