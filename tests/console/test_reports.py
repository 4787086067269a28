"""Reports of blocks, for engines without events: applied in order or not at all."""

from __future__ import annotations

import asyncio
import gc
import json
from array import array
from typing import Any
from weakref import ref

import pytest

from warmroute.config import Index
from warmroute.console.reports import MAX_BYTES, Reports
from warmroute.edge.errors import Refusal
from warmroute.index.cache_view import CacheView
from warmroute.index.lookup import Lookup

SIZE = 16


def prompt(seed: int, blocks: int = 2) -> list[int]:
    return [1000 + (seed * 7919 + index) % 100_000 for index in range(blocks * SIZE)]


class Reporter:
    def __init__(self) -> None:
        self.cache_view = CacheView(Index())
        self.cache = self.cache_view.join("node", ["m"])
        self.cache_view.serves(self.cache, "m", (), ("ad1",))
        self.reports = Reports(self.cache_view, lambda: 5.0)

    async def says(self, sequence: int, name: str = "node", **more: Any) -> dict[str, int]:
        body = json.dumps({"sequence": sequence, "block_size": SIZE, **more}).encode()
        return await self.reports.take(name, body)

    async def refused(self, sequence: int, **more: Any) -> Refusal:
        with pytest.raises(Refusal) as refusal:
            await self.says(sequence, **more)
        return refusal.value

    def hit(self, tokens: list[int], model: str = "m", salt: str = "") -> int:
        asked = Lookup(array("I", [*tokens, 7]).tobytes(), len(tokens) + 1, len(tokens) + 1, salt=salt)
        found = self.cache_view.hits(model, asked, 5.0).get("node")
        return found.tokens if found is not None else 0


