"""A scaling decision: which nodes to add and to remove, and why. And the log of decisions."""

from __future__ import annotations

from typing import Final

import msgspec

from warmroute.config.nodes import Role
from warmroute.config.scaling import Pool
from warmroute.event_log import EventLog
from warmroute.scaling.offers import Offer, OfferKey

log = EventLog("warmroute.scaling")

REPEAT_AFTER_S: Final = 600.0
"""An obstacle that was absent for this time is logged again. Quotas come and go with each decision."""


class PaidNode(msgspec.Struct, frozen=True):
    """A machine that costs money: serving, starting (pending), not answering or terminating."""

    offer: OfferKey | None
    """Offer of the machine; None for a node that somebody else added to the fleet."""
    island: str
    usd_per_hour: float
    gpu: str = ""
    counts_toward_limit: bool = True
    """Whether the machine counts towards the limits of nodes. Its price always counts towards the budget."""
    role: Role = "mixed"


def paid_for(offer: Offer) -> PaidNode:
    """Return a machine of this offer."""
    return PaidNode(offer.key, offer.island, offer.usd_per_hour, offer.gpu, role=offer.role)


class AddNode(msgspec.Struct, frozen=True):
    offer: Offer
    reason: str


class RemoveNode(msgspec.Struct, frozen=True):
    node: str
    reason: str


class SwitchRole(msgspec.Struct, frozen=True):
    node: str
    role: Role
    reason: str


class PoolDecision(msgspec.Struct, frozen=True):
    """The part of a decision that is about the prefill nodes, or about those that serve requests."""

    nodes: int
    desired_nodes: int
    utilisation: float


class ScalingDecision(msgspec.Struct, kw_only=True):
    """One decision. In a dry run it is logged and not executed."""

    at_s: float
    desired_nodes: int
    nodes: int
    """Number of serving and pending nodes."""
    additions: tuple[AddNode, ...] = ()
    removals: tuple[RemoveNode, ...] = ()
    switches: tuple[SwitchRole, ...] = ()
    """Nodes that get another role."""
    needed: int = 0
    """Nodes that are missing, whatever the limits allow."""
    reasons: tuple[str, ...] = ()
    """Why this many nodes are desired, and what prevents them."""
    obstacles: tuple[str, ...] = ()
    """The reasons that prevent adding nodes that are needed."""
    invalid_inputs: tuple[str, ...] = ()
    """A sentence for each metric and offer that was ignored because its value is impossible."""
    panicking: bool = False
    dry_run: bool = False
    utilisation: float = 0.0
    """Fraction of the serving nodes' time that the work takes."""
    pools: dict[Pool, PoolDecision] = {}
    """The decision of each pool; empty where no node has a role."""

    @property
    def changes(self) -> bool:
        return bool(self.additions or self.removals or self.switches)


def count_of_nodes(count: int) -> str:
    return f"{count} node" if count == 1 else f"{count} nodes"


class DecisionLog:
    """Logs each decision that changes the fleet, and each new obstacle that prevents adding nodes."""

    def __init__(self) -> None:
        self._invalid_inputs: tuple[str, ...] = ()
        self._obstacles_s: dict[str, float] = {}
        """When each obstacle was last present."""

    def log(self, decision: ScalingDecision, now_s: float, *, has_provisioners: bool) -> None:
        """Without provisioners somebody else adds nodes, so obstacles are not logged."""
        if decision.changes:
            log.info("scaling_decision", **_fields(decision), reason="; ".join(decision.reasons))
        if decision.invalid_inputs and decision.invalid_inputs != self._invalid_inputs:
            self._invalid_inputs = decision.invalid_inputs
            log.info("scaling_inputs_invalid", reason="; ".join(decision.invalid_inputs))
        recent = {text: last_s for text, last_s in self._obstacles_s.items() if now_s - last_s <= REPEAT_AFTER_S}
        new = [text for text in decision.obstacles if text not in recent]
        self._obstacles_s = recent | dict.fromkeys(decision.obstacles, now_s)
        if new and has_provisioners:
            needed = "; ".join(reason for reason in decision.reasons if reason not in decision.obstacles)
            log.warning(
                "scaling_blocked",
                "The autoscaler cannot add the nodes needed.",
                **_fields(decision),
                reason=needed,
                obstacle="; ".join(new),
            )


def _fields(decision: ScalingDecision) -> dict[str, object]:
    fields: dict[str, object] = {"nodes": decision.nodes, "desired_nodes": decision.desired_nodes}
    return fields | ({"dry_run": True} if decision.dry_run else {})
