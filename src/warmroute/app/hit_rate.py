"""The usual hit rate of a route, when it drops, and the likely cause."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from math import exp, inf, sqrt
from operator import sub
from typing import Final, Literal, NamedTuple

from warmroute._kernel import RouteTraffic
from warmroute.app.alerts import Alert
from warmroute.app.prompt_doctor import RouteReport
from warmroute.app.prompt_doctor.findings import Finding, PromptChange
from warmroute.core.cache_view import CacheView
from warmroute.core.fleet import Fleet
from warmroute.core.health import HealthState
from warmroute.core.traffic import Traffic
from warmroute.event_log import EventLog

# The usual hit rate of one route, and when it has dropped.
#
# Two rates: by tokens (cached ÷ prompt tokens), which is what counts, and by prompts (the mean of each prompt's cached
# share), which one huge prompt cannot change. A drop is an alert if all of this holds, at two checks in a row:
#
# 1. The baseline is mature: MIN_AGE_S of traffic and MIN_BASE_PROMPTS prompts.
# 2. The rate by tokens is MIN_DROP, and a fifth of the baseline, below it.
# 3. The rate by prompts is SIGMAS standard deviations below its baseline. The deviation has three parts: that of single
#    prompts, that of the baseline's own mean, and that between windows of the same length in the past (traffic comes in
#    bursts and has seasons).
#
# The check looks at the last 30, 60, 150 and 300 seconds, as far as they have MIN_PROMPTS prompts: a large drop shows
# in the first, a small one, or one of a route with few requests, needs more of them.
#
# The baseline decays with DECAY_S and lags a minute behind, or up to five with few requests, so that a drop does not
# enter it before it is noticed. It
# stands still while there is a drop. After ADAPT_S with prompts the current rate becomes the baseline. A drop that
# ended by itself counts as a deviation between windows, so that drops that recur do not alert again and again.
#
# Only prompts end a drop: the check looks at windows since the drop began, and only when prompts have come since the
# last check. Otherwise a route without traffic would recover as soon as the low prompts have left the short windows.

CHECK_S: Final = 5.0
WINDOWS_S: Final = (30.0, 60.0, 150.0, 300.0)
"""The shortest window with enough prompts counts: a busy route is judged after half a minute, a quiet one after
five."""
WINDOW_S: Final = WINDOWS_S[0]
MAX_WINDOW_S: Final = WINDOWS_S[-1]
MIN_PROMPTS: Final = 30
"""Of fewer prompts a rate says too little."""
DELAY_S: Final = 60.0
"""The baseline lags at least this far behind, and until 2 · MIN_PROMPTS prompts have come since, but never more than
MAX_WINDOW_S."""
DECAY_S: Final = 1800.0
"""A prompt this long ago counts 1/e: seven eighths of the baseline are from the last hour."""
MIN_AGE_S: Final = 120.0
"""A route has no usual rate before it had prompts for this long."""
MIN_BASE_PROMPTS: Final = 150.0
"""A baseline of fewer (decayed) prompts is chance."""
MIN_DROP: Final = 0.12
"""Smaller drops, as fractions of the prompt tokens, are within what traffic does by itself."""
MIN_RELATIVE_DROP: Final = 0.2
"""A drop also has to be this fraction of the usual rate: above 60 %, that is more than MIN_DROP."""
SIGMAS: Final = 5.0
"""A drop has to exceed this many deviations between windows: each route is checked 17,000 times a day."""
DEVIATION_DECAY_S: Final = 14_400.0
"""How long the router remembers how much windows differ."""
RECOVERED_WEIGHT: Final = 5.0
"""A window of a drop that ended by itself counts as this many in the deviation between windows."""
PRIOR_WINDOWS: Final = 4.0
"""Weight of the deviation that is assumed at first, in windows."""
PRIOR_DEVIATION: Final = 0.04
"""Deviation between windows that is assumed at first."""
RECOVERED: Final = 0.5
"""A drop has ended when less than this fraction of the least drop is left."""
ADAPT_S: Final = 3600.0
"""After an hour of prompts a drop is no incident any more, but how the traffic is."""

End = Literal["recovered", "adapted"]


class Totals(NamedTuple):
    """A route's totals at one time; also their difference between two times."""

    at_s: float
    prompts: int
    prompt_tokens: int
    cached_tokens: int
    shares: float
    squares: float
    saved_ms: float
    prompt_ms: float
    sampled_blocks: int
    known_blocks: int

    def since(self, before: Totals) -> Totals:
        return Totals(*map(sub, self, before))

    @property
    def hit_ratio(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def known_ratio(self) -> float | None:
        """The hit rate of a cache that never evicts, from a sample of blocks; None without any."""
        return self.known_blocks / self.sampled_blocks if self.sampled_blocks else None


def totals_of(traffic: RouteTraffic, now_s: float) -> Totals:
    return Totals(
        now_s, traffic.counted_prompts, traffic.prompt_tokens, traffic.cached_tokens, traffic.hit_shares,
        traffic.hit_share_squares, traffic.saved_gpu_ms, traffic.prompt_gpu_ms, traffic.sampled_blocks,
        traffic.known_blocks,
    )  # fmt: skip


class Baseline:
    """Decayed sums of what was usual."""

    __slots__ = (
        "_deviation", "_windows", "age_s", "cached", "known", "prompt_ms", "prompts", "sampled", "saved_ms", "shares",
        "squares", "tokens",
    )  # fmt: skip

    def __init__(self) -> None:
        self.age_s = self.prompts = self.tokens = self.cached = self.prompt_ms = 0.0
        self.shares = self.squares = self.saved_ms = self.sampled = self.known = 0.0
        self._windows = PRIOR_WINDOWS
        self._deviation = PRIOR_WINDOWS * PRIOR_DEVIATION**2

    def add(self, part: Totals) -> None:
        """Add the traffic of `part.at_s` seconds."""
        kept = exp(-part.at_s / DECAY_S)
        self.age_s += part.at_s if part.prompts else 0.0
        self.prompts = self.prompts * kept + part.prompts
        self.tokens = self.tokens * kept + part.prompt_tokens
        self.cached = self.cached * kept + part.cached_tokens
        self.prompt_ms = self.prompt_ms * kept + part.prompt_ms
        self.shares = self.shares * kept + part.shares
        self.squares = self.squares * kept + part.squares
        self.saved_ms = self.saved_ms * kept + part.saved_ms
        self.sampled = self.sampled * kept + part.sampled_blocks
        self.known = self.known * kept + part.known_blocks

    def add_window(self, window: Totals, weight: float = 1.0) -> None:
        """Learn how much windows differ from the baseline, beyond the variance of their prompts."""
        if not self.is_mature:
            return
        kept = exp(-window.at_s / DEVIATION_DECAY_S)
        beyond = (window.shares / window.prompts - self.mean) ** 2 - self.variance / window.prompts
        self._windows = self._windows * kept + weight
        self._deviation = self._deviation * kept + weight * max(0.0, beyond)

    @property
    def is_mature(self) -> bool:
        return self.age_s >= MIN_AGE_S and self.prompts >= MIN_BASE_PROMPTS

    @property
    def hit_ratio(self) -> float:
        return self.cached / self.tokens if self.tokens else 0.0

    @property
    def known_ratio(self) -> float | None:
        return self.known / self.sampled if self.sampled >= 1.0 else None

    @property
    def mean(self) -> float:
        return self.shares / self.prompts if self.prompts else 0.0

    @property
    def variance(self) -> float:
        """Return the variance of single prompts. A little is assumed in any case: all prompts may have been alike by
        chance."""
        return max(0.01, self.squares / self.prompts - self.mean**2) if self.prompts else 0.25

    def deviation(self, prompts: int) -> float:
        """Return the standard deviation of the mean of a window with this many prompts."""
        return sqrt(self.variance / prompts + self.variance / max(1.0, self.prompts) + self._deviation / self._windows)


class Drop:
    """A drop that lasts."""

    def __init__(self, since_s: float, baseline: Baseline) -> None:
        self.since_s = since_s
        """When the window began in which it was noticed."""
        self.hit_ratio = 0.0
        """The current one."""
        self.baseline_ratio = baseline.hit_ratio
        self.prompts = 0
        self.traffic_s = 0.0
        """Time between checks between which prompts came."""
        self.last_prompt_s = since_s
        """When the last check was that found new prompts."""
        self.lost_ms = 0.0
        """Prefill time beyond what the same prompts would have taken at the baseline's hit rate, at current speeds:
        while nearly all tokens are cached, the learned speed is that of short prefills, and too slow for long ones."""

    def add(self, part: Totals, baseline: Baseline, now_s: float) -> None:
        self.prompts += part.prompts
        if part.prompts:
            self.traffic_s += part.at_s
            self.last_prompt_s = now_s
        self.lost_ms += part.prompt_ms * baseline.saved_ms / max(1.0, baseline.prompt_ms) - part.saved_ms


class HitRate:
    """Takes the totals of one route every CHECK_S."""

    def __init__(self) -> None:
        self.baseline = Baseline()
        self.window: Totals | None = None
        """The current window; None with too little traffic."""
        self.hit_ratio: float | None = None
        """Hit ratio of the last window with enough prompts; None before the first."""
        self.drop: Drop | None = None
        self.ended: End | None = None
        """Why the last drop ended, at the check at which it did."""
        self._readings: deque[Totals] = deque()
        self._absorbed = 0
        """Readings that the baseline has taken."""
        self._window_start: Totals | None = None
        self._low_checks = 0
        self._high_checks = 0

    @property
    def prompts(self) -> int:
        """The prompts of the last reading; below 0 before the first."""
        return self._readings[-1].prompts if self._readings else -1

    def update(self, now: Totals) -> None:
        self.ended = None
        readings = self._readings
        last = readings[-1] if readings else None
        readings.append(now)
        self._absorb()
        while len(readings) > 2 and readings[1].at_s <= now.at_s - MAX_WINDOW_S - DELAY_S:
            readings.popleft()
            self._absorbed = max(0, self._absorbed - 1)
        windows = list(self._windows(now, self.drop.since_s if self.drop is not None else -inf))
        self.window = windows[0] if windows else None
        if self.window is not None:
            self.hit_ratio = self.window.hit_ratio
        if self.drop is not None:
            self._follow(self.drop, now, last)
            return
        low = next((window for window in windows if self._is_low(window)), None)
        self._low_checks = self._low_checks + 1 if low is not None else 0
        if low is not None and self._low_checks >= 2:
            self._begin(low, now)

    def _absorb(self) -> None:
        """Let the baseline take the readings that are old enough. While the rate is low, it takes none."""
        readings = self._readings
        if self.drop is not None or self._low_checks:
            return
        while self._absorbed + 1 < len(readings):
            before, then = readings[self._absorbed], readings[self._absorbed + 1]
            seconds, prompts = readings[-1].at_s - then.at_s, readings[-1].prompts - then.prompts
            if seconds < DELAY_S or (prompts < 2 * MIN_PROMPTS and seconds < MAX_WINDOW_S):
                break
            self.baseline.add(then.since(before))
            self._absorbed += 1
            self._learn_deviation(before, then)

    def _learn_deviation(self, before: Totals, then: Totals, weight: float = 1.0) -> None:
        start = self._window_start = self._window_start or before
        whole = then.since(start)
        if whole.at_s >= WINDOW_S and whole.prompts >= MIN_PROMPTS:
            self.baseline.add_window(whole, weight)
            self._window_start = then
        elif whole.at_s > MAX_WINDOW_S:
            self._window_start = then

    def _windows(self, now: Totals, since_s: float) -> Iterator[Totals]:
        """Yield the windows that begin at `since_s` at the earliest, end now and have enough prompts, the shortest
        first."""
        lengths = list(WINDOWS_S)
        for start in reversed(self._readings):
            if start.at_s < since_s:
                return
            while lengths and now.at_s - start.at_s >= lengths[0] - 0.5:
                length = lengths.pop(0)
                if now.prompts - start.prompts >= MIN_PROMPTS and now.at_s - start.at_s < length + WINDOW_S:
                    yield now.since(start)
            if not lengths:
                return

    @property
    def least_drop(self) -> float:
        return max(MIN_DROP, MIN_RELATIVE_DROP * self.baseline.hit_ratio)

    def _is_low(self, window: Totals) -> bool:
        baseline = self.baseline
        if not baseline.is_mature or baseline.hit_ratio - window.hit_ratio < self.least_drop:
            return False
        below = baseline.mean - window.shares / window.prompts
        return below >= SIGMAS * baseline.deviation(window.prompts)

    def _begin(self, window: Totals, now: Totals) -> None:
        self.drop = drop = Drop(now.at_s - window.at_s, self.baseline)
        drop.hit_ratio = window.hit_ratio
        drop.add(window, self.baseline, now.at_s)
        self._high_checks = 0

    def _follow(self, drop: Drop, now: Totals, last: Totals | None) -> None:
        if last is not None:
            drop.add(now.since(last), self.baseline, now.at_s)
        window = self.window
        if window is not None:
            drop.hit_ratio = window.hit_ratio
        if window is not None and drop.last_prompt_s == now.at_s:
            is_high = self.baseline.hit_ratio - window.hit_ratio < RECOVERED * self.least_drop
            self._high_checks = self._high_checks + 1 if is_high else 0
        if self._high_checks >= 2:
            self._end("recovered")
        elif drop.traffic_s >= ADAPT_S:
            self._end("adapted")
            self.baseline = Baseline()

    def _end(self, why: End) -> None:
        """The baseline learns from the drop how much windows may differ, and nothing else."""
        self.drop, self.ended = None, why
        self._low_checks = 0
        if why == "recovered":
            for before, then in pairwise(list(self._readings)[self._absorbed :]):
                self._learn_deviation(before, then, RECOVERED_WEIGHT)
        self._absorbed = len(self._readings) - 1
        self._window_start = None


# What happened to the nodes' caches lately: restarts, nodes that left, lost KV events, another size.
#
# The hit rate's alerts name these as causes. The router compares two readings of its own state every few seconds, so
# that no other code has to report anything.

MAX_CHANGES: Final = 256
"""Bounds memory: a fleet that restarts as a whole makes one change for each node."""
SMALLER: Final = 0.9
"""A cache of less than this fraction of its former size counts as smaller."""
_LOST_STATES: Final = (HealthState.DOWN, HealthState.EJECTED)

ChangeKind = Literal["restarted", "left", "kv_events_lost", "smaller_cache"]


class CacheChange(NamedTuple):
    at_s: float
    node: str
    kind: ChangeKind
    models: tuple[str, ...]
    before: int = 0
    """Tokens that a cache held before it became smaller."""
    after: int = 0


class _NodeState(NamedTuple):
    incarnation: float
    gaps: int
    events_unusable: bool
    capacity_tokens: int
    is_lost: bool
    models: tuple[str, ...]


class CacheChanges:
    def __init__(self, fleet: Fleet, cache_view: CacheView) -> None:
        self._fleet = fleet
        self._cache_view = cache_view
        self._states: dict[str, _NodeState] = {}
        self._changes: deque[CacheChange] = deque(maxlen=MAX_CHANGES)

    def update(self, now_s: float) -> None:
        states: dict[str, _NodeState] = {}
        for node in self._fleet:
            cache = self._cache_view.cache(node.name)
            before = self._states.get(node.name)
            state = _NodeState(
                node.incarnation,
                cache.gaps if cache is not None else 0,
                cache is not None and (cache.events_missing or cache.token_mismatch),
                cache.capacity_blocks * cache.block_size if cache is not None else 0,
                node.health.state in _LOST_STATES,
                node.models or (),
            )
            if before is not None and not state.capacity_tokens:  # a node that restarts reports its size later
                state = state._replace(capacity_tokens=before.capacity_tokens)
            if before is not None and not state.incarnation:
                state = state._replace(incarnation=before.incarnation)
            states[node.name] = state
            if before is not None:
                self._add(now_s, node.name, before, state)
        for name in self._states.keys() - states.keys():
            self._changes.append(CacheChange(now_s, name, "left", self._states[name].models))
        self._states = states

    def _add(self, now_s: float, name: str, before: _NodeState, now: _NodeState) -> None:
        found: list[CacheChange] = []
        if before.incarnation and now.incarnation != before.incarnation:
            found.append(CacheChange(now_s, name, "restarted", now.models))
        if now.is_lost and not before.is_lost:
            found.append(CacheChange(now_s, name, "left", now.models))
        if now.gaps > before.gaps or now.events_unusable:
            found.append(CacheChange(now_s, name, "kv_events_lost", now.models))
        if now.capacity_tokens < SMALLER * before.capacity_tokens:
            found.append(
                CacheChange(now_s, name, "smaller_cache", now.models, before.capacity_tokens, now.capacity_tokens)
            )
        self._changes.extend(found)

    def since(self, at_s: float, model: str, *kinds: ChangeKind) -> list[CacheChange]:
        """Return the changes of the model's nodes since a time; those of all nodes if `model` is empty."""
        return [
            change
            for change in self._changes
            if change.at_s >= at_s
            and change.kind in kinds
            and (not model or not change.models or model in change.models)
        ]


def names_of(changes: Iterable[CacheChange]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(change.node for change in changes))


# The likely cause of a drop of the hit rate.
#
# Did prompts change, or caches? core/reuse.py samples which blocks earlier prompts had, whether or not a node still has
# them. If the share of such known blocks fell with the hit rate, prompts are not those of before. If it did not, their
# prefixes are known and were lost: a restart, lost KV events, or evictions.

CauseKind = Literal["prompts_changed", "cache_too_small", "kv_events_lost", "node_restarted", "new_traffic", "unknown"]

BEFORE_S: Final = 90.0
"""A change counts as a cause if it came at most this long before the drop."""
RESTART_S: Final = 300.0
"""A restart explains a drop for this long. A cache that is not warm by then is too small."""
MIN_SAMPLED_BLOCKS: Final = 20
"""A share of fewer sampled blocks says too little."""
REPRESENTATIVE: Final = 0.7
"""The known blocks say something about a route if their share was at least this fraction of its hit rate."""
MIN_SHARE: Final = 0.3
"""Share of the prompts that have to be new or changed."""
FULL: Final = 0.05
"""A cache with fewer free blocks than this fraction is full."""
KEPT_FOREVER_S: Final = 1e6
SHOWN_NODES: Final = 4
"""Nodes that a sentence names. The rest is a number."""


class Cause(NamedTuple):
    kind: CauseKind
    sentence: str
    what_to_do: str
    nodes: tuple[str, ...] = ()


class Causes:
    def __init__(
        self,
        fleet: Fleet,
        cache_view: CacheView,
        changes: CacheChanges,
        prompts: Callable[[tuple[str, str]], RouteReport | None],
    ) -> None:
        """`prompts`: what the prompt doctor knows of a route."""
        self._fleet = fleet
        self._cache_view = cache_view
        self._changes = changes
        self._prompts = prompts

    def find(self, key: tuple[str, str], rate: HitRate, now_s: float) -> Cause:
        drop = rate.drop
        assert drop is not None
        since_s = drop.since_s - BEFORE_S
        report = self._prompts(key)
        prompts = list(_from_prompts(report, since_s))
        caches = self._from_caches(key[0], since_s, now_s)
        match _prompts_are_known(rate):
            case True:
                found = [*caches, *self._too_small(key[0], now_s), *prompts]
            case False:
                found = [*prompts, *caches] or [_NEW]
            case None:
                found = [*prompts[:1], *caches, *self._too_small(key[0], now_s)]
        return found[0] if found else _UNKNOWN

    def _from_caches(self, model: str, since_s: float, now_s: float) -> list[Cause]:
        found: list[Cause] = []
        if smaller := self._changes.since(since_s, model, "smaller_cache"):
            found.append(_smaller(smaller))
        if gone := self._changes.since(max(since_s, now_s - RESTART_S), model, "restarted", "left"):
            found.append(_restarted(gone))
        if lost := self._changes.since(since_s, model, "kv_events_lost"):
            found.append(events_lost(names_of(lost)))
        return found

    def _too_small(self, model: str, now_s: float) -> list[Cause]:
        """Return the cause if the model's caches are full and evict what prompts still use."""
        group = self._fleet.group(model)
        names = [node.name for node in group.members] if group is not None else []
        found = [cache for name in names if (cache := self._cache_view.cache(name)) is not None]
        caches = [cache for cache in found if cache.capacity_blocks]
        full = [cache for cache in caches if cache.free_blocks <= FULL * cache.capacity_blocks]
        if not full or 2 * len(full) < len(caches):
            return []
        tokens = sum([cache.capacity_blocks * cache.block_size for cache in caches])
        kept_s = min([now_s - cache.oldest_s for cache in full if cache.oldest_s == cache.oldest_s], default=0.0)
        reuse = self._cache_view.reuse
        later = 1.0 - reuse.share_within(kept_s) / max(1e-9, reuse.share_within(KEPT_FOREVER_S))
        return [
            Cause(
                "cache_too_small",
                f"The caches of its nodes are full: they hold {tokens:,} tokens, and keep a prefix for about "
                f"{kept_s:,.0f} s. {max(0.0, later):.0%} of the reuses come later than that.",
                _LARGER, tuple(cache.name for cache in full[:SHOWN_NODES]),
            )
        ]  # fmt: skip


def _prompts_are_known(rate: HitRate) -> bool | None:
    """Return whether the blocks of current prompts are as often known as before; None if that cannot be told."""
    window, before = rate.window, rate.baseline.known_ratio
    now = window.known_ratio if window is not None else None
    if window is None or before is None or now is None or window.sampled_blocks < MIN_SAMPLED_BLOCKS:
        return None
    usual = rate.baseline.hit_ratio
    if before < REPRESENTATIVE * usual:
        return None
    return before - now < 0.5 * (usual - window.hit_ratio)


def _from_prompts(report: RouteReport | None, since_s: float) -> list[Cause]:
    if report is None:
        return []
    found = [_changed_by(finding) for finding in report.findings if finding.since_s >= since_s]
    change = report.change
    if change is not None:
        if change.changed_share >= MIN_SHARE:
            found.append(_changed_at(change))
        if max(change.new_share, change.new_tenant_share) >= MIN_SHARE:
            found.append(_new(change))
    return found


_LARGER: Final = (
    "Give the engines more KV memory (vLLM: --gpu-memory-utilization, a quantized KV cache), add nodes, or send fewer "
    "different prompts."
)
_UNKNOWN: Final = Cause(
    "unknown", "Neither prompts nor caches show what has changed.",
    "Compare requests before and after with `warmroute explain`, and look at `warmroute doctor prompts`.",
)  # fmt: skip
_NEW: Final = Cause(
    "new_traffic", "Most of the prompts' text was never sent before.",
    "Nothing, if the traffic is meant to be new: the caches fill within minutes. Otherwise look for a client that "
    "changes its prompts (`warmroute doctor prompts`).",
)  # fmt: skip


def _changed_by(finding: Finding) -> Cause:
    return Cause(
        "prompts_changed",
        f"Prompts now differ by {finding.what_differs} at {finding.place} (token {finding.token:,}), before text that "
        f"they have in common: {finding.share:.0%} of the prompts.",
        finding.what_to_do,
    )


def _changed_at(change: PromptChange) -> Cause:
    return Cause(
        "prompts_changed",
        f"{change.changed_share:.0%} of the prompts differ from the earlier ones from {change.place} on.",
        "Nothing, if the change was meant: the caches fill within minutes. Otherwise undo it.",
    )


def _new(change: PromptChange) -> Cause:
    if change.new_tenant_share >= change.new_share:
        return _NEW._replace(sentence=f"{change.new_tenant_share:.0%} of the prompts come from new tenants.")
    return _NEW._replace(sentence=f"{change.new_share:.0%} of the prompts begin like no earlier one.")


def _smaller(changes: list[CacheChange]) -> Cause:
    last = changes[-1]
    names = names_of(changes)
    return Cause(
        "cache_too_small",
        f"The KV cache of {listed(names)} became smaller: {last.before:,} tokens before, {last.after:,} now.",
        _LARGER, names,
    )  # fmt: skip


def _restarted(changes: list[CacheChange]) -> Cause:
    restarted, left = (names_of([one for one in changes if one.kind == kind]) for kind in ("restarted", "left"))
    said = [f"{listed(restarted)} restarted with an empty cache."] if restarted else []
    said += [f"{listed(left)} left with what {'it' if len(left) == 1 else 'they'} had cached."] if left else []
    return Cause(
        "node_restarted", " ".join(said),
        "Nothing, if that was meant: the caches fill within minutes. Otherwise look at the engine's log.",
        (*restarted, *left),
    )  # fmt: skip


def events_lost(names: tuple[str, ...]) -> Cause:
    return Cause(
        "kv_events_lost",
        f"KV events of {listed(names)} were lost, so the router does not know what is cached there.",
        "Check the connection to the engine's event port, and enable replay (vLLM: replay_endpoint in "
        "--kv-events-config), so that the router can fetch lost events.",
        names,
    )


def listed(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:SHOWN_NODES])
    return shown if len(names) <= SHOWN_NODES else f"{shown} and {len(names) - SHOWN_NODES} more"


