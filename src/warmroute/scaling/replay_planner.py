"""When a search by replay starts, in a process of its own, and how long its plan counts."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable
from functools import partial
from math import exp, inf
from tempfile import TemporaryFile
from typing import IO, Final, Protocol

import msgspec

from warmroute.blocking import run_in_thread
from warmroute.config import Scaling
from warmroute.core.demand import DemandMeter, percentile_ms
from warmroute.event_log import EventLog
from warmroute.scaling.fleet_plan import (
    MIN_INTERVALS,
    MIN_REQUESTS,
    RECENT_SHARE,
    CannotPlan,
    FleetPlan,
    PlanRequest,
    ReplayedFleet,
    duration,
    judged_excess,
    too_little_traffic,
)
from warmroute.scaling.recent_traffic import BLOCK_TOKENS, RecentTraffic, framed

# The TTFT p90 that the recorded requests usually have on a fleet so large that hardly any of them waits.
#
# Some minutes have longer prompts than others, by chance. They take longer on a fleet of any size, and the next minutes
# have other prompts. So a search by replay compares this floor with the usual one, and does not count the difference
# (lab/planning/search.py). The baseline is a mean over time that fades: what was measured FADE_WINDOWS times
# `ScalingReplay.window_s` ago counts 1/e. It begins with an assumption that counts as one window: the first minutes
# say little about what is usual.

FADE_WINDOWS: Final = 4.0
"""With windows of 30 minutes, a measurement of two hours ago counts 1/e."""
ASSUMED_SHARE_OF_LIMIT: Final = 0.75
"""The first baseline, as a share of the limit of the TTFT p90."""


class BaselineTtft(msgspec.Struct):
    _sum: float
    _weight_s: float
    _updated_s: float = -inf

    @classmethod
    def assumed(cls, limit_ms: float, window_s: float) -> BaselineTtft:
        """Return the baseline before anything was measured. `limit_ms`: the objective's limit of the TTFT p90."""
        return cls(ASSUMED_SHARE_OF_LIMIT * limit_ms * window_s, window_s)

    @property
    def ttft_ms(self) -> float:
        return self._sum / self._weight_s

    def record(self, ttft_ms: float, now_s: float, measured_s: float, window_s: float) -> None:
        """Take over the floor of a search. `measured_s`: the recorded time that it was measured over. Searches that
        follow each other sooner measure the same requests, so each counts for the time since the last one."""
        passed_s = max(0.0, now_s - self._updated_s) if self._updated_s > -inf else measured_s
        fades = exp(-passed_s / (FADE_WINDOWS * window_s))
        weight_s = min(passed_s, measured_s)
        self._sum = self._sum * fades + ttft_ms * weight_s
        self._weight_s = self._weight_s * fades + weight_s
        self._updated_s = now_s


# Scaling by replay: when a search starts, how long its plan counts, and whether its predictions can be trusted.
#
# A search starts every `ScalingReplay.interval_s`, if the last one has ended and there is enough recorded traffic (50
# requests, and MIN_RECORDED_S of time), and earlier if more requests arrive than the last plan allows for, margin and
# chance included, or if the load rises and the fleet was only just large enough. Its plan counts for MAX_AGE_INTERVALS
# intervals. A node is spare if no plan of the last third of the window (RECENT_SHARE, 10 minutes) wanted it, without a
# gap between the plans. Now and then the search also replays the traffic as it was on the fleet as it is, and the
# planner compares the predicted TTFT and time between tokens with the observed ones. If one of those that the objective
# limits differs by more than MAX_ERROR several times in a row, the autoscaler goes by thresholds until they agree
# again. So it does without a plan: at the start, with little traffic, or if the searching process fails.

log = EventLog("warmroute.scaling")

