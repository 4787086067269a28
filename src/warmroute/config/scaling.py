"""Settings of scaling: limits, objectives, provisioners."""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from itertools import combinations
from typing import Annotated, ClassVar, Final, Literal

import msgspec
from msgspec import Meta

from warmroute.config.nodes import MaxInflight, Role
from warmroute.config.section import NOT_IN_FILE, REMOVED, Count, Port, Ratio, Seconds, Section, keys_of

# Settings of autoscaling.

LOW_UTILISATION: Final = 0.45
LOW_QUEUE_PER_NODE: Final = 1.0
"""The router removes nodes only below this utilisation, and with fewer waiting requests per node than this."""

TimeOfDay = Annotated[str, Meta(pattern="^(([01][0-9]|2[0-3]):[0-5][0-9]|24:00)$")]
Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
Pool = Literal["prefill", "decode"]
DAYS: tuple[Day, ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


class IslandLimits(Section, frozen=True):
    """Limits on the number of nodes of an island."""

    island: Annotated[str, Meta(min_length=1, description="Name of the island, as in nodes and offers.")]
    min_nodes: Annotated[int, Meta(ge=0, description="Minimum number of nodes.")] = 0
    max_nodes: Annotated[int, Meta(ge=0, description="Maximum number of nodes.")] = 64


class RoleLimits(Section, frozen=True):
    """Limits on the number of nodes of a role."""

    role: Annotated[
        Pool,
        Meta(description="`prefill`: the prefill nodes. `decode`: all nodes that serve requests, also mixed ones."),
    ]
    min_nodes: Annotated[Count, Meta(description="Minimum number of nodes.")] = 1
    max_nodes: Annotated[Count, Meta(description="Maximum number of nodes.")] = 64


class Hours(Section, frozen=True):
    """Hours of the day with a higher minimum number of nodes."""

    start: Annotated[TimeOfDay, Meta(description="Start, `HH:MM` in UTC.")]
    end: Annotated[
        TimeOfDay, Meta(description="End, `HH:MM` in UTC. An end at or before the start is on the next day.")
    ]
    min_nodes: Annotated[Count, Meta(description="Minimum number of nodes during these hours.")]
    days: Annotated[tuple[Day, ...], Meta(min_length=1, description="Days of the week on which the hours start.")] = (
        DAYS
    )


class Objective(Section, frozen=True):
    """What the autoscaler has to reach with the cheapest fleet. All limits that are set count. The budget is
    `scaling.budget_usd_per_hour`."""

    removed: ClassVar = {
        "ttft_p99_ms": "no limit",
        "min_good_ratio": "no limit",
    }

    ttft_p90_ms: Annotated[float, Meta(ge=0, description="Limit of the p90 time to first token. 0: no limit.")] = 2000.0
    ttft_p99_ms: Annotated[float, Meta(ge=0), REMOVED] = 0.0
    """Limit of the p99 time to first token. 0: no limit. A replay has too few requests for a stable p99."""
    inter_token_p90_ms: Annotated[
        float, Meta(ge=0, description="Limit of the p90, over requests, of the mean time between tokens. 0: no limit.")
    ] = 0.0
    min_good_ratio: Annotated[float, Meta(ge=0, le=1), REMOVED] = 0.0
    """Minimum fraction of requests whose first token comes within 2 s + 0.5 ms × prompt tokens. 0: no limit."""


class ScalingReplay(Section, frozen=True):
    """Scaling by replay: before the autoscaler changes the fleet, a process of low priority replays the recent traffic
    on fleets of other sizes. The file sets none of this."""

    enabled: Annotated[bool, REMOVED] = True
    """Replay recent traffic to decide how many nodes are needed. false: thresholds only, for comparisons."""
    interval_s: Annotated[Seconds, REMOVED] = 300.0
    """Time between two searches. If more requests arrive than expected, a fifth of it; if the load rises and the fleet
    is only just large enough, two fifths."""
    window_s: Annotated[Seconds, REMOVED] = 1800.0
    """How much of the recent traffic is replayed: it holds the pauses between the turns of conversations."""
    max_requests: Annotated[int, Meta(ge=100, le=100000), REMOVED] = 10_000
    """Maximum number of requests in one replay. It has more than 4,000 only if these cover too little time, on busy
    nodes."""
    margin: Annotated[float, Meta(ge=0, le=1), REMOVED] = 0.05
    """The fleet has to meet the objective with this fraction more requests than expected, besides what chance does to
    few conversations; to remove a node, the rest has to meet it with at least twice this fraction more."""
    cpu_share: Annotated[Ratio, REMOVED] = 0.1
    """Fraction of one core that the replaying process may take on average: the router itself comes first."""


class Scaling(Section, frozen=True):
    """When the router adds and removes nodes."""

    removed: ClassVar = {
        "keda_host": "listen.host",
        "max_latency_p99_ms": "no limit",
    }

    enabled: Annotated[bool, Meta(description="Scale the fleet.")] = False
    dry_run: Annotated[bool, Meta(description="Log scaling decisions without executing them.")] = False
    interval_s: Annotated[Seconds, REMOVED] = 5.0
    """Time between two decisions: a tenth of the time over which load is averaged."""
    min_nodes: Annotated[int, Meta(ge=0, description="Minimum number of nodes. 0 allows scaling to zero.")] = 1
    max_nodes: Annotated[Count, Meta(description="Maximum number of nodes.")] = 8
    budget_usd_per_hour: Annotated[
        float, Meta(ge=0, description="Maximum cost of all nodes together. 0: no limit.")
    ] = 0.0
    target_utilisation: Annotated[float, Meta(ge=LOW_UTILISATION, le=1), REMOVED] = 0.6
    """Between two replays, the router adds nodes if prefill and decode take more than this fraction of the fleet's
    time."""
    max_queue_per_node: Annotated[float, Meta(gt=LOW_QUEUE_PER_NODE), REMOVED] = 4.0
    """Between two replays, the router adds nodes if more requests per node than this wait, in the router and on nodes,
    and the objective is missed."""
    min_hit_ratio: Annotated[float, Meta(ge=0, le=1), REMOVED] = 0.3
    """Without replay, the router adds nodes if less than this fraction of the prompt tokens is cached, and more cache
    would help."""
    max_ttft_p99_ms: Annotated[float, Meta(ge=0), REMOVED] = 10_000.0
    """Without replay, the router adds nodes if the p99 time to first token is longer. An offer on which a usual prompt
    takes longer is not used. 0: no limit."""
    max_latency_p99_ms: Annotated[float, Meta(ge=0), REMOVED] = 0.0
    """Without replay, the router adds nodes if the p99 response time is longer. 0: no limit."""
    stable_window_s: Annotated[Seconds, REMOVED] = 60.0
    """Time over which the router averages load: a dozen decisions."""
    panic_window_s: Annotated[Seconds, REMOVED] = 15.0
    """Shorter time over which it averages load to detect a sudden rise: three decisions."""
    trend_window_s: Annotated[float, Meta(ge=0), REMOVED] = 300.0
    """Time over which the router measures the load's trend, to add nodes early: about as long as a node takes to start.
    0: off."""
    cooldown_up_s: Annotated[Seconds, REMOVED] = 30.0
    """Time after a change before the router adds nodes: half of what `stable_window_s` needs to show the change."""
    cooldown_down_s: Annotated[Seconds, REMOVED] = 180.0
    """Time after a change before the router removes nodes. A node that is missing costs more than one too many."""
    scale_to_zero_after_s: Annotated[
        float,
        Meta(ge=0, description="Time without requests after which the last nodes are removed. Needs `min_nodes = 0`."),
    ] = 600.0
    first_node_wait_s: Annotated[
        Seconds, Meta(description="Maximum time a request waits for the first node of an empty fleet.")
    ] = 600.0
    offer_backoff_s: Annotated[Seconds, REMOVED] = 60.0
    """Time for which the router does not use an offer that failed. It doubles with each failure, so clouds without
    capacity are not asked in vain."""
    boot_timeout_s: Annotated[Seconds, REMOVED] = 900.0
    """Time for a new node to get an address. Clouds that have a machine give it one within minutes."""
    load_timeout_s: Annotated[
        Seconds, Meta(description="Time for its engine to load the model and pass a health check.")
    ] = 1800.0
    drain_timeout_s: Annotated[Seconds, REMOVED] = 900.0
    """Time for the requests of a draining node to finish before the router removes it: longer than
    `first_byte_timeout_s`."""
    prewarm_prefixes: Annotated[int, Meta(ge=0), REMOVED] = 16
    """Number of hot prefixes that a new node prefills before it gets traffic: seconds of work."""
    lock_file: Annotated[
        str,
        Meta(description="Lock file. Of all routers that use it, only one scales the fleet. Empty: no lock."),
    ] = ""
    switch_roles: Annotated[
        bool,
        Meta(
            description="Change the role of a prefill or decode node that its pool can spare, if the other pool lacks "
            "nodes and the engine can play both parts (vLLM with `kv_role` `kv_both`)."
        ),
    ] = False
    keda_host: Annotated[str, REMOVED] = ""
    """Address of the gRPC listener for KEDA's external scaler. Empty: `listen.host`. KEDA asks over the network that
    clients come by."""
    keda_port: Annotated[
        Port,
        Meta(
            description="Deprecated: KEDA's trigger `metrics-api` reads `GET /admin/scaling` instead. Port of the gRPC "
            "listener for KEDA's external scaler. 0: no listener."
        ),
    ] = 0
    max_mean_wait_ms: Annotated[float, Meta(gt=0), NOT_IN_FILE] = 100.0
    """The router adds nodes if the mean wait for a node is longer."""
    max_kv_usage: Annotated[Ratio, NOT_IN_FILE] = 0.35
    """The router adds nodes if running requests use more than this fraction of the KV memory. The rest is cache."""
    max_step_up: Annotated[Count, NOT_IN_FILE] = 8
    max_step_down: Annotated[Count, NOT_IN_FILE] = 4
    """Nodes that one decision adds or removes at most."""
    objective: Objective = Objective()
    replay: ScalingReplay = ScalingReplay()
    hours: tuple[Hours, ...] = ()
    islands: tuple[IslandLimits, ...] = ()
    roles: tuple[RoleLimits, ...] = ()


def scaling_problems(scaling: Scaling, node_roles: Set[Role]) -> Iterator[str]:
    """Find values that contradict each other. `node_roles`: those of all nodes that are configured or may be added."""
    if scaling.min_nodes > scaling.max_nodes:
        yield f"scaling.min_nodes ({scaling.min_nodes}) is above scaling.max_nodes ({scaling.max_nodes})"
    objective = scaling.objective
    limits = (objective.ttft_p90_ms, objective.ttft_p99_ms, objective.inter_token_p90_ms, objective.min_good_ratio)
    if scaling.replay.enabled and not any(limits):
        yield "scaling.objective has no limit: set one, or scaling.replay.enabled = false"
    if scaling.panic_window_s > scaling.stable_window_s:
        yield "scaling.panic_window_s is above scaling.stable_window_s"
    names: set[str] = set()
    for island in scaling.islands:
        if island.island in names:
            yield f"scaling.islands: {island.island!r} is defined twice"
        names.add(island.island)
        if island.min_nodes > island.max_nodes:
            yield f"scaling.islands: min_nodes of {island.island!r} is above its max_nodes"
    roles = [one.role for one in scaling.roles]
    for one in scaling.roles:
        if roles.count(one.role) > 1:
            yield f"scaling.roles: {one.role!r} is defined twice"
        if one.min_nodes > one.max_nodes:
            yield f"scaling.roles: min_nodes of {one.role!r} is above its max_nodes"
    if sum(one.min_nodes for one in scaling.roles) > scaling.max_nodes:
        yield "scaling.roles: the sum of all min_nodes is above scaling.max_nodes"
    elif scaling.enabled and "prefill" in node_roles and len(node_roles) > 1:
        minimums = {"prefill": 1, "decode": 1} | {one.role: one.min_nodes for one in scaling.roles}
        if sum(minimums.values()) > scaling.max_nodes:
            both = " and ".join(f"{count} {role}" for role, count in minimums.items())
            yield f"scaling.max_nodes ({scaling.max_nodes}) is below the minimums of both pools: {both}"
    if sum(island.min_nodes for island in scaling.islands) > scaling.max_nodes:
        yield "scaling.islands: the sum of all min_nodes is above scaling.max_nodes"
    for hours in scaling.hours:
        if hours.min_nodes > scaling.max_nodes:
            yield f"scaling.hours: min_nodes {hours.min_nodes} is above scaling.max_nodes"


# Settings of provisioners, which start and end nodes: each `[[provisioners]]` is one cloud, cluster or command.

Kind = Literal["process", "kubernetes", "ec2", "skypilot", "command", "webhook"]
Market = Literal["on_demand", "spot"]
COMMON_VARIABLES = ("PATH", "HOME", "USER", "LANG", "LC_*", "TZ", "TMPDIR")
"""Environment variables that every program gets which the router starts."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\*?\Z")


class ProvisionerConfig(Section, frozen=True):
    """A source of nodes. Each kind takes only some of the keys (docs/reference/provisioners.md)."""

    removed: ClassVar = {
        "expected_start_s": "what it measures",
        "state_dir": "the user's state directory",
    }

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
    timeout_s: Annotated[Seconds, REMOVED] = 30.0
    """Timeout of a call to the provisioner: a cloud API answers within seconds."""
    island: Annotated[str, Meta(description="Island of the nodes. Empty: provider and region.")] = ""
    api_key_env: Annotated[str, Meta(description="Environment variable with the API key that the engines require.")] = (
        ""
    )
    role: Annotated[
        Role, Meta(description="Role of the nodes: their engines have to be started for it. As `nodes.role`.")
    ] = "mixed"
    bootstrap_port: Annotated[int, Meta(ge=1, le=65_535), REMOVED] = 8998
    """Port of a prefill node's bootstrap server, SGLang's default. As `nodes.bootstrap_port`."""
    max_inflight: MaxInflight = 0
    gpu: Annotated[str, Meta(description="GPU of the nodes, for example `L4`. Empty: as the provider reports.")] = ""
    gpus: Annotated[Count, Meta(description="GPUs per node if the provider does not report it.")] = 1
    spot: Annotated[bool, Meta(description="process, kubernetes: the nodes can be preempted.")] = False
    usd_per_hour: Annotated[
        float, Meta(ge=0, description="process, kubernetes: cost of a node. 0: another node costs nothing.")
    ] = 0.0
    expected_start_s: Annotated[float, Meta(ge=0), REMOVED] = 0.0
    """Expected time until a new node serves. The router replaces it by what it measures."""
    max_nodes: Annotated[int, Meta(ge=0, description="Maximum number of nodes per offer. 0: no limit.")] = 0
    allow_free: Annotated[bool, REMOVED] = False
    """Accept offers with a price of 0. The router always accepts them for process and kubernetes: elsewhere a price of
    0 is an error of the provider."""
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
    state_dir: Annotated[str, REMOVED] = ""
    """process: directory for the list of processes. Empty: in the user's state directory."""

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
    sky_command: Annotated[str, REMOVED] = "sky"
    """skypilot: path of the `sky` command."""
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
    named = ", ".join(sorted(keys & known.keys()))
    for field in msgspec.structs.fields(ProvisionerConfig):
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        if field.name in known and field.name not in keys and getattr(one, field.name) != default:
            yield (f"provisioners.{field.name}: kind {one.kind!r} does not have this key; it has {named}")
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
