"""A node: its address, models, engine, island and KV events."""

from __future__ import annotations

from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from msgspec import Meta

from warmroute.config.section import ConfigError, Section

Role = Literal["mixed", "prefill", "decode"]
MAX_NAME_LENGTH: Final = 200
"""Characters in a node's name."""


MaxInflight = Annotated[
    int,
    Meta(
        ge=0,
        le=1_000_000,
        description="Requests that the router sends to the node at the same time. Further ones wait at the router, or "
        "get 429 where they may not wait. 0: no limit.",
    ),
]


class NodeConfig(Section, frozen=True):
    """An engine endpoint."""

    url: Annotated[str, Meta(description="Base URL: `http://host:port` or `https://host:port`.")]
    name: Annotated[
        str, Meta(description="Name in metrics, logs and the admin API, without control characters. Empty: host:port.")
    ] = ""
    models: Annotated[
        tuple[str, ...], Meta(description="Models that the node serves. Empty: read from its /v1/models.")
    ] = ()
    max_model_len: Annotated[
        int,
        Meta(
            ge=0,
            le=1_000_000_000,
            description="Maximum number of prompt and output tokens together. 0: as the engine reports in /v1/models.",
        ),
    ] = 0
    max_inflight: MaxInflight = 0
    engine: Annotated[
        Literal["auto", "vllm", "sglang", "trtllm"],
        Meta(description="Engine of the node. `auto`: detected from its metrics."),
    ] = "auto"
    role: Annotated[
        Role,
        Meta(
            description="`prefill` nodes prefill prompts for other nodes, and serve whole requests while they are "
            "idle and that costs less. `decode` nodes decode answers, and prefill where that costs less. `mixed` nodes "
            "do both."
        ),
    ] = "mixed"
    bootstrap_port: Annotated[
        int,
        Meta(
            ge=1,
            le=65_535,
            description="Port of a prefill node's bootstrap server (SGLang's `--disaggregation-bootstrap-port`).",
        ),
    ] = 8998
    kv_store: Annotated[
        str,
        Meta(
            description="Shared KV store of the node: the name of a `[[kv_stores]]`. Empty: that of its island, if any."
        ),
    ] = ""
    island: Annotated[
        str, Meta(description="Island of the node: provider and region, for example `aws/us-east-1`.")
    ] = "local"
    gpu: Annotated[str, Meta(description="GPU of the node, for example `L4`. The autoscaler learns speeds by GPU.")] = (
        ""
    )
    gpus: Annotated[
        int, Meta(ge=1, le=1024, description="Number of GPUs of the node. Metrics of GPU seconds count all of them.")
    ] = 1
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
    """Return the node's name. Raises ConfigError if its name or its URL is invalid.

    The name is printed in logs and sent in headers, so it must not contain control characters.
    """
    if len(node.name) > MAX_NAME_LENGTH or not node.name.isprintable():
        raise ConfigError(
            f"nodes.name: {node.name[:MAX_NAME_LENGTH]!r} contains control characters or is longer than "
            f"{MAX_NAME_LENGTH} characters"
        )
    if not node.url.isprintable() or " " in node.url:
        raise ConfigError(f"nodes.url: {node.url!r} contains spaces or control characters")
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