MAX_AGE_INTERVALS: Final = 4.0
"""A plan counts for this many intervals: 20 minutes. Three searches in a row may fail before thresholds decide."""
MIN_RECORDED_S: Final = 300.0
"""Recorded time that a search needs. With less, a replay begins with empty caches that the nodes do not have, and a
line through the arrivals is noise."""
MIN_RECORDED_SHARE: Final = 0.5
"""If `window_s` is short, this fraction of it is enough instead of MIN_RECORDED_S."""
PREDICT_EVERY: Final = 3
"""One search in this many also predicts the current fleet's TTFT, and says what a larger fleet would save."""
MAX_ERROR: Final = 2.0
"""Largest ratio of a predicted and an observed time."""
MIN_SHARE_OF_LIMIT: Final = 0.5
"""A wrong prediction counts only if one of the two is above this fraction of the objective."""
DEFAULT_LIMIT_MS: Final = 2000.0
"""The limit with which predictions are judged if the objective has none."""
WRONG_BEFORE_FALLBACK: Final = 3
"""One wrong prediction may be chance, or a node that was slow for a minute."""
RIGHT_BEFORE_RETURN: Final = 2
"""Fewer than WRONG_BEFORE_FALLBACK: with thresholds the fleet costs more, so the way back is shorter."""
MIN_MEASURED: Final = 30
"""Fewest first tokens or responses: a percentile of fewer is unknown."""
TTFT_P90: Final = "TTFT p90"
MIN_STAY: Final = 0.9
"""Plans of less time than this fraction of the time whose arrivals they expect again (RECENT_SHARE) make no node
spare."""
SOON_INTERVALS: Final = 0.4
CLOSE_SHARE_OF_LIMIT: Final = 0.8
"""If the load rises, and the excess of the planned fleet is above CLOSE_SHARE_OF_LIMIT, the next search starts after
SOON_INTERVALS times the interval: a node takes minutes to start."""
RECENT_S: Final = 300.0
"""If the arrivals of this last time exceed the plan, a search starts early."""
KNOWN_S: Final = 900.0
"""How long a replay need not be repeated, if its result was clear."""
MIN_KNOWN_REQUESTS: Final = 6 * MIN_REQUESTS
"""A replay of fewer requests is repeated."""
TARGET_AGE_S: Final = 1200.0
"""How long the planner remembers that no fleet meets the objective."""


class PlanRunner(Protocol):
    """Runs a search beside the router."""

    @property
    def recorded(self) -> int:
        """Number of requests in the recorded traffic."""

    @property
    def recorded_s(self) -> float:
        """Time since the first of them arrived."""

    def start(self, request: PlanRequest, done: Callable[[FleetPlan | None, str], object]) -> None:
        """Call `done` with the plan, or with None and the reason."""


class PlannerStats(msgspec.Struct):
    """For the metrics."""

    searches: int = 0
    failures: int = 0
    replays: int = 0
    cpu_s: float = 0.0
    predicted_ms: float = 0.0
    observed_ms: float = 0.0
    trusted: bool = True


class _Reading(msgspec.Struct):
    """Arrivals, first tokens and responses until a search began, and the nodes that served then."""

    at_s: float
    own: float
    """Arrivals at this process."""
    everyone: float
    """Arrivals at all routers."""
    ttft_counts: array[int]
    inter_token_counts: array[int]
    nodes: int


