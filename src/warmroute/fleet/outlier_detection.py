"""Outlier detection: finds nodes that answer, but far worse than their peers. Takes counters and a clock; no I/O.

The rules, for a node with at least `min_requests` requests within `interval_s`:

    failures   at least `failure_ratio` of its requests failed. A request that failed on every node does not count: then
               the request is at fault.
    slow       a prompt token takes `slow_factor` times as long as usual on this node, and `slow_factor` times the
               slowdown of its peers; or `slow_factor` times as long as on peers with the same `gpu`. So a slower GPU is
               not an outlier, nor is a node with longer prompts: the learned speed is a time per token (node_speed.py).

An outlier is ejected: it gets no requests for `ejection_s`, times the number of its ejections, up to MAX_EJECTION_S.
Then it returns at its next passed health check, with slow start. Ejections leave at least 1 − `max_ejected_ratio` of a
model's nodes up.

The fleet calls `find` after each passed health check, so the rules need no timer and run in replay, too.
"""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple

from warmroute.config import OutlierDetection as OutlierConfig

if TYPE_CHECKING:
    from warmroute.fleet.group import Group
    from warmroute.fleet.node import Node

FAILURES: Final = "failures"
SLOW: Final = "slow"
MAX_EJECTION_S: Final = 300.0
"""The longest ejection. One ejection is forgiven for each such time that a node stays up."""
USUAL_S: Final = 300.0
"""Time constant of the average that is a node's usual speed."""
PEERS_VALID_S: Final = 1.0
"""Time for which the typical speed of a model's nodes is used again."""


class Counts(NamedTuple):
    """Counters of a node at one moment."""

    passed: int = 0
    failed: int = 0
    first_tokens: int = 0
    """Those that its speed was learned from."""


class Outlier(NamedTuple):
    kind: str
    """FAILURES or SLOW."""
    reason: str


class RecentRequests:
    """How a node's requests ended within the last interval, its usual speed, and its ejections."""

    __slots__ = ("_middle", "_middle_s", "_repeats", "_returned_s", "_start", "checked_s", "ejections", "usual_ms")

    def __init__(self) -> None:
        self._start = self._middle = Counts()
        self._middle_s = self._returned_s = self.checked_s = -math.inf
        self._repeats = 0
        self.usual_ms = 0.0
        """Usual prefill time per token; 0.0 before it is known."""
        self.ejections = {FAILURES: 0, SLOW: 0}
        """Since the node joined, by kind."""

    def restart(self, now: Counts, now_s: float) -> None:
        """Forget what was before: the node has just come up."""
        self._start = self._middle = now
        self._middle_s = self._returned_s = now_s

    def since(self, now: Counts, now_s: float, interval_s: float) -> Counts:
        """Return the counts of the last half to whole interval."""
        if now_s - self._middle_s >= interval_s / 2:
            long_ago = now_s - self._middle_s >= interval_s
            self._start, self._middle, self._middle_s = now if long_ago else self._middle, now, now_s
        return Counts(*(max(0, after - before) for after, before in zip(now, self._start, strict=True)))

    def count_ejection(self, kind: str, now_s: float) -> int:
        """Return how many ejections are not forgiven, including this one."""
        self.ejections[kind] += 1
        forgiven = min(self._repeats, (now_s - self._returned_s) // MAX_EJECTION_S)
        self._repeats += 1 - int(forgiven)
        return self._repeats


class OutlierDetection:
    def __init__(self, config: OutlierConfig) -> None:
        self.config = config
        self._typical: dict[tuple[str, str], tuple[float, float]] = {}
        """By model and GPU: when it was computed, and the median time per token of the nodes that are up."""

    def find(self, node: Node, now_s: float) -> Outlier | None:
        """Return why a node that is up should be ejected; None if it should not. Call this at each health check."""
        recent, config = node.recent_requests, self.config
        elapsed_s, recent.checked_s = now_s - recent.checked_s, now_s
        counts = recent.since(counts_of(node), now_s, config.interval_s)
        outlier = self._failing(counts)
        if outlier is None and counts.first_tokens >= config.min_requests:
            outlier = self._slow(node, now_s)
            if outlier is None:
                _learn_usual(node, elapsed_s)
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
        factor = self.config.slow_factor
        if not factor:
            return None
        times = slowdown(node)
        if times >= factor:
            peers = [slowdown(peer) for group in node.groups for peer in group.up.nodes if peer is not node]
            if peers and times >= factor * median(peers):
                return Outlier(SLOW, f"a prompt token takes {times:.1f} times as long as before; other nodes keep up")
        gpu, now_ms = node.config.gpu, node.speed.ms_per_token
        if gpu:
            typical_ms = max((self._typical_ms(group, gpu, now_s) for group in node.groups), default=0.0)
            if typical_ms and now_ms >= factor * typical_ms:
                times = now_ms / typical_ms
                return Outlier(SLOW, f"a prompt token takes {times:.1f} times as long as on other nodes with {gpu}")
        return None

    def _typical_ms(self, group: Group, gpu: str, now_s: float) -> float:
        """Return the median time per token of the nodes with this GPU; 0.0 if there are fewer than three."""
        key = group.model, gpu
        computed_s, typical_ms = self._typical.get(key, (-math.inf, 0.0))
        if now_s - computed_s >= PEERS_VALID_S:
            nodes = [node for node in group.up.nodes if node.config.gpu == gpu and node.speed.answers]
            typical_ms = median([node.speed.ms_per_token for node in nodes]) if len(nodes) > 2 else 0.0
            self._typical[key] = now_s, typical_ms
        return typical_ms

    def _leaves_enough(self, group: Group) -> bool:
        """Return whether enough nodes of the model stay up without one of them."""
        left = len(group.up) - 1
        return left >= max(1, math.ceil(group.serving * (1.0 - self.config.max_ejected_ratio)))


def counts_of(node: Node) -> Counts:
    ok, rejected, _busy, failed, broken, _canceled = node.outcomes
    return Counts(ok + rejected, failed + broken - node.excused_failures, node.speed.answers)


def slowdown(node: Node) -> float:
    """Return how many times as long a prompt token takes as usual on this node; 1.0 if that is not known."""
    usual_ms = node.recent_requests.usual_ms
    return node.speed.ms_per_token / usual_ms if usual_ms else 1.0


def _learn_usual(node: Node, elapsed_s: float) -> None:
    recent, now_ms = node.recent_requests, node.speed.ms_per_token
    weight = 1.0 - math.exp(-elapsed_s / USUAL_S) if recent.usual_ms else 1.0
    recent.usual_ms += weight * (now_ms - recent.usual_ms)
