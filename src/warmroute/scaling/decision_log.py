"""Logs scaling decisions: each one that changes the fleet, and each new obstacle that prevents adding nodes."""

from __future__ import annotations

from typing import Final

from warmroute.event_log import EventLog
from warmroute.scaling.scaling_decision import ScalingDecision

log = EventLog("warmroute.scaling")

REPEAT_AFTER_S: Final = 600.0
"""An obstacle that was absent for this time is logged again."""


class DecisionLog:
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
