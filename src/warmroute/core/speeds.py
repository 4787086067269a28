"""The speeds of nodes in prefill, decode and KV transfer: learned from responses, reviewed against their peers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from math import inf, sqrt
from statistics import median
from typing import TYPE_CHECKING, Final

from warmroute._kernel import DECODE_MIN_SHARE, OUTCOME_OK, STEP_WORK, DecodeSpeedState, SpeedState
from warmroute.event_log import EventLog

if TYPE_CHECKING:
    from warmroute.core.group import Group
    from warmroute.core.node import Node


# The speed of a node: prefill time per token and a decode factor, learned from the responses it gave.
#
# Prefill work is counted in tokens of a short prompt. Attention makes a token more expensive the more tokens precede
# it:
#
#     work(new, cached) = new + ATTENTION_WORK · new · (cached + new / 2)
#     prefill           = 1.5 · token_ms + ms_per_token · work                          [ms]
#
# The kernel updates the speed at each first token; tests/accounting_reference.py has the same formulas in Python. A
# node prefills prompts one after the other or several in one step. Either way, the time during which at least one of
# them waited for its first token went into all of them together. So a first token is charged with the time since the
# previous first token, or since its own dispatch if that was later, and the speed is the ratio of the two sums. One
# first token counts as at most four times slower than estimated. The rest of its time is charged to the next one, if
# that prompt waited as well, up to twice what the estimate was before: both may have been prefilled in one step. A
# prompt whose own time explains it, although more than that is left, is charged with nothing else: the node stood still
# before.
#
# An engine takes a whole step for a prompt that needs only a part of one. So where it took at most one and a half
# steps, an estimate that is up to one step shorter counts as right. A short prompt weighs less: weight = work / (work +
# step_work).
#
# Until a node has served a request, it has the speed of its peers. `SpeedReview` judges what was learned.
#
# Telemetry counts costs with `long_ms_per_token`, which is learned from prompts with at least LONG_PREFILL_WORK that
# were prefilled alone, and `step_ms`, the time of a step, a low quantile of the time per output token:
#
#     prefill_cost = max(step_ms, long_ms_per_token · work)                             [ms]

DEFAULT_MS_PER_TOKEN: Final = 0.05
PRIOR_WORK: Final = 2000.0
"""An initial guess weighs as much as this many prefilled tokens."""

FACTOR_RELAXATION: Final = 0.05
"""Share of a decode factor's deviation from 1 that a health check without a response in between takes away."""


class NodeSpeed(SpeedState):
    """The learned speed of one node. SpeedState holds the fields for the kernel."""

    __slots__ = ("_responses", "implausible")

    def __init__(self) -> None:
        self.implausible = ""
        """Why the learned speed is implausible; empty if it is not."""
        self._responses = 0
        """Responses of the node at the last review."""
        self.answers = 0
        """First tokens that the speed was learned from."""
        self.ms_per_token = DEFAULT_MS_PER_TOKEN
        """Prefill time per token of a short prompt."""
        self.factor = 1.0
        """Decode time per token, relative to the model's DecodeSpeed."""
        self._at_s = 0.0
        self._last_first_token_s = 0.0
        self.guess(DEFAULT_MS_PER_TOKEN)

    def guess(self, ms_per_token: float) -> None:
        """Set the prefill speed of a node that was not measured: that of its peers, or the default."""
        self.ms_per_token = self.learned_ms_per_token = ms_per_token
        self._work = PRIOR_WORK
        self._ms = PRIOR_WORK * ms_per_token

    def relax(self, responses: int) -> None:
        """Let the decode factor of a node without requests, and without a response since the last call, return to 1:
        a node that was slow for a while gets few requests, and has to be measured again."""
        if responses == self._responses:
            self.factor += FACTOR_RELAXATION * (1.0 - self.factor)
        self._responses = responses

    def replace(self, ms_per_token: float) -> None:
        """Use this speed in prices instead of the learned one. Learning goes on beside it."""
        self.is_replaced = True
        self.ms_per_token = ms_per_token

    def restore(self) -> None:
        """Use the learned speed again."""
        self.is_replaced = False
        self.ms_per_token = self.learned_ms_per_token

    @property
    def long_ms_per_token(self) -> float:
        """Prefill time per token of long prompts; that of all prompts until a long one was measured."""
        return self.long_ms / self.long_work if self.long_prefills and not self.is_replaced else self.ms_per_token

    @property
    def step_ms(self) -> float:
        """The least time of a prefill: a decode step that no prefill interrupts."""
        return min(self._step_ms, STEP_WORK * self.long_ms_per_token)

    @property
    def source(self) -> str:
        """Where the speed in prices comes from: `learned`, or `assumed` (that of its peers, or the default)."""
        return "learned" if self.answers and not self.is_replaced else "assumed"


