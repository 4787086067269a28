"""Settings of the node side: nodes, islands, KV stores, discovery, connections, health checks, polling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Final, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from warmroute.config.section import NOT_IN_FILE, REMOVED, ConfigError, Count, Port, Seconds, Section, keys_of

# A node: its address, models, engine, island and KV events.

EngineName = Literal["auto", "vllm", "sglang", "trtllm"]
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

    removed: ClassVar = {
        "max_model_len": "what the engine reports",
        "kv_replay": "what the engine reports",
    }

    url: Annotated[str, Meta(description="Base URL: `http://host:port` or `https://host:port`.")]
    name: Annotated[
        str, Meta(description="Name in metrics, logs and the admin API, without control characters. Empty: host:port.")
    ] = ""
    models: Annotated[
        tuple[str, ...], Meta(description="Models that the node serves. Empty: read from its /v1/models.")
    ] = ()
    max_model_len: Annotated[int, Meta(ge=0, le=1000000000), REMOVED] = 0
    """Maximum number of prompt and output tokens together. 0: as the engine reports in /v1/models."""
    max_inflight: MaxInflight = 0
    engine: Annotated[
        EngineName,
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
    kv_replay: Annotated[str, Meta(pattern="^(tcp://.+:[0-9]+)?$"), REMOVED] = ""
    """Endpoint that replays missed KV events: `tcp://host:port`. Empty: from the engine."""


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


# Settings of islands: the network between the router and its nodes, and when a conversation leaves its island.


class IslandConfig(Section, frozen=True):
    """An island: nodes that share a cheap network. An island without this table has a measured round trip and no
    egress cost."""

    removed: ClassVar = {
        "round_trip_ms": "what health checks measure",
    }

    name: Annotated[str, Meta(min_length=1, description="Name that nodes use, for example `aws/us-east-1`.")]
    round_trip_ms: Annotated[float, Meta(ge=0), REMOVED] = 0.0
    """Network round trip between the router and the island. 0: measured by health checks."""
    egress_usd_per_gb: Annotated[
        float,
        Meta(ge=0, description="Cost of traffic between the router and the island, for requests and responses."),
    ] = 0.0


class IslandAffinity(Section, frozen=True):
    """When a conversation leaves its island, for the policy `price` and models with nodes on several islands. The file
    sets none of this."""

    max_delay_ms: Annotated[float, Meta(ge=0), REMOVED] = 1000.0
    """A conversation leaves its island if its first token would come this much later there than on another island: a
    second is what a reader notices, and a conversation that left prefills its whole history again."""
    gpu_usd_per_hour: Annotated[float, Meta(gt=0), REMOVED] = 2.0
    """Cost of a GPU. The router uses it to convert egress cost into time. Rented L4 to H100 cost 0.7 to 4 USD."""
    enabled: Annotated[bool, NOT_IN_FILE] = True
    """Off: the router prices every turn of a conversation on all islands."""


def island_problems(islands: Sequence[IslandConfig]) -> Iterator[str]:
    """Find islands with the same name."""
    names: set[str] = set()
    for island in islands:
        if island.name in names:
            yield f"islands: {island.name!r} is defined twice"
        names.add(island.name)


# Settings of shared KV stores, such as LMCache's remote backend or a Mooncake store.


class KvStoreConfig(Section, frozen=True):
    """A KV store that several nodes read and write. What one of them has prefilled, the others can load."""

    name: Annotated[str, Meta(min_length=1, description="Name, for `nodes.kv_store` and the metrics.")]
    capacity_tokens: Annotated[
        Count, Meta(description="Tokens that fit: the store's bytes divided by the bytes of KV cache per token.")
    ]
    island: Annotated[
        str, Meta(description="All nodes of this island use the store. Empty: those with `nodes.kv_store`.")
    ] = ""


def kv_store_of(node: NodeConfig, stores: Sequence[KvStoreConfig]) -> str:
    """Return the name of the node's store; empty if it has none."""
    return node.kv_store or next((one.name for one in stores if one.island and one.island == node.island), "")


