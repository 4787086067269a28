"""How many nodes to add and to remove: by the last plan, and by thresholds between two plans.

offer_selection.py says which node to add, `rank_candidates` in thresholds.py which one to remove.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from math import ceil
from typing import Final

from warmroute.config import LOW_QUEUE_PER_NODE, Hours, Scaling
from warmroute.config.scaling import DAYS
from warmroute.scaling.capacity import ScalingInputs
from warmroute.scaling.fleet_plan import FleetPlan, excess
from warmroute.scaling.observer import FleetView, sanitize
from warmroute.scaling.offer_selection import OfferSelector
from warmroute.scaling.offers import OfferKey
from warmroute.scaling.scaling_decision import AddNode, PaidNode, RemoveNode, ScalingDecision, count_of_nodes, paid_for
from warmroute.scaling.thresholds import (
    RemovalCandidate,
    exchange_candidate,
    nodes_needed,
    paid_node,
    rank_candidates,
    removable_nodes,
)

# How many nodes to add and to remove by a fleet plan. Between two replays, thresholds react to what a plan could not
# know.
#
#     add     what the plan wants beyond the current nodes
#     add     a burst: the stable window has BURST times the arrivals of the plan, more than chance explains, and
#             requests wait: as many nodes as the plan has, scaled by the arrivals, at most MAX_BURST times as many
#     add     the router rejects requests, or the objective is missed while more than `max_queue_per_node` requests wait
#             for each node: 1, if none is starting
#     remove  what the plan can spare, if the objective is met now
#
# The hit ratio, the utilisation and the KV memory do not count: they are part of the replay.

BURST: Final = 1.5
"""The arrivals have to be this many times those of the plan. The plan's margin and chance cover less."""
MAX_BURST: Final = 2.0
"""No more than doubles the fleet at once: one minute of arrivals is a poor forecast."""
CHANCE_ERRORS: Final = 4.0
"""Arrivals that exceed the expected ones by less than this many standard errors are chance. Conversations arrive less
evenly than single requests would."""
MIN_FIRST_TOKENS: Final = 20
"""A percentile of fewer first tokens, or of the times between tokens of fewer streams, is unknown."""


def burst_ratio(inputs: ScalingInputs, plan: FleetPlan) -> float:
    """Return the arrivals of the stable window relative to those of the plan, if they are a burst; 0 if not."""
    stable = inputs.view.stable
    expected = plan.arrivals_per_s * plan.growth * stable.span_s
    if stable.arrivals < max(BURST * expected, expected + CHANCE_ERRORS * expected**0.5) or expected <= 0:
        return 0.0
    if stable.waiting <= LOW_QUEUE_PER_NODE * len(inputs.serving):
        return 0.0
    return min(MAX_BURST, stable.arrivals / expected)


def planned_nodes(inputs: ScalingInputs, plan: FleetPlan, burst: float) -> tuple[int, list[str]]:
    """Return how many nodes to add, and the reasons. `burst`: the result of `burst_ratio`."""
    explained = plan.explain(inputs.config.objective)
    reasons = [explained, plan.assumed_load] if explained else []
    wanted = plan.desired_nodes
    if burst:
        wanted = max(wanted, ceil(wanted * burst))
        reasons.append(f"{burst:.1f} × the arrivals that were replayed, and requests wait")
    needed = max(0, wanted - inputs.node_count)
    symptom = _symptom(inputs)
    if symptom:
        reasons.append(symptom)
        if not inputs.pending:
            needed = max(needed, 1)
    return needed, reasons


def _symptom(inputs: ScalingInputs) -> str:
    """Return what shows that the fleet is too small whatever was replayed, or an empty string."""
    stable, config = inputs.view.stable, inputs.config
    if stable.shed_per_s > 0:
        return f"the router rejects {stable.shed_per_s:.2g} requests/s"
    queue = stable.waiting / len(inputs.serving) if inputs.serving else 0.0
    if queue > config.max_queue_per_node and _misses_objective(inputs):
        return f"{queue:.1f} requests wait per node, limit {config.max_queue_per_node:g}; the objective is missed"
    return ""


