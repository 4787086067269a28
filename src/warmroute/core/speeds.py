"""Judges the prefill speeds that nodes seem to have, and gives nodes without a plausible one that of their peers.

A speed is learned from times to first tokens. A node that sends something else first (a proxy in between, an API that
the router does not know) seems to be far faster than it is, and would get every request. A speed is implausible if

    absurd    a prompt token takes less than MIN_MS_PER_TOKEN or more than MAX_MS_PER_TOKEN
    early     most first tokens came within half the time of a further token of the same response. A first token takes
              at least one step of the engine, as each further one does.
    constant  the time to the first token does not depend on the prompt, although prompts differ, and the node seems to
              be twice as fast as its peers or as the default. Only prompts that were prefilled alone count.

Then prices use the peers' median instead, or the default where no peer has a plausible speed. The node goes on learning
beside it, and its own speed returns when it is plausible. A node that has not served a request has its peers' speed.
While a node serves no requests, its decode factor returns towards 1.
Peers are the nodes that serve the same model, with the same `gpu` if there are such.

The fleet calls `review` at each passed health check, so the rules need no timer and run in replay, too.
"""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING, Final

from warmroute._kernel import OUTCOME_OK
from warmroute.event_log import EventLog
from warmroute.fleet.node_speed import DEFAULT_MS_PER_TOKEN, NodeSpeed

if TYPE_CHECKING:
    from warmroute.fleet.group import Group
    from warmroute.fleet.node import Node

log = EventLog("warmroute.fleet")

MIN_MS_PER_TOKEN: Final = 0.0003
"""3 million tokens/s. 1.5 B takes 0.0042 ms for a token on an H200; 0.5 B in FP8 on a B200 would take a tenth of it."""
MAX_MS_PER_TOKEN: Final = 1000.0
"""One token/s: slower than a 70 B model on a CPU."""
MIN_ANSWERS: Final = 16
"""A speed is judged after this many responses."""
EARLY_SHARE: Final = 0.8
LATE_SHARE: Final = 0.5
"""A node is implausible above the first share of early first tokens, and plausible again below the second."""
MIN_LONE_PREFILLS: Final = 32
MIN_SPREAD_TOKENS: Final = 500.0
"""Standard deviation of the prompts' work from which on their times have to differ."""
CONSTANT_BELOW: Final = 0.05
DEPENDENT_ABOVE: Final = 0.2
"""Times are constant if a prompt that is longer by the standard deviation takes less than the first share of the mean
time more; they depend on the prompt again above the second."""
FASTER_THAN_PEERS: Final = 0.5
PEERS_VALID_S: Final = 1.0
"""Time for which the peers' median is used again."""
MAX_KEPT: Final = 4096
"""Values that are kept for this time, by model and GPU."""


class SpeedReview:
    def __init__(self) -> None:
        self._estimates: dict[tuple[str, str], tuple[float, float | None]] = {}
        """By model and GPU: when it was computed, and the median of the plausible speeds."""

    def review(self, node: Node, now_s: float) -> None:
        """Judge a node's speed, and update it where it is not the node's own."""
        speed = node.speed
        if not node.inflight:
            speed.relax(node.outcomes[OUTCOME_OK])
        if not speed.answers:
            self.assume_peers(node, now_s)
            return
        before = speed.implausible
        if speed.answers < MIN_ANSWERS and not before:
            return
        speed.implausible = implausible_because(speed, self._peers_ms(node, now_s))
        changed = bool(speed.implausible) != bool(before)
        if changed:
            self._estimates.clear()
        if speed.implausible:
            speed.replace(self._peers_ms(node, now_s))
        elif changed:
            speed.restore()
        if changed:
            node.recent_requests.usual_ms = 0.0  # what was usual was the other speed
            self._log(node)

    def assume_peers(self, node: Node, now_s: float | None = None) -> None:
        """Give a node that has not served a request the speed of its peers, if they have shown one."""
        if not node.speed.answers:
            node.speed.guess(self._peers_ms(node, now_s))

    @staticmethod
    def _log(node: Node) -> None:
        speed = node.speed
        fields = {"node": node.name, "learned_ms_per_token": f"{speed.learned_ms_per_token:.3g}"}
        if speed.implausible:
            log.warning(
                "prefill_speed_implausible",
                "Routing uses the speed of the node's peers until its own is plausible.",
                **fields,
                reason=speed.implausible,
                used_ms_per_token=f"{speed.ms_per_token:.3g}",
            )
        else:
            log.info("prefill_speed_plausible", "Routing uses the node's own speed again.", **fields)

    def _peers_ms(self, node: Node, now_s: float | None) -> float:
        """Return the median of the plausible speeds of the node's peers; the default if there are none."""
        gpu = node.config.gpu
        for gpus in (gpu, "") if gpu else ("",):
            for group in node.groups:
                estimate_ms = self._estimate_ms(group, gpus, now_s)
                if estimate_ms is not None:
                    return estimate_ms
        return DEFAULT_MS_PER_TOKEN

    def _estimate_ms(self, group: Group, gpu: str, now_s: float | None) -> float | None:
        """Return the median of the plausible speeds of the nodes with this GPU (empty: any). Without a time, it is
        computed anew."""
        key = group.model, gpu
        computed_s, estimate_ms = self._estimates.get(key, (-math.inf, None))
        if now_s is None or not 0.0 <= now_s - computed_s < PEERS_VALID_S:
            speeds = [
                node.speed.ms_per_token
                for node in group.members
                if node.speed.answers and not node.speed.implausible and (not gpu or node.config.gpu == gpu)
            ]
            estimate_ms = median(speeds) if speeds else None
            if now_s is not None:
                if len(self._estimates) >= MAX_KEPT:  # of models that are gone, too
                    self._estimates.clear()
                self._estimates[key] = now_s, estimate_ms
        return estimate_ms


def implausible_because(speed: NodeSpeed, peers_ms: float) -> str:
    """Return why the learned speed is implausible; empty if it is not."""
    learned_ms, was_implausible = speed.learned_ms_per_token, bool(speed.implausible)
    if not MIN_MS_PER_TOKEN <= learned_ms <= MAX_MS_PER_TOKEN:
        return "no engine prefills a token in this time"
    if speed.timed_answers >= MIN_ANSWERS and speed.early_share > (LATE_SHARE if was_implausible else EARLY_SHARE):
        return "first tokens come sooner than further ones"
    spread = math.sqrt(speed.lone_xx)
    if speed.lone_prefills >= MIN_LONE_PREFILLS and spread >= MIN_SPREAD_TOKENS:
        dependence = speed.lone_xy / (spread * speed.lone_ms) if speed.lone_ms > 0.0 else 0.0
        least, factor = (DEPENDENT_ABOVE, 1.0) if was_implausible else (CONSTANT_BELOW, FASTER_THAN_PEERS)
        if dependence < least and learned_ms < factor * max(peers_ms, DEFAULT_MS_PER_TOKEN):
            return "the time to the first token does not depend on the prompt's length"
    return ""
