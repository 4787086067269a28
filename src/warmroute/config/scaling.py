"""Settings of provisioners, which start and end nodes: each `[[provisioners]]` is one cloud, cluster or command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from warmroute.config.node_settings import MaxInflight, Role
from warmroute.config.section import NOT_IN_FILE, Count, Port, Seconds, Section, keys_of

Kind = Literal["process", "kubernetes", "ec2", "skypilot", "command", "webhook"]
Market = Literal["on_demand", "spot"]
COMMON_VARIABLES = ("PATH", "HOME", "USER", "LANG", "LC_*", "TZ", "TMPDIR")
"""Environment variables that every program gets which the router starts."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\*?\Z")


class ProvisionerConfig(Section, frozen=True):
    """A source of nodes. Each kind takes only some of the keys (docs/reference/provisioners.md)."""

    kind: Annotated[Kind, Meta(description="Kind of provisioner.")]
    name: Annotated[str, Meta(description="Name in metrics, logs and the admin API. Empty: the kind.")] = ""
    deployment: Annotated[
        str,
        Meta(
            pattern="^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$",
            description="Tag by which the router finds its machines again. Each fleet needs its own: lower-case "
            "letters, digits and dashes.",
        ),
    ] = "warmroute"
    timeout_s: Annotated[Seconds, Meta(description="Timeout of a call to the provisioner.")] = 30.0
    island: Annotated[str, Meta(description="Island of the nodes. Empty: provider and region.")] = ""
    api_key_env: Annotated[str, Meta(description="Environment variable with the API key that the engines require.")] = (
        ""
    )
    role: Annotated[
        Role, Meta(description="Role of the nodes: their engines have to be started for it. As `nodes.role`.")
    ] = "mixed"
    bootstrap_port: Annotated[
        int, Meta(ge=1, le=65_535, description="Port of a prefill node's bootstrap server. As `nodes.bootstrap_port`.")
    ] = 8998
    max_inflight: MaxInflight = 0
    gpu: Annotated[str, Meta(description="GPU of the nodes, for example `L4`. Empty: as the provider reports.")] = ""
    gpus: Annotated[Count, Meta(description="GPUs per node if the provider does not report it.")] = 1
    spot: Annotated[bool, Meta(description="process, kubernetes: the nodes can be preempted.")] = False
    usd_per_hour: Annotated[
        float, Meta(ge=0, description="process, kubernetes: cost of a node. 0: another node costs nothing.")
    ] = 0.0
    expected_start_s: Annotated[
        float,
        Meta(ge=0, description="Expected time until a new node serves. The router replaces it by what it measures."),
    ] = 0.0
    max_nodes: Annotated[int, Meta(ge=0, description="Maximum number of nodes per offer. 0: no limit.")] = 0
    allow_free: Annotated[
        bool,
        Meta(description="Accept offers with a price of 0. The router always accepts them for process and kubernetes."),
    ] = False
    port: Annotated[Port, Meta(description="Port of the engines. process: the first port to try.")] = 8000

    command: Annotated[
        tuple[str, ...],
        Meta(
            description="process: command that starts an engine, with {port}, {token} and {name} as placeholders "
            "(empty: a simulated engine). command: the program that provisions nodes."
        ),
    ] = ()
    pass_env: Annotated[
        tuple[str, ...],
        Meta(
            description="process, skypilot, command, kubernetes (plugins of the kubeconfig): environment variables "
            "that its programs receive, besides PATH, HOME, USER, LANG, LC_*, TZ and TMPDIR. A `*` at the end stands "
            "for any rest: `AWS_*`."
        ),
    ] = ()
    state_dir: Annotated[
        str, Meta(description="process: directory for the list of processes. Empty: in the user's state directory.")
    ] = ""

    workload: Annotated[
        Literal["deployment", "statefulset", "leaderworkerset"],
        Meta(description="kubernetes: kind of the workload to scale."),
    ] = "deployment"
    workload_name: Annotated[str, Meta(description="kubernetes: name of the workload.")] = ""
    namespace: Annotated[
        str, Meta(description="kubernetes: namespace of the workload. Empty: that of the context.")
    ] = ""
    kubeconfig: Annotated[str, Meta(description="kubernetes: kubeconfig file. Empty: kubectl's default.")] = ""
    context: Annotated[str, Meta(description="kubernetes: context in the kubeconfig. Empty: the current one.")] = ""

    regions: Annotated[
        tuple[str, ...], Meta(description="ec2, skypilot: regions to use. skypilot: empty for all.")
    ] = ()
    instance_types: Annotated[
        tuple[str, ...],
        Meta(description="ec2, skypilot: instance types to use. skypilot: empty for all with `gpu`."),
    ] = ()
    markets: Annotated[tuple[Market, ...], Meta(min_length=1, description="ec2, skypilot: markets to use.")] = (
        "on_demand",
    )
    prices: Annotated[
        dict[str, float],
        Meta(
            description="ec2, skypilot: USD per hour of each offer, by `REGION/TYPE/spot`, `REGION/TYPE` or `TYPE`. "
            "skypilot: overrides the catalogue."
        ),
    ] = msgspec.field(default_factory=dict)
    launch_template: Annotated[str, Meta(description="ec2: name of the launch template, the same in every region.")] = (
        ""
    )
    images: Annotated[dict[str, str], Meta(description="ec2: image per region. Overrides the launch template.")] = (
        msgspec.field(default_factory=dict)
    )
    subnets: Annotated[dict[str, str], Meta(description="ec2: subnet per region. Overrides the launch template.")] = (
        msgspec.field(default_factory=dict)
    )
    user_data_file: Annotated[
        str, Meta(description="ec2: file with the script that starts the engine. Overrides the launch template.")
    ] = ""
    address: Annotated[
        Literal["private", "public"], Meta(description="ec2: address of an instance that the router connects to.")
    ] = "private"

    task_file: Annotated[str, Meta(description="skypilot: YAML file of the task that starts the engine.")] = ""
    sky_command: Annotated[str, Meta(description="skypilot: path of the `sky` command.")] = "sky"
    clouds: Annotated[tuple[str, ...], Meta(description="skypilot: clouds to use, as the catalogue names them.")] = ()

    url: Annotated[str, Meta(pattern="^(https?://.+)?$", description="webhook: URL that receives the calls.")] = ""
    token_env: Annotated[str, Meta(description="webhook: environment variable with the bearer token of the calls.")] = (
        ""
    )

    min_usd_per_gpu_hour: Annotated[float, NOT_IN_FILE] = 0.02
    """A lower price per GPU is a bid floor, not a price: the router drops the offer."""
    max_usd_per_hour: Annotated[float, NOT_IN_FILE] = 500.0
    """A higher price per node is an error: the router drops the offer."""
    catalog_dir: Annotated[str, NOT_IN_FILE] = "~/.sky/catalogs"
    """SkyPilot's catalogue."""
    endpoint_url: Annotated[str, NOT_IN_FILE] = ""
    """API endpoint of EC2. Empty: as AWS_ENDPOINT_URL_EC2 says, or that of AWS."""
    stop_grace_s: Annotated[float, NOT_IN_FILE] = 10.0
    """Time for a process to end before the router kills it."""

    @property
    def label(self) -> str:
        return self.name or self.kind


