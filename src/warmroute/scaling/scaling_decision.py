"""A scaling decision: which nodes to add and to remove, and why."""

from __future__ import annotations

import msgspec

from warmroute.scaling.offer import Offer, OfferKey


class PendingNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node that was requested and does not serve yet."""

    offer: OfferKey | None
    """None for a node that somebody else added to the fleet and that has not been checked yet."""
    island: str
    gpu: str
    usd_per_hour: float


class PaidNode(msgspec.Struct, frozen=True):
    """A machine that costs money: serving, starting, not answering or terminating."""

    offer: OfferKey | None
    island: str
    usd_per_hour: float
    counts_toward_limit: bool = True
    """Whether it counts toward the limits of nodes. Its price always counts toward the budget."""


class AddNode(msgspec.Struct, frozen=True):
    offer: Offer
    reason: str


class RemoveNode(msgspec.Struct, frozen=True):
    node: str
    reason: str


class ScalingDecision(msgspec.Struct, kw_only=True):
    """One decision. In a dry run it is logged and not executed."""

    at_s: float
    desired_nodes: int
    nodes: int
    """Serving and pending ones."""
    additions: tuple[AddNode, ...] = ()
    removals: tuple[RemoveNode, ...] = ()
    reasons: tuple[str, ...] = ()
    """Why this many nodes are desired, and what prevents them."""
    obstacles: tuple[str, ...] = ()
    """Those of the reasons that prevent adding nodes that are needed."""
    invalid_inputs: tuple[str, ...] = ()
    """A sentence for each metric and offer that was ignored because its value is impossible."""
    panicking: bool = False
    dry_run: bool = False
    utilisation: float = 0.0
    """Fraction of the serving nodes' time that the work takes."""

    @property
    def changes(self) -> bool:
        return bool(self.additions or self.removals)


def count_of_nodes(count: int) -> str:
    return f"{count} node" if count == 1 else f"{count} nodes"
