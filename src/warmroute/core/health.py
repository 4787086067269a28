"""Which nodes are up, suspect or down: the circuit breaker of a node, and outlier detection among its peers.

core/fleet.py tells it how tickets ended (`close_ticket`, `count_failure`). MEANINGS (core/messages.py) says what each
outcome counts as.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple

from warmroute.config import Health, OutlierDetection
from warmroute.core.messages import AT_FAULT, PASSED

if TYPE_CHECKING:
    from warmroute.core.group import Group
    from warmroute.core.node import Node


# The health of one node: a state machine with a circuit breaker. It takes events and a clock, and does no I/O.
#
#     state       event                                               next state
#     ---------   -------------------------------------------------   ----------
#     UNKNOWN     a check passes                                      UP
#     any         connection refused, or a check answers 5xx          DOWN, confirmed
#     UP          `consecutive_failures` requests in a row fail       DOWN, suspected (the circuit breaker opens)
#     UP          `consecutive_timeouts` checks in a row time out,    DOWN, suspected
#                 and the node answers nothing else meanwhile
#     DOWN        confirmed, and a check passes                       UP, with slow start
#     DOWN        suspected before it was ever UP, a check passes     UP, with slow start
#     DOWN        suspected, the breaker's time is over,              HALF_OPEN
#                 and a check passes
#     HALF_OPEN   the trial request succeeds                          UP, with slow start
#     HALF_OPEN   the trial request fails                             DOWN, for twice as long
#     UP          it answers far worse than its peers                 EJECTED (see below)
#     EJECTED     the ejection is over, and a check passes            UP, with slow start
#
# A busy node is not a dead one: while no node is UP, the router still uses suspected and ejected nodes
# (`usable_as_last_resort`), and a check that times out does not count while the node answers requests.

CHECKS_TIME_OUT: Final = "health checks time out"
"""Why a node is down whose health checks time out."""


class HealthState(enum.Enum):
    UNKNOWN = "unknown"
    UP = "up"
    DOWN = "down"
    HALF_OPEN = "half_open"
    EJECTED = "ejected"


@dataclass(slots=True, eq=False)
class NodeHealth:
    config: Health
    state: HealthState = HealthState.UNKNOWN
    confirmed: bool = False
    """DOWN because the connection was refused or the node said so, not on suspicion."""
    reason: str = "not yet checked"
    failure: str = ""
    """Why it went DOWN the last time."""
    breaker_open_until_s: float = 0.0
    ejected_until_s: float = 0.0
    ejection_s: float = 0.0
    """How long its last ejection takes."""
    up_since_s: float = -1e9
    half_open_s: float = -1e9
    last_response_s: float = -1e9
    """When the node last answered anything."""
    last_passed_s: float = -1e9
    """When a request last passed."""
    _consecutive_failures: int = 0
    _consecutive_timeouts: int = 0
    _first_timeout_s: float = 0.0
    _failed_check_s: float = -1e9
    _next_open_s: float = 0.0
    """How long the breaker stays open the next time."""
    _ever_up: bool = False

    def __post_init__(self) -> None:
        self._next_open_s = self.config.breaker_open_s

    @property
    def awaits_first_check(self) -> bool:
        """Whether no check has ended yet: none passed, failed or timed out."""
        return self.state is HealthState.UNKNOWN and not self._consecutive_timeouts

    def check_passed(self, now_s: float) -> None:
        if now_s < self._failed_check_s:
            return  # an older result than the one known
        self.last_response_s = now_s
        self._consecutive_timeouts = 0
        if self.state is HealthState.UNKNOWN:
            self.state, self.reason, self._ever_up = HealthState.UP, "health check passed", True
        elif self.state is HealthState.DOWN and (self.confirmed or not self._ever_up):
            self._recover(now_s, "health check passed")
        elif self.state is HealthState.DOWN and now_s >= self.breaker_open_until_s:
            self.state, self.reason = HealthState.HALF_OPEN, "health check passed; waiting for a trial request"
            self.half_open_s = now_s
        elif self.state is HealthState.EJECTED and now_s >= self.ejected_until_s:
            self._recover(now_s, "the ejection is over")

    def eject(self, now_s: float, ejection_s: float, reason: str) -> None:
        self.state, self.confirmed, self.reason = HealthState.EJECTED, False, reason
        self.ejection_s, self.ejected_until_s = ejection_s, now_s + ejection_s

    def check_timed_out(self, now_s: float, last_response_s: float = -1e9) -> None:
        """`last_response_s`: when the node last sent a byte of any running response."""
        self.last_response_s = max(self.last_response_s, last_response_s)
        if not self._consecutive_timeouts:
            self._first_timeout_s = now_s - self.config.timeout_s
        if self.last_response_s > self._first_timeout_s:
            self._consecutive_timeouts = 0
            return  # it answers other requests: busy, not dead
        self._consecutive_timeouts += 1
        if self._consecutive_timeouts >= self.config.consecutive_timeouts and self.state is not HealthState.DOWN:
            self._mark_down(now_s, confirmed=False, reason=CHECKS_TIME_OUT)
        elif self.state is HealthState.UNKNOWN:
            self.reason = CHECKS_TIME_OUT

    def check_failed(self, now_s: float, reason: str) -> None:
        """The connection was refused, or the node says that it cannot serve."""
        self._failed_check_s = now_s
        if self.confirmed_down:
            self.reason = self.failure = reason
            return
        self._mark_down(now_s, confirmed=True, reason=reason)

    def request_passed(self, now_s: float) -> bool:
        """Return whether the request was a successful trial: the node is UP again."""
        self.last_response_s = self.last_passed_s = now_s
        self._consecutive_failures = 0
        if self.state is not HealthState.HALF_OPEN:
            return False
        self._recover(now_s, "trial request succeeded")
        return True

    def request_failed(self, now_s: float, reason: str) -> None:
        self._consecutive_failures += 1
        if self.state is HealthState.HALF_OPEN or (
            self.state is HealthState.UP and self._consecutive_failures >= self.config.consecutive_failures
        ):
            self._mark_down(now_s, confirmed=False, reason=reason)

    def _recover(self, now_s: float, reason: str) -> None:
        self.state, self.confirmed, self.reason = HealthState.UP, False, reason
        self.up_since_s = now_s
        self._ever_up = True
        self._consecutive_failures = 0
        self._next_open_s = self.config.breaker_open_s

    def _mark_down(self, now_s: float, *, confirmed: bool, reason: str) -> None:
        self.state, self.confirmed, self.reason, self.failure = HealthState.DOWN, confirmed, reason, reason
        self.breaker_open_until_s = now_s + self._next_open_s
        self._next_open_s = min(self._next_open_s * 2, self.config.breaker_open_max_s)
        self._consecutive_failures = 0
        self._consecutive_timeouts = 0

    @property
    def eligibility(self) -> tuple[HealthState, bool]:
        """State and `confirmed`: what decides whether the router may choose the node."""
        return self.state, self.confirmed

    @property
    def check_has_timed_out(self) -> bool:
        """Whether the last health check timed out, and the node has answered nothing since."""
        return self._consecutive_timeouts > 0

    @property
    def confirmed_down(self) -> bool:
        return self.state is HealthState.DOWN and self.confirmed

    @property
    def usable_as_last_resort(self) -> bool:
        """Whether to try the node while no node is UP."""
        return self.state in (HealthState.HALF_OPEN, HealthState.EJECTED) or (
            self.state is HealthState.DOWN and not self.confirmed
        )

    def traffic_share(self, now_s: float) -> float:
        """Return the share of its normal traffic that an UP node gets: below 1 during slow start."""
        slow_start_s = self.config.slow_start_s
        age_s = now_s - self.up_since_s
        return 1.0 if age_s >= slow_start_s else max(0.1, age_s / slow_start_s)


# Outlier detection: finds nodes that answer, but far worse than their peers. Takes counters and a clock; no I/O.
#
# The rules, for a node with at least `min_requests` requests within `interval_s`:
#
#     failures   at least `failure_ratio` of its requests failed. A request that failed on every node does not count:
#     then
#                the request is at fault.
#     slow       its first tokens take `slow_factor` times as long as usual on this node, and it slowed down
#     `slow_factor`
#                times as much as its peers; or a prompt token takes `slow_factor` times as long as on peers with the
#                same
#                `gpu`. Only peers whose first tokens were compared within `interval_s`, too, tell how much peers slowed
#                down: idle peers may run on the same busy machine. It has to be slow for a whole `interval_s`: after a
#                single stall, a node is as fast as before. "As usual" takes into account what was on the node at each
#                dispatch:
#
#                lateness = sum of times to first token / sum of (work ahead · usual time per token + steps)
#
#                So neither a slower GPU nor longer prompts make a node an outlier. A long queue in the engine does not,
#                either, nor do first tokens that take less than MIN_SLOW_TTFT_MS on average. Only streamed responses to
#                prompts that the policy reads count.
#
# An outlier is ejected: it gets no requests for `ejection_s`, times the number of its ejections, up to MAX_EJECTION_S.
# Then it returns at its next passed health check, with slow start. Ejections leave at least 1 − `max_ejected_ratio` of
# a model's nodes up.
#
# The fleet calls `find` after each passed health check, so the rules need no timer and run in replay, too.

FAILURES: Final = "failures"
SLOW: Final = "slow"
MAX_EJECTION_S: Final = 300.0
"""The longest ejection. One ejection is forgiven for each such time that a node stays up."""
USUAL_S: Final = 300.0
"""Time constant of the average that is a node's usual speed."""
MIN_SLOW_TTFT_MS: Final = 200.0
LONG_QUEUE_KV_USAGE: Final = 0.5
"""Above this, requests in an engine's queue may wait for its KV cache."""
PEERS_VALID_S: Final = 1.0
"""Time for which the typical speed of a model's nodes is used again."""
MAX_KEPT: Final = 4096
"""Values that are kept for this time, by model and GPU."""