_COMMON_KEYS = {
    "kind",
    "name",
    "deployment",
    "timeout_s",
    "island",
    "allow_free",
    "api_key_env",
    "role",
    "bootstrap_port",
    "max_inflight",
}
_NODE_KEYS = {"gpu", "gpus", "spot", "usd_per_hour", "expected_start_s", "max_nodes", "port"}
_OFFER_KEYS = {"gpu", "gpus", "expected_start_s", "max_nodes", "port", "regions", "instance_types", "markets", "prices"}
KEYS_OF_KIND: dict[str, set[str]] = {
    "process": _NODE_KEYS | {"command", "state_dir", "pass_env"},
    "kubernetes": _NODE_KEYS | {"workload", "workload_name", "namespace", "kubeconfig", "context", "pass_env"},
    "ec2": _OFFER_KEYS | {"launch_template", "images", "subnets", "user_data_file", "address"},
    "skypilot": _OFFER_KEYS | {"task_file", "sky_command", "clouds", "pass_env"},
    "command": {"command", "pass_env"},
    "webhook": {"url", "token_env"},
}
"""The keys of each kind, without _COMMON_KEYS."""
_REQUIRED_KEYS = {
    "kubernetes": ("workload_name", "gpu"),
    "ec2": ("regions", "instance_types"),
    "skypilot": ("task_file", "clouds"),
    "command": ("command",),
    "webhook": ("url",),
    "process": ("gpu",),
}


