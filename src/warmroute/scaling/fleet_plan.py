"""What a replay is asked, and the plan that it answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import isfinite
from statistics import median
from typing import Final

import msgspec

from warmroute.config import Config, Objective, ScalingReplay
from warmroute.scaling.capacity import ScalingInputs
from warmroute.scaling.observer import FleetView, NodeView
from warmroute.scaling.offer_selection import OfferSelector
from warmroute.scaling.offers import OfferKey
from warmroute.scaling.scaling_decision import PaidNode, count_of_nodes
from warmroute.scaling.thresholds import paid_node, rank_candidates

# A fleet plan: what the replay of recent traffic says about fleets of other sizes, and how many nodes follow from it.
#
#     PlanRequest   the fleet, the offers, the learned speeds, the objective: what a search is made from
#     FleetPlan     its result: nodes to add of which offer, or nodes to spare, and the replayed fleets that show why
#
# Both cross a pipe: the search runs in another process (replay_planner.py), in virtual time in this one.

MIN_REQUESTS: Final = 50
"""Fewer requests say too little about a p90."""
RECENT_SHARE: Final = 1 / 3
"""The arrivals of this last part of the recorded time count as those of now: 10 of 30 minutes."""
MENTIONED: Final = 0.05
"""An explanation mentions how far the TTFT is above its baseline, from this fraction of the limit on."""
SAME_LOAD: Final = 0.01
"""Loads that differ by less than this fraction count as the same."""
_DEFAULTS: Final = ScalingReplay()


class NodeFigures(msgspec.Struct, frozen=True):
    """The learned speed and the memory of one kind of node."""

    ms_per_token: float
    """Prefill time per token of a short prompt, without the time of a step."""
    step_ms: float
    """Time of a decode step over an empty context."""
    slope_ms: float
    """Additional time of a step for each token of context."""
    kv_tokens: int


class FleetNode(msgspec.Struct, frozen=True):
    gpu: str
    island: str
    usd_per_hour: float = 0.0


class OfferedNode(msgspec.Struct, frozen=True):
    offer: OfferKey
    node: FleetNode
    most: int
    """How many more nodes of this offer may be added."""


class ReplayedFleet(msgspec.Struct, kw_only=True, frozen=True):
    """The result of one replay."""

    nodes: int
    usd_per_hour: float
    """Price of the whole fleet."""
    offer: OfferKey | None = None
    """Offer of the nodes that were added."""
    load: float = 1.0
    """Arrivals relative to the recorded traffic."""
    arrivals_per_s: float = 0.0
    tokens_per_s: float = 0.0
    """Tokens per second of prompts and answers together."""
    ttft_p50_ms: float | None = None
    ttft_p90_ms: float | None = None
    ttft_p99_ms: float | None = None
    inter_token_p90_ms: float | None = None
    good_ratio: float | None = None
    hit_ratio: float = 0.0
    excess: float = 0.0
    """The largest value relative to its limit. At most 1: the fleet meets the objective."""

    @property
    def question(self) -> tuple[object, ...]:
        """What was replayed. `load` is not part of it: it is relative to the traffic of one search."""
        return self.nodes, self.usd_per_hour, self.offer, self.arrivals_per_s, self.tokens_per_s


def mean_of(one: ReplayedFleet, other: ReplayedFleet, objective: Objective) -> ReplayedFleet:
    """Return the means of two replays of the same fleet. Where one of them misses the objective by more than its values
    say (it was stopped, or lost requests), the larger excess counts."""
    means: dict[str, float | None] = {}
    for name in ("ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms", "inter_token_p90_ms", "good_ratio", "hit_ratio"):
        values = [value for value in (getattr(one, name), getattr(other, name)) if value is not None]
        means[name] = sum(values) / len(values) if values else None
    fleet = msgspec.structs.replace(one, **means)
    # A replay that was stopped has the figures of the part before: too good to be averaged.
    is_worse = any(_is_worse(replayed, objective) for replayed in (one, other))
    worst = max(one.excess, other.excess)
    return msgspec.structs.replace(fleet, excess=worst if is_worse else _excess_of(fleet, objective))


def judged_excess(fleet: ReplayedFleet, objective: Objective, above_baseline_ms: float) -> float:
    """Return the excess of a fleet whose TTFT p90 is reduced by `above_baseline_ms`. A replay that was stopped, or lost
    requests, is not reduced: its requests wait."""
    if not above_baseline_ms or _is_worse(fleet, objective):
        return fleet.excess
    return _excess_of(fleet, objective, above_baseline_ms)


def _is_worse(fleet: ReplayedFleet, objective: Objective) -> bool:
    """Return whether the fleet misses the objective by more than its values say."""
    return fleet.excess > 1.001 * _excess_of(fleet, objective)


def _excess_of(fleet: ReplayedFleet, objective: Objective, above_baseline_ms: float = 0.0) -> float:
    ttft_p90_ms = None if fleet.ttft_p90_ms is None else max(0.0, fleet.ttft_p90_ms - above_baseline_ms)
    return excess(objective, ttft_p90_ms, fleet.ttft_p99_ms, fleet.inter_token_p90_ms, fleet.good_ratio)


class PlanRequest(msgspec.Struct, kw_only=True):
    nodes: tuple[FleetNode, ...]
    """The serving and pending nodes. The last `removable` of them may be removed, the very last one first."""
    removable: int = 0
    offers: tuple[OfferedNode, ...] = ()
    """The available offers, the cheapest for its speed first."""
    figures: dict[str, NodeFigures]
    """The figures by GPU. A GPU that is not listed counts as the first one."""
    round_trip_ms: dict[str, float] = {}
    """The round trip by island."""
    objective: Objective = Objective()
    margin: float = _DEFAULTS.margin
    max_requests: int = _DEFAULTS.max_requests
    lead_s: float = 0.0
    """Time until a node that is requested now would serve."""
    share: float = 1.0
    """The fraction of the fleet's requests that is in the recorded traffic: other routers send the rest."""
    target_excess: float = 1.0
    """The `target_excess` of the last plan: above 1 if no fleet meets the objective."""
    baseline_ttft_ms: float | None = None
    """The baseline: the usual TTFT p90 of a fleet on which hardly any request waits (replay_planner.py)."""
    known: tuple[ReplayedFleet, ...] = ()
    """Replays of the last minutes, which need not be repeated if they are clear enough."""
    predict_current: bool = False
    """Whether to replay the traffic as it was on the current fleet, to compare with what was observed."""
    show_larger: bool = False
    """Whether to replay a larger fleet, to say what it would save."""
    max_cpu_s: float = 30.0
    router: Config = Config()
    """The router's own settings, as far as they matter for routing."""