class Counts(NamedTuple):
    """Counters of a node at one moment, or their increase since then."""

    passed: int = 0
    failed: int = 0
    first_tokens: int = 0
    """Those that its speed was learned from."""
    ttft_ms: float = 0.0
    """Of streamed responses: times to first token, the prefill work until then, and what the rest takes."""
    work: float = 0.0
    steps_ms: float = 0.0


class Outlier(NamedTuple):
    kind: str
    """FAILURES or SLOW."""
    reason: str


class RecentRequests:
    """How a node's requests ended within the last interval, its usual speed, and its ejections."""

    __slots__ = (
        "_middle", "_middle_s", "_repeats", "_returned_s", "_slow_s", "_slow_since_s", "_start", "checked_s",
        "compared_s", "ejections", "lateness", "ms_per_token", "queued_s", "usual_lateness", "usual_ms",
    )  # fmt: skip

    def __init__(self) -> None:
        self._start = self._middle = Counts()
        self._middle_s = self._returned_s = self.checked_s = self.queued_s = -math.inf
        self._slow_since_s = self._slow_s = -math.inf
        self.compared_s = -math.inf
        """When its first tokens were last compared with the usual ones."""
        self._repeats = 0
        self.ms_per_token = self.usual_ms = 0.0
        """Its present and its usual prefill time per token; 0.0 before they are known."""
        self.lateness = self.usual_lateness = 1.0
        self.ejections = {FAILURES: 0, SLOW: 0}
        """Since the node joined, by kind."""

    def restart(self, now: Counts, now_s: float) -> None:
        """Forget what was before: the node has just come up."""
        self._start = self._middle = now
        self._middle_s = self._returned_s = now_s
        self._slow_s = self.compared_s = -math.inf

    def since(self, now: Counts, now_s: float, interval_s: float) -> Counts:
        """Return the counts of the last half to whole interval."""
        if now_s - self._middle_s >= interval_s / 2:
            long_ago = now_s - self._middle_s >= interval_s
            self._start, self._middle, self._middle_s = now if long_ago else self._middle, now, now_s
        start = self._start
        return Counts(
            max(0, now.passed - start.passed),
            max(0, now.failed - start.failed),
            max(0, now.first_tokens - start.first_tokens),
            now.ttft_ms - start.ttft_ms,
            now.work - start.work,
            now.steps_ms - start.steps_ms,
        )

    @property
    def slowdown(self) -> float:
        """How many times as long first tokens take as usual; 1.0 if that is not known."""
        return self.lateness / self.usual_lateness

    def judge(self, counts: Counts, ms_per_token: float, queued: bool, now_s: float) -> None:
        """Compare the first tokens of the last interval with the usual ones. `queued`: the engine had a long queue."""
        self.ms_per_token = ms_per_token
        expected_ms = counts.work * self.usual_ms + counts.steps_ms
        known = self.usual_ms and expected_ms and not queued
        self.lateness = counts.ttft_ms / expected_ms if known else self.usual_lateness
        if known:
            self.compared_s = now_s

    def slow_for_s(self, slow: bool, now_s: float, interval_s: float) -> float:
        """Keep whether the node is slow now, and return for how long it has been. Gaps without enough requests to tell
        do not count if they are shorter than the interval."""
        if now_s - self._slow_s >= interval_s:
            self._slow_since_s = now_s
        self._slow_s = now_s if slow else -math.inf
        return now_s - self._slow_since_s if slow else 0.0

    def learn_usual(self, elapsed_s: float) -> None:
        weight = 1.0 - math.exp(-elapsed_s / USUAL_S) if self.usual_ms else 1.0
        self.usual_ms += weight * (self.ms_per_token - self.usual_ms)
        self.usual_lateness += weight * (self.lateness - self.usual_lateness)

    def count_ejection(self, kind: str, now_s: float) -> int:
        """Return how many ejections are not forgiven, including this one."""
        self.ejections[kind] += 1
        forgiven = min(self._repeats, (now_s - self._returned_s) // MAX_EJECTION_S)
        self._repeats += 1 - int(forgiven)
        return self._repeats


class Outliers:
    def __init__(self, config: OutlierDetection) -> None:
        self.config = config
        self._typical: dict[tuple[str, str], tuple[float, float]] = {}
        """By model and GPU: when it was computed, and the median time per token of the nodes that are up."""

    def find(self, node: Node, now_s: float) -> Outlier | None:
        """Return why a node that is up should be ejected; None if it should not. Call this at each health check."""
        recent, config = node.recent_requests, self.config
        elapsed_s, recent.checked_s = now_s - recent.checked_s, now_s
        counts = recent.since(counts_of(node), now_s, config.interval_s)
        outlier = self._failing(counts)
        if node.waiting > node.running or (node.waiting and node.kv_usage > LONG_QUEUE_KV_USAGE):
            recent.queued_s = now_s
        if outlier is None and counts.first_tokens >= config.min_requests:
            recent.judge(counts, node.speed.ms_per_token, now_s - recent.queued_s < config.interval_s, now_s)
            if counts.ttft_ms >= MIN_SLOW_TTFT_MS * counts.first_tokens:
                outlier = self._slow(node, now_s)
            slow_for_s = recent.slow_for_s(outlier is not None, now_s, config.interval_s)
            if outlier is None:
                recent.learn_usual(elapsed_s)
            elif slow_for_s < config.interval_s:
                return None
        if outlier is None or not all(self._leaves_enough(group) for group in node.groups):
            return None
        return outlier

    def ejection_s(self, node: Node, outlier: Outlier, now_s: float) -> float:
        """Count an ejection, and return how long it takes."""
        times, first_s = node.recent_requests.count_ejection(outlier.kind, now_s), self.config.ejection_s
        return min(first_s * times, max(first_s, MAX_EJECTION_S))

    def came_up(self, node: Node, now_s: float) -> None:
        """What the node did before it came up no longer counts."""
        node.recent_requests.restart(counts_of(node), now_s)

    def _failing(self, counts: Counts) -> Outlier | None:
        ratio, total = self.config.failure_ratio, counts.passed + counts.failed
        if not ratio or total < self.config.min_requests or counts.failed < ratio * total:
            return None
        return Outlier(FAILURES, f"{counts.failed} of its last {total} requests failed")

    def _slow(self, node: Node, now_s: float) -> Outlier | None:
        factor, recent, gpu = self.config.slow_factor, node.recent_requests, node.config.gpu
        if not factor:
            return None
        slowdown = recent.slowdown
        if slowdown >= factor and recent.lateness >= factor:
            groups = [group.sort_if_changed() for group in node.groups]
            others = [other.recent_requests for group in groups for other in group.up.nodes if other is not node]
            slowdowns = [other.slowdown for other in others if now_s - other.compared_s < self.config.interval_s]
            if slowdowns and slowdown >= factor * median(slowdowns):
                return Outlier(SLOW, f"first tokens take {slowdown:.1f} times as long as before; other nodes keep up")
        typical_ms = max((self._typical_ms(group, gpu, now_s) for group in node.groups), default=0.0) if gpu else 0.0
        if typical_ms and recent.ms_per_token >= factor * typical_ms:
            times = recent.ms_per_token / typical_ms
            return Outlier(SLOW, f"prompts take {times:.1f} times as long as on other nodes with {gpu}")
        return None

    def _typical_ms(self, group: Group, gpu: str, now_s: float) -> float:
        """Return the median time per token of the nodes with this GPU; 0.0 if that of fewer than three is known."""
        key = group.model, gpu
        computed_s, typical_ms = self._typical.get(key, (-math.inf, 0.0))
        if now_s - computed_s >= PEERS_VALID_S:
            nodes = [node for node in group.sort_if_changed().up.nodes if node.config.gpu == gpu]
            speeds = [ms for node in nodes if (ms := node.recent_requests.ms_per_token)]
            typical_ms = median(speeds) if len(speeds) > 2 else 0.0
            if len(self._typical) >= MAX_KEPT:  # of models that are gone, too
                self._typical.clear()
            self._typical[key] = now_s, typical_ms
        return typical_ms

    def _leaves_enough(self, group: Group) -> bool:
        """Return whether enough nodes of the model stay up without one of them."""
        left = len(group.sort_if_changed().up) - 1
        return left >= max(1, math.ceil(group.serving * (1.0 - self.config.max_ejected_ratio)))


def counts_of(node: Node) -> Counts:
    outcomes, speed, steps_ms = node.outcomes, node.speed, node.streamed_steps_ms
    passed = sum([outcomes[outcome] for outcome in PASSED])
    failed = sum([outcomes[outcome] for outcome in AT_FAULT]) - node.excused_failures
    return Counts(passed, failed, speed.answers, node.streamed_ttft_ms, node.streamed_work, steps_ms)
