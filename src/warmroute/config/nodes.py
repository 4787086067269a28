"""Settings of discovery, which finds nodes that others start: each `[[discovery]]` is one source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from warmroute.config.node_settings import MaxInflight, Role
from warmroute.config.section import Port, Seconds, Section

DEFAULT_ENGINE_PORT = 8000
"""Port of an engine whose source names none: that of vLLM."""


class DiscoveryConfig(Section, frozen=True):
    """A source of nodes that somebody else starts. Each kind takes only some of the keys (docs/guides/discovery.md)."""

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
    models: Annotated[
        tuple[str, ...], Meta(description="Models that the nodes serve. Empty: read from their /v1/models.")
    ] = ()
    engine: Annotated[
        Literal["auto", "vllm", "sglang", "trtllm"],
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
    kv_replay: Annotated[
        str,
        Meta(
            pattern="^(tcp://.+:[0-9]+)?$",
            description="Endpoint that replays missed KV events: `tcp://*:PORT`. Empty: from the engine.",
        ),
    ] = ""

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
    max_refresh_s: Annotated[
        Seconds, Meta(description="dns: longest time between two resolutions. A record's TTL may be shorter.")
    ] = 30.0

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
    timeout_s: Annotated[Seconds, Meta(description="dns, kubernetes: timeout of a request to the source.")] = 10.0

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
    for field in msgspec.structs.fields(DiscoveryConfig):
        if field.name not in keys and getattr(one, field.name) != field.default:
            yield f"discovery.{field.name}: kind {one.kind!r} does not have this key; it has {', '.join(sorted(keys))}"
    if one.kind == "file" and not one.file:
        yield f"discovery.file: kind 'file' requires it ({one.label})"
    if one.kind == "dns" and not one.dns_name:
        yield f"discovery.dns_name: kind 'dns' requires it ({one.label})"
    if one.kind == "kubernetes" and sum(map(bool, (one.service, one.pod_selector, one.inference_pool))) != 1:
        yield f"discovery: kind 'kubernetes' requires one of service, pod_selector and inference_pool ({one.label})"
    if one.inference_pool and (one.port or one.port_name):
        yield f"discovery: the InferencePool names the ports; remove port and port_name ({one.label})"