def kv_store_problems(stores: Sequence[KvStoreConfig], nodes: Sequence[NodeConfig]) -> Iterator[str]:
    """Find values that contradict each other."""
    names = [store.name for store in stores]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield f"kv_stores: {name!r} is defined twice"
    islands = [store.island for store in stores if store.island]
    for island in dict.fromkeys(islands):
        if islands.count(island) > 1:
            yield f"kv_stores: two stores have the island {island!r}"
    for node in nodes:
        if node.kv_store and node.kv_store not in names:
            yield f"nodes.kv_store: no [[kv_stores]] has the name {node.kv_store!r}"


# Settings of discovery, which finds nodes that others start: each `[[discovery]]` is one source.

DEFAULT_ENGINE_PORT = 8000
"""Port of an engine whose source names none: that of vLLM."""


class DiscoveryConfig(Section, frozen=True):
    """A source of nodes that somebody else starts. Each kind takes only some of the keys (docs/guides/discovery.md)."""

    removed: ClassVar = {
        "models": "what the nodes report",
        "kv_replay": "what the engine reports",
    }

    kind: Annotated[Literal["file", "dns", "kubernetes"], Meta(description="Kind of source.")]
    name: Annotated[str, Meta(description="Name in metrics, logs and the admin API. Empty: the kind.")] = ""
    scheme: Annotated[
        Literal["http", "https"], Meta(description="Scheme of the engines' URLs, unless a target has its own.")
    ] = "http"
    port: Annotated[
        Port,
        Meta(
            description="dns, kubernetes: port of the engines. 0: that of the SRV record, the Service or the Pod. "
            "Without one, 8000."
        ),
    ] = 0
    models: Annotated[tuple[str, ...], REMOVED] = ()
    """Models that the nodes serve. Empty: read from their /v1/models."""
    engine: Annotated[
        EngineName,
        Meta(description="Engine of the nodes. `auto`: detected from their metrics."),
    ] = "auto"
    role: Annotated[Role, Meta(description="Role of the nodes that name none themselves.")] = "mixed"
    island: Annotated[
        str, Meta(description="Island of the nodes. Empty: as the source reports it, otherwise `local`.")
    ] = ""
    gpu: Annotated[str, Meta(description="GPU of the nodes. Empty: as the source reports it.")] = ""
    usd_per_hour: Annotated[float, Meta(ge=0, description="Cost of each node. 0: unknown.")] = 0.0
    max_inflight: MaxInflight = 0
    api_key_env: Annotated[str, Meta(description="Environment variable with the API key that the engines require.")] = (
        ""
    )
    kv_events: Annotated[
        str,
        Meta(
            pattern="^(auto|off|tcp://.+:[0-9]+)$",
            description="Endpoint of each node's KV events: `auto`, `off`, or `tcp://*:PORT` (`*`: the node's host).",
        ),
    ] = "auto"
    kv_replay: Annotated[str, Meta(pattern="^(tcp://.+:[0-9]+)?$"), REMOVED] = ""
    """Endpoint that replays missed KV events: `tcp://*:PORT`. Empty: from the engine."""

    file: Annotated[
        str, Meta(description="file: targets in the format of Prometheus' file_sd: JSON, or YAML (.yml, .yaml).")
    ] = ""

    dns_name: Annotated[str, Meta(description="dns: the name to resolve.")] = ""
    record_type: Annotated[Literal["A", "AAAA", "SRV"], Meta(description="dns: records to resolve.")] = "A"
    dns_server: Annotated[
        str,
        Meta(
            pattern=r"^([0-9.]+(:[0-9]+)?|\[[0-9A-Fa-f:]+\](:[0-9]+)?)?$",
            description="dns: address of the DNS server: `10.0.0.53`, `10.0.0.53:8600` or `[fd00::53]:53`. Empty: as "
            "/etc/resolv.conf says.",
        ),
    ] = ""
    max_refresh_s: Annotated[Seconds, REMOVED] = 30.0
    """dns: longest time between two resolutions. A record's TTL may be shorter: half a minute is how long a new node
    waits."""

    service: Annotated[str, Meta(description="kubernetes: Service whose EndpointSlices list the nodes.")] = ""
    pod_selector: Annotated[
        str, Meta(description="kubernetes: label selector of the Pods, for example `app=vllm,tier=gpu`.")
    ] = ""
    inference_pool: Annotated[
        str,
        Meta(
            description="kubernetes: InferencePool (inference.networking.k8s.io/v1) that lists Pods and ports. "
            "Its InferenceObjectives set the priorities of requests that reach `warmroute picker`."
        ),
    ] = ""
    port_name: Annotated[str, Meta(description="kubernetes: name of the port, if a Service or a Pod has several.")] = ""
    namespace: Annotated[
        str, Meta(description="kubernetes: namespace of the Service or of the Pods. Empty: that of the context.")
    ] = ""
    kubeconfig: Annotated[
        str, Meta(description="kubernetes: kubeconfig file. Empty: the Pod's service account, or kubectl's default.")
    ] = ""
    context: Annotated[str, Meta(description="kubernetes: context in the kubeconfig. Empty: the current one.")] = ""
    pass_env: Annotated[
        tuple[str, ...],
        Meta(
            description="kubernetes: environment variables that a plugin for credentials receives, besides PATH, HOME, "
            "USER, LANG, LC_*, TZ, TMPDIR, KUBECONFIG and KUBERNETES_*. A `*` at the end stands for any rest: `AWS_*`."
        ),
    ] = ()
    timeout_s: Annotated[Seconds, REMOVED] = 10.0
    """dns, kubernetes: timeout of a request to the source. The nodes that are known stay meanwhile."""

    @property
    def label(self) -> str:
        return self.name or self.kind