class FleetPlan(msgspec.Struct, kw_only=True):
    nodes: int = 0
    """Number of nodes of the current fleet, pending ones included."""
    add: int = 0
    postponed: int = 0
    """Nodes that the replays call for, and that too few measured requests do not justify yet."""
    offer: OfferKey | None = None
    spare: int = 0
    """How many nodes the fleet could do without."""
    fleets: tuple[ReplayedFleet, ...] = ()
    larger: ReplayedFleet | None = None
    """The replay of a fleet with more nodes than needed, which shows what they would save."""
    target_excess: float = 1.0
    """Above 1 if no fleet meets the objective: then the plan is the smallest fleet that comes close to the best."""
    floor_ms: float | None = None
    """The TTFT p90 of a fleet that is so large that hardly any request waits, if it was replayed."""
    above_baseline_ms: float = 0.0
    """By how much `floor_ms` is above the baseline. This part of a fleet's TTFT p90 does not count."""
    rises: bool = False
    """Whether the load rises more than chance explains."""
    growth: float = 1.0
    """Expected arrivals when a node that is requested now would serve, relative to the recorded traffic."""
    chance: float = 0.0
    """By which fraction chance makes the arrivals of a few minutes differ."""
    margin: float = 0.0
    """`ScalingReplay.margin` when the search began."""
    arrivals_per_s: float = 0.0
    """Arrivals per second in the recorded traffic, scaled to all routers."""
    recorded: int = 0
    """Requests in the recorded traffic."""
    measured_s: float = 0.0
    """Length of the last part of the recorded traffic, in which replays are measured. The rest fills the caches."""
    predicted: ReplayedFleet | None = None
    """The replay of the traffic, without growth or margin, on the current fleet."""
    replays: int = 0
    replayed_requests: int = 0
    cpu_s: float = 0.0
    skipped: str = ""
    """Why nothing was replayed; empty if something was."""

    @property
    def desired_nodes(self) -> int:
        return self.nodes + self.add - self.spare

    @property
    def needed_nodes(self) -> int:
        """How many nodes the replays call for: `desired_nodes` and the postponed ones."""
        return self.desired_nodes + self.postponed

    @property
    def load(self) -> float:
        """The arrivals with which the fleet has to meet the objective, relative to the recorded traffic."""
        return self.growth * (1.0 + self.margin + self.chance)

    @property
    def assumed_load(self) -> str:
        """Say which load the fleet has to hold, and why."""
        return (
            f"replayed with {self.load:.0%} of the recorded load: {self.growth:.0%} expected when a new node serves, "
            f"margin {self.margin:.0%}, chance {self.chance:.0%}"
        )

    def fleet(self, nodes: int) -> ReplayedFleet | None:
        """Return the replay with this many nodes; with the offer that was chosen, if several were replayed."""
        found = [one for one in self.fleets if one.nodes == nodes and one.offer in (None, self.offer)]
        return found[-1] if found else None

    def explain(self, objective: Objective) -> str:
        """Return why this is the size that the fleet should have."""
        if self.skipped:
            return self.skipped
        desired = self.needed_nodes
        chosen = self.fleet(desired) or self._nearest(desired, objective)
        if chosen is None:
            return ""
        parts = [f"{self._named(chosen)}: {describe(chosen, objective, with_limit=True)}"]
        if chosen.nodes != desired:
            parts.insert(0, f"{count_of_nodes(desired)}, which earlier plans wanted and this search did not replay")
        if self.postponed:
            parts.append(f"{count_of_nodes(self.desired_nodes)} for now: too few requests to add more at once")
        smaller = self.fleet(chosen.nodes - 1)
        if smaller is not None:
            parts.append(f"{self._named(smaller)}: {describe(smaller, objective)}")
        if self.larger is not None and _same(chosen.arrivals_per_s, self.larger.arrivals_per_s):
            parts.append(_saving(chosen, self.larger))
        if self.above_baseline_ms > MENTIONED * objective.ttft_p90_ms:
            longer = duration(self.above_baseline_ms)
            parts.append(
                f"{longer} of each TTFT p90 do not count: many more nodes also take {longer} longer than usual"
            )
        if self.target_excess > 1.0:
            parts.append("no fleet meets the objective: more nodes would hardly help")
        elif judged_excess(chosen, objective, self.above_baseline_ms) > 1.0:
            parts.append("the limits allow no fleet that meets the objective")
        return "; ".join(parts)

    def _nearest(self, nodes: int, objective: Objective) -> ReplayedFleet | None:
        """Return the largest smaller fleet that was replayed and met the target, so that this many nodes do, too; else
        the smallest larger one."""
        smaller = [
            one
            for one in self.fleets
            if one.nodes < nodes and judged_excess(one, objective, self.above_baseline_ms) <= self.target_excess
        ]
        larger = [one for one in self.fleets if one.nodes > nodes]
        return max(smaller, key=lambda one: one.nodes, default=None) or min(
            larger, key=lambda one: one.nodes, default=None
        )

    def _named(self, fleet: ReplayedFleet) -> str:
        """Return the number of nodes, and the load if it is not that of the plan: to remove a node the rest has to hold
        more."""
        load = "" if _same(fleet.load, self.load) else f" with {fleet.load:.0%} of the recorded load"
        return count_of_nodes(fleet.nodes) + load