class ReplayPlanner:
    def __init__(self, config: Scaling, meter: DemandMeter, runner: PlanRunner) -> None:
        self.config = config
        self._meter = meter
        self._runner = runner
        self.stats = PlannerStats()
        self._plan: FleetPlan | None = None
        self.planned_s = float("-inf")
        """Until when the traffic of the plan was recorded."""
        self._started_s = float("-inf")
        self._running = False
        self._search_s = 0.0
        """How long the last search took."""
        self._generation = 0
        """Number of changes of the objective and of `[scaling.replay]`. The result of a search that began before the
        last change does not count."""
        self._readings: deque[_Reading] = deque()
        self._known: deque[tuple[float, ReplayedFleet]] = deque()
        """Replays of the last minutes, each with the time of its search."""
        self._desired: deque[tuple[float, int]] = deque()
        """How many nodes each plan wanted, in the time whose arrivals a plan expects again."""
        self._arrived: deque[tuple[float, float]] = deque()
        """How many requests had arrived, at each turn of the last `window_s`."""
        self._expected_per_s = 0.0
        """Arrivals per second that the plan allows for, as the meter counts them."""
        self._wrong = self._right = 0
        self._unreachable_s = float("-inf")
        self._baseline_ttft = self._assumed_baseline()
        self._failing = False
        self.problem = "no replay has ended yet"
        """Why there is no plan; empty if there is one."""

    def reconfigure(self, config: Scaling) -> None:
        """Use a changed configuration. What was found for another objective does not count any more."""
        before, self.config = self.config, config
        if (before.objective, before.replay) != (config.objective, config.replay):
            self.forget()

    def forget(self) -> None:
        """Begin again: what was found before, and what a running search finds, does not count any more."""
        self._generation += 1
        self._known.clear()
        self._baseline_ttft = self._assumed_baseline()
        self._forget_plan()
        self._started_s = self._unreachable_s = float("-inf")

    def _assumed_baseline(self) -> BaselineTtft:
        return BaselineTtft.assumed(self.config.objective.ttft_p90_ms, self.config.replay.window_s)

    def _forget_plan(self, problem: str = "") -> None:
        """Forget the plan, and what earlier ones wanted: other things may have happened between them and the next
        one."""
        self.problem, self._plan = problem or self.problem, None
        self._desired.clear()

    def plan(self, now_s: float) -> FleetPlan | None:
        """Return the plan that counts, or None: then thresholds decide."""
        plan = self._plan
        if plan is None or not self.stats.trusted or plan.skipped:
            return None
        if now_s - self.planned_s > MAX_AGE_INTERVALS * self.config.replay.interval_s:
            self.problem = self.problem or "the last replay is too old"
            return None
        return plan

    @property
    def last_plan(self) -> FleetPlan | None:
        """The last plan, whether it counts or not."""
        return self._plan

    def turn(self, now_s: float, serving: int, create_request: Callable[[], PlanRequest]) -> None:
        """Start a search if it is time."""
        replay = self.config.replay
        intervals = MIN_INTERVALS if self._grows(now_s) else SOON_INTERVALS if self._is_only_just_enough() else 1.0
        if self._running or now_s - self._started_s < replay.interval_s * intervals:
            return
        recorded, recorded_s = self._runner.recorded, self._runner.recorded_s
        least_s = min(MIN_RECORDED_S, MIN_RECORDED_SHARE * replay.window_s)
        if recorded < MIN_REQUESTS or recorded_s < least_s:
            self._forget_plan(too_little_traffic(recorded, recorded_s, least_s))
            return
        self._started_s = now_s
        readings = self._readings
        ttft_counts, _, inter_token_counts = self._meter.times()
        own, everyone = self._meter.own_counts()[0], self._meter.counts()[0]
        readings.append(_Reading(now_s, own, everyone, ttft_counts, inter_token_counts, serving))
        while readings[0].at_s < now_s - replay.window_s - replay.interval_s:
            readings.popleft()
        try:
            request = create_request()
        except CannotPlan as reason:
            self._forget_plan(f"no replay: {reason}")
            return
        request.share = self._share()
        # The plan is used after the search, not when it begins: the node comes that much later.
        request.lead_s += self._search_s
        request.baseline_ttft_ms = self._baseline_ttft.ttft_ms
        while self._known and self._known[0][0] < now_s - KNOWN_S:
            self._known.popleft()
        request.known = tuple(fleet for _, fleet in reversed(self._known))
        # Each of the two costs a replay of its own, and is needed for trust and for the explanation, not for the
        # decision.
        request.predict_current = request.show_larger = self.stats.searches % PREDICT_EVERY == PREDICT_EVERY - 1
        if self._plan is not None and now_s - self._unreachable_s < TARGET_AGE_S:
            request.target_excess = self._plan.target_excess
        self._running = True
        generation = self._generation
        self._runner.start(request, lambda plan, reason: self._ended(plan, reason, now_s, generation))

    def _grows(self, now_s: float) -> bool:
        """Return whether more requests arrive than the last plan allows for: margin and chance included."""
        arrived, plan = self._arrived, self._plan
        arrived.append((now_s, self._meter.counts()[0]))
        while arrived[0][0] < now_s - max(RECENT_S, self.config.replay.window_s):
            arrived.popleft()
        if plan is None or plan.skipped or now_s - arrived[0][0] < 0.9 * RECENT_S:
            return False
        return self._arrivals_per_s(now_s - RECENT_S, now_s) > self._expected_per_s

    def _is_only_just_enough(self) -> bool:
        """Return whether the load rises, and the fleet is only just large enough for what the last plan expected."""
        plan = self._plan
        if plan is None or plan.skipped or self._failing or not plan.rises or plan.target_excess > 1.0 or plan.spare:
            return False
        fleet = plan.fleet(plan.desired_nodes)
        if fleet is None:
            return False
        return CLOSE_SHARE_OF_LIMIT < judged_excess(fleet, self.config.objective, plan.above_baseline_ms) <= 1.0

    def _arrivals_per_s(self, since_s: float, until_s: float) -> float:
        """Return what the meter counted between two times, as far as they are known."""
        known = [one for one in self._arrived if since_s <= one[0] <= until_s]
        if len(known) < 2:
            return 0.0
        (since_s, before), (until_s, after) = known[0], known[-1]
        return (after - before) / (until_s - since_s)

    def _share(self) -> float:
        """Return the fraction of all routers' arrivals that came to this process, in the recorded time."""
        oldest, newest = self._readings[0], self._readings[-1]
        own, everyone = newest.own, newest.everyone
        if newest is not oldest:
            own, everyone = own - oldest.own, everyone - oldest.everyone
        # Never 0: the search divides by it.
        return min(1.0, max(0.01, own / everyone)) if everyone >= 1.0 else 1.0

    def _ended(self, plan: FleetPlan | None, reason: str, started_s: float, generation: int) -> None:
        self._running = False
        if generation != self._generation:
            return
        stats = self.stats
        stats.searches += 1
        if plan is None:
            stats.failures += 1
            self.problem = f"replay failed: {reason}"
            if not self._failing:
                self._failing = True
                log.warning("scaling_replay_failed", "The autoscaler goes by thresholds meanwhile.", reason=reason)
            return
        if self._failing:
            self._failing = False
            log.info("scaling_replay_recovered", "The autoscaler goes by replay again.")
        if plan.floor_ms is not None:
            self._baseline_ttft.record(plan.floor_ms, started_s, plan.measured_s, self.config.replay.window_s)
        stats.replays += plan.replays
        stats.cpu_s += plan.cpu_s
        self._search_s = plan.cpu_s / self.config.replay.cpu_share
        if plan.target_excess > 1.0 and started_s - self._unreachable_s >= TARGET_AGE_S:
            self._unreachable_s = started_s
        if plan.recorded >= MIN_KNOWN_REQUESTS:
            known = {fleet.question for _, fleet in self._known}
            self._known.extend((started_s, fleet) for fleet in plan.fleets if fleet.question not in known)
        if plan.skipped:
            self._desired.clear()
        else:
            plan.spare = self._long_spare(plan, started_s)
            measured_per_s = self._arrivals_per_s(started_s - plan.measured_s, started_s)
            self._expected_per_s = (measured_per_s or plan.arrivals_per_s) * plan.load
        before, self._plan, self.planned_s = self._plan, plan, started_s
        if plan.larger is None and before is not None and before.needed_nodes == plan.needed_nodes:
            plan.larger = before.larger
        if self.stats.trusted or plan.skipped:
            self.problem = plan.skipped
        self._compare(plan, started_s)

    def _long_spare(self, plan: FleetPlan, started_s: float) -> int:
        """Return how many nodes no plan has wanted for as long as the time whose arrivals a plan expects again."""
        desired, replay = self._desired, self.config.replay
        stay_s = RECENT_SHARE * replay.window_s
        if desired and started_s - desired[-1][0] > MAX_AGE_INTERVALS * replay.interval_s:
            desired.clear()  # nobody knows what plans would have wanted between
        desired.append((started_s, plan.desired_nodes))
        since_s = started_s - MIN_STAY * stay_s
        while len(desired) > 1 and desired[1][0] <= since_s:  # the plans of all of this time stay, if there are few
            desired.popleft()
        if desired[0][0] > since_s:
            return 0
        return max(0, min(plan.spare, plan.nodes - max(nodes for _, nodes in desired)))

    # Accuracy.

    def _compare(self, plan: FleetPlan, started_s: float) -> None:
        between = self._readings_of(plan, started_s)
        if plan.predicted is None or between is None:
            return
        pairs = self._predicted_and_observed(plan.predicted, *between)
        if not pairs:
            return
        stats = self.stats
        wrong = next((one for one in pairs if one.is_wrong), None)
        if pairs[0].is_ttft_p90:
            stats.predicted_ms, stats.observed_ms = pairs[0].predicted_ms, pairs[0].observed_ms
        shown = wrong or pairs[0]
        if wrong is not None:
            self._wrong, self._right = self._wrong + 1, 0
        else:
            self._wrong, self._right = 0, self._right + 1
        if stats.trusted and wrong is not None and self._wrong >= WRONG_BEFORE_FALLBACK:
            stats.trusted = False
            predicted, observed = duration(wrong.predicted_ms), duration(wrong.observed_ms)
            self.problem = f"replay predicts {wrong.name} {predicted}, observed {observed}"
            log.warning(
                "scaling_replay_inaccurate",
                "The autoscaler goes by thresholds until predictions are right again.",
                reason=wrong.name,
                predicted_ms=round(wrong.predicted_ms),
                observed_ms=round(wrong.observed_ms),
            )
        elif not stats.trusted and self._right >= RIGHT_BEFORE_RETURN:
            stats.trusted = True
            log.info(
                "scaling_replay_accurate",
                "The autoscaler goes by replay again.",
                predicted_ms=round(shown.predicted_ms),
                observed_ms=round(shown.observed_ms),
            )

    def _predicted_and_observed(self, predicted: ReplayedFleet, since: _Reading, until: _Reading) -> list[_Compared]:
        """Return the times that the objective limits, and the TTFT p90 in any case: it counts without any limit."""
        objective = self.config.objective
        first_tokens = _difference(until.ttft_counts, since.ttft_counts)
        responses = _difference(until.inter_token_counts, since.inter_token_counts)
        limits = objective.ttft_p90_ms, objective.ttft_p99_ms, objective.inter_token_p90_ms
        ttft_limit_ms = limits[0] or (inf if any(limits) else DEFAULT_LIMIT_MS)
        found = []
        for name, limit_ms, predicted_ms, counts, share in (
            (TTFT_P90, ttft_limit_ms, predicted.ttft_p90_ms, first_tokens, 0.9),
            ("TTFT p99", limits[1], predicted.ttft_p99_ms, first_tokens, 0.99),
            ("inter-token p90", limits[2], predicted.inter_token_p90_ms, responses, 0.9),
        ):
            if not limit_ms or predicted_ms is None or sum(counts) < MIN_MEASURED:
                continue
            observed_ms = percentile_ms(counts, share)
            if observed_ms is not None:
                found.append(_Compared(name, limit_ms, predicted_ms, observed_ms))
        return found

    def _readings_of(self, plan: FleetPlan, started_s: float) -> tuple[_Reading, _Reading] | None:
        """Return the readings around the time that the replay measured; None if the fleet changed meanwhile."""
        until = next((one for one in self._readings if one.at_s == started_s), None)
        since_s = started_s - plan.measured_s
        before = [one for one in self._readings if one.at_s < started_s]
        if until is None or not before:
            return None
        since = min(before, key=lambda one: abs(one.at_s - since_s))
        between = [one for one in self._readings if since.at_s <= one.at_s <= started_s]
        if abs(since.at_s - since_s) > 0.5 * plan.measured_s or any(one.nodes != plan.nodes for one in between):
            return None
        return since, until


