"""The nodes, and how the router speaks and listens to them."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from msgspec import Meta

from warmroute.config.section import Bytes, ConfigError, Count, Seconds, Section


class Upstream(Section, frozen=True):
    """How the router speaks to its nodes."""

    connect_timeout_s: Annotated[Seconds, Meta(description="Time to connect to a node (TLS included).")] = 2.0
    first_byte_timeout_s: Annotated[
        Seconds,
        Meta(description="Time for a node to begin its answer; a non-streamed answer begins when it is complete."),
    ] = 600.0
    between_chunks_timeout_s: Annotated[
        Seconds, Meta(description="Longest silence of a node within an answer that it has begun.")
    ] = 120.0
    idle_timeout_s: Annotated[
        Seconds,
        Meta(description="How long an unused connection to a node is kept; below the 5 s after which vLLM closes it."),
    ] = 4.0
    idle_connections: Annotated[Count, Meta(description="Unused connections kept for each node.")] = 256
    attempts: Annotated[Count, Meta(description="Nodes tried for one request before it fails with 502.")] = 3
    response_header_bytes: Annotated[Bytes, Meta(description="Largest response head taken from a node.")] = 65_536
    ca_file: Annotated[
        str, Meta(description="PEM file of the authorities that https nodes are verified with; empty: the system's.")
    ] = ""


class Health(Section, frozen=True):
    """How the router learns which nodes can serve."""

    interval_s: Annotated[Seconds, Meta(description="Time between two active checks of a node (with jitter).")] = 1.0
    timeout_s: Annotated[Seconds, Meta(description="Time for a node to answer a check.")] = 2.0
    path: Annotated[str, Meta(description="Path of the active check.", pattern="^/")] = "/health"
    slow_checks: Annotated[
        Count,
        Meta(
            description="Checks in a row that time out, with no traffic answered meanwhile, before a node is avoided."
        ),
    ] = 3
    failures: Annotated[
        Count, Meta(description="Requests in a row that fail on a node before its circuit breaker opens.")
    ] = 5
    open_s: Annotated[Seconds, Meta(description="How long the breaker stays open at first; doubles each time.")] = 0.5
    open_limit_s: Annotated[Seconds, Meta(description="Longest time the breaker stays open.")] = 15.0
    slow_start_s: Annotated[
        float, Meta(ge=0, description="Time over which a node that came back grows to its full share; 0 for at once.")
    ] = 10.0


class Metrics(Section, frozen=True):
    """How the router reads its nodes' load."""

    interval_s: Annotated[Seconds, Meta(description="Time between two reads of a node's metrics (with jitter).")] = 1.0
    timeout_s: Annotated[Seconds, Meta(description="Time for a node to answer with its metrics.")] = 2.0
    stale_s: Annotated[Seconds, Meta(description="Age after which what a node said of its load no longer counts.")] = (
        5.0
    )
    models_interval_s: Annotated[Seconds, Meta(description="Time between two reads of a node's /v1/models.")] = 30.0


class NodeConfig(Section, frozen=True):
    """One engine endpoint."""

    url: Annotated[str, Meta(description="Base URL, `http://host:port` or `https://host:port`.")]
    name: Annotated[str, Meta(description="Name in metrics, logs and the admin API; empty: host:port.")] = ""
    models: Annotated[tuple[str, ...], Meta(description="Models it serves; empty: asked from its /v1/models.")] = ()
    engine: Annotated[
        Literal["auto", "vllm", "sglang", "trtllm"], Meta(description="The engine; `auto` tells it by its metrics.")
    ] = "auto"
    role: Annotated[
        Literal["mixed", "prefill", "decode"],
        Meta(description="What it does; requests are sent to `mixed` nodes, and to `decode` where there are none."),
    ] = "mixed"
    island: Annotated[str, Meta(description="The island it stands on: provider and region, say `aws/us-east-1`.")] = (
        "local"
    )
    gpu: Annotated[str, Meta(description="Its hardware, say `L4`; nodes with the same word are taken to be alike.")] = (
        ""
    )
    usd_per_hour: Annotated[float, Meta(ge=0, description="What it costs an hour; 0 where that is not known.")] = 0.0
    api_key_env: Annotated[
        str, Meta(description="Environment variable with the key that the node itself asks for.")
    ] = ""
    kv_events: Annotated[
        str,
        Meta(
            pattern="^(auto|off|tcp://.+:[0-9]+)$",
            description="Where its KV events are: `auto` asks the engine, `off` does without, or `tcp://host:port` "
            "(`*` for its own host).",
        ),
    ] = "auto"
    kv_replay: Annotated[
        str,
        Meta(
            pattern="^(tcp://.+:[0-9]+)?$",
            description="Where its KV events are replayed, `tcp://host:port`; empty: as the engine says.",
        ),
    ] = ""


def node_name(node: NodeConfig) -> str:
    """The node's name; also checks its URL."""
    scheme, separator, rest = node.url.partition("://")
    host_port = rest.rstrip("/")
    if not separator or scheme not in ("http", "https") or not host_port:
        raise ConfigError(f"nodes.url: {node.url!r} is not like http://host:port")
    if "/" in host_port or "?" in host_port or "@" in host_port:
        raise ConfigError(f"nodes.url: {node.url!r} has more than scheme, host and port")
    try:
        parts = urlsplit(node.url)
        good = bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise ConfigError(f"nodes.url: {node.url!r} has no host, or a port that is none")
    return node.name or host_port