def _same(load: float, other: float) -> bool:
    return abs(load - other) <= SAME_LOAD * max(load, other)


def too_little_traffic(recorded: int, recorded_s: float = 0.0, least_s: float = 0.0) -> str:
    if recorded < MIN_REQUESTS:
        return f"replay has too little traffic: {recorded} of {MIN_REQUESTS} requests"
    return f"replay has too little traffic: {recorded_s:.0f} of {least_s:.0f} s"


def excess(
    objective: Objective, ttft_p90_ms: float | None, ttft_p99_ms: float | None, inter_token_p90_ms: float | None,
    good_ratio: float | None,
) -> float:  # fmt: skip
    """Return the largest measured value relative to its limit. `warmroute plan` and the autoscaler both judge fleets
    with it."""
    ratios = [0.0]
    for value, limit in (
        (ttft_p90_ms, objective.ttft_p90_ms),
        (ttft_p99_ms, objective.ttft_p99_ms),
        (inter_token_p90_ms, objective.inter_token_p90_ms),
    ):
        if limit and value is not None:
            ratios.append(value / limit)
    if objective.min_good_ratio and good_ratio is not None:
        # With 99 % wanted, 98 % are twice as many bad answers as allowed: shares of bad answers compare like times do.
        ratios.append((1.0 - good_ratio) / max(1e-3, 1.0 - objective.min_good_ratio))
    return max(ratios)


