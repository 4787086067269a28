"""POST /admin/nodes/NAME/blocks: reports about a node's cache, for engines without KV events.

    {"sequence": 7, "rank": 0, "snapshot": false, "block_size": 16, "cleared": false,
     "removed": [{"hashes": [12], "tier": "gpu"}],
     "stored": [{"hashes": [13, 14], "parent": 11, "token_ids": [… 32 tokens], "lora": "", "salt": "", "tier": "gpu"}]}

A snapshot replaces everything that was reported before. Every other report must have the next sequence number; the
router applies it in this order: cleared, removed, stored. If a report is missing, the router asks for a snapshot.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Annotated, Final, Literal
from weakref import WeakKeyDictionary

import msgspec
from msgspec import Meta

from warmroute.core.cache_view import CacheView
from warmroute.core.node_cache import EngineHash, NodeCache, Tier
from warmroute.edge.async_handler import decode_body
from warmroute.edge.errors import HttpError

MAX_BYTES: Final = 1_048_576
"""Parsing JSON blocks the event loop: larger caches are reported as a snapshot and further reports."""
MAX_BLOCKING_S: Final = 0.002
"""Time after which other tasks get a turn."""

Hash = int | Annotated[str, Meta(min_length=1, max_length=64)]
"""A block's hash. Text is for engines whose hashes are longer than 64 bits."""
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
    snapshot: bool = False
    cleared: bool = False
    removed: list[RemovedBlocks | Hash] = []
    """What the node evicted. A hash alone is a block that left the GPU."""
    stored: list[StoredBlocks] = []


_report: Final = msgspec.json.Decoder(Report)


class _Progress(msgspec.Struct):
    """The last report of a rank."""

    generation: int
    sequence: int = -1


class BlockReports:
    def __init__(self, cache_view: CacheView, now: Callable[[], float] = time.monotonic) -> None:
        self._cache_view = cache_view
        self._now = now
        self._progress: WeakKeyDictionary[NodeCache, dict[int, _Progress]] = WeakKeyDictionary()
        """The last report of each rank, by cache. Weak, so that a removed node takes its entry along."""
        # A report yields to the event loop in the middle. The next report of the same node must not be applied in
        # between.
        self._lock = asyncio.Lock()

    async def apply(self, name: str, body: bytes) -> dict[str, int]:
        """Apply a report about this node. Return the response. Raises HttpError."""
        if len(body) > MAX_BYTES:
            raise HttpError(
                413,
                f"A report has at most {MAX_BYTES:,} bytes. Send a snapshot with some of the blocks, then further "
                "reports with the others.",
                code="report_too_large",
            )
        cache = self._cache_view.cache(name)
        if cache is None:
            raise HttpError(404, f"The cache index has no node {name[:200]!r}.", code="unknown_node")
        try:
            report = decode_body(body, _report)
        except msgspec.DecodeError as error:
            raise HttpError(400, f"The report is invalid: {error}", code="bad_report") from None
        async with self._lock:
            progress = self._check_sequence(cache, report)
            await self._apply(cache, progress, report)
            return {
                "sequence": progress.sequence,
                "blocks": self._cache_view.index.pair_count(cache.ranks[report.rank]),
            }

    def _check_sequence(self, cache: NodeCache, report: Report) -> _Progress:
        by_rank = self._progress.setdefault(cache, {})
        progress = by_rank.get(report.rank) if report.rank in cache.ranks else None
        if progress is None and report.rank in cache.ranks:
            raise HttpError(409, "The router receives the KV events of this node.", code="has_events")
        if report.snapshot:
            cache.add_rank(report.rank)
            progress = by_rank[report.rank] = _Progress(cache.generation)
        # The cache was purged since (the engine restarted, or changed its model): what the last report built on is
        # gone.
        elif progress is None or progress.generation != cache.generation:
            raise _snapshot_required("there is no earlier report")
        elif report.sequence != progress.sequence + 1:
            raise _snapshot_required(f"expected sequence {progress.sequence + 1}, got {report.sequence}")
        return progress

    async def _apply(self, cache: NodeCache, progress: _Progress, report: Report) -> None:
        rank = report.rank
        pause_s = time.monotonic() + MAX_BLOCKING_S
        try:
            if report.snapshot or report.cleared:
                cache.all_blocks_cleared(rank)
            for part in report.removed:
                removed = RemovedBlocks([part]) if isinstance(part, int | str) else part
                cache.blocks_removed(rank, _engine_hashes(removed.hashes), Tier[removed.tier.upper()])
            for blocks in report.stored:
                parent = None if blocks.parent is None else _engine_hashes([blocks.parent])[0]
                if not cache.blocks_stored(
                    rank, parent, _engine_hashes(blocks.hashes), blocks.token_ids, report.block_size,
                    Tier[blocks.tier.upper()], lora=blocks.lora, salt=blocks.salt,
                ):  # fmt: skip
                    raise _snapshot_required("the parent of a block is unknown")
                if time.monotonic() >= pause_s:
                    await asyncio.sleep(0)
                    pause_s = time.monotonic() + MAX_BLOCKING_S
        except HttpError:
            self._discard(cache, rank)
            raise
        except (ValueError, TypeError, OverflowError, KeyError) as error:
            self._discard(cache, rank)
            raise HttpError(400, f"The report is invalid: {error}. Send a snapshot.", code="bad_report") from None
        progress.sequence, progress.generation = report.sequence, cache.generation
        cache.set_complete(rank, True)
        cache.last_contact_s = self._now()

    # Half of a report is applied when its error shows. The other half is unknown, so nothing of this rank can be
    # trusted.
    def _discard(self, cache: NodeCache, rank: int) -> None:
        self._progress.get(cache, {}).pop(rank, None)
        if rank in cache.ranks:
            cache.events_lost(rank)
            cache.remove_rank(rank)


def _snapshot_required(why: str) -> HttpError:
    return HttpError(
        409, f"The report does not follow the last one: {why}. Send a snapshot (`snapshot`: true).",
        code="snapshot_required",
    )  # fmt: skip


def _engine_hashes(hashes: list[Hash]) -> list[EngineHash]:
    return [hash_.encode() if isinstance(hash_, str) else hash_ for hash_ in hashes]
