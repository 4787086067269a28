"""A schedule made in hindsight, for the comparison of scalers: for each part of the day a number of nodes, requested in
time. KEDA's cron trigger scales like this. Nobody knows the load of a day so well; it shows what is possible."""

from __future__ import annotations

from collections.abc import Sequence

from warmroute.config import Scaling
from warmroute.lab.peers.scalers import decision_for
from warmroute.lab.simulated_scaling import BusyShares
from warmroute.scaling.observer import FleetView
from warmroute.scaling.offer_selection import OfferSelector
from warmroute.scaling.scaling_decision import PaidNode, ScalingDecision


class Cron:
    def __init__(
        self, config: Scaling, offers: OfferSelector, busy: BusyShares, *, nodes: Sequence[int], part_s: float,
        ahead_s: float,
    ) -> None:  # fmt: skip
        """`nodes`: for each part of the day, which is `part_s` long."""
        self._config, self._offers = config, offers
        self._nodes, self._part_s, self._ahead_s = nodes, part_s, ahead_s
        self._began_s: float | None = None

    def decide(self, view: FleetView, pending: Sequence[PaidNode], wall_s: float = 0.0) -> ScalingDecision:
        if self._began_s is None:
            self._began_s = view.now_s
        now_s = view.now_s - self._began_s
        parts = (int(at_s / self._part_s) % len(self._nodes) for at_s in (now_s, now_s + self._ahead_s))
        wanted = max(self._nodes[part] for part in parts)
        return decision_for(view, pending, wanted, "schedule", self._config, self._offers)
