"""Where nodes may be had: each `[[provisioners]]` is one cloud, cluster or command."""

from __future__ import annotations

from itertools import combinations
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from warmroute.config.section import ConfigError, Count, Port, Seconds, Section

Kind = Literal["process", "kubernetes", "ec2", "skypilot", "command", "webhook"]
Market = Literal["on_demand", "spot"]


class ProvisionerConfig(Section, frozen=True):
    """Where nodes may be had. Which keys count depends on the kind (docs/provisioners.md)."""

    kind: Annotated[Kind, Meta(description="What it is.")]
    name: Annotated[str, Meta(description="Its name in metrics, logs and the admin API; empty: its kind.")] = ""
    deployment: Annotated[
        str,
        Meta(
            pattern="^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$",
            description="Name that its machines carry, so that they are found again: each fleet needs its own.",
        ),
    ] = "warmroute"
    timeout_s: Annotated[Seconds, Meta(description="Time for one call to it.")] = 30.0
    island: Annotated[str, Meta(description="The island its nodes stand on; empty: provider and region.")] = ""
    api_key_env: Annotated[str, Meta(description="Environment variable with the key that its engines ask for.")] = ""
    gpu: Annotated[str, Meta(description="The GPU of its nodes, say `L4`; empty: what the provider says.")] = ""
    gpus: Annotated[Count, Meta(description="GPUs of a node, where the provider does not say.")] = 1
    spot: Annotated[bool, Meta(description="process, kubernetes: whether its nodes may be taken back.")] = False
    usd_per_hour: Annotated[
        float, Meta(ge=0, description="process, kubernetes: what a node costs; 0 where it costs nothing to add one.")
    ] = 0.0
    start_s: Annotated[float, Meta(ge=0, description="Time from the request to a node that serves, to begin with.")] = (
        0.0
    )
    most: Annotated[int, Meta(ge=0, description="Most nodes of each offer; 0 where nobody says.")] = 0
    free: Annotated[
        bool, Meta(description="Whether a price of 0 is meant; elsewhere than process and kubernetes it is dropped.")
    ] = False
    min_usd_per_gpu_hour: Annotated[
        float, Meta(ge=0, description="A price below this for each GPU is a bid floor, not a price: dropped.")
    ] = 0.02
    max_usd_per_hour: Annotated[float, Meta(gt=0, description="A price above this for a node is dropped.")] = 500.0
    port: Annotated[
        Port, Meta(description="Port that engines listen on; process: the first of those that are tried.")
    ] = 8000

    command: Annotated[
        tuple[str, ...],
        Meta(
            description="process: starts an engine, with {port}, {token} and {name} filled in (empty: a simulated "
            "one). command: the operator's program."
        ),
    ] = ()
    state_dir: Annotated[
        str, Meta(description="process: folder that remembers the processes; empty: in the state folder of the user.")
    ] = ""
    grace_s: Annotated[
        float, Meta(ge=0, description="process: time that an engine has to end before it is killed.")
    ] = 10.0

    workload: Annotated[
        Literal["deployment", "statefulset", "leaderworkerset"], Meta(description="kubernetes: what is scaled.")
    ] = "deployment"
    workload_name: Annotated[str, Meta(description="kubernetes: its name.")] = ""
    namespace: Annotated[str, Meta(description="kubernetes: its namespace; empty: that of the context.")] = ""
    kubeconfig: Annotated[
        str, Meta(description="kubernetes: file that says how to reach the cluster; empty: as kubectl finds it.")
    ] = ""
    context: Annotated[str, Meta(description="kubernetes: context in that file; empty: the current one.")] = ""

    regions: Annotated[
        tuple[str, ...], Meta(description="ec2, skypilot: regions to look in (skypilot: empty for all).")
    ] = ()
    instance_types: Annotated[
        tuple[str, ...], Meta(description="ec2, skypilot: instance types to take (skypilot: empty for all with `gpu`).")
    ] = ()
    markets: Annotated[tuple[Market, ...], Meta(min_length=1, description="ec2, skypilot: how to buy.")] = (
        "on_demand",
    )
    prices: Annotated[
        dict[str, float],
        Meta(
            description="ec2: dollars an hour by offer, `REGION/TYPE/spot`, `REGION/TYPE` or `TYPE`; "
            "skypilot: instead of the catalogue's."
        ),
    ] = msgspec.field(default_factory=dict)
    launch_template: Annotated[str, Meta(description="ec2: name of the launch template, the same in every region.")] = (
        ""
    )
    images: Annotated[dict[str, str], Meta(description="ec2: image by region, instead of the template's.")] = (
        msgspec.field(default_factory=dict)
    )
    subnets: Annotated[dict[str, str], Meta(description="ec2: subnet by region, instead of the template's.")] = (
        msgspec.field(default_factory=dict)
    )
    user_data_file: Annotated[
        str, Meta(description="ec2: file with the script that starts the engine, instead of the template's.")
    ] = ""
    address: Annotated[
        Literal["private", "public"], Meta(description="ec2: which address of an instance the router speaks to.")
    ] = "private"
    endpoint_url: Annotated[str, Meta(description="ec2: another endpoint than AWS's own.")] = ""

    task: Annotated[str, Meta(description="skypilot: the task's YAML file, which starts the engine.")] = ""
    sky: Annotated[str, Meta(description="skypilot: its command.")] = "sky"
    catalog_dir: Annotated[
        str, Meta(description="skypilot: its catalogue; one folder for each version, or for each cloud.")
    ] = "~/.sky/catalogs"
    clouds: Annotated[tuple[str, ...], Meta(description="skypilot: clouds to look in, by the catalogue's names.")] = ()

    url: Annotated[str, Meta(pattern="^(https?://.+)?$", description="webhook: where calls are posted to.")] = ""
    token_env: Annotated[
        str, Meta(description="webhook: environment variable with the bearer token that calls carry.")
    ] = ""

    @property
    def label(self) -> str:
        return self.name or self.kind


