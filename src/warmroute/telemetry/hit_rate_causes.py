"""The likely cause of a drop of the hit rate.

Did prompts change, or caches? index/reuse.py samples which blocks earlier prompts had, whether or not a node still has
them. If the share of such known blocks fell with the hit rate, prompts are not those of before. If it did not, their
prefixes are known and were lost: a restart, lost KV events, or evictions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, NamedTuple

from warmroute.fleet.fleet import Fleet
from warmroute.index.cache_view import CacheView
from warmroute.prompt_doctor.findings import Finding
from warmroute.prompt_doctor.prompt_changes import PromptChange
from warmroute.prompt_doctor.prompt_doctor import RouteReport
from warmroute.telemetry.cache_changes import CacheChange, CacheChanges, names_of
from warmroute.telemetry.hit_rate import HitRate

CauseKind = Literal["prompts_changed", "cache_too_small", "kv_events_lost", "node_restarted", "new_traffic", "unknown"]

BEFORE_S: Final = 90.0
"""A change counts as a cause if it came at most this long before the drop."""
RESTART_S: Final = 300.0
"""A restart explains a drop for this long. A cache that is not warm by then is too small."""
MIN_SAMPLED_BLOCKS: Final = 20
REPRESENTATIVE: Final = 0.7
"""The known blocks say something about a route if their share was at least this fraction of its hit rate."""
MIN_SHARE: Final = 0.3
"""Share of the prompts that have to be new or changed."""
FULL: Final = 0.05
"""A cache with fewer free blocks than this fraction is full."""
KEPT_FOREVER_S: Final = 1e6
SHOWN_NODES: Final = 4


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
