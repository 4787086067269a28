"""Islands: what lies between the router and its nodes, and when a conversation may leave its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from warmroute.config.section import ConfigError, Seconds, Section


class IslandConfig(Section, frozen=True):
    """An island: nodes that share a cheap network. One that only nodes name is measured, and its network is free."""

    name: Annotated[str, Meta(min_length=1, description="Its name, as nodes say it: `aws/us-east-1`.")]
    round_trip_ms: Annotated[
        float, Meta(ge=0, description="From the router there and back; 0: measured by the health checks.")
    ] = 0.0
    egress_usd_per_gb: Annotated[
        float,
        Meta(ge=0, description="What a gigabyte between the router and the island costs, prompts and answers alike."),
    ] = 0.0


class Crossing(Section, frozen=True):
    """When a conversation leaves its island, for the policy `price`. Counts where a model's nodes stand on several."""

    sticky: Annotated[
        bool, Meta(description="Whether a conversation stays on its island; off: each turn is priced over all islands.")
    ] = True
    spill_ms: Annotated[
        float,
        Meta(
            ge=0,
            description="How much later its first token may come at home than elsewhere, before a conversation leaves.",
        ),
    ] = 1000.0
    usd_per_hour: Annotated[
        float, Meta(gt=0, description="What an hour is worth, say that of a GPU: turns egress money into time.")
    ] = 2.0
    remembered_s: Annotated[
        Seconds, Meta(description="How long a conversation that says nothing is remembered; at least half of that.")
    ] = 3600.0


def check_islands(islands: Sequence[IslandConfig]) -> None:
    """Raises ConfigError."""
    names: set[str] = set()
    for island in islands:
        if island.name in names:
            raise ConfigError(f"islands: {island.name!r} stands there twice: give each island one table")
        names.add(island.name)
