"""Which fleets are replayed and which one is chosen: in a process of its own, or inside a replay."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from math import ceil, inf
from typing import IO, Final
from zlib import crc32

import msgspec

from warmroute.core.trace_row import TraceRow
from warmroute.lab.planning.fleet_replay import HOPELESS, FleetReplay, simulated_nodes
from warmroute.lab.planning.recorded_traffic import (
    MIN_MEASURED_SHARE,
    Forecast,
    RecordedRequest,
    Sample,
    forecast,
    recorded_until,
    thinned,
)
from warmroute.lab.workloads.trace import prompts_of, text_lengths
from warmroute.lab.workloads.workload_prompt import WorkloadPrompt
from warmroute.lab.world import World
from warmroute.scaling.fleet_plan import (
    MIN_REQUESTS,
    FleetNode,
    FleetPlan,
    OfferedNode,
    PlanRequest,
    ReplayedFleet,
    judged_excess,
    mean_of,
    too_little_traffic,
)
from warmroute.scaling.offers import OfferKey
from warmroute.scaling.replay_planner import PlanningTask

# Which fleets are replayed, and which one is chosen: the cheapest that meets the objective with a margin.
#
#     load to add nodes       growth · (1 + margin + chance)                  the fleet has to meet the objective
#     load to remove nodes    growth · (1 + margin + max(margin, chance))     the rest has to stay below SPARE_EXCESS
#
# `growth` and `chance` are the forecast (recorded_traffic.py), `margin` is configured. While the load rises, what is
# left has to hold RISING times the load to remove nodes.
#
# If the current fleet does not meet the objective, the search doubles the number of added nodes of each offer until it
# does, then bisects, and takes the cheapest result. If three times the fleet is hardly better, none meets the
# objective: then the plan is the smallest fleet that comes within CLOSE of the best. The next searches go by this, and
# check with three times the fleet whether it is still so. If the current fleet meets the objective, the search removes
# nodes: 1, 2, 4, 8, …
#
# Two rules against chance, since searches are many and each could buy a node, or keep one:
# - A fleet that misses its limit narrowly is replayed twice, with other copies of conversations, and the mean counts.
# - A much larger fleet is replayed, too, on which hardly any request waits (_ample). If its TTFT p90 is above the usual
#   one (scaling/replay_planner.py), the recorded prompts are longer than usual. More nodes do not change that, so this
#   difference does not count for any fleet.

USUAL_REQUESTS: Final = 4000
"""A replay has no more, unless they cover too little time: then it has up to `ScalingReplay.max_requests`."""
MIN_MEASURED: Final = 20
"""Fewer measured requests say too little about a p90, and nothing if the traffic has just stopped."""
MAX_OFFERS: Final = 3
"""Kinds of nodes that a search tries. Each costs several replays."""
MIN_IMPROVEMENT: Final = 0.05
"""More nodes have hardly helped if they lower the excess by less than this fraction."""
CLOSE: Final = 1.15
"""Where no fleet meets the objective, one is large enough if its excess is within this factor of the best."""
MUCH_CLOSER: Final = 0.85
"""Where no fleet meets the objective, the next searches go by a new target if it is below this fraction of the last."""
LARGER: Final = 1.5
"""A fleet this many times as large shows whether more nodes would save anything."""
CLEARLY_MET: Final = 0.7
"""A replay with at most this excess need not be repeated with about the same load: the objective is met."""
CLEARLY_MISSED: Final = 1.4
"""A replay with at least this excess, relative to the target, need not be repeated: the objective is missed."""
RISING: Final = 1.25
"""While the load rises, the rest of the fleet has to hold this many times the load: a removed node would be bought
again."""
MIN_SIMULATED: Final = 0.75
"""Least share of a simulated node's work that the sample must have for each node. A smaller fleet is not replayed,
unless it is one node smaller."""
MAX_SAMPLES: Final = 10
"""Attempts to find a sample that is small enough, and not much smaller."""
NEARLY: Final = 0.9
"""A sample this near to the wanted number of requests is good enough."""
SPARE_EXCESS: Final = 0.92
"""What is left of the fleet has to stay below this fraction of the objective, so that noise does not remove a node that
the next search adds again."""
NARROWLY: Final = 1.15
"""A fleet that misses its limit by less than this factor is replayed again, with other copies, and the mean counts."""
AMPLE: Final = 2.0
"""An ample fleet has this many times as many nodes more than the current one, within the next two limits."""
AMPLE_NODES: Final = 8
"""An ample fleet has at most this many nodes more, or AMPLE_SHARE of the current ones if that is more."""
AMPLE_SHARE: Final = 0.5
"""A large fleet needs relatively few nodes more until hardly any request waits."""
MAX_ABOVE_BASELINE: Final = 0.3
"""Largest part of the limit of the TTFT p90 that is not counted because prompts are longer than usual."""
REQUESTS_PER_NODE: Final = 25
"""Measured requests for each node that a search adds: what few requests say may be chance, and the next search
follows."""
OVERLOADED: Final = HOPELESS
"""If the current fleet has this excess, requests might wait on the ample fleet, too: then its TTFT is no baseline."""


def plan_fleet(
    request: PlanRequest,
    recorded: Sequence[RecordedRequest],
    until_ms: float,
    pause: Callable[[], object] = lambda: None,
    cpu_s: Callable[[], float] = time.process_time,
) -> FleetPlan:
    """Search the cheapest fleet. `recorded`: in the order of arrival. `until_ms`: the end of the recorded time."""
    nodes = len(request.nodes)
    if len(recorded) < MIN_REQUESTS:
        return FleetPlan(
            nodes=nodes,
            recorded=len(recorded),
            skipped=too_little_traffic(len(recorded)),
        )
    sample, expected = _sample(request, recorded, until_ms, min(USUAL_REQUESTS, request.max_requests))
    if _is_too_short(sample, recorded, until_ms):
        sample, expected = _sample(request, recorded, until_ms, request.max_requests)
    smallest = _smallest_fleet(nodes, sample.share)
    if _is_too_short(sample, recorded, until_ms):
        sample, expected = _sample(request, recorded, until_ms, request.max_requests, may_remove=False)
        smallest = nodes
    skipped = _why_skipped(request, recorded, until_ms, sample)
    if skipped:
        return FleetPlan(nodes=nodes, recorded=len(recorded), skipped=skipped)
    search = _Search(request, FleetReplay(request, sample, pause), expected, smallest, cpu_s)
    plan = search.run()
    plan.recorded, plan.measured_s, plan.arrivals_per_s = len(recorded), sample.measured_s, sample.arrivals_per_s
    return plan


def _why_skipped(
    request: PlanRequest, recorded: Sequence[RecordedRequest], until_ms: float, sample: Sample
) -> str:  # fmt: skip
    """Return why the sample says too little; an empty string if it does not."""
    if _is_too_short(sample, recorded, until_ms):
        recorded_s = (until_ms - recorded[0].at_ms) / 1000.0
        return (
            f"replay has too much traffic: {request.max_requests} requests cover "
            f"{sample.measured_s:.0f} s of one node, at least {MIN_MEASURED_SHARE * recorded_s:.0f} s are needed"
        )
    if len(sample.requests) - sample.warm_up < MIN_MEASURED:
        return "replay has too little traffic of the last minutes"
    return ""


def _is_too_short(sample: Sample, recorded: Sequence[RecordedRequest], until_ms: float) -> bool:
    recorded_s = (until_ms - recorded[0].at_ms) / 1000.0
    return sample.requests is not recorded and sample.measured_s < MIN_MEASURED_SHARE * recorded_s


def _sample(
    request: PlanRequest, recorded: Sequence[RecordedRequest], until_ms: float, most: int, *, may_remove: bool = True
) -> tuple[Sample, Forecast]:
    """Return a sample, and the load to expect relative to it. The sample has so few requests that a replay with the
    highest load has at most `most`. `may_remove`: whether smaller fleets are replayed, with more load."""
    nodes = max(1, len(request.nodes))
    expected = forecast(recorded, until_ms, request.lead_s, request.share)
    highest = _highest_load(expected, request.margin, may_remove)
    found: tuple[Sample, Forecast] | None = None
    for _ in range(MAX_SAMPLES):
        sample = thinned(recorded, until_ms, nodes, request.share, max(1, int(most / highest)))
        expected = forecast(recorded, until_ms, request.lead_s, request.share, sample.from_ms)
        sizes = range(_smallest_fleet(nodes, sample.share) if may_remove else nodes, 2 * nodes + 1)
        rounded_up = max(simulated_nodes(size, sample.share) / (size * sample.share) for size in sizes)
        assumed, highest = highest, _highest_load(expected, request.margin, may_remove) * rounded_up
        if len(sample.requests) * highest > most:
            highest = max(highest, assumed / NEARLY)  # a smaller one
            continue
        if found is None or sample.measured_s > found[0].measured_s:
            found = sample, expected
        if sample.requests is recorded or highest > NEARLY * assumed:
            break  # there is hardly room for more
    return found or (sample, expected)


def _smallest_fleet(nodes: int, share: float) -> int:
    """Return how small a fleet may be for this sample. If the sample has work for one node of it, a fleet of half the
    size has one simulated node with twice the requests. Later searches, with a sample for what is left then, go on."""
    least = MIN_SIMULATED * min(1.0, nodes * share)
    return max(1, min(nodes - 1, ceil(least / share)))


def _ample(nodes: tuple[FleetNode, ...]) -> tuple[FleetNode, ...]:
    """Return a fleet with as many more nodes, of the same kinds, that hardly any request waits."""
    more = min(AMPLE * len(nodes), max(AMPLE_NODES, AMPLE_SHARE * len(nodes)))
    return (*nodes, *islice(cycle(nodes), ceil(more)))


def _load_to_remove(expected: Forecast, margin: float) -> float:
    """Return the load that the rest of the fleet has to hold before a node is removed."""
    return expected.growth * (1.0 + margin + max(margin, expected.chance)) * (RISING if expected.rises else 1.0)


def _highest_load(expected: Forecast, margin: float, may_remove: bool) -> float:
    to_add = expected.growth * (1.0 + margin + expected.chance)
    return max(1.0, _load_to_remove(expected, margin) if may_remove else to_add)


class _Search:
    def __init__(
        self, request: PlanRequest, replay: FleetReplay, expected: Forecast, smallest: int, cpu_s: Callable[[], float]
    ) -> None:
        self._request = request
        self._replay = replay
        self._expected = expected
        self._smallest = smallest
        self._cpu_s = cpu_s
        self._start_s = cpu_s()
        self._fleets: list[ReplayedFleet] = []
        self._target = max(1.0, request.target_excess)
        self._above_baseline_ms = 0.0
        """The part of every fleet's TTFT p90 that does not count."""

    @property
    def _late(self) -> bool:
        """Whether the search has taken as long as it may."""
        return self._cpu_s() - self._start_s > self._request.max_cpu_s

    def run(self) -> FleetPlan:
        request, nodes = self._request, self._request.nodes
        growth, chance, margin = self._expected.growth, self._expected.chance, request.margin
        plan = FleetPlan(nodes=len(nodes), growth=growth, chance=chance, margin=margin, rises=self._expected.rises)
        up = plan.load
        current = self._run(nodes, up) if nodes else None
        if current is not None:
            plan.floor_ms = self._measure_floor(current, up)
            plan.above_baseline_ms = self._above_baseline_ms
            current = self._fleets[0] = self._again_if_narrow(current, nodes, up, None, 1.0)
        if self._target > 1.0 and current is not None:
            self._check_target(current, up)
        if current is None or self._excess(current) > self._target:
            chosen = self._cheapest_addition(current, up)
            if chosen is not None:
                most = max(1, self._replay.measured // REQUESTS_PER_NODE)
                wanted = chosen.nodes - len(nodes)
                plan.add, plan.offer = min(most, wanted), chosen.offer
                plan.postponed = wanted - plan.add
        else:
            plan.spare = self._spare(_load_to_remove(self._expected, margin))
        if request.predict_current and nodes:
            plan.predicted = self._replay.run(nodes, 1.0)
        if request.show_larger and not self._late:
            plan.larger = self._larger(plan, up)
        plan.fleets = tuple(self._fleets)
        plan.target_excess = self._target
        plan.replays, plan.replayed_requests = self._replay.replays, self._replay.requests
        plan.cpu_s = self._cpu_s() - self._start_s
        return plan

    def _run(
        self, nodes: Sequence[FleetNode], load: float, offer: OfferedNode | None = None, *, limit: float = 0.0
    ) -> ReplayedFleet:
        """`limit`: the excess that decides, if a narrow miss is to be replayed again."""
        key = offer.offer if offer is not None else None
        known = self._known(nodes, load, key)
        if known is not None:
            fleet = msgspec.structs.replace(known, load=known.arrivals_per_s / max(1e-9, self._replay.arrivals_per_s))
        else:
            fleet = self._again_if_narrow(self._replay.run(nodes, load, key), nodes, load, key, limit)
        self._fleets.append(fleet)
        return fleet

    def _again_if_narrow(
        self, fleet: ReplayedFleet, nodes: Sequence[FleetNode], load: float, offer: OfferKey | None, limit: float
    ) -> ReplayedFleet:
        """Replay a fleet that misses this limit narrowly a second time, and return the mean."""
        if not limit < self._excess(fleet) < NARROWLY * limit or self._late:
            return fleet
        return mean_of(fleet, self._replay.run(nodes, load, offer, variant=1), self._request.objective)

    def _excess(self, fleet: ReplayedFleet) -> float:
        """Return the excess without what is unusual."""
        return judged_excess(fleet, self._request.objective, self._above_baseline_ms)

    def _measure_floor(self, current: ReplayedFleet, load: float) -> float | None:
        """Return the TTFT p90 of a fleet on which hardly any request waits, and find out how unusual it is."""
        request, limit_ms = self._request, self._request.objective.ttft_p90_ms
        if not limit_ms or current.excess >= OVERLOADED or self._late:
            return None
        floor_ms = self._replay.run(_ample(request.nodes), load).ttft_p90_ms
        if floor_ms is not None and request.baseline_ttft_ms is not None:
            self._above_baseline_ms = min(MAX_ABOVE_BASELINE * limit_ms, max(0.0, floor_ms - request.baseline_ttft_ms))
        return floor_ms

    def _known(self, nodes: Sequence[FleetNode], load: float, offer: OfferKey | None) -> ReplayedFleet | None:
        """Return an earlier replay of the same fleet that answers the question: with at least as many requests and
        tokens it met the objective clearly, or with at most as many it missed it clearly."""
        arrivals_per_s, tokens_per_s = load * self._replay.arrivals_per_s, load * self._replay.tokens_per_s
        usd = sum(node.usd_per_hour for node in nodes)
        for one in self._request.known:
            if (one.nodes, one.offer) != (len(nodes), offer) or abs(one.usd_per_hour - usd) > 0.01 * usd:
                continue
            was_more = one.arrivals_per_s >= arrivals_per_s and one.tokens_per_s >= tokens_per_s
            was_less = one.arrivals_per_s <= arrivals_per_s and one.tokens_per_s <= tokens_per_s
            is_met = self._excess(one) < CLEARLY_MET * self._target
            if (is_met and was_more) or (self._excess(one) > CLEARLY_MISSED * self._target and was_less):
                return one
        return None

    def _check_target(self, current: ReplayedFleet, load: float) -> None:
        """An earlier search found that no fleet meets the objective. Forget it if one does now, or comes much closer:
        the traffic may have changed since."""
        offer = next((one for one in self._request.offers if one.most >= 1), None)
        best = current
        if self._excess(current) > 1.0 and offer is not None:
            nodes = self._request.nodes
            best = self._run((*nodes, *[offer.node] * min(offer.most, 2 * len(nodes))), load, offer)
        excess = self._excess(best)
        if excess <= 1.0:
            self._target = 1.0
        elif CLOSE * excess < MUCH_CLOSER * self._target:
            self._target = CLOSE * excess

    def _cheapest_addition(self, current: ReplayedFleet | None, load: float) -> ReplayedFleet | None:
        best: ReplayedFleet | None = None
        for offer in self._request.offers[:MAX_OFFERS]:
            if offer.most < 1 or self._late:
                continue
            found = self._smallest_addition(offer, current, load)
            if current is not None and self._excess(current) <= self._target:
                return None  # no fleet meets the objective, and the current one comes close enough
            if found is not None and (best is None or self._is_better(found, best)):
                best = found
        return best

    def _is_better(self, one: ReplayedFleet, other: ReplayedFleet) -> bool:
        meets, other_meets = self._excess(one) <= self._target, self._excess(other) <= self._target
        if meets != other_meets:
            return meets
        if not meets:
            return self._excess(one) < self._excess(other)
        return (one.usd_per_hour, one.nodes) < (other.usd_per_hour, other.nodes)

    def _smallest_addition(
        self, offer: OfferedNode, current: ReplayedFleet | None, load: float
    ) -> ReplayedFleet | None:
        """Return the smallest fleet with more nodes of this offer that meets the target; the largest one if none
        does."""
        nodes = self._request.nodes
        tried: dict[int, ReplayedFleet] = {}

        def excess(added: int) -> float:
            if added not in tried:
                tried[added] = self._run((*nodes, *[offer.node] * added), load, offer, limit=self._target)
            return self._excess(tried[added])

        low, added = 0, 1
        before = self._excess(current) if current is not None else inf
        while excess(added) > self._target:
            if added >= offer.most or self._late:
                break
            low = added
            hardly = excess(added) > (1.0 - MIN_IMPROVEMENT) * before
            before = excess(added)
            added = min(offer.most, max(2 * added, 2 * len(nodes)) if hardly else 2 * added)
            if hardly and excess(added) > max(self._target, (1.0 - MIN_IMPROVEMENT) * before):
                self._target = CLOSE * excess(added)
                if current is not None and self._excess(current) <= self._target:
                    return None
                low = 0
        high = added
        while high - low > 1 and excess(high) <= self._target and not self._late:
            middle = (low + high) // 2
            if excess(middle) <= self._target:
                high = middle
            else:
                low = middle
        return tried[high]

    def _spare(self, load: float) -> int:
        """Return how many nodes the fleet could do without."""
        request, spare = self._request, 0
        most = min(request.removable, len(request.nodes) - self._smallest)
        removed = 1
        while removed <= most and not self._late:
            limit = SPARE_EXCESS * self._target
            if self._excess(self._run(request.nodes[:-removed], load, limit=limit)) > limit:
                break
            spare, removed = removed, 2 * removed
        return spare

    def _larger(self, plan: FleetPlan, load: float) -> ReplayedFleet | None:
        """Return what half as many nodes more than planned would reach."""
        request = self._request
        offer = next((one for one in request.offers if plan.offer in (None, one.offer)), None)
        if offer is None:
            return None
        needed = plan.needed_nodes
        added = needed - plan.nodes + max(1, round((LARGER - 1.0) * needed))
        if added < 1:
            return None
        return self._replay.run((*request.nodes, *[offer.node] * added), load, offer.offer)


# The process that searches a fleet by replay (scaling/replay_planner.py starts it):
#
#     python -m warmroute.lab.planning.search < task > plan
#
# It has the lowest priority, sleeps so that it takes its share of a core at most, and ends when the router has ended.

MAX_MEMORY_BYTES: Final = 4 << 30
"""Address space of a search: a fault in it must not take the router's machine."""
USED_SHARE: Final = 0.97
"""Part of the CPU share that a search uses by its own measure. The start and the end of a process are outside of what
it can measure."""
SLEEP_S: Final = 0.02
"""The process sleeps at least this long at a time."""
CHECK_S: Final = 1.0
"""Time between two checks whether the router still runs."""


class Throttle:
    """Sleeps so that the process takes at most `share` of a core, counted from its start. Ends it with the router."""

    def __init__(self, share: float, parent: int) -> None:
        self._share = share if share >= 1.0 else USED_SHARE * share
        self._parent = parent
        self._start_s = self._checked_s = time.monotonic()
        self._start_cpu_s = 0.0

    def pause(self) -> None:
        now_s = time.monotonic()
        ahead_s = (time.process_time() - self._start_cpu_s) / self._share - (now_s - self._start_s)
        if ahead_s > SLEEP_S or now_s - self._checked_s > CHECK_S:
            self._checked_s = now_s
            if os.getppid() != self._parent:
                sys.exit("the router has ended")
        if ahead_s > SLEEP_S and self._share < 1.0:
            time.sleep(ahead_s)


def lower_priority(max_cpu_s: float) -> None:
    """Let every other process go first, and bound what a mistake could cost."""
    os.nice(19)
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError):
        pass  # not allowed in this container: nice remains
    for limit, value in ((resource.RLIMIT_CPU, int(2 * max_cpu_s) + 60), (resource.RLIMIT_AS, MAX_MEMORY_BYTES)):
        _soft, hard = resource.getrlimit(limit)
        resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def read_recorded(lines: Iterator[bytes], block_tokens: int, recorded_ms: float) -> tuple[list[RecordedRequest], float]:
    """Return the recorded requests in the order of their arrival, and until when: without the last moments, because
    many requests that arrived then have not ended yet."""
    decoder = msgspec.json.Decoder(TraceRow)
    rows: list[tuple[float, int, TraceRow]] = []
    for line in lines:
        conversation, _, text = line.partition(b" ")
        row = decoder.decode(text)
        rows.append((row.timestamp + row.timestamp_us / 1000.0, int(conversation), row))
    until_ms = recorded_until(recorded_ms, [row.duration_ms or 0.0 for _, _, row in rows])
    rows = [one for one in rows if one[0] <= until_ms]
    rows.sort(key=lambda one: one[0])
    in_order = [row for _, _, row in rows]
    prompts = (prompt for _, prompt in prompts_of(in_order, block_tokens, text_lengths(in_order)))
    recorded = [
        RecordedRequest(prompt, at_ms, conversation)
        for prompt, (at_ms, conversation, _) in zip(prompts, rows, strict=True)
    ]
    return recorded, until_ms