class _Compared(msgspec.Struct, frozen=True):
    """A predicted and an observed time."""

    name: str
    limit_ms: float
    predicted_ms: float
    observed_ms: float

    @property
    def is_ttft_p90(self) -> bool:
        return self.name == TTFT_P90

    @property
    def is_wrong(self) -> bool:
        larger, smaller = max(self.predicted_ms, self.observed_ms), min(self.predicted_ms, self.observed_ms)
        return larger > MAX_ERROR * max(1e-3, smaller) and larger > MIN_SHARE_OF_LIMIT * self.limit_ms


def _difference(after: array[int], before: array[int]) -> list[int]:
    return [now - then for now, then in zip(after, before, strict=True)]


# Searches by replay in a process of their own, so that they take nothing from the router's event loop.
#
# Each search is one process (lab/planning/search.py). It has the lowest priority, sleeps so that it takes at most
# `ScalingReplay.cpu_share` of a core, and ends with its search, with its time limit, or with the router. Whatever
# happens to it, the router goes on, and scales by thresholds meanwhile.
#
#     stdin     a file in memory: the length of the task (8 bytes), the task, then one recorded request a line
#     stdout    the plan

MODULE: Final = "warmroute.lab.planning.search"
START_S: Final = 60.0
"""Time for the process to start and to read the traffic, on a busy machine."""
LATE: Final = 3.0
"""A process that takes this many times its own limit of time is killed."""
LINES_AT_ONCE: Final = 64
PAUSE_S: Final = 0.0005
"""Pause between two batches of LINES_AT_ONCE. A shorter one would give the event loop no chance to take over."""
ENVIRONMENT: Final = ("PATH", "HOME", "LANG", "PYTHONPATH", "LD_LIBRARY_PATH", "TMPDIR")
"""Variables that the process inherits: it needs no credentials."""