def blocks(first: int, tokens: list[int], **more: Any) -> dict[str, Any]:
    return {"hashes": [first + number for number in range(len(tokens) // SIZE)], "token_ids": tokens, **more}


async def test_a_whole_report_then_deltas() -> None:
    reporter = Reporter()
    assert await reporter.says(7, whole=True, stored=[blocks(1, prompt(1))]) == {"sequence": 7, "blocks": 2}
    assert reporter.hit(prompt(1)) == 32 and reporter.cache.complete and reporter.cache.heard_s == 5.0
    told = [blocks(11, prompt(2), parent=2), blocks(21, prompt(3), salt="s"), blocks(31, prompt(4), lora="ad1")]
    assert await reporter.says(8, stored=told) == {"sequence": 8, "blocks": 8}
    assert reporter.hit(prompt(1) + prompt(2)) == 64
    assert (reporter.hit(prompt(3)), reporter.hit(prompt(3), salt="s")) == (0, 32)
    assert (reporter.hit(prompt(4)), reporter.hit(prompt(4), "ad1")) == (0, 32)
    assert (await reporter.says(9, removed=[12, {"hashes": [21, 22]}]))["blocks"] == 5
    assert reporter.hit(prompt(1) + prompt(2)) == 48 and reporter.hit(prompt(3), salt="s") == 0
    assert await reporter.says(10, cleared=True, stored=[blocks(1, prompt(5))]) == {"sequence": 10, "blocks": 2}
    assert (reporter.hit(prompt(1)), reporter.hit(prompt(5))) == (0, 32)


async def test_a_whole_report_replaces_everything() -> None:
    reporter = Reporter()
    await reporter.says(0, whole=True, stored=[blocks(1, prompt(1))])
    await reporter.says(0, whole=True, stored=[blocks(1, prompt(2))])
    assert (reporter.hit(prompt(1)), reporter.hit(prompt(2))) == (0, 32)


async def test_long_hashes_are_text_and_tiers_are_named() -> None:
    reporter = Reporter()
    await reporter.says(0, whole=True, stored=[{"hashes": ["ab" * 32], "token_ids": prompt(1, 1), "tier": "cpu"}])
    await reporter.says(1, stored=[{"hashes": ["cd"], "parent": "ab" * 32, "token_ids": prompt(2, 1)}])
    assert reporter.hit(prompt(1, 1) + prompt(2, 1)) == 32
    await reporter.says(2, removed=[{"hashes": ["ab" * 32], "tier": "cpu"}])
    assert reporter.hit(prompt(1, 1)) == 0


@pytest.mark.parametrize("sequence", [0, 1, 3, 100])
async def test_a_delta_that_does_not_follow_changes_nothing_and_asks_for_the_whole(sequence: int) -> None:
    reporter = Reporter()
    await reporter.says(1, whole=True, stored=[blocks(1, prompt(1))])
    refusal = await reporter.refused(sequence, removed=[1])
    assert refusal.status == 409 and "whole" in refusal.message and refusal.code == "send_whole"
    assert reporter.hit(prompt(1)) == 32
    await reporter.says(2, removed=[1])
    assert reporter.hit(prompt(1)) == 0


async def test_a_delta_without_a_whole_before_asks_for_it() -> None:
    reporter = Reporter()
    assert (await reporter.refused(0, stored=[blocks(1, prompt(1))])).status == 409
    assert not reporter.cache.is_told


@pytest.mark.parametrize(
    ("stored", "status"),
    [
        (blocks(11, prompt(2), parent=99), 409),
        ({"hashes": [11, 12], "token_ids": [1, 2, 3]}, 400),
        ({"hashes": [1 << 70], "token_ids": prompt(2, 1)}, 400),
    ],
)
async def test_a_report_that_does_not_fit_is_forgotten_with_all_before_it(stored: dict[str, Any], status: int) -> None:
    reporter = Reporter()
    await reporter.says(0, whole=True, stored=[blocks(1, prompt(1))])
    refusal = await reporter.refused(1, stored=[blocks(21, prompt(3)), stored])
    assert refusal.status == status and "whole" in refusal.message
    assert reporter.hit(prompt(1)) == reporter.hit(prompt(3)) == 0 and not reporter.cache.is_told
    assert (await reporter.refused(1)).status == 409
    await reporter.says(4, whole=True, stored=[blocks(1, prompt(1))])
    assert reporter.hit(prompt(1)) == 32 and reporter.cache.complete


async def test_after_a_restart_the_whole_is_asked_for() -> None:
    reporter = Reporter()
    await reporter.says(0, whole=True, stored=[blocks(1, prompt(1))])
    reporter.cache.restarted()
    assert (await reporter.refused(1)).status == 409
    reporter.cache_view.leave("node")
    assert (await reporter.refused(1)).status == 404
    reporter.cache_view.join("node", ["m"])
    assert (await reporter.refused(1)).status == 409, "another node by the same name"


async def test_a_node_with_events_needs_no_reports() -> None:
    reporter = Reporter()
    reporter.cache.follow(0)
    refusal = await reporter.refused(0, whole=True)
    assert refusal.status == 409 and refusal.code == "has_events"
    assert await reporter.says(0, rank=1, whole=True) == {"sequence": 0, "blocks": 0}


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b"{}", b'{"sequence":0}', b'{"sequence":-1,"block_size":16}', b'{"sequence":0,"block_size":0}',
        b'{"sequence":0,"block_size":16,"whloe":true}', b'{"sequence":0,"block_size":16,"stored":[{"hashes":[1]}]}',
        b'{"sequence":0,"block_size":16,"stored":[{"hashes":[1],"token_ids":[-1]}]}',
        b'{"sequence":0,"block_size":16,"stored":[{"hashes":[""],"token_ids":[1]}]}',
        b'{"sequence":0,"block_size":16,"removed":[{"hashes":[1],"tier":"tape"}]}', b"\xff",
    ],
)  # fmt: skip
async def test_what_is_no_report_is_refused(body: bytes) -> None:
    reporter = Reporter()
    with pytest.raises(Refusal) as refusal:
        await reporter.reports.take("node", body)
    assert refusal.value.status == 400 and not reporter.cache.is_told


async def test_a_report_is_bounded() -> None:
    reporter = Reporter()
    with pytest.raises(Refusal) as refusal:
        await reporter.reports.take("node", b" " * (MAX_BYTES + 1))
    assert refusal.value.status == 413


async def test_the_largest_report_is_applied_in_slices() -> None:
    reporter = Reporter()
    stored = [blocks(1 + number, prompt(number, 1)) for number in range(6500)]
    body = json.dumps({"sequence": 0, "whole": True, "block_size": SIZE, "stored": stored}, separators=(",", ":"))
    assert MAX_BYTES * 0.7 < len(body) <= MAX_BYTES
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.ensure_future(others())
    assert (await reporter.reports.take("node", body.encode()))["blocks"] == 6500
    beside.cancel()
    assert turns >= 4, "the loop gets its turn between them"


async def test_what_a_node_reported_is_forgotten_with_the_node() -> None:
    reporter = Reporter()
    await reporter.says(0, whole=True, stored=[blocks(1, prompt(1))])
    cache = ref(reporter.cache)
    del reporter.cache
    reporter.cache_view.leave("node")
    gc.collect()
    assert cache() is None
    reporter.cache_view.join("node", ["m"])
    assert (await reporter.refused(1, stored=[blocks(3, prompt(2))])).code == "send_whole"
