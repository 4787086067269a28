"""Settings of autoscaling."""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Annotated, Final, Literal

from msgspec import Meta

from warmroute.config.node_settings import Role
from warmroute.config.section import NOT_IN_FILE, Count, Port, Ratio, Seconds, Section

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

    ttft_p90_ms: Annotated[float, Meta(ge=0, description="Limit of the p90 time to first token. 0: no limit.")] = 2000.0
    ttft_p99_ms: Annotated[float, Meta(ge=0, description="Limit of the p99 time to first token. 0: no limit.")] = 0.0
    inter_token_p90_ms: Annotated[
        float, Meta(ge=0, description="Limit of the p90, over requests, of the mean time between tokens. 0: no limit.")
    ] = 0.0
    min_good_ratio: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Minimum fraction of requests whose first token comes within 2 s + 0.5 ms × prompt tokens. "
            "0: no limit.",
        ),
    ] = 0.0


class ScalingReplay(Section, frozen=True):
    """Scaling by replay: before the autoscaler changes the fleet, a process of low priority replays the recent traffic
    on fleets of other sizes."""

    enabled: Annotated[
        bool, Meta(description="Replay recent traffic to decide how many nodes are needed. false: thresholds only.")
    ] = True
    interval_s: Annotated[
        Seconds,
        Meta(
            description="Time between two searches. If more requests arrive than expected, a fifth of it; if the load "
            "rises and the fleet is only just large enough, two fifths."
        ),
    ] = 300.0
    window_s: Annotated[Seconds, Meta(description="How much of the recent traffic is replayed.")] = 1800.0
    max_requests: Annotated[
        int,
        Meta(
            ge=100,
            le=100_000,
            description="Maximum number of requests in one replay. It has more than 4,000 only if these cover too "
            "little time, on busy nodes.",
        ),
    ] = 10_000
    margin: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="The fleet has to meet the objective with this fraction more requests than expected, besides "
            "what chance does to few conversations; to remove a node, the rest has to meet it with at least twice this "
            "fraction more.",
        ),
    ] = 0.05
    cpu_share: Annotated[
        Ratio, Meta(description="Fraction of one core that the replaying process may take on average.")
    ] = 0.1


class Scaling(Section, frozen=True):
    """When the router adds and removes nodes."""

    enabled: Annotated[bool, Meta(description="Scale the fleet.")] = False
    dry_run: Annotated[bool, Meta(description="Log scaling decisions without executing them.")] = False
    interval_s: Annotated[Seconds, Meta(description="Time between two decisions.")] = 5.0
    min_nodes: Annotated[int, Meta(ge=0, description="Minimum number of nodes. 0 allows scaling to zero.")] = 1
    max_nodes: Annotated[Count, Meta(description="Maximum number of nodes.")] = 8
    budget_usd_per_hour: Annotated[
        float, Meta(ge=0, description="Maximum cost of all nodes together. 0: no limit.")
    ] = 0.0
    target_utilisation: Annotated[
        float,
        Meta(
            ge=LOW_UTILISATION,
            le=1,
            description="The router adds nodes if prefill and decode take more than this fraction of the fleet's time.",
        ),
    ] = 0.6
    max_queue_per_node: Annotated[
        float,
        Meta(
            gt=LOW_QUEUE_PER_NODE,
            description="The router adds nodes if more requests per node than this wait, in the router and on nodes.",
        ),
    ] = 4.0
    min_hit_ratio: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="The router adds nodes if less than this fraction of the prompt tokens is cached, and more "
            "cache would help.",
        ),
    ] = 0.3
    max_ttft_p99_ms: Annotated[
        float, Meta(ge=0, description="The router adds nodes if the p99 time to first token is longer. 0: no limit.")
    ] = 10_000.0
    max_latency_p99_ms: Annotated[
        float, Meta(ge=0, description="The router adds nodes if the p99 response time is longer. 0: no limit.")
    ] = 0.0
    stable_window_s: Annotated[Seconds, Meta(description="Time over which the router averages load.")] = 60.0
    panic_window_s: Annotated[
        Seconds, Meta(description="Shorter time over which it averages load to detect a sudden rise.")
    ] = 15.0
    trend_window_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Time over which the router measures the load's trend, to add nodes early. 0: off.",
        ),
    ] = 300.0
    cooldown_up_s: Annotated[Seconds, Meta(description="Time after a change before the router adds nodes.")] = 30.0
    cooldown_down_s: Annotated[Seconds, Meta(description="Time after a change before the router removes nodes.")] = (
        180.0
    )
    scale_to_zero_after_s: Annotated[
        float,
        Meta(ge=0, description="Time without requests after which the last nodes are removed. Needs `min_nodes = 0`."),
    ] = 600.0
    first_node_wait_s: Annotated[
        Seconds, Meta(description="Maximum time a request waits for the first node of an empty fleet.")
    ] = 600.0
    offer_backoff_s: Annotated[
        Seconds,
        Meta(description="Time for which the router does not use an offer that failed. It doubles with each failure."),
    ] = 60.0
    boot_timeout_s: Annotated[Seconds, Meta(description="Time for a new node to get an address.")] = 900.0
    load_timeout_s: Annotated[
        Seconds, Meta(description="Time for its engine to load the model and pass a health check.")
    ] = 1800.0
    drain_timeout_s: Annotated[
        Seconds, Meta(description="Time for the requests of a draining node to finish before the router removes it.")
    ] = 900.0
    prewarm_prefixes: Annotated[
        int, Meta(ge=0, description="Number of hot prefixes that a new node prefills before it gets traffic.")
    ] = 16
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
    keda_host: Annotated[str, Meta(description="Address of the gRPC listener for KEDA's external scaler.")] = (
        "127.0.0.1"
    )
    keda_port: Annotated[Port, Meta(description="Port of the gRPC listener for KEDA. 0: no listener.")] = 0
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