def search(file: IO[bytes]) -> bytes:
    size = int.from_bytes(file.read(8), "big")
    task = msgspec.msgpack.decode(file.read(size), type=PlanningTask)
    lower_priority(task.request.max_cpu_s)
    throttle = Throttle(task.cpu_share, task.parent)
    throttle.pause()
    recorded, until_ms = read_recorded(iter(file), task.block_tokens, task.recorded_ms)
    task.request.lead_s += (task.recorded_ms - until_ms) / 1000.0
    plan = plan_fleet(task.request, recorded, until_ms, throttle.pause)
    throttle.pause()
    plan.cpu_s = time.process_time()
    return msgspec.msgpack.encode(plan)


if __name__ == "__main__":
    sys.stdout.buffer.write(search(sys.stdin.buffer))


# Searches by replay inside a replay: the simulated router records what reaches it, and a search that begins now ends
# when a process with its share of a core would have ended it.

REQUEST_CPU_S: Final = 0.0006
"""CPU time of one replayed request, so that results do not depend on the machine."""
DURATIONS: Final = 500
"""Requests that have ended last, for the time that requests take."""


class SimulatedPlanning:
    def __init__(self, world: World, window_s: float, cpu_share: float) -> None:
        self._world = world
        self._calendar = world.calendar
        self._window_ms = 1000.0 * window_s
        self._cpu_share = cpu_share
        self._recorded: deque[RecordedRequest] = deque()
        self._count = 0
        world.on_arrival = self._record

    @property
    def recorded(self) -> int:
        return len(self._recorded)

    @property
    def recorded_s(self) -> float:
        return (self._calendar.now_ms - self._recorded[0].at_ms) / 1000.0 if self._recorded else 0.0

    def _record(self, prompt: WorkloadPrompt) -> None:
        now_ms, recorded = self._calendar.now_ms, self._recorded
        self._count += 1
        conversation = crc32(prompt.session) if prompt.session else self._count
        recorded.append(RecordedRequest(prompt, now_ms, conversation))
        while recorded[0].at_ms < now_ms - self._window_ms:
            recorded.popleft()

    def start(self, request: PlanRequest, done: Callable[[FleetPlan | None, str], object]) -> None:
        now_ms = self._calendar.now_ms
        until_ms = recorded_until(now_ms, self._world.results.latency_ms[-DURATIONS:])
        request.lead_s += (now_ms - until_ms) / 1000.0
        since_ms = now_ms - self._window_ms
        plan = plan_fleet(request, [one for one in self._recorded if since_ms <= one.at_ms <= until_ms], until_ms)
        plan.cpu_s = REQUEST_CPU_S * plan.replayed_requests
        self._calendar.after(1000.0 * plan.cpu_s / self._cpu_share, done, plan, "")