_COMMON_KEYS = {
    "kind", "name", "scheme", "models", "engine", "role", "island", "gpu", "usd_per_hour", "max_inflight",
    "api_key_env", "kv_events", "kv_replay",
}  # fmt: skip
_KEYS_OF_KIND = {
    "file": {"file"},
    "dns": {"dns_name", "record_type", "dns_server", "max_refresh_s", "port", "timeout_s"},
    "kubernetes": {
        "service", "pod_selector", "inference_pool", "port", "port_name", "namespace", "kubeconfig", "context",
        "pass_env", "timeout_s",
    },
}  # fmt: skip


def discovery_problems(sources: tuple[DiscoveryConfig, ...]) -> Iterator[str]:
    """Find values that contradict each other."""
    labels: set[str] = set()
    for one in sources:
        if one.label in labels:
            yield f"discovery: two sources have the name {one.label!r}; give each its own name"
        labels.add(one.label)
        if not one.label.isprintable() or len(one.label) > 100:
            yield f"discovery.name: {one.label[:100]!r} contains control characters or is longer than 100 characters"
        yield from _problems(one)


def _problems(one: DiscoveryConfig) -> Iterator[str]:
    keys = _KEYS_OF_KIND[one.kind] | _COMMON_KEYS
    named = sorted(keys & keys_of(DiscoveryConfig).keys())
    for field in msgspec.structs.fields(DiscoveryConfig):
        if field.name not in keys and getattr(one, field.name) != field.default:
            yield f"discovery.{field.name}: kind {one.kind!r} does not have this key; it has {', '.join(named)}"
    if one.kind == "file" and not one.file:
        yield f"discovery.file: kind 'file' requires it ({one.label})"
    if one.kind == "dns" and not one.dns_name:
        yield f"discovery.dns_name: kind 'dns' requires it ({one.label})"
    if one.kind == "kubernetes" and sum(map(bool, (one.service, one.pod_selector, one.inference_pool))) != 1:
        yield f"discovery: kind 'kubernetes' requires one of service, pod_selector and inference_pool ({one.label})"
    if one.inference_pool and (one.port or one.port_name):
        yield f"discovery: the InferencePool names the ports; remove port and port_name ({one.label})"


# How the router talks to nodes: connections, health checks, polling of their metrics.