class PlanningTask(msgspec.Struct, kw_only=True):
    request: PlanRequest
    cpu_share: float
    parent: int
    """Id of the router's process. The search ends when that process does."""
    block_tokens: int
    recorded_ms: float
    """The time now, on the clock of the requests' times."""


class SearchFailed(Exception):
    """Why there is no plan."""


class PlanningProcess:
    """Runs one search at a time."""

    def __init__(self, traffic: RecentTraffic, cpu_share: float, command: tuple[str, ...] = ()) -> None:
        """`command`: another program, for tests."""
        self._traffic = traffic
        self.cpu_share = cpu_share
        self._command = command or (sys.executable, "-m", MODULE)
        self._process: subprocess.Popen[bytes] | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def recorded(self) -> int:
        return len(self._traffic)

    @property
    def recorded_s(self) -> float:
        return self._traffic.recorded_s

    @property
    def pid(self) -> int | None:
        """Id of the running search's process; None if none runs."""
        return self._process.pid if self._process is not None else None

    def start(self, request: PlanRequest, done: Callable[[FleetPlan | None, str], object]) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(request, done))

    async def _run(self, request: PlanRequest, done: Callable[[FleetPlan | None, str], object]) -> None:
        try:
            plan = await run_in_thread(partial(self._search, request), "planning")
        except Exception as error:  # whatever it is, thresholds remain, and the next search is tried
            if not self._closed:
                known = isinstance(error, OSError | SearchFailed | msgspec.MsgspecError)
                done(None, str(error) if known else f"{type(error).__name__}: {error}")
        else:
            done(plan, "")

    def _search(self, request: PlanRequest) -> FleetPlan:
        """Run the search. Blocks, so call it in a thread. Raises OSError, MsgspecError or SearchFailed."""
        lines, share, recorded_ms = self._traffic.snapshot()
        request.share *= share
        task = PlanningTask(
            request=request,
            cpu_share=self.cpu_share,
            parent=os.getpid(),
            block_tokens=BLOCK_TOKENS,
            recorded_ms=recorded_ms,
        )
        since_ms = recorded_ms - 1000.0 * self._traffic.window_s
        timeout_s = START_S + LATE * request.max_cpu_s / self.cpu_share
        with _new_file() as file:
            encoded = msgspec.msgpack.encode(task)
            file.write(len(encoded).to_bytes(8, "big") + encoded)
            for at in range(0, len(lines), LINES_AT_ONCE):
                if self._closed:
                    raise SearchFailed("the router stops")
                file.writelines(framed(lines[at : at + LINES_AT_ONCE], share, since_ms))
                time.sleep(PAUSE_S)  # lets the event loop run
            file.seek(0)
            process = subprocess.Popen(
                self._command, stdin=file, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
            )  # fmt: skip
        self._process = process
        if self._closed:  # `close` has not seen the process
            process.kill()
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise SearchFailed(f"the process did not end within {timeout_s:.0f} s") from None
        finally:
            self._process = None
        if process.returncode:
            raise SearchFailed(_reason(process.returncode, errors))
        return msgspec.msgpack.decode(output, type=FleetPlan)

    async def close(self) -> None:
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)


def _new_file() -> IO[bytes]:
    """Return a file in memory, where Python can create one."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("recent traffic"), "w+b")
    return TemporaryFile()


def _reason(code: int, errors: bytes) -> str:
    if code < 0:
        return f"the process was ended by signal {-code}"
    last = errors.decode("utf-8", "replace").strip().splitlines()[-1:]
    return f"the process ended with status {code}" + (f": {last[0][:200]}" if last else "")