# The decode speed of a model: the time per output token, as a line over the context of a node's batch.
#
#     token_ms(node) = factor(node) · (base + slope · context)                          [ms]
#     context        = prompt tokens of the node's requests + REQUEST_CONTEXT for each of them
#
# All nodes of a model share one line, so that the estimate for an idle node stays current. Each node's deviation from
# it is its own factor (see above). The kernel updates both when a response ends; tests/accounting_reference.py has
# the same formulas in Python.

DEFAULT_BASE_MS: Final = 15.0
DEFAULT_SLOPE_MS: Final = 3e-5
PRIOR_CONTEXT: Final = 20_000.0
"""The default slope weighs as much as responses spread this far around the mean context [tokens]."""


class DecodeSpeed(DecodeSpeedState):
    """The learned line of one model. DecodeSpeedState holds the fields for the kernel."""

    __slots__ = ()

    def __init__(self) -> None:
        self.answers = 0
        self.least_ms = DECODE_MIN_SHARE * DEFAULT_BASE_MS
        self.mean_ms = DEFAULT_BASE_MS
        self.slope_ms = DEFAULT_SLOPE_MS
        self.mean_context = 0.0
        self._xx = PRIOR_CONTEXT**2
        self._xy = PRIOR_CONTEXT**2 * DEFAULT_SLOPE_MS

    def token_ms(self, context: float) -> float:
        """Return the time per token on a node with factor 1 whose batch has this many tokens of context."""
        line_ms = self.mean_ms + self.slope_ms * (context - self.mean_context)
        return line_ms if line_ms > self.least_ms else self.least_ms


# Judges the prefill speeds that nodes seem to have, and gives nodes without a plausible one that of their peers.
#
# A speed is learned from times to first tokens. A node that sends something else first (a proxy in between, an API that
# the router does not know) seems to be far faster than it is, and would get every request. A speed is implausible if
#
#     absurd    a prompt token takes less than MIN_MS_PER_TOKEN or more than MAX_MS_PER_TOKEN
#     early     most first tokens came within half the time of a further token of the same response. A first token takes
#               at least one step of the engine, as each further one does.
#     constant  the time to the first token does not depend on the prompt, although prompts differ, and the node seems
#     to
#               be twice as fast as its peers or as the default. Only prompts that were prefilled alone count.
#
# Then prices use the peers' median instead, or the default where no peer has a plausible speed. The node goes on
# learning beside it, and its own speed returns when it is plausible. A node that has not served a request has its
# peers' speed. While a node serves no requests, its decode factor returns towards 1. Peers are the nodes that serve the
# same model, with the same `gpu` if there are such.
#
# The fleet calls `review` at each passed health check, so the rules need no timer and run in replay, too.

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


# How long KV tokens take from a prefill node to a decode node, learned for each pair of islands.
#
#     transfer = LATENCY_MS + ms_per_token · tokens          [ms]
#
# The prior is a network of about 6 GB/s within an island, and a tenth of it between islands, for a model with 128 KB of
# KV cache per token. The router sees the time between the decode request and the first token of its stream, less the
# steps of the decode node's batch. `ms_per_token` is the ratio of two decaying sums, as for a node's prefill speed.
#
# Loads from a shared KV store have the same formula, learned for each store and island. A network or a store that seems
# slower than prefilling is not used, so nothing more is learned of it: what was learned fades with time, and the prior
# returns.