_NODE = {"gpu", "gpus", "spot", "usd_per_hour", "start_s", "most", "port"}
_PRICED = {"gpu", "gpus", "start_s", "most", "port", "regions", "instance_types", "markets", "prices"}
_COMMON = {
    "kind", "name", "deployment", "timeout_s", "island", "free", "min_usd_per_gpu_hour", "max_usd_per_hour",
    "api_key_env",
}  # fmt: skip
TAKES: dict[str, set[str]] = {
    "process": _NODE | {"command", "state_dir", "grace_s"},
    "kubernetes": _NODE | {"workload", "workload_name", "namespace", "kubeconfig", "context"},
    "ec2": _PRICED | {"launch_template", "images", "subnets", "user_data_file", "address", "endpoint_url"},
    "skypilot": _PRICED | {"task", "sky", "catalog_dir", "clouds"},
    "command": {"command"},
    "webhook": {"url", "token_env"},
}
"""Which keys each kind takes, besides those that all take."""


def check_provisioners(provisioners: tuple[ProvisionerConfig, ...]) -> None:
    """Raises ConfigError where values do not fit together."""
    names: set[str] = set()
    for one in provisioners:
        if one.label in names:
            raise ConfigError(f"provisioners: two are named {one.label!r}: give each its own name")
        names.add(one.label)
        _check(one)
    for one, other in combinations(provisioners, 2):
        if one.kind == other.kind and _see_the_same(one, other):
            raise ConfigError(
                f"provisioners: {one.label!r} and {other.label!r} would see, and end, each other's machines: "
                + ("scale each workload once" if one.kind == "kubernetes" else "give each its own deployment")
            )


def _see_the_same(one: ProvisionerConfig, other: ProvisionerConfig) -> bool:
    """Of two of one kind. What a command or a webhook sees is its own affair; processes are kept by name."""
    if one.kind == "kubernetes":
        where = ("workload", "workload_name", "namespace", "kubeconfig", "context")
        return all(getattr(one, key) == getattr(other, key) for key in where)
    if one.deployment != other.deployment:
        return False
    if one.kind == "ec2":
        return one.endpoint_url == other.endpoint_url and not set(one.regions).isdisjoint(other.regions)
    return one.kind == "skypilot" and one.sky == other.sky


def _check(one: ProvisionerConfig) -> None:
    takes = TAKES[one.kind] | _COMMON
    for field in msgspec.structs.fields(ProvisionerConfig):
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        if field.name not in takes and getattr(one, field.name) != default:
            raise ConfigError(
                f"provisioners.{field.name} means nothing to kind {one.kind!r}; it takes {', '.join(sorted(takes))}"
            )
    needs = {
        "kubernetes": ("workload_name", "gpu"),
        "ec2": ("regions", "instance_types"),
        "skypilot": ("task", "clouds"),
        "command": ("command",),
        "webhook": ("url",),
        "process": ("gpu",),
    }
    for name in needs[one.kind]:
        if not getattr(one, name):
            raise ConfigError(f"provisioners.{name} is needed with kind {one.kind!r} ({one.label})")
    if one.kind == "ec2" and not one.launch_template and set(one.images) < set(one.regions):
        raise ConfigError("provisioners: ec2 needs launch_template, or images with one for each region")
    if one.kind == "skypilot" and not (one.gpu or one.instance_types):
        raise ConfigError("provisioners: skypilot needs gpu or instance_types, else its whole catalogue is on offer")
    for where, usd in one.prices.items():
        if not 0 <= usd < float("inf"):
            raise ConfigError(f"provisioners.prices: {usd} for {where!r} is no price")