def _misses_objective(inputs: ScalingInputs) -> bool:
    """Return whether the stable window has values beyond the objective, of enough first tokens or streams."""
    stable, objective = inputs.view.stable, inputs.config.objective
    knows_ttft = stable.first_tokens >= MIN_FIRST_TOKENS
    knows_inter_token = stable.inter_token_samples >= MIN_FIRST_TOKENS
    return (
        excess(
            objective,
            stable.ttft_p90_ms if knows_ttft else None,
            stable.ttft_p99_ms if knows_ttft else None,
            stable.inter_token_p90_ms if knows_inter_token else None,
            stable.good_ratio if knows_ttft else None,
        )
        > 1.0
    )


def planned_removals(
    inputs: ScalingInputs, minimum: int, plan: FleetPlan, *, any_node: bool
) -> tuple[list[RemovalCandidate], str]:
    """Return the nodes that the plan can spare, the best candidate first, and why."""
    serving = len(inputs.serving)
    if not minimum or serving > inputs.config.max_nodes:
        return removable_nodes(inputs, minimum, any_node=any_node)
    spare = min(serving - minimum, serving - plan.desired_nodes)
    if spare <= 0 or inputs.pending or inputs.panicking or _misses_objective(inputs):
        return [], ""
    chosen = rank_candidates(inputs, any_node=any_node)[:spare]
    return chosen, f"without {count_of_nodes(len(chosen))} the objective would be met" if chosen else ""


# Decides once an interval whether to add or remove nodes. No I/O.
#
# `planned_nodes` says how many nodes to add and to remove by a replay of the recent traffic. Without a plan,
# thresholds.py says how many nodes the demand needs, and which nodes the fleet could do without. This module adds the
# limits: minimums by configuration, schedule and island, `max_nodes`, the budget, step sizes and cooldowns.
#
# All machines that are paid for count towards `max_nodes` and the budget, also those that do not answer, drain or
# terminate. A machine that its cloud reclaims does not count.
#
# The demand includes its trend until a node that is requested now would serve. In panic mode (the short window needs
# PANIC_RATIO times the current nodes) the short window counts too, and no node is removed. After a change, no node is
# added for `cooldown_up_s` and none is removed for `cooldown_down_s`. Without a plan a node is removed only if it was
# spare for all of `cooldown_down_s`, as are nodes that have come since the plan; what a plan spares of its own nodes,
# several plans have spared (replay_planner.py).

PANIC_RATIO: Final = 1.5
"""Panic mode starts if the panic window needs this many times the current nodes."""
MIN_PANIC_ARRIVALS: Final = 8
"""Arrivals that a panic needs in its window. One long prompt is none."""
MAX_GROWTH: Final = 2.0
"""A trend is followed up to twice the current load: lines through a start of the day point to infinity."""

Planner = Callable[[ScalingInputs], FleetPlan | None]
"""Returns the plan that counts now, or None: then thresholds decide."""


