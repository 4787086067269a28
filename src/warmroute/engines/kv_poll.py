"""KV events that are fetched instead of published (TensorRT-LLM): each answer is numbered events, handed out once.

number follows the last        applied
number skips some              somebody else fetched them, or the engine's buffer ran over: all is forgotten
number is not above the last   the engine has begun anew
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from warmroute.engines.kv_apply import Applied, Applier
from warmroute.engines.trtllm import Reader, Told
from warmroute.index.node_cache import NodeCache

SLICE_S: Final = 0.002


class _Rank:
    def __init__(self, cache: NodeCache, rank: int) -> None:
        self.last = -1
        self.complete = False
        self.reader = Reader()
        self.applier = Applier(cache, rank)


class PolledEvents:
    """One node's fetched events, from numbered events to beliefs."""

    def __init__(self, cache: NodeCache, now: Callable[[], float] = time.monotonic) -> None:
        self._cache = cache
        self._now = now
        self._ranks: dict[int, _Rank] = {}

    @property
    def block_size(self) -> int:
        return next((one.applier.block_size for one in self._ranks.values()), 0)

    async def take(self, told: list[Told]) -> None:
        """Applies an answer's events, giving way to others every few milliseconds."""
        self._cache.heard(self._now())
        until_s = time.monotonic() + SLICE_S
        for event in told:
            self._take(event)
            if time.monotonic() >= until_s:
                await asyncio.sleep(0)
                until_s = time.monotonic() + SLICE_S
        for rank, one in self._ranks.items():
            self._cache.tells_all(rank, one.complete)

    def _take(self, told: Told) -> None:
        rank = told.attention_dp_rank or 0
        one = self._ranks.get(rank)
        if one is None:
            self._cache.follow(rank)
            one = self._ranks[rank] = _Rank(self._cache, rank)
        if told.event_id <= one.last:
            self._cache.cleared(rank)
            one = self._ranks[rank] = _Rank(self._cache, rank)
        if told.event_id != one.last + 1:
            if one.last >= 0:
                self._cache.lost(rank)
            one.complete = False
        elif told.event_id == 0:
            one.complete = True
        one.last = told.event_id
        for event in one.reader.events(told):
            if one.applier.apply(event) is Applied.ORPHANED and one.complete:
                self._cache.lost(rank)
                one.complete = False

    def restarted(self) -> None:
        """The engine's process is another one."""
        self._cache.restarted()
        for rank in self._ranks:
            self._cache.tells_all(rank, False)
            self._ranks[rank] = _Rank(self._cache, rank)

    def close(self) -> None:
        for rank in self._ranks:
            self._cache.unfollow(rank)
        self._ranks.clear()