LATENCY_MS: Final = 10.0
"""Time of a transfer without any tokens: two requests instead of one, and the connection between the engines."""
PRIOR_MS_PER_TOKEN: Final = 0.02
FAR_FACTOR: Final = 10.0
"""Between two islands, a token takes this many times as long until it was measured."""
PRIOR_TOKENS: Final = 20_000.0
"""The prior weighs as much as this many transferred tokens."""
KEPT: Final = 0.98
"""What a transfer leaves of the weight of earlier ones."""
MIN_TOKENS: Final = 256
"""A shorter transfer says nothing about the network."""
MAX_KV_TRANSFER_FACTOR: Final = 10.0
"""One transfer counts as at most this many times as slow as the others: it may have waited for memory."""
HALF_LIFE_S: Final = 600.0
"""After this time without a measurement, half of what was learned is left beside the prior."""
MAX_LOAD_TOKENS: Final = 4_000.0
"""One load counts as at most this many tokens, a fifth of the prior: its first token may be late for other reasons."""
MAX_ISLAND_PAIRS: Final = 256
NEEDS_PARTNER: Final = frozenset(("sglang",))
"""Engines whose decode nodes cannot prefill: their requests always go to a pair of nodes."""


def transfer_ms(ms_per_token: float, tokens: float) -> float:
    return LATENCY_MS + ms_per_token * tokens if tokens > 0.0 else LATENCY_MS


@dataclass(slots=True, eq=False)
class TransferSpeed:
    """Of transfers between two islands, or of loads from a shared KV store to the nodes of an island."""

    prior_ms_per_token: float = PRIOR_MS_PER_TOKEN
    max_tokens: float = inf
    """One measurement counts as at most this many tokens."""
    measured: int = 0
    _tokens: float = PRIOR_TOKENS
    _ms: float = field(init=False)
    _at_s: float = 0.0

    def __post_init__(self) -> None:
        self._ms = self._tokens * self.prior_ms_per_token

    def ms_per_token(self, now_s: float) -> float:
        tokens, ms = self._sums(now_s)
        return ms / tokens

    def learn(self, tokens: float, took_ms: float, now_s: float) -> None:
        """A transfer of this many tokens took this long."""
        if tokens < MIN_TOKENS:
            return
        sum_tokens, sum_ms = self._sums(now_s)
        expected_ms = LATENCY_MS + tokens * sum_ms / sum_tokens
        token_ms = min(max(took_ms - LATENCY_MS, 0.01 * expected_ms), MAX_KV_TRANSFER_FACTOR * expected_ms)
        weight = min(1.0, self.max_tokens / tokens)
        self._tokens = sum_tokens * KEPT + tokens * weight
        self._ms = sum_ms * KEPT + token_ms * weight
        self._at_s = now_s
        self.measured += 1

    def _sums(self, now_s: float) -> tuple[float, float]:
        left = 0.5 ** (max(0.0, now_s - self._at_s) / HALF_LIFE_S)
        prior_tokens = PRIOR_TOKENS * (1.0 - left)
        return self._tokens * left + prior_tokens, self._ms * left + prior_tokens * self.prior_ms_per_token


@dataclass(slots=True, eq=False)
class TransferSpeeds:
    """Of one model, between all islands and from all stores."""

    _speeds: dict[tuple[str, str], TransferSpeed] = field(default_factory=dict)
    _load_speeds: dict[tuple[str, str], TransferSpeed] = field(default_factory=dict)

    def from_store(self, store: str, island: str) -> TransferSpeed:
        """Return how fast nodes of an island load KV tokens from a shared KV store."""
        key = (store, island)
        speed = self._load_speeds.get(key)
        if speed is None:
            speed = TransferSpeed(max_tokens=MAX_LOAD_TOKENS)
            if len(self._load_speeds) < MAX_ISLAND_PAIRS:
                self._load_speeds[key] = speed
        return speed

    def between(self, prefill_island: str, decode_island: str) -> TransferSpeed:
        key = (prefill_island, decode_island)
        speed = self._speeds.get(key)
        if speed is None:
            far = 1.0 if prefill_island == decode_island else FAR_FACTOR
            speed = TransferSpeed(PRIOR_MS_PER_TOKEN * far)
            if len(self._speeds) < MAX_ISLAND_PAIRS:
                self._speeds[key] = speed
        return speed


