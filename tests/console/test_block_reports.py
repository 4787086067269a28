"""Block reports for engines without KV events: the router applies them in order or not at all."""

from __future__ import annotations

import asyncio
import gc
import json
from array import array
from typing import Any
from weakref import ref

import pytest

from warmroute.config import Index
from warmroute.core.cache_view import CacheView
from warmroute.core.messages import Lookup
from warmroute.edge.errors import HttpError
from warmroute.engines import block_reports
from warmroute.engines.block_reports import MAX_BYTES, BlockReports

SIZE = 16


def prompt(seed: int, blocks: int = 2) -> list[int]:
    return [1000 + (seed * 7919 + index) % 100_000 for index in range(blocks * SIZE)]


class Reporter:
    def __init__(self) -> None:
        self.cache_view = CacheView(Index())
        self.cache = self.cache_view.add_node("node", ["m"])
        self.cache_view.set_models(self.cache, "m", (), ("ad1",))
        self.reports = BlockReports(self.cache_view, lambda: 5.0)

    async def send(self, sequence: int, name: str = "node", **more: Any) -> dict[str, int]:
        body = json.dumps({"sequence": sequence, "block_size": SIZE, **more}).encode()
        return await self.reports.apply(name, body)

    async def rejected(self, sequence: int, **more: Any) -> HttpError:
        with pytest.raises(HttpError) as error:
            await self.send(sequence, **more)
        return error.value

    def hit(self, tokens: list[int], model: str = "m", salt: str = "") -> int:
        lookup = Lookup(array("I", [*tokens, 7]).tobytes(), len(tokens) + 1, len(tokens) + 1, salt=salt)
        found = self.cache_view.hits(model, lookup, 5.0).get("node")
        return found.tokens if found is not None else 0


