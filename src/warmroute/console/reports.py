"""POST /admin/nodes/NAME/blocks: what a node's cache holds, told by whoever knows it, for engines without KV events.

    {"sequence": 7, "rank": 0, "whole": false, "block_size": 16, "cleared": false,
     "removed": [{"hashes": [12], "tier": "gpu"}],
     "stored": [{"hashes": [13, 14], "parent": 11, "token_ids": […32 of them], "lora": "", "salt": "", "tier": "gpu"}]}

A report with `whole` replaces everything that was told before; any other must have the sequence that follows the last,
and is applied in this order: cleared, removed, stored. Whoever missed one is told to send the whole again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Annotated, Final, Literal
from weakref import WeakKeyDictionary

import msgspec
from msgspec import Meta

from warmroute.edge.errors import Refusal
from warmroute.index.cache_view import CacheView
from warmroute.index.node_cache import EngineHash, NodeCache
from warmroute.index.tiers import Tier

MAX_BYTES: Final = 1_048_576
"""Reading JSON holds the loop: a larger set comes as a whole and the deltas that follow it."""
SLICE_S: Final = 0.002
_TIERS: Final = {"gpu": Tier.GPU, "cpu": Tier.CPU, "disk": Tier.DISK, "remote": Tier.REMOTE}

Hash = int | Annotated[str, Meta(min_length=1, max_length=64)]
"""Text stands for engines whose hashes are longer than 64 bits."""
TierName = Literal["gpu", "cpu", "disk", "remote"]


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class StoredBlocks(_Part, frozen=True):
    hashes: list[Hash]
    token_ids: list[Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]]
    parent: Hash | None = None
    lora: str = ""
    salt: str = ""
    tier: TierName = "gpu"


class RemovedBlocks(_Part, frozen=True):
    hashes: list[Hash]
    tier: TierName = "gpu"


class Report(_Part, frozen=True):
    sequence: Annotated[int, Meta(ge=0)]
    block_size: Annotated[int, Meta(ge=1, le=65536)]
    rank: Annotated[int, Meta(ge=0, le=65535)] = 0
    whole: bool = False
    cleared: bool = False
    removed: list[RemovedBlocks | Hash] = []
    """A bare hash is one that left the GPU."""
    stored: list[StoredBlocks] = []


_decode: Final = msgspec.json.Decoder(Report).decode


class _Told:
    """How far the reports of one rank have come."""

    __slots__ = ("era", "sequence")

    def __init__(self, era: int) -> None:
        self.era = era
        self.sequence = -1


class Reports:
    def __init__(self, cache_view: CacheView, now: Callable[[], float] = time.monotonic) -> None:
        self._cache_view = cache_view
        self._now = now
        self._told: WeakKeyDictionary[NodeCache, dict[int, _Told]] = WeakKeyDictionary()
        """By cache and rank. What a node told is forgotten with the node."""
        self._one_at_a_time = asyncio.Lock()

    async def take(self, name: str, body: bytes) -> dict[str, int]:
        """Takes a node's report, and returns what to answer. Raises Refusal."""
        if len(body) > MAX_BYTES:
            raise Refusal(
                413,
                f"A report has at most {MAX_BYTES:,} bytes: send `whole` with a part of the blocks, then the others.",
                code="report_too_large",
            )
        cache = self._cache_view.cache(name)
        if cache is None:
            raise Refusal(404, f"Nothing is kept of a node named {name[:200]!r}.", code="unknown_node")
        try:
            report = _decode(body)
        except msgspec.DecodeError as error:
            raise Refusal(400, f"The report can't be read: {error}", code="bad_report") from None
        async with self._one_at_a_time:
            told = self._continues(cache, report)
            await self._apply(cache, told, report)
            return {"sequence": told.sequence, "blocks": self._cache_view.index.pairs_of(cache.ranks[report.rank])}

    def _continues(self, cache: NodeCache, report: Report) -> _Told:
        of_ranks = self._told.setdefault(cache, {})
        told = of_ranks.get(report.rank)
        if told is None or report.rank not in cache.ranks:
            if report.rank in cache.ranks:
                raise Refusal(409, "This node tells by its KV events what it holds.", code="has_events")
            told = None
        if report.whole:
            cache.follow(report.rank)
            told = of_ranks[report.rank] = _Told(cache.era)
        elif told is None or told.era != cache.era:
            raise _send_whole("nothing is known of what it held before")
        elif report.sequence != told.sequence + 1:
            raise _send_whole(f"sequence {told.sequence + 1} was due, not {report.sequence}")
        return told

    async def _apply(self, cache: NodeCache, told: _Told, report: Report) -> None:
        rank = report.rank
        until_s = time.monotonic() + SLICE_S
        try:
            if report.whole or report.cleared:
                cache.cleared(rank)
            for part in report.removed:
                gone = RemovedBlocks([part]) if isinstance(part, int | str) else part
                cache.removed(rank, _hashes(gone.hashes), _TIERS[gone.tier])
            for blocks in report.stored:
                if not cache.stored(
                    rank, _hash(blocks.parent), _hashes(blocks.hashes), blocks.token_ids, report.block_size,
                    _TIERS[blocks.tier], lora=blocks.lora, salt=blocks.salt,
                ):  # fmt: skip
                    raise _send_whole("a block's parent is not known")
                if time.monotonic() >= until_s:
                    await asyncio.sleep(0)
                    until_s = time.monotonic() + SLICE_S
        except Refusal:
            self._lose(cache, rank)
            raise
        except (ValueError, TypeError, OverflowError, KeyError) as error:
            self._lose(cache, rank)
            raise Refusal(
                400, f"The report makes no sense: {error}. Send the whole set again.", code="bad_report"
            ) from None
        told.sequence, told.era = report.sequence, cache.era
        cache.tells_all(rank, True)
        cache.heard(self._now())

    def _lose(self, cache: NodeCache, rank: int) -> None:
        self._told.get(cache, {}).pop(rank, None)
        if rank in cache.ranks:
            cache.lost(rank)
            cache.unfollow(rank)


def _send_whole(why: str) -> Refusal:
    return Refusal(409, f"The report does not follow: {why}. Send the whole set (`whole`: true).", code="send_whole")


def _hash(name: int | str | None) -> EngineHash | None:
    return name.encode() if isinstance(name, str) else name


def _hashes(names: list[Hash]) -> list[EngineHash]:
    return [name.encode() if isinstance(name, str) else name for name in names]
