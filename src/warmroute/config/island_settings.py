"""Settings of islands: the network between the router and its nodes, and when a conversation leaves its island."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

from msgspec import Meta

from warmroute.config.section import NOT_IN_FILE, Section


class IslandConfig(Section, frozen=True):
    """An island: nodes that share a cheap network. An island without this table has a measured round trip and no
    egress cost."""

    name: Annotated[str, Meta(min_length=1, description="Name that nodes use, for example `aws/us-east-1`.")]
    round_trip_ms: Annotated[
        float,
        Meta(ge=0, description="Network round trip between the router and the island. 0: measured by health checks."),
    ] = 0.0
    egress_usd_per_gb: Annotated[
        float,
        Meta(ge=0, description="Cost of traffic between the router and the island, for requests and responses."),
    ] = 0.0


class IslandAffinity(Section, frozen=True):
    """When a conversation leaves its island, for the policy `price` and models with nodes on several islands."""

    max_delay_ms: Annotated[
        float,
        Meta(
            ge=0,
            description="A conversation leaves its island if its first token would come this much later there than "
            "on another island.",
        ),
    ] = 1000.0
    gpu_usd_per_hour: Annotated[
        float, Meta(gt=0, description="Cost of a GPU. The router uses it to convert egress cost into time.")
    ] = 2.0
    enabled: Annotated[bool, NOT_IN_FILE] = True
    """Off: the router prices every turn of a conversation on all islands."""


def island_problems(islands: Sequence[IslandConfig]) -> Iterator[str]:
    """Find islands with the same name."""
    names: set[str] = set()
    for island in islands:
        if island.name in names:
            yield f"islands: {island.name!r} is defined twice"
        names.add(island.name)