# The prefill speed of a node by its whole answers: nobody sees the first token of an answer that is not streamed.
#
#     took = ms_per_token · work + token_ms · output tokens + constant                 [ms]
#
# is a regression over the last answers, of which prompts and outputs differ. Most of the time is decoding, so the speed
# counts only if it is clearly different from 0: at least MIN_SIGNIFICANCE times its standard error. One answer counts
# as at most MAX_WHOLE_ANSWER_FACTOR times the mean. Only answers count whose prompt did not wait behind others, as far
# as the router knows.

MAX_ANSWERS: Final = 64
"""Older answers fade: each new one weighs at least as much as one of this number."""
MIN_SPREAD_WORK: Final = 300.0
"""Standard deviation of the prompts' work from which on their times have to differ."""
MIN_SIGNIFICANCE: Final = 4.0
MAX_WHOLE_ANSWER_FACTOR: Final = 4.0
INTERVAL_S: Final = 0.05
"""An answer that ends sooner after the last one of its node that counted does not count: a node with hundreds of
answers a second needs no more of them for its speed, and each costs about as much as its ticket."""
MAX_CORRELATION: Final = 0.9
"""Where long prompts have long answers, nothing tells what takes the time. A higher correlation counts as that."""


class WholeAnswers:
    __slots__ = ("_answers", "_dd", "_dt", "_tt", "_wd", "_wt", "_ww", "next_s", "output", "took_ms", "work")

    def __init__(self) -> None:
        self._answers = 0
        self.next_s = 0.0
        """When the next answer counts."""
        self.work = self.output = self.took_ms = 0.0
        """Moving means."""
        self._ww = self._dd = self._tt = self._wd = self._wt = self._dt = 0.0
        """Their moving covariances, w: work, d: output tokens, t: time."""

    def add(self, work: float, output: float, took_ms: float) -> None:
        self._answers += 1
        weight = max(1.0 / MAX_ANSWERS, 1.0 / self._answers)
        if self._answers > 1:
            took_ms = min(took_ms, MAX_WHOLE_ANSWER_FACTOR * self.took_ms)
        w, d, t = work - self.work, output - self.output, took_ms - self.took_ms
        self.work += weight * w
        self.output += weight * d
        self.took_ms += weight * t
        kept = 1.0 - weight
        self._ww = kept * (self._ww + weight * w * w)
        self._dd = kept * (self._dd + weight * d * d)
        self._tt = kept * (self._tt + weight * t * t)
        self._wd = kept * (self._wd + weight * w * d)
        self._wt = kept * (self._wt + weight * w * t)
        self._dt = kept * (self._dt + weight * d * t)

    @property
    def ms_per_token(self) -> float | None:
        """The prefill time per token of a short prompt; None while the answers do not show it."""
        ww, dd = self._ww, self._dd
        if self._answers < MIN_ANSWERS or ww < MIN_SPREAD_WORK * MIN_SPREAD_WORK:
            return None
        if dd < 1.0:  # all outputs are equally long
            slope, token_ms, free = self._wt / ww, 0.0, 1.0
        else:
            free = 1.0 - self._wd * self._wd / (ww * dd)
            if free < 1.0 - MAX_CORRELATION * MAX_CORRELATION:
                return None
            slope = (self._wt - self._dt * self._wd / dd) / (ww * free)
            token_ms = (self._dt - self._wt * self._wd / ww) / (dd * free)
        rest = max(0.0, self._tt - slope * self._wt - token_ms * self._dt)
        error = sqrt(rest / (min(self._answers, MAX_ANSWERS) * ww * free))
        return slope if slope > 0.0 and slope >= MIN_SIGNIFICANCE * error else None
