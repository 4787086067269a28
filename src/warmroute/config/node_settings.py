"""Settings of the nodes: their addresses, connections to them, health checks and polling."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from msgspec import Meta

from warmroute.config.section import ConfigError, Count, Seconds, Section


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


class NodeConfig(Section, frozen=True):
    """An engine endpoint."""

    url: Annotated[str, Meta(description="Base URL: `http://host:port` or `https://host:port`.")]
    name: Annotated[str, Meta(description="Name in metrics, logs and the admin API. Empty: host:port.")] = ""
    models: Annotated[
        tuple[str, ...], Meta(description="Models that the node serves. Empty: read from its /v1/models.")
    ] = ()
    engine: Annotated[
        Literal["auto", "vllm", "sglang", "trtllm"],
        Meta(description="Engine of the node. `auto`: detected from its metrics."),
    ] = "auto"
    role: Annotated[
        Literal["mixed", "prefill", "decode"],
        Meta(description="The router sends requests to `mixed` nodes, or to `decode` nodes if there are no others."),
    ] = "mixed"
    island: Annotated[
        str, Meta(description="Island of the node: provider and region, for example `aws/us-east-1`.")
    ] = "local"
    gpu: Annotated[
        str, Meta(description="GPU of the node, for example `L4`. The autoscaler learns speeds by GPU.")
    ] = ""
    usd_per_hour: Annotated[float, Meta(ge=0, description="Cost of the node. 0: unknown.")] = 0.0
    api_key_env: Annotated[str, Meta(description="Environment variable with the API key that the node requires.")] = ""
    kv_events: Annotated[
        str,
        Meta(
            pattern="^(auto|off|tcp://.+:[0-9]+)$",
            description="Endpoint of the node's KV events: `auto` (from the engine), `off`, or `tcp://host:port` "
            "(`*`: the node's host).",
        ),
    ] = "auto"
    kv_replay: Annotated[
        str,
        Meta(
            pattern="^(tcp://.+:[0-9]+)?$",
            description="Endpoint that replays missed KV events: `tcp://host:port`. Empty: from the engine.",
        ),
    ] = ""


def node_name(node: NodeConfig) -> str:
    """Return the node's name. Raises ConfigError if its URL is invalid."""
    scheme, separator, rest = node.url.partition("://")
    host_port = rest.rstrip("/")
    if not separator or scheme not in ("http", "https") or not host_port:
        raise ConfigError(f"nodes.url: {node.url!r} does not look like http://host:port")
    if "/" in host_port or "?" in host_port or "@" in host_port:
        raise ConfigError(f"nodes.url: {node.url!r} contains more than scheme, host and port")
    try:
        parts = urlsplit(node.url)
        valid = bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError(f"nodes.url: {node.url!r} has no host or an invalid port")
    return node.name or host_port
