"""When the fleet grows and shrinks, and within which limits."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from warmroute.config.section import ConfigError, Count, Port, Seconds, Section

Share = Annotated[float, Meta(gt=0, le=1)]
Clock = Annotated[str, Meta(pattern="^(([01][0-9]|2[0-3]):[0-5][0-9]|24:00)$")]
Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
DAYS: tuple[Day, ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


class IslandLimits(Section, frozen=True):
    """How many nodes an island may have."""

    island: Annotated[str, Meta(min_length=1, description="The island's name, as nodes and offers say it.")]
    min_nodes: Annotated[int, Meta(ge=0, description="Nodes that it has at least.")] = 0
    max_nodes: Annotated[int, Meta(ge=0, description="Nodes that it has at most.")] = 64


class Hours(Section, frozen=True):
    """Hours in which the fleet is kept larger: what is known of the day before it comes."""

    start: Annotated[Clock, Meta(description="When it begins, `HH:MM` in UTC.")]
    end: Annotated[Clock, Meta(description="When it ends, `HH:MM` in UTC; not after the start: on the next day.")]
    min_nodes: Annotated[Count, Meta(description="Nodes that there are at least meanwhile.")]
    days: Annotated[tuple[Day, ...], Meta(min_length=1, description="Days of the week on which it begins.")] = DAYS


class Scaling(Section, frozen=True):
    """When nodes are added and given back."""

    enabled: Annotated[bool, Meta(description="Whether the fleet is scaled at all.")] = False
    dry_run: Annotated[bool, Meta(description="Whether decisions are only said, and nothing is done.")] = False
    interval_s: Annotated[Seconds, Meta(description="Time between two decisions.")] = 5.0
    min_nodes: Annotated[int, Meta(ge=0, description="Nodes that there are at least; 0 lets the fleet go to zero.")] = 1
    max_nodes: Annotated[Count, Meta(description="Nodes that there are at most.")] = 8
    budget_usd_per_hour: Annotated[
        float, Meta(ge=0, description="What all nodes together may cost an hour; 0 for no limit.")
    ] = 0.0
    utilisation: Annotated[
        Share,
        Meta(description="Share of the fleet's time that prefill and decode work may take; above it nodes are added."),
    ] = 0.6
    wait_ms: Annotated[
        float,
        Meta(gt=0, description="How long requests may wait for a node on average, by their work; beyond, nodes come."),
    ] = 100.0
    utilisation_floor: Annotated[
        Share, Meta(description="Below this share nodes may go, if those that stay would be below `utilisation`.")
    ] = 0.45
    queue_up: Annotated[
        float, Meta(gt=0, description="Requests that wait for each node, here and there, above which nodes are added.")
    ] = 4.0
    queue_drain: Annotated[
        float, Meta(ge=0, description="Requests that wait for each node, below which nodes may go.")
    ] = 1.0
    hit_floor: Annotated[
        float,
        Meta(ge=0, le=1, description="Share of cached prompt tokens below which nodes are added, if more cache helps."),
    ] = 0.3
    ttft_p99_ceiling_ms: Annotated[
        float, Meta(ge=0, description="Time to first token, p99, above which nodes are added; 0 for no ceiling.")
    ] = 10_000.0
    latency_p99_ceiling_ms: Annotated[
        float, Meta(ge=0, description="Time of a whole answer, p99, above which nodes are added; 0 for no ceiling.")
    ] = 0.0
    kv_usage: Annotated[
        Share,
        Meta(
            description="Share of KV memory that running requests may fill, so that the rest is cache; else nodes come."
        ),
    ] = 0.35
    stable_window_s: Annotated[Seconds, Meta(description="What is seen within this time decides.")] = 60.0
    panic_window_s: Annotated[Seconds, Meta(description="… and within this time, in a panic.")] = 15.0
    panic_threshold: Annotated[
        float,
        Meta(gt=1, description="Panic begins where the short window asks for so many times the nodes there are."),
    ] = 1.5
    forecast_s: Annotated[
        float, Meta(ge=0, description="How far back a trend is looked for, so that nodes come in time; 0 for none.")
    ] = 300.0
    cooldown_up_s: Annotated[Seconds, Meta(description="Time after a change before nodes are added again.")] = 30.0
    cooldown_down_s: Annotated[Seconds, Meta(description="Time after a change before nodes are given back.")] = 180.0
    max_step_up: Annotated[Count, Meta(description="Nodes added at once.")] = 8
    max_step_down: Annotated[Count, Meta(description="Nodes given back at once.")] = 4
    to_zero_after_s: Annotated[
        float, Meta(ge=0, description="Time without a request after which the last nodes go, with `min_nodes = 0`.")
    ] = 600.0
    hold_s: Annotated[
        Seconds, Meta(description="How long a request waits for a first node to come where there is none.")
    ] = 600.0
    rest_s: Annotated[Seconds, Meta(description="How long an offer that failed is left alone; doubles each time.")] = (
        60.0
    )
    rest_limit_s: Annotated[Seconds, Meta(description="Longest time that an offer is left alone.")] = 3600.0
    request_limit_s: Annotated[Seconds, Meta(description="Time for a cloud to say yes to a request for a node.")] = (
        120.0
    )
    boot_limit_s: Annotated[Seconds, Meta(description="Time for a node to have an address.")] = 900.0
    load_limit_s: Annotated[Seconds, Meta(description="Time for its engine to load the model and pass a check.")] = (
        1800.0
    )
    warm_limit_s: Annotated[Seconds, Meta(description="Time to prefill what is hot before a node takes traffic.")] = (
        60.0
    )
    drain_limit_s: Annotated[
        Seconds, Meta(description="Time for a node's requests to finish before it is ended all the same.")
    ] = 900.0
    warm_prefixes: Annotated[
        int, Meta(ge=0, description="Hot prefixes that are prefilled on a new node before it takes traffic.")
    ] = 16
    lock_file: Annotated[
        str,
        Meta(description="File that only one process holds, so that only one scales; empty where there is only one."),
    ] = ""
    keda_host: Annotated[str, Meta(description="Address that KEDA's external scaler listens on.")] = "127.0.0.1"
    keda_port: Annotated[Port, Meta(description="Its port, over gRPC; 0: KEDA is not spoken to.")] = 0
    hours: tuple[Hours, ...] = ()
    islands: tuple[IslandLimits, ...] = ()


def check_scaling(scaling: Scaling) -> None:
    """Raises ConfigError where values do not fit together."""
    if scaling.min_nodes > scaling.max_nodes:
        raise ConfigError(f"scaling.min_nodes is {scaling.min_nodes}, above scaling.max_nodes ({scaling.max_nodes})")
    if scaling.utilisation_floor > scaling.utilisation:
        raise ConfigError("scaling.utilisation_floor is above scaling.utilisation: nodes would come and go in turn")
    if scaling.queue_drain >= scaling.queue_up:
        raise ConfigError("scaling.queue_drain is not below scaling.queue_up: nodes would come and go in turn")
    if scaling.panic_window_s > scaling.stable_window_s:
        raise ConfigError("scaling.panic_window_s is above scaling.stable_window_s")
    names: set[str] = set()
    for island in scaling.islands:
        if island.island in names:
            raise ConfigError(f"scaling.islands: {island.island!r} stands there twice")
        names.add(island.island)
        if island.min_nodes > island.max_nodes:
            raise ConfigError(f"scaling.islands: {island.island!r} has min_nodes above max_nodes")
    if sum(island.min_nodes for island in scaling.islands) > scaling.max_nodes:
        raise ConfigError("scaling.islands: their min_nodes together are above scaling.max_nodes")
    for hours in scaling.hours:
        if hours.min_nodes > scaling.max_nodes:
            raise ConfigError(f"scaling.hours: {hours.min_nodes} nodes from {hours.start} are above scaling.max_nodes")
