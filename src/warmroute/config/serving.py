"""How the router serves its clients: where it listens, what they may ask, how it ends, what it says."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from warmroute.config.section import Bytes, Count, Port, PriorityName, Seconds, Section


class Listen(Section, frozen=True):
    """Where clients reach the router."""

    host: Annotated[str, Meta(description="Address to listen on; `::` listens on IPv6 and IPv4.")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="TCP port; 0 takes a free one and prints it.")] = 8080
    unix: Annotated[str, Meta(description="Path of a unix socket to listen on instead of TCP.")] = ""
    tls_cert: Annotated[str, Meta(description="PEM file with the certificate chain; with `tls_key`, serves HTTPS.")] = (
        ""
    )
    tls_key: Annotated[str, Meta(description="PEM file with the certificate's private key.")] = ""
    backlog: Annotated[Count, Meta(description="Connections the kernel may hold before they are accepted.")] = 4096


class Admin(Section, frozen=True):
    """The separate listener for metrics and the admin API."""

    host: Annotated[str, Meta(description="Address of the admin listener; anything but loopback needs a token.")] = (
        "127.0.0.1"
    )
    port: Annotated[Port, Meta(description="TCP port of the admin listener; 0 takes a free one.")] = 8081
    enabled: Annotated[bool, Meta(description="Whether the admin listener runs at all.")] = True
    token_sha256: Annotated[
        str,
        Meta(
            pattern="^([0-9a-f]{64})?$",
            description="SHA-256 of the token that every admin call but /health and /ready must carry "
            "(`warmroute hash-key` makes it).",
        ),
    ] = ""


class Limits(Section, frozen=True):
    """What a client may ask of the router, each with its own error."""

    header_bytes: Annotated[Bytes, Meta(description="Largest request head; above it 431.")] = 32_768
    header_count: Annotated[Count, Meta(description="Most header fields in a request; above it 431.")] = 100
    body_bytes: Annotated[Bytes, Meta(description="Largest request body; above it 413.")] = 33_554_432
    buffered_bytes: Annotated[
        Bytes, Meta(description="Request bodies held in memory in all; above it 503 for those that would add more.")
    ] = 2_147_483_648
    connections: Annotated[
        Count, Meta(description="Client connections in all; further ones are told 503 and closed.")
    ] = 20_000
    header_timeout_s: Annotated[
        Seconds, Meta(description="Time for a request's head to arrive, from its first byte; above it 408.")
    ] = 10.0
    body_timeout_s: Annotated[
        Seconds, Meta(description="Time for a request's body to arrive after its head; above it 408.")
    ] = 60.0
    idle_timeout_s: Annotated[
        Seconds, Meta(description="How long a kept-alive connection may stay silent between requests.")
    ] = 75.0
    stall_timeout_s: Annotated[
        Seconds, Meta(description="How long a client may stop reading its response before it counts as gone.")
    ] = 120.0


class Log(Section, frozen=True):
    """What is said on standard error."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least severity that is logged.")
    ] = "info"
    format: Annotated[
        Literal["text", "json"], Meta(description="`text` for people, `json` for collectors: one object a line.")
    ] = "text"
    requests: Annotated[
        bool, Meta(description="Logs a line for each request (never its content): for hunting, not for production.")
    ] = False


class Shutdown(Section, frozen=True):
    """How the router ends on SIGTERM."""

    delay_s: Annotated[
        float,
        Meta(
            ge=0, description="Time in which /ready says 503 while requests are still accepted, for balancers in front."
        ),
    ] = 0.0
    deadline_s: Annotated[
        float, Meta(ge=0, description="Time that running requests have to finish before they are cut.")
    ] = 30.0


class KeyConfig(Section, frozen=True):
    """One API key that clients may use."""

    sha256: Annotated[
        str, Meta(pattern="^[0-9a-f]{64}$", description="SHA-256 of the key (`warmroute hash-key` makes it).")
    ]
    tenant: Annotated[str, Meta(min_length=1, description="Whose key it is.")]
    priority: Annotated[PriorityName, Meta(description="The highest priority that its requests may ask for.")] = "high"
    requests_per_min: Annotated[
        int,
        Meta(ge=0, description="Requests a minute that its tenant may send, with all its keys; 0: no limit."),
    ] = 0
    tokens_per_min: Annotated[
        int,
        Meta(
            ge=0,
            description="Tokens a minute that its tenant may use, of prompts and answers, with all its keys; 0: no "
            "limit.",
        ),
    ] = 0
    shares: Annotated[
        str,
        Meta(
            description="Tenants with the same word here may know of each other's cached prompts; empty: nobody else's."
        ),
    ] = ""
