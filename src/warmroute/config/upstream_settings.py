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
        int,
        Meta(
            ge=0,
            description="Maximum number of nodes the router tries for a request before it answers with an error. "
            "0: every eligible node.",
        ),
    ] = 0
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


class Hedging(Section, frozen=True):
    """Sending a request that waits too long for its first token to a second node as well."""

    max_ratio: Annotated[
        float,
        Meta(ge=0, le=1, description="Maximum share of requests that the router hedges, beside ten at once. 0: none."),
    ] = 0.05
    factor: Annotated[
        float,
        Meta(ge=1, description="A first token is overdue after this many times the time that the router expected."),
    ] = 5.0
    min_delay_s: Annotated[
        Seconds, Meta(description="A first token is not overdue before this time, whatever the router expected.")
    ] = 2.0


class OutlierDetection(Section, frozen=True):
    """Ejection of nodes that answer far worse than their peers."""

    interval_s: Annotated[
        Seconds,
        Meta(description="Time over which the requests of a node are judged. A slow one is ejected after this time."),
    ] = 10.0
    min_requests: Annotated[Count, Meta(description="A node with fewer requests in this time is not judged.")] = 10
    failure_ratio: Annotated[
        float, Meta(ge=0, le=1, description="Share of failed requests from which on a node is ejected. 0: never.")
    ] = 0.5
    slow_factor: Annotated[
        float,
        Meta(
            ge=0,
            description="A node is ejected if its prompt tokens take this many times as long as before, unless other "
            "nodes slow down as well, or as on other nodes with the same `gpu`. 0: never.",
        ),
    ] = 5.0
    ejection_s: Annotated[
        Seconds,
        Meta(description="Time of a node's first ejection. Each further one takes this much longer, up to 300 s."),
    ] = 30.0
    max_ejected_ratio: Annotated[
        float,
        Meta(
            ge=0, le=1, description="A node is not ejected if more than this share of its model's nodes would be out."
        ),
    ] = 0.5


class Polling(Section, frozen=True):
    """Polling of the nodes' own metrics."""

    interval_s: Annotated[Seconds, Meta(description="Time between two reads of a node's /metrics, plus jitter.")] = 1.0
    stale_s: Annotated[Seconds, Meta(description="Age after which the router ignores a node's metrics.")] = 5.0
