"""What happened to the nodes' caches lately: restarts, nodes that left, lost KV events, another size.

The hit rate's alerts name these as causes. The router compares two readings of its own state every few seconds, so that
no other code has to report anything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

from warmroute.fleet.fleet import Fleet
from warmroute.fleet.health import HealthState
from warmroute.index.cache_view import CacheView

MAX_CHANGES: Final = 256
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