class Upstream(Section, frozen=True):
    """Connections to nodes."""

    connect_timeout_s: Annotated[Seconds, REMOVED] = 2.0
    """Time to connect to a node, including TLS: a lost SYN is sent again after one second, and has another one."""
    first_byte_timeout_s: Annotated[
        Seconds,
        Meta(description="Time for a node to start its response. Without streaming, it starts when it is complete."),
    ] = 600.0
    between_chunks_timeout_s: Annotated[Seconds, Meta(description="Maximum time between two chunks of a response.")] = (
        120.0
    )
    idle_timeout_s: Annotated[Seconds, REMOVED] = 4.0
    """Time the router keeps an unused connection: below the 5 s after which vLLM and SGLang close it."""
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
    """Health checks and circuit breakers. The file sets none of this."""

    interval_s: Annotated[Seconds, REMOVED] = 1.0
    """Time between two health checks of a node, plus jitter: a node that hangs is noticed within seconds."""
    timeout_s: Annotated[Seconds, REMOVED] = 2.0
    """Timeout of a health check and of a metrics read. A busy engine answers late; `consecutive_timeouts` allows it."""
    path: Annotated[str, Meta(pattern="^/"), REMOVED] = "/health"
    """Path of the health check, the same for vLLM, SGLang and TensorRT-LLM."""
    consecutive_timeouts: Annotated[Count, REMOVED] = 3
    """Consecutive health check timeouts after which a node is down, unless it answers requests in the meantime: an
    engine that compiles or loads an adapter misses one or two."""
    consecutive_failures: Annotated[Count, REMOVED] = 5
    """Consecutive failed requests after which the circuit breaker of a node opens: as in Envoy's outlier detection."""
    breaker_open_s: Annotated[Seconds, REMOVED] = 0.5
    """Time for which a circuit breaker opens at first. It doubles with each failed trial, so half a second costs a dead
    node few trials, and one that only stumbled is back soon."""
    breaker_open_max_s: Annotated[Seconds, REMOVED] = 15.0
    """Maximum time for which a circuit breaker opens: a restarted engine waits no longer for its first request."""
    slow_start_s: Annotated[float, Meta(ge=0), REMOVED] = 10.0
    """Time over which the traffic of a recovered node rises to its full share: its cache is empty. 0: at once."""


class Hedging(Section, frozen=True):
    """Sending a request that waits too long for its first token to a second node as well."""

    max_ratio: Annotated[
        float,
        Meta(ge=0, le=1, description="Maximum share of requests that the router hedges, beside ten at once. 0: none."),
    ] = 0.05
    factor: Annotated[float, Meta(ge=1), REMOVED] = 5.0
    """A first token is overdue after this many times the time that the router expected: estimates of a node that works
    are rarely wrong by more."""
    min_delay_s: Annotated[Seconds, REMOVED] = 2.0
    """A first token is not overdue before this time, whatever was expected: as long as a health check."""


class OutlierDetection(Section, frozen=True):
    """Ejection of nodes that answer far worse than their peers. The file sets none of this."""

    interval_s: Annotated[Seconds, REMOVED] = 10.0
    """Time over which the requests of a node are judged. A slow one is ejected after this time. As in Envoy."""
    min_requests: Annotated[Count, REMOVED] = 10
    """A node with fewer requests in this time is not judged: five failures of ten are hardly chance."""
    failure_ratio: Annotated[float, Meta(ge=0, le=1), REMOVED] = 0.5
    """Share of failed requests from which on a node is ejected. 0: never. Below half, most are served there."""
    slow_factor: Annotated[float, Meta(ge=0), REMOVED] = 5.0
    """A node is ejected if its prompt tokens take this many times as long as before, unless other nodes slow down as
    well, or as on other nodes with the same `gpu`. 0: never. Other mixes of prompts change the time by less."""
    ejection_s: Annotated[Seconds, REMOVED] = 30.0
    """Time of a node's first ejection. Each further one takes this much longer, up to 300 s. As in Envoy."""
    max_ejected_ratio: Annotated[float, Meta(ge=0, le=1), REMOVED] = 0.5
    """A node is not ejected if more than this share of its model's nodes would be out: if most nodes are bad, the load
    or the requests are at fault."""


class Polling(Section, frozen=True):
    """Polling of the nodes' own metrics. The file sets none of this."""

    interval_s: Annotated[Seconds, REMOVED] = 1.0
    """Time between two reads of a node's /metrics, plus jitter. Between them, the router counts its own requests."""
    stale_s: Annotated[Seconds, REMOVED] = 5.0
    """Age after which the router ignores a node's metrics: a few reads may fail."""