def blocks(first: int, tokens: list[int], **more: Any) -> dict[str, Any]:
    return {"hashes": [first + number for number in range(len(tokens) // SIZE)], "token_ids": tokens, **more}


async def test_a_snapshot_and_further_reports_are_applied() -> None:
    reporter = Reporter()
    assert await reporter.send(7, snapshot=True, stored=[blocks(1, prompt(1))]) == {"sequence": 7, "blocks": 2}
    assert reporter.hit(prompt(1)) == 32 and reporter.cache.complete and reporter.cache.last_contact_s == 5.0
    stored = [blocks(11, prompt(2), parent=2), blocks(21, prompt(3), salt="s"), blocks(31, prompt(4), lora="ad1")]
    assert await reporter.send(8, stored=stored) == {"sequence": 8, "blocks": 8}
    assert reporter.hit(prompt(1) + prompt(2)) == 64
    assert (reporter.hit(prompt(3)), reporter.hit(prompt(3), salt="s")) == (0, 32)
    assert (reporter.hit(prompt(4)), reporter.hit(prompt(4), "ad1")) == (0, 32)
    assert (await reporter.send(9, removed=[12, {"hashes": [21, 22]}]))["blocks"] == 5
    assert reporter.hit(prompt(1) + prompt(2)) == 48 and reporter.hit(prompt(3), salt="s") == 0
    assert await reporter.send(10, cleared=True, stored=[blocks(1, prompt(5))]) == {"sequence": 10, "blocks": 2}
    assert (reporter.hit(prompt(1)), reporter.hit(prompt(5))) == (0, 32)


async def test_a_snapshot_replaces_everything() -> None:
    reporter = Reporter()
    await reporter.send(0, snapshot=True, stored=[blocks(1, prompt(1))])
    await reporter.send(0, snapshot=True, stored=[blocks(1, prompt(2))])
    assert (reporter.hit(prompt(1)), reporter.hit(prompt(2))) == (0, 32)


async def test_hashes_can_be_text_and_blocks_can_be_in_other_tiers() -> None:
    reporter = Reporter()
    await reporter.send(0, snapshot=True, stored=[{"hashes": ["ab" * 32], "token_ids": prompt(1, 1), "tier": "cpu"}])
    await reporter.send(1, stored=[{"hashes": ["cd"], "parent": "ab" * 32, "token_ids": prompt(2, 1)}])
    assert reporter.hit(prompt(1, 1) + prompt(2, 1)) == 32
    await reporter.send(2, removed=[{"hashes": ["ab" * 32], "tier": "cpu"}])
    assert reporter.hit(prompt(1, 1)) == 0


@pytest.mark.parametrize("sequence", [0, 1, 3, 100])
async def test_a_report_out_of_order_changes_nothing_and_requires_a_snapshot(sequence: int) -> None:
    reporter = Reporter()
    await reporter.send(1, snapshot=True, stored=[blocks(1, prompt(1))])
    error = await reporter.rejected(sequence, removed=[1])
    assert error.status == 409 and "snapshot" in error.message and error.code == "snapshot_required"
    assert reporter.hit(prompt(1)) == 32
    await reporter.send(2, removed=[1])
    assert reporter.hit(prompt(1)) == 0


async def test_the_first_report_must_be_a_snapshot() -> None:
    reporter = Reporter()
    assert (await reporter.rejected(0, stored=[blocks(1, prompt(1))])).status == 409
    assert not reporter.cache.has_events


@pytest.mark.parametrize(
    ("stored", "status"),
    [
        (blocks(11, prompt(2), parent=99), 409),
        ({"hashes": [11, 12], "token_ids": [1, 2, 3]}, 400),
        ({"hashes": [1 << 70], "token_ids": prompt(2, 1)}, 400),
    ],
)
async def test_an_inconsistent_report_discards_everything_reported_before(stored: dict[str, Any], status: int) -> None:
    reporter = Reporter()
    await reporter.send(0, snapshot=True, stored=[blocks(1, prompt(1))])
    error = await reporter.rejected(1, stored=[blocks(21, prompt(3)), stored])
    assert error.status == status and "snapshot" in error.message
    assert reporter.hit(prompt(1)) == reporter.hit(prompt(3)) == 0 and not reporter.cache.has_events
    assert (await reporter.rejected(1)).status == 409
    await reporter.send(4, snapshot=True, stored=[blocks(1, prompt(1))])
    assert reporter.hit(prompt(1)) == 32 and reporter.cache.complete


async def test_after_a_restart_a_snapshot_is_required() -> None:
    reporter = Reporter()
    await reporter.send(0, snapshot=True, stored=[blocks(1, prompt(1))])
    reporter.cache.restarted()
    assert (await reporter.rejected(1)).status == 409
    reporter.cache_view.remove_node("node")
    assert (await reporter.rejected(1)).status == 404
    reporter.cache_view.add_node("node", ["m"])
    assert (await reporter.rejected(1)).status == 409, "another node with the same name"


async def test_reports_for_a_rank_with_kv_events_are_rejected() -> None:
    reporter = Reporter()
    reporter.cache.add_rank(0)
    error = await reporter.rejected(0, snapshot=True)
    assert error.status == 409 and error.code == "has_events"
    assert await reporter.send(0, rank=1, snapshot=True) == {"sequence": 0, "blocks": 0}


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
async def test_an_invalid_report_is_rejected(body: bytes) -> None:
    reporter = Reporter()
    with pytest.raises(HttpError) as error:
        await reporter.reports.apply("node", body)
    assert error.value.status == 400 and not reporter.cache.has_events


async def test_a_report_that_is_too_large_is_rejected() -> None:
    reporter = Reporter()
    with pytest.raises(HttpError) as error:
        await reporter.reports.apply("node", b" " * (MAX_BYTES + 1))
    assert error.value.status == 413


async def test_a_large_report_does_not_block_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_reports, "MAX_BLOCKING_S", 0.0002)
    reporter = Reporter()
    stored = [blocks(1 + number, prompt(number, 1)) for number in range(6500)]
    body = json.dumps({"sequence": 0, "snapshot": True, "block_size": SIZE, "stored": stored}, separators=(",", ":"))
    assert MAX_BYTES * 0.7 < len(body) <= MAX_BYTES
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.ensure_future(others())
    assert (await reporter.reports.apply("node", body.encode()))["blocks"] == 6500
    beside.cancel()
    assert turns >= 4, "other tasks run in between"


async def test_reports_are_forgotten_when_the_node_is_removed() -> None:
    reporter = Reporter()
    await reporter.send(0, snapshot=True, stored=[blocks(1, prompt(1))])
    cache = ref(reporter.cache)
    del reporter.cache
    reporter.cache_view.remove_node("node")
    gc.collect()
    assert cache() is None
    reporter.cache_view.add_node("node", ["m"])
    assert (await reporter.rejected(1, stored=[blocks(3, prompt(2))])).code == "snapshot_required"