class Scaler:
    def __init__(self, config: Scaling, offers: OfferSelector) -> None:
        self.config = config
        self._offers = offers
        self._maximum = ""
        """The maximum in words, if it is not `max_nodes` alone; else empty."""
        self._added_s = self._removed_s = float("-inf")
        """When nodes were last added and removed."""
        self._panic_until_s = float("-inf")
        self._desired_elsewhere: int | None = None
        """The last number of desired nodes that differed from the fleet, where somebody else adds and removes nodes."""
        self._spare: deque[tuple[float, int]] = deque()
        """The number of spare nodes at each decision within the last `cooldown_down_s`."""

    def limit(self, config: Scaling, offers: OfferSelector, maximum: str) -> None:
        """Decide by these settings and offers from now on. `maximum`: in words, if it is not `max_nodes` alone."""
        self.config, self._offers, self._maximum = config, offers, maximum

    @property
    def changed_s(self) -> tuple[float, float]:
        """When nodes were last added and removed."""
        return self._added_s, self._removed_s

    @changed_s.setter
    def changed_s(self, times_s: tuple[float, float]) -> None:
        self._added_s, self._removed_s = times_s

    def hold_desired(self, desired_nodes: int) -> None:
        """Nodes went to the other pool: do not desire them again until the cooldown ends."""
        self._desired_elsewhere = desired_nodes

    def request_failed(self) -> None:
        """A requested node does not come: the next request need not wait for the cooldown."""
        self._added_s = float("-inf")

    def decide(
        self, view: FleetView, pending: Sequence[PaidNode] = (), wall_s: float = 0.0,
        terminating: Sequence[PaidNode] = (), planner: Planner | None = None,
    ) -> ScalingDecision:  # fmt: skip
        """`wall_s`: seconds since 1970, for the schedule. `terminating`: machines that are paid for and not in the
        view. `planner`: if the autoscaler goes by replay."""
        config = self.config
        problems: list[str] = [*self._offers.problems]
        view = sanitize(view, problems)
        inputs = ScalingInputs(config, view, pending, self._growth(view))
        plan = planner(inputs) if planner is not None and inputs.serving else None
        burst = burst_ratio(inputs, plan) if plan is not None else 0.0
        inputs.panicking = self._panicking(inputs) if plan is None else self._bursting(inputs, burst)
        decision = ScalingDecision(
            at_s=view.now_s,
            desired_nodes=inputs.node_count,
            nodes=inputs.node_count,
            dry_run=config.dry_run,
            utilisation=inputs.demand.utilisation(inputs.serving_size),
            panicking=inputs.panicking,
            invalid_inputs=tuple(problems),
        )
        missing, not_offered = self._missing_by_island(inputs)
        any_island = max(config.min_nodes, scheduled_min_nodes(config.hours, wall_s))
        by_island = sum(one.min_nodes for one in config.islands) - sum(not_offered.values())
        minimum = self._minimum(inputs, min(max(any_island, by_island), config.max_nodes))
        needed, reasons = nodes_needed(inputs) if plan is None else planned_nodes(inputs, plan, burst)
        if inputs.node_count < minimum:
            needed = max(needed, min(any_island, minimum) - inputs.node_count)
            running = "running or starting" if inputs.pending else "running"
            reasons.append(f"{count_of_nodes(inputs.node_count)} {running}, minimum is {minimum}")
        decision.needed = needed
        obstacles = [
            f"island {island} needs {count_of_nodes(count)} more, and no provisioner offers nodes there"
            for island, count in not_offered.items()
        ]
        current = [paid_node(node) for node in view.nodes if not node.unchecked]
        paid = [*current, *inputs.pending, *terminating]
        blocked = False
        if needed > 0 or missing:
            planned = plan.offer if plan is not None else None
            blocked = self._add(decision, inputs, paid, needed, missing, reasons, obstacles, planned)
        if needed > 0 or (missing and not blocked):
            self._spare.clear()
        else:  # also where only an island misses nodes, and none is available for it
            # Without provisioners the autoscaler only names a number: which node goes is KEDA's choice.
            any_node = self._offers.somebody_else_scales
            if plan is None:
                candidates, reason = removable_nodes(inputs, minimum, any_node=any_node)
            else:
                candidates, reason = planned_removals(inputs, minimum, plan, any_node=any_node)
            exchange = bool(missing) and not candidates and not inputs.pending and len(inputs.serving) > 1
            exchange = exchange and not inputs.panicking
            if exchange:
                candidates, reason = exchange_candidate(inputs, paid, missing, self._offers)
            if reason:
                reasons.append(reason)
            seen = plan is not None and len(inputs.serving) <= min(plan.nodes, config.max_nodes)
            self._remove(decision, candidates, minimum, reasons, at_once=seen and minimum > 0 and not exchange)
        if self._offers.somebody_else_scales:
            self._hold_desired(decision)
        decision.reasons, decision.obstacles = (*reasons, *obstacles), tuple(obstacles)
        return decision

    def _hold_desired(self, decision: ScalingDecision) -> None:
        """Without offers somebody else scales the fleet by `desired_nodes`: keep it until the fleet has reached it, or
        until the cooldown ends."""
        changed_s = max(self._added_s, self._removed_s)
        if decision.desired_nodes != decision.nodes:
            self._desired_elsewhere = decision.desired_nodes
        elif decision.at_s - changed_s < self.config.cooldown_down_s and self._desired_elsewhere is not None:
            decision.desired_nodes = self._desired_elsewhere
        else:
            self._desired_elsewhere = None

    def _growth(self, view: FleetView) -> float:
        """Return the load when a node that is requested now would serve, relative to the current load."""
        starts_s = [self._offers.start_s(offer) for offer in self._offers.offers]
        ahead_s = min(starts_s, default=0.0) + self.config.interval_s
        return min(MAX_GROWTH, max(1.0, 1.0 + view.growth_per_s * ahead_s))

    def _panicking(self, inputs: ScalingInputs) -> bool:
        config, view, demand = self.config, inputs.view, inputs.panic_demand
        limit = config.target_utilisation * PANIC_RATIO
        over = demand.utilisation(inputs.size, inputs.growth) > limit and demand.known
        queued = view.panic.waiting > LOW_QUEUE_PER_NODE * max(1, len(view.nodes))
        if over and queued and view.panic.arrivals >= MIN_PANIC_ARRIVALS:
            self._panic_until_s = view.now_s + config.stable_window_s
        return view.now_s < self._panic_until_s

    def _bursting(self, inputs: ScalingInputs, burst: float) -> bool:
        if burst:
            self._panic_until_s = inputs.view.now_s + self.config.stable_window_s
        return inputs.view.now_s < self._panic_until_s

    def _minimum(self, inputs: ScalingInputs, minimum: int) -> int:
        config, view = self.config, inputs.view
        idle = config.scale_to_zero_after_s > 0 and view.idle_s >= config.scale_to_zero_after_s
        if minimum == 0 and not (idle and not view.waiting) and (view.waiting or inputs.serving):
            return 1
        return minimum

    def _missing_by_island(self, inputs: ScalingInputs) -> tuple[dict[str, int], dict[str, int]]:
        """Return how many nodes islands miss: those with offers, and those without. The latter block nothing. Where
        there are no offers at all, somebody else adds nodes."""
        current = Counter(node.island for node in inputs.serving) + Counter(one.island for one in inputs.pending)
        offered = {offer.island for offer in self._offers.offers}
        missing: dict[str, int] = {}
        not_offered: dict[str, int] = {}
        for one in self.config.islands:
            if current[one.island] < one.min_nodes:
                found = missing if not offered or one.island in offered else not_offered
                found[one.island] = one.min_nodes - current[one.island]
        return missing, not_offered

    def _add(
        self, decision: ScalingDecision, inputs: ScalingInputs, paid: list[PaidNode], needed: int,
        missing: dict[str, int], reasons: list[str], obstacles: list[str], planned: OfferKey | None,
    ) -> bool:  # fmt: skip
        """Add `needed` nodes; those that islands miss come first and count among them. Return whether no node is
        available, for another reason than a cooldown. `planned`: the offer that a replay chose."""
        config, view = self.config, inputs.view
        desired = min(decision.nodes + max(needed, sum(missing.values())), config.max_nodes)
        decision.desired_nodes = max(decision.nodes, desired)
        maximum = self._maximum or count_of_nodes(config.max_nodes)
        if desired <= decision.nodes:
            obstacles.append(f"maximum of {maximum} reached")
            return True
        paid = list(paid)
        machines = sum(one.counts_toward_limit for one in paid)
        if machines >= config.max_nodes and self._offers.offers:
            unused = machines - decision.nodes
            obstacles.append(f"maximum of {maximum} reached; {unused} of them do not answer or are leaving")
            return True
        # An empty fleet serves nobody: no cooldown, and the fastest offer.
        no_nodes = inputs.node_count == 0
        wait_s = config.cooldown_up_s - (view.now_s - max(self._added_s, self._removed_s))
        if wait_s > 0 and not no_nodes:
            reasons.append(f"cooldown: the last change was less than {config.cooldown_up_s:g} s ago")
            return False
        additions: list[AddNode] = []
        at_once = min(desired - decision.nodes, config.max_nodes - machines, config.max_step_up)

        def add(count: int, island: str | None) -> None:
            for _ in range(count):
                offer, reason = self._offers.select(
                    paid,
                    inputs.speeds,
                    view.now_s,
                    prefill_work=view.stable.prefill_work or 0.0,
                    panicking=inputs.panicking or no_nodes,
                    island=island,
                    planned=planned,
                )
                if offer is None:
                    if reason not in obstacles:
                        obstacles.append(reason)
                    return
                additions.append(AddNode(offer, reason))
                paid.append(paid_for(offer))

        for island, count in missing.items():
            add(min(count, at_once - len(additions)), island)
        add(min(needed, at_once) - len(additions), None)
        if additions:
            self._added_s = view.now_s
            decision.additions = tuple(additions)
        return not additions

    def _remove(
        self, decision: ScalingDecision, candidates: Sequence[RemovalCandidate], minimum: int, reasons: list[str], *,
        at_once: bool,
    ) -> None:  # fmt: skip
        """Remove those candidates that were spare for the whole cooldown. `at_once`: they have been spare for long
        enough, in plans that have seen all nodes."""
        config, now_s, spare = self.config, decision.at_s, self._spare
        spare.append((now_s, len(candidates)))
        while spare and spare[0][0] < now_s - config.cooldown_down_s:
            spare.popleft()
        always_spare = len(candidates) if at_once else min(count for _, count in spare)
        if not always_spare:
            return
        if now_s - max(self._added_s, self._removed_s) < config.cooldown_down_s:
            reasons.append(f"cooldown: the last change was less than {config.cooldown_down_s:g} s ago")
            return
        if not at_once and now_s - spare[0][0] < config.cooldown_down_s - 1.5 * config.interval_s and minimum:
            reasons.append(f"nodes have to be spare for {config.cooldown_down_s:g} s")
            return
        chosen = candidates[: min(always_spare, config.max_step_down)]
        decision.removals = tuple(RemoveNode(one.node.name, one.reason) for one in chosen)
        decision.desired_nodes = decision.nodes - len(chosen)
        self._removed_s = now_s
        spare.clear()


def scheduled_min_nodes(hours: Iterable[Hours], wall_s: float) -> int:
    """Return the highest minimum of the entries of `[[scaling.hours]]` that apply now, by the time and the day of the
    week in UTC. `wall_s`: seconds since 1970."""
    now = datetime.fromtimestamp(wall_s, UTC)
    minute = now.hour * 60 + now.minute
    today, yesterday = DAYS[now.weekday()], DAYS[now.weekday() - 1]
    minimum = 0
    for one in hours:
        start, end = _minute(one.start), _minute(one.end)
        overnight = end <= start
        started_today = today in one.days and start <= minute and (overnight or minute < end)
        started_yesterday = overnight and yesterday in one.days and minute < end
        if started_today or started_yesterday:
            minimum = max(minimum, one.min_nodes)
    return minimum


def _minute(clock: str) -> int:
    hours, _, minutes = clock.partition(":")
    return int(hours) * 60 + int(minutes)