def provisioner_problems(provisioners: tuple[ProvisionerConfig, ...]) -> Iterator[str]:
    """Find values that contradict each other."""
    labels: set[str] = set()
    for one in provisioners:
        if one.label in labels:
            yield f"provisioners: two have the name {one.label!r}; give each its own name"
        labels.add(one.label)
        if not one.label.isprintable():
            yield f"provisioners.name: {one.label!r} contains control characters"
        yield from _problems(one)
    for one, other in combinations(provisioners, 2):
        if one.kind == other.kind and _manage_same_machines(one, other):
            advice = "scale each workload only once" if one.kind == "kubernetes" else "give each its own deployment"
            yield f"provisioners: {one.label!r} and {other.label!r} would end each other's machines: {advice}"


def _manage_same_machines(one: ProvisionerConfig, other: ProvisionerConfig) -> bool:
    """For two of the same kind. Processes have their own names; commands and webhooks must keep theirs apart."""
    if one.kind == "kubernetes":
        keys = ("workload", "workload_name", "namespace", "kubeconfig", "context")
        return all(getattr(one, key) == getattr(other, key) for key in keys)
    if one.deployment != other.deployment:
        return False
    if one.kind == "ec2":
        return one.endpoint_url == other.endpoint_url and not set(one.regions).isdisjoint(other.regions)
    return one.kind == "skypilot" and one.sky_command == other.sky_command


def _region_problems(one: ProvisionerConfig) -> Iterator[str]:
    missing = [region for region in one.regions if region not in one.images]
    if not one.launch_template and missing:
        yield (
            f"provisioners.images: {one.label!r} has no image for {', '.join(missing)}; add one for each region, or set"
            " launch_template"
        )
    for key in ("images", "subnets"):
        for region in getattr(one, key):
            if region not in one.regions:
                yield f"provisioners.{key}: {region!r} is not one of the regions ({', '.join(one.regions)})"


def _problems(one: ProvisionerConfig) -> Iterator[str]:
    known, keys = keys_of(ProvisionerConfig), KEYS_OF_KIND[one.kind] | _COMMON_KEYS
    for field in msgspec.structs.fields(ProvisionerConfig):
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        if field.name in known and field.name not in keys and getattr(one, field.name) != default:
            yield (
                f"provisioners.{field.name}: kind {one.kind!r} does not have this key; it has {', '.join(sorted(keys))}"
            )
    for name in _REQUIRED_KEYS[one.kind]:
        if not getattr(one, name):
            yield f"provisioners.{name}: kind {one.kind!r} requires it ({one.label})"
    for name in one.pass_env:
        if not _VARIABLE.match(name):
            yield f"provisioners.pass_env: {name!r} is not the name of an environment variable"
    if one.kind == "ec2":
        yield from _region_problems(one)
    if one.kind == "skypilot" and not (one.gpu or one.instance_types):
        yield "provisioners: skypilot requires gpu or instance_types, or it offers its whole catalogue"
    for offer, usd in one.prices.items():
        if not 0 <= usd < float("inf"):
            yield f"provisioners.prices: {usd} is not a valid price for {offer!r}"