# Alerts about the hit rate: a drop below a route's baseline, with its likely cause, and prompts that prevent reuse.

log = EventLog("warmroute.telemetry")

LOG_AFTER_S: Final = 15.0
"""Time after a drop was noticed before it is logged: the prompt doctor needs some prompts to see the cause."""
CHANGED_CAUSE_S: Final = 60.0
"""Least time before another cause of the same drop is logged."""
MIN_LOST_SHARE: Final = 0.2
"""Of a route's prompt tokens. Prompts that cost more reuse than this are an alert, also without a drop."""

QUIET_S: Final = 60.0
"""After this time without prompts a drop's alert says so."""
LOST_EVENTS_S: Final = 60.0
"""For how long lost KV events are an alert."""

RouteKey = tuple[str, str]


class _Logged:
    """What was logged of a drop."""

    def __init__(self, noticed_s: float) -> None:
        self.at_s = noticed_s
        """When it was noticed, or last logged."""
        self.kind: CauseKind | None = None
        """The cause that was logged; None before."""


class HitRateAlerts:
    def __init__(
        self,
        traffic: Traffic,
        changes: CacheChanges,
        causes: Causes,
        findings: Callable[[], list[Finding]],
    ) -> None:
        self._traffic = traffic
        self._changes = changes
        self._causes = causes
        self._findings = findings
        self.rates: dict[RouteKey, HitRate] = {}
        """The hit rate of each model and route."""
        self.causes: dict[RouteKey, Cause] = {}
        """The likely cause of each drop that lasts."""
        self.drops: Counter[tuple[str, str, CauseKind]] = Counter()
        """Drops that were logged, by model, route and cause."""
        self.lost_s: defaultdict[RouteKey, float] = defaultdict(float)
        """GPU seconds of drops that have ended."""
        self._logged: dict[RouteKey, _Logged] = {}
        self._next_s = -1e9

    def __call__(self, now_s: float) -> Iterator[Alert]:
        if now_s >= self._next_s:
            self._next_s = now_s + CHECK_S - 0.5
            self._check(now_s)
        for key, cause in self.causes.items():
            yield self._drop_alert(key, cause, now_s)
        yield from self._lost_events(now_s)
        for finding in self._findings():
            key = (finding.model, finding.route)
            rate = self.rates.get(key)
            if key in self.causes or rate is None or rate.hit_ratio is None:
                continue
            if finding.could_share - finding.cached_share >= MIN_LOST_SHARE:
                yield _finding_alert(finding)

    def _lost_events(self, now_s: float) -> Iterator[Alert]:
        """Yield an alert while KV events are being lost, unless a drop names them as its cause."""
        names = names_of(self._changes.since(now_s - LOST_EVENTS_S, "", "kv_events_lost"))
        explained = {node for cause in self.causes.values() if cause.kind == "kv_events_lost" for node in cause.nodes}
        if names and not explained.issuperset(names):
            cause = events_lost(names)
            yield Alert(
                id="kv_events_lost", severity="warning", nodes=names, title=f"{listed(names)}: KV events are lost",
                cause=cause.sentence, what_to_do=cause.what_to_do,
            )  # fmt: skip

    def lost_gpu_s(self, key: RouteKey) -> float:
        """Return the GPU seconds that all drops of a route have cost."""
        rate = self.rates.get(key)
        current = rate.drop.lost_ms / 1000.0 if rate is not None and rate.drop is not None else 0.0
        return self.lost_s[key] + max(0.0, current)

    def _check(self, now_s: float) -> None:
        self._changes.update(now_s)
        for key, traffic in self._traffic.by_route.items():
            rate = self.rates.get(key)
            if rate is None:
                rate = self.rates[key] = HitRate()
            drop = rate.drop
            if drop is None and rate.prompts == traffic.counted_prompts:
                continue  # nothing new
            rate.update(totals_of(traffic, now_s))
            if rate.drop is not None:
                self._follow(key, rate, now_s)
            elif rate.ended is not None and drop is not None:
                self.causes.pop(key, None)
                logged = self._logged.pop(key)
                self.lost_s[key] += max(0.0, drop.lost_ms / 1000.0)
                if logged.kind is None:
                    continue
                log.info(
                    "hit_rate_recovered",
                    "The rate is near its baseline again."
                    if rate.ended == "recovered"
                    else "The rate has not recovered in an hour of traffic. It is the new baseline.",
                    model=key[0], route=key[1], reason=rate.ended, hit_ratio=round(drop.hit_ratio, 3),
                    duration_s=round(now_s - drop.since_s), lost_gpu_s=round(drop.lost_ms / 1000.0, 1),
                )  # fmt: skip

    def _follow(self, key: RouteKey, rate: HitRate, now_s: float) -> None:
        """Update the cause of a drop, and log it once; again if the router finds another cause."""
        cause = self.causes[key] = self._causes.find(key, rate, now_s)
        logged = self._logged.setdefault(key, _Logged(now_s))
        known = logged.kind
        drop = rate.drop
        assert drop is not None
        if known is None and (cause.kind == "prompts_changed" or now_s - logged.at_s >= LOG_AFTER_S):
            self.drops[key[0], key[1], cause.kind] += 1
            logged.kind, logged.at_s = cause.kind, now_s
            log.warning(
                "hit_rate_dropped", f"{cause.sentence} {cause.what_to_do}", model=key[0], route=key[1],
                reason=cause.kind, hit_ratio=round(drop.hit_ratio, 3), baseline=round(drop.baseline_ratio, 3),
            )  # fmt: skip
        elif known is not None and cause.kind not in (known, "unknown") and now_s - logged.at_s >= CHANGED_CAUSE_S:
            logged.kind, logged.at_s = cause.kind, now_s
            log.warning(
                "hit_rate_cause_changed", f"{cause.sentence} {cause.what_to_do}", model=key[0], route=key[1],
                reason=cause.kind,
            )  # fmt: skip

    def _drop_alert(self, key: RouteKey, cause: Cause, now_s: float) -> Alert:
        drop = self.rates[key].drop
        assert drop is not None
        lost_s = max(0.0, drop.lost_ms / 1000.0)
        quiet_s = now_s - drop.last_prompt_s
        quiet = (
            f" No prompts came in the last {quiet_s / 60.0:,.0f} min, so nothing shows whether it has recovered."
            if quiet_s >= QUIET_S
            else ""
        )
        return Alert(
            id=f"hit_rate_dropped {key[0]} {key[1]}", severity="warning", nodes=cause.nodes,
            title=f"{_route(key)}: hit rate fell from {drop.baseline_ratio:.0%} to {drop.hit_ratio:.0%}",
            cause=f"{cause.sentence} Cost so far: {lost_s:,.1f} GPU seconds.{quiet}",
            what_to_do=cause.what_to_do,
        )  # fmt: skip


def _finding_alert(finding: Finding) -> Alert:
    return Alert(
        id=f"prompts_prevent_reuse {finding.model} {finding.route} {finding.kind}", severity="warning",
        title=f"{_route((finding.model, finding.route))}: {finding.cached_share:.0%} of the prompt tokens are cached, "
        f"{finding.could_share:.0%} could be",
        cause=f"{finding.share:.0%} of the prompts differ by {finding.what_differs} at {finding.place} "
        f"(token {finding.token:,}), before text that they have in common. Cost so far: {finding.lost_gpu_s:,.1f} GPU "
        "seconds.",
        what_to_do=finding.what_to_do,
    )  # fmt: skip


def _route(key: RouteKey) -> str:
    return f"{key[0]}, route {key[1]}" if key[1] else key[0]