def describe(fleet: ReplayedFleet, objective: Objective, *, with_limit: bool = False) -> str:
    """Return what the replay measured for each limit of the objective."""
    parts = []
    for name, value_ms, limit_ms in (
        ("TTFT p90", fleet.ttft_p90_ms, objective.ttft_p90_ms),
        ("TTFT p99", fleet.ttft_p99_ms, objective.ttft_p99_ms),
        ("inter-token p90", fleet.inter_token_p90_ms, objective.inter_token_p90_ms),
    ):
        if limit_ms and value_ms is not None:
            parts.append(f"{name} {duration(value_ms)}" + (f" (objective {duration(limit_ms)})" if with_limit else ""))
    if objective.min_good_ratio and fleet.good_ratio is not None:
        limit = f" (objective {objective.min_good_ratio:.0%})" if with_limit else ""
        parts.append(f"{fleet.good_ratio:.1%} good{limit}")
    return ", ".join(parts) or "nothing measured"


def _saving(chosen: ReplayedFleet, larger: ReplayedFleet) -> str:
    saved_ms = (chosen.ttft_p90_ms or 0.0) - (larger.ttft_p90_ms or 0.0)
    usd = larger.usd_per_hour - chosen.usd_per_hour
    cost = f" for {usd:.2f} USD/h" if usd > 0 else ""
    if saved_ms < 0.02 * (chosen.ttft_p90_ms or 0.0):
        return f"{count_of_nodes(larger.nodes)} would save nothing{cost}"
    return f"{count_of_nodes(larger.nodes)} would save {duration(saved_ms)}{cost}"


def duration(ms: float) -> str:
    if ms >= 10_000.0:
        return f"{ms / 1000.0:.0f} s"
    return f"{ms / 1000.0:.2g} s" if ms >= 1000.0 else f"{ms:.0f} ms"


# Puts together what a search by replay needs: the fleet, the offers and the learned speeds.
#
# The speed of a kind of node is the median over the nodes with the same GPU. A GPU without a measured node counts as
# the most frequent one.

MIN_KV_TOKENS: Final = 1024
"""A smaller cache holds no ordinary prompt: the engine reported something else."""
MAX_CONTEXT_STEPS: Final = 6.0
"""A decode step reads the weights once and the KV cache of its context. A full cache is at most about this many times
as large as the weights. With short answers the learned slope is mostly the prefills between tokens, and too high."""
MIN_CPU_S: Final = 5.0
"""A search gets at least this much CPU time, also with a short `interval_s`: one replay of 10,000 requests takes 3
s."""
MIN_INTERVALS: Final = 0.2
"""If more requests arrive than the plan expected, the next search starts this many intervals after the last one: a
minute of five."""
MAX_INTERVALS: Final = 1.5
"""A search takes at most this many times `ScalingReplay.interval_s`."""
MAX_NODES: Final = 512
"""Larger fleets are not replayed."""


class CannotPlan(Exception):
    """Why nothing can be replayed."""


def router_settings(config: Config) -> Config:
    """Return the settings that matter for routing, without names of nodes, keys and files."""
    # The settings cross a pipe to another process, which needs no key, no path and no name of a node.
    return Config(
        routing=config.routing,
        price=config.price,
        admission=config.admission,
        hedging=config.hedging,
        islands=config.islands,
        island_affinity=config.island_affinity,
    )


