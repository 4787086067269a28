"""How the router talks to nodes: connections, health checks, polling of their metrics."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from warmroute.config.section import Count, Seconds, Section


class Upstream(Section, frozen=True):
    """Connections to nodes."""

    connect_timeout_s: Annotated[Seconds, Meta(description="Time to connect to a node, including TLS.")] = 2.0
    first_byte_timeout_s: Annotated[
        Seconds,
        Meta(description="Time for a node to start its response. Without streaming, it starts when it is complete."),
    ] = 600.0
    between_chunks_timeout_s: Annotated[Seconds, Meta(description="Maximum time between two chunks of a response.")] = (
        120.0
    )
    idle_timeout_s: Annotated[
        Seconds,
        Meta(description="Time the router keeps an unused connection. Must be below the node's own: 5 s for vLLM."),
    ] = 4.0
    max_attempts: Annotated[
        Count, Meta(description="Maximum number of nodes the router tries for a request before it answers 502.")
    ] = 3
    ca_file: Annotated[
        str, Meta(description="PEM file with the CA certificates for https nodes. Empty: those of the system.")
    ] = ""


class Health(Section, frozen=True):
    """Health checks and circuit breakers."""

    interval_s: Annotated[Seconds, Meta(description="Time between two health checks of a node, plus jitter.")] = 1.0
    timeout_s: Annotated[Seconds, Meta(description="Timeout of a health check and of a metrics read.")] = 2.0
    path: Annotated[str, Meta(description="Path of the health check.", pattern="^/")] = "/health"
    consecutive_timeouts: Annotated[
        Count,
        Meta(
            description="Consecutive health check timeouts after which a node is down, unless it answers requests "
            "in the meantime."
        ),
    ] = 3
    consecutive_failures: Annotated[
        Count, Meta(description="Consecutive failed requests after which the circuit breaker of a node opens.")
    ] = 5
    breaker_open_s: Annotated[
        Seconds, Meta(description="Time for which a circuit breaker opens at first. It doubles with each failed trial.")
    ] = 0.5
    breaker_open_max_s: Annotated[Seconds, Meta(description="Maximum time for which a circuit breaker opens.")] = 15.0
    slow_start_s: Annotated[
        float,
        Meta(ge=0, description="Time over which the traffic of a recovered node rises to its full share. 0: at once."),
    ] = 10.0


class Polling(Section, frozen=True):
    """Polling of the nodes' own metrics."""

    interval_s: Annotated[Seconds, Meta(description="Time between two reads of a node's /metrics, plus jitter.")] = 1.0
    stale_s: Annotated[Seconds, Meta(description="Age after which the router ignores a node's metrics.")] = 5.0