def plan_request(
    inputs: ScalingInputs, offers: OfferSelector, terminating: Sequence[PaidNode], router: Config
) -> PlanRequest:
    """Return the request without what the planner adds. Raises CannotPlan."""
    config, view = inputs.config, inputs.view
    figures = node_figures(view)
    removable = rank_candidates(inputs, any_node=not offers.offers)
    names = [one.node.name for one in removable]
    fixed = [node for node in inputs.serving if node.name not in names]
    leaving = [one.node for one in reversed(removable)]  # the best candidate is the last one
    nodes = [
        *(FleetNode(one.gpu, one.island, _usd(one.usd_per_hour)) for one in fixed),
        *(FleetNode(one.gpu, one.island, _usd(one.usd_per_hour)) for one in inputs.pending),
        *(FleetNode(one.gpu, one.island, _usd(one.usd_per_hour)) for one in leaving),
    ]
    if not nodes:
        raise CannotPlan("no node serves")
    if len(nodes) > MAX_NODES:
        raise CannotPlan(f"more than {MAX_NODES} nodes")
    paid = [*(paid_node(node) for node in view.nodes if not node.unchecked), *inputs.pending, *terminating]
    offered: dict[tuple[str, str], OfferedNode] = {}
    for offer, most in offers.ranked(paid, inputs.speeds, view.now_s, view.stable.prefill_work or 0.0):
        node = FleetNode(offer.gpu, offer.island, offer.usd_per_hour)
        offered.setdefault((offer.gpu, offer.island), OfferedNode(offer.key, node, most))
    starts_s = [offers.start_s(offer) for offer in offers.offers]
    if not offers.offers:  # somebody else adds nodes, such as those there are
        # KEDA or an operator adds nodes. The best guess is a node like most of those that run.
        room = max(0, config.max_nodes - len(nodes))
        offered[("", "")] = OfferedNode(("", "node"), _most_frequent(nodes), room)
    places = {node.island for node in nodes} | {one.node.island for one in offered.values()}
    round_trips = {one.island: offers.round_trip_ms(one) for one in offers.offers}
    return PlanRequest(
        nodes=tuple(nodes),
        removable=len(leaving),
        offers=tuple(offered.values()),
        figures=figures,
        round_trip_ms={place: round_trips.get(place, offers.island_round_trip_ms(place)) for place in places},
        objective=config.objective,
        margin=config.replay.margin,
        max_requests=config.replay.max_requests,
        lead_s=min(starts_s, default=0.0) + MIN_INTERVALS * config.replay.interval_s,
        max_cpu_s=max(MIN_CPU_S, MAX_INTERVALS * config.replay.interval_s * config.replay.cpu_share),
        router=router,
    )


def node_figures(view: FleetView) -> dict[str, NodeFigures]:
    """Return the speed and memory of each GPU with a measured node, the most frequent one first. Raises CannotPlan."""
    by_gpu: dict[str, list[NodeView]] = {}
    for node in view.nodes:
        if node.learned:
            by_gpu.setdefault(node.gpu, []).append(node)
    if not by_gpu:
        raise CannotPlan("the speed of no node is known yet")
    figures: dict[str, NodeFigures] = {}
    for gpu, nodes in sorted(by_gpu.items(), key=lambda one: -len(one[1])):
        capacities = [node.kv_tokens for node in nodes if node.kv_tokens >= MIN_KV_TOKENS]
        if not capacities:
            continue
        # Prefills between tokens make an estimate of the step too high, so the smaller of two counts.
        steps_ms = [node.step_ms for node in nodes if node.step_ms > 0]
        step_ms, kv_tokens = min([view.decode_base_ms, *([median(steps_ms)] if steps_ms else [])]), median(capacities)
        slope_ms = max(0.0, view.slope_ms) if isfinite(view.slope_ms) else 0.0
        figures[gpu] = NodeFigures(
            ms_per_token=median(node.long_ms_per_token for node in nodes),
            step_ms=step_ms,
            slope_ms=min(slope_ms, MAX_CONTEXT_STEPS * step_ms / kv_tokens),
            kv_tokens=int(kv_tokens),
        )
    if not figures:
        raise CannotPlan("no node reports the size of its KV cache")
    return figures


def _most_frequent(nodes: Iterable[FleetNode]) -> FleetNode:
    return Counter(nodes).most_common(1)[0][0]


def _usd(usd_per_hour: float) -> float:
    return usd_per_hour if isfinite(usd_per_hour) else 0.0
