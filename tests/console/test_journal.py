"""The journal of decisions: at a running router, over real sockets, in memory and on disk."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import threading
import tracemalloc
from array import array
from pathlib import Path
from typing import Any

import pytest
from harness import (
    CLOSE,
    DONE,
    SSE_HEAD,
    Answer,
    Router,
    answer,
    chat,
    chunk,
    engines,
    event,
    failing,
    hanging,
    normal,
    post,
    router,
    script,
    stream,
    until,
)

from warmroute.config import Health, Index, NodeConfig, Routing
from warmroute.config import Journal as JournalConfig
from warmroute.fleet.fleet import Fleet
from warmroute.fleet.node import Outcome
from warmroute.index.cache_view import CacheView
from warmroute.index.lookup import Lookup
from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing.decision import Decision
from warmroute.routing.dispatch import Dispatch
from warmroute.routing.query import Query
from warmroute.routing.router import Router as Decider
from warmroute.telemetry.counters import Counters
from warmroute.telemetry.journal import MOST_PENDING, Entry, Journal, append

SECRET = "xyzzy-plugh"
LONG = f"{SECRET} " * 700
"""Some 2,000 tokens, read as text."""
PRICE = {"policy": "price", "seed": 7}
USAGE = json.dumps(
    {
        "choices": [],
        "usage": {"prompt_tokens": 2100, "completion_tokens": 17, "prompt_tokens_details": {"cached_tokens": 1984}},
    }
).encode()


async def decisions(r: Router, limit: int = 100) -> list[dict[str, Any]]:
    return (await r.admin("GET", f"/admin/decisions?limit={limit}")).json["decisions"]


async def send(r: Router, request_id: str, content: str = LONG, *headers: str, **more: Any) -> Answer:
    return await r.ask(post(chat(content, **more), headers=[f"X-Request-Id: {request_id}", *headers]))


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


# What an entry says.


async def test_a_decision_is_kept_with_its_reasons_and_its_end() -> None:
    async with engines(2) as both, router(*both, routing=PRICE) as r:
        for engine in both:
            engine.behave = normal(USAGE)
        assert (await send(r, "first")).status == 200
        assert (await send(r, "second", LONG, "X-Priority: high")).status == 200
        second, first = await decisions(r)
        assert (first["request_id"], second["request_id"]) == ("first", "second")
        assert second == (await r.admin("GET", "/admin/decisions/second")).json
        assert first["time"] <= second["time"] and first["time"].endswith("Z")
        assert (first["model"], first["priority"], second["priority"]) == ("m", "normal", "high")
        assert first["cached_tokens"] == 0 and "is warm anywhere" in first["sentence"]
        tokens = second["prompt_tokens"]
        assert tokens > 1000 and second["cached_tokens"] + second["new_tokens"] == tokens
        assert second["cached_tokens"] > 0.9 * tokens
        assert second["node"] == second["answered_by"] == first["node"]
        other = "node1" if second["node"] == "node0" else "node0"
        assert second["sentence"].startswith(f"{second['node']}: {second['cached_tokens']:,} of {tokens:,} tokens warm")
        assert second["sentence"].endswith(f"{other} is free but cold")
        assert second["considered"] == 2
        best, worse = second["candidates"]
        assert (best["node"], best["chosen"]) == (second["node"], True)
        assert (worse["node"], worse["chosen"]) == (other, False)
        assert best["total_ms"] < worse["total_ms"]
        assert worse["total_ms"] == pytest.approx(sum(worse["terms_ms"].values()), abs=0.1)
        assert (second["outcome"], second["status"], second["attempts"]) == ("ok", 200, 1)
        assert 0 < second["first_byte_ms"] <= second["took_ms"]
        assert second["reported"] == {"prompt_tokens": 2100, "cached_tokens": 1984, "output_tokens": 17}


async def test_a_request_that_runs_is_told_as_running() -> None:
    async with engines() as [engine], router(engine) as r:
        gate = asyncio.Event()
        engine.behave = script(SSE_HEAD, chunk(event(0)), gate, DONE)
        peer = await r.connect()
        peer.write(post(headers=["X-Request-Id: slow"]))
        await peer.head()
        told = (await r.admin("GET", "/admin/decisions/slow")).json
        assert (told["outcome"], told["took_ms"], told["status"]) == ("running", None, None)
        gate.set()
        await until(lambda: (entry := r.service.journal.find(b"slow")) is not None and entry.end is not None)
        assert (await decisions(r))[0]["outcome"] == "ok"


async def test_every_end_has_its_outcome() -> None:
    async with engines(2) as [bad, good], router(bad, good, upstream={"attempts": 2}) as r:
        bad.behave = failing(500)
        answers = {(await send(r, f"turn{number}")).status for number in range(2)}
        assert answers == {200}
        moved = next(one for one in await decisions(r) if one["attempts"] == 2)
        assert (moved["node"], moved["answered_by"], moved["outcome"]) == ("node0", "node1", "ok")
        assert moved["sentence"] == (
            "node1: stands in for node0, which failed; chosen was node0: it is its turn (round_robin)"
        )
        bad.behave = good.behave = failing(500)
        assert (await send(r, "nobody")).status == 502
        bad.behave = good.behave = failing(404)
        assert (await send(r, "rejected")).status == 404
        bad.behave = good.behave = script(SSE_HEAD, chunk(event(0)), CLOSE)
        assert not (await send(r, "broken")).complete
        bad.behave = good.behave = hanging
        peer = await r.connect()
        peer.write(post(headers=["X-Request-Id: left"]))
        await until(lambda: r.service.journal.find(b"left"))
        peer.leave()
        await until(lambda: r.inflight() == 0)
        told = {one["request_id"]: (one["outcome"], one["status"], one["answered_by"]) for one in await decisions(r)}
        assert told["nobody"] == ("failed", 502, None)
        nobody = (await r.admin("GET", "/admin/decisions/nobody")).json["sentence"]
        assert nobody.startswith("no node answered, 2 tried; chosen was node")
        assert told["rejected"][:2] == ("rejected", 404)
        assert told["broken"][:2] == ("broken", 200)
        assert told["left"] == ("left", None, None)
        bad.behave = good.behave = normal()


async def test_a_request_that_waited_here_says_for_how_long() -> None:
    tables = {"routing": PRICE, "admission": {"ahead_ms": 0.01}}
    async with engines() as [engine], router(engine, **tables) as r:
        gate = asyncio.Event()
        engine.behave = script(gate, answer(USAGE))
        peers = [await r.connect() for _ in range(2)]
        for number, peer in enumerate(peers):
            peer.write(post(chat(f"{number}{LONG}", stream=True), headers=[f"X-Request-Id: n{number}"]))
            await until(lambda number=number: len(engine.seen) + r.service.admission.waiting == number + 1)
        await asyncio.sleep(0.05)
        assert r.service.admission.waiting == 1 and len(r.service.journal) == 1
        gate.set()
        for peer in peers:
            assert (await peer.answer()).status == 200
        second, first = await decisions(r)
        assert second["held_ms"] >= 50 > 1 > first["held_ms"]
        assert second["sentence"].endswith(" ms first") and "; it waited here for " in second["sentence"]
        assert second["first_byte_ms"] > second["held_ms"]


async def test_nothing_that_a_user_typed_is_in_it(tmp_path: Path) -> None:
    file = tmp_path / "journal"
    async with engines(2) as both, router(*both, routing=PRICE, journal={"file": str(file)}) as r:
        both[0].behave = both[1].behave = stream(3)
        await send(r, "one", LONG, f"X-Session-Id: {SECRET}", user=SECRET, metadata={"a": SECRET})
        await r.ask(post(chat(LONG), path=f"/v1/chat/completions?a={SECRET}"))
        page = await r.admin("GET", "/admin/decisions")
        await until(lambda: r.service.counters.journal_written == 2)
        assert len(page.json["decisions"]) == len(lines(file)) == 2
        assert SECRET.encode() not in page.body and SECRET not in file.read_text()
        assert all(one["prompt_tokens"] > 1000 for one in lines(file))


# How much is kept.


async def test_the_ring_is_bounded_and_has_the_latest_first() -> None:
    async with engines() as [engine], router(engine, journal={"keep": 5}) as r:
        for number in range(12):
            await send(r, f"n{number}")
        assert [one["request_id"] for one in await decisions(r)] == [f"n{number}" for number in range(11, 6, -1)]
        assert [one["request_id"] for one in await decisions(r, 2)] == ["n11", "n10"]
        gone = await r.admin("GET", "/admin/decisions/n3")
        assert gone.status == 404 and gone.error["code"] == "unknown_request"
        assert "The last 5 are (journal.keep)" in gone.error["message"]
        await send(r, "n9", model="m")
        assert (await r.admin("GET", "/admin/decisions/n9")).json["time"] == (await decisions(r))[0]["time"]
        for wrong in ("0", "x", "-1", "", "²"):
            refused = await r.admin("GET", f"/admin/decisions?limit={wrong.encode().hex() if wrong == '²' else wrong}x")
            assert refused.error["code"] == "bad_limit"
        assert (await r.admin("POST", "/admin/decisions")).status == 405


async def test_it_can_be_switched_off() -> None:
    async with engines() as [engine], router(engine, journal={"keep": 0}) as r:
        assert (await send(r, "one")).status == 200
        assert not r.service.journal.on and await decisions(r) == []


async def test_what_it_keeps_grows_and_shrinks_on_reload() -> None:
    async with engines() as [engine], router(engine) as r:
        for number in range(6):
            await send(r, f"n{number}")
        r.service.journal.reconfigure(JournalConfig(keep=2))
        assert [one["request_id"] for one in await decisions(r)] == ["n5", "n4"]
        r.service.journal.reconfigure(JournalConfig(keep=3))
        for number in range(6, 9):
            await send(r, f"n{number}")
        assert [one["request_id"] for one in await decisions(r)] == ["n8", "n7", "n6"]


async def test_it_keeps_neither_prompts_nor_bodies_alive() -> None:
    held = (Lookup, Query, Decision, Dispatch)
    before = [thing for thing in gc.get_objects() if type(thing) in held]
    others = {id(thing) for thing in before}  # of other tests' modules, alive throughout
    async with engines(2) as both, router(*both, routing=PRICE) as r:
        for number in range(30):
            await send(r, f"n{number}", f"{number} {LONG}")
        assert len(await decisions(r)) == 30
        await until(lambda: not r.service.listener.connections)
        gc.collect()
        kept = [thing for thing in gc.get_objects() if type(thing) in held and id(thing) not in others]
        assert not kept, {type(thing).__name__ for thing in kept}
        asks = [thing for thing in gc.get_objects() if type(thing) is RoutingRequest]
        assert not [ask for ask in asks if SECRET.encode() in (ask.prefix_key() or b"")]
        entries = [thing for thing in gc.get_objects() if type(thing) is Entry]
        assert len(entries) == 30
        reached, ahead = set(), list(entries)
        while ahead:  # bytes that an entry alone leads to: no more than its id
            thing = ahead.pop()
            for part in gc.get_referents(thing):
                if isinstance(part, bytes | str):
                    assert len(part) < 100, part[:200]
                elif type(part).__module__.startswith("warmroute.routing") and id(part) not in reached:
                    reached.add(id(part))
                    ahead.append(part)


def test_memory_is_bounded_on_a_large_fleet() -> None:
    """A thousand nodes' prices are 100 KB a decision: of those that have ended only the best are kept."""
    fleet, cache_view = Fleet(Health()), CacheView(Index())
    for number in range(1000):
        fleet.check_passed(fleet.add(NodeConfig(url=f"http://n{number}:1", models=("m",))), 0.0)
    decider, journal = Decider(fleet, cache_view, Routing(seed=1)), Journal(JournalConfig(keep=20), Counters())
    tokens = array("I", range(4000))

    def decide(number: int) -> None:
        lookup = Lookup(tokens.tobytes(), len(tokens), 0)
        decision = decider.decide(RoutingRequest("m"), 1.0, lookup)
        assert len(decision.prices or ()) == 1000
        entry = Entry(b"%d" % number, "", "m", "", 1, 1.0, 0.0, decision.grounds())
        journal.decided(entry)
        with decider.dispatch(decision, decision.node, 1.0) as ticket:
            journal.ended(entry, Outcome.OK, ticket, 1, 200, 2.0)

    decide(-1)
    tracemalloc.start()
    try:
        for number in range(200):
            decide(number)
        gc.collect()
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(journal) == 20
    assert kept_bytes < 20 * 16_384


# On disk.


async def test_what_has_ended_is_written_a_line_each(tmp_path: Path) -> None:
    file = tmp_path / "journal.jsonl"
    async with engines(2) as both, router(*both, routing=PRICE, journal={"file": str(file), "keep": 3}) as r:
        for number in range(10):
            await send(r, f"n{number}")
        counters = r.service.counters
        await until(lambda: counters.journal_written == 10)
        written = lines(file)
        assert [one["request_id"] for one in written] == [f"n{number}" for number in range(10)]
        assert written[-1] == {**(await decisions(r))[0], "time": written[-1]["time"]}
        page = (await r.admin("GET", "/metrics")).body
        assert b"warmroute_journal_written_total 10" in page and b"warmroute_journal_dropped_total 0" in page
        await send(r, "last")
    assert lines(file)[-1]["request_id"] == "last", "what is left is written at the end"
    assert file.stat().st_mode & 0o007 == 0


async def test_a_share_is_written_by_chance(tmp_path: Path) -> None:
    journal = Journal(JournalConfig(file=str(tmp_path / "f"), sample=0.25), Counters())
    async with engines() as [engine], router(engine) as r:
        await send(r, "one")
        entry = r.service.journal.find(b"one")
        assert entry is not None and entry.end is not None
        ticket = type("T", (), {"node": entry.end[1], "first_byte_s": 1.0})()
        for _ in range(4000):
            journal.ended(entry, Outcome.OK, ticket, 1, 200, 2.0)
        assert 800 < len(journal._pending) < 1200
        journal.reconfigure(JournalConfig(file=str(tmp_path / "f"), sample=0.0))
        before = len(journal._pending)
        journal.ended(entry, Outcome.OK, ticket, 1, 200, 2.0)
        assert len(journal._pending) == before
        journal.reconfigure(JournalConfig(file=str(tmp_path / "f")))
        for _ in range(MOST_PENDING):
            journal.ended(entry, Outcome.OK, ticket, 1, 200, 2.0)
        assert len(journal._pending) == MOST_PENDING, "a disk that hangs is not waited for in memory"
        assert journal._counters.journal_dropped == before


def test_the_file_is_begun_anew_once_it_is_large(tmp_path: Path) -> None:
    file = tmp_path / "j"
    for number in range(10):
        append(file, b"%d%b\n" % (number, b"x" * 28), 100)
    assert file.read_bytes().count(b"\n") == 1 and file.read_bytes()[:1] == b"9"
    older = tmp_path / "j.1"
    assert [line[:1] for line in older.read_bytes().splitlines()] == [b"6", b"7", b"8"]
    assert {path.name for path in tmp_path.iterdir()} == {"j", "j.1"}
    append(file, b"y" * 500 + b"\n", 100)
    assert file.stat().st_size == 501, "a batch is never cut"


async def test_a_disk_that_hangs_keeps_no_router_from_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warmroute.telemetry.journal.CLOSE_S", 0.2)
    file = tmp_path / "j"
    os.mkfifo(file)  # opening it waits for a reader
    async with engines() as [engine], router(engine, journal={"file": str(file)}) as r:
        await send(r, "one")
    writers = [thread for thread in threading.enumerate() if thread.name == "warmroute-journal"]
    assert writers and all(thread.daemon for thread in writers)
    with file.open("rb") as reader:  # lets the thread go
        assert b'"one"' in reader.readline()
    for thread in writers:
        thread.join(10)
        assert not thread.is_alive()


async def test_a_disk_that_fails_hurts_no_request_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "later" / "journal"
    caplog.set_level(logging.INFO)
    async with engines() as [engine], router(engine, journal={"file": str(file)}) as r:
        counters = r.service.counters
        for number in range(3):
            assert (await send(r, f"n{number}")).status == 200
            await until(lambda number=number: counters.journal_dropped == number + 1)
        said = [record for record in caplog.records if "can't be written" in record.getMessage()]
        assert len(said) == 1 and "No such file or directory" in said[0].getMessage()
        file.parent.mkdir()
        await send(r, "n3")
        await until(lambda: counters.journal_written == 1)
        assert [one["request_id"] for one in lines(file)] == ["n3"]
        assert len(await decisions(r)) == 4
        assert f"the journal is written to {file} again; 3 decisions were dropped so far" in caplog.text


async def test_a_full_disk(caplog: pytest.LogCaptureFixture) -> None:
    async with engines() as [engine], router(engine, journal={"file": "/dev/full"}) as r:
        assert (await send(r, "one")).status == 200
        await until(lambda: r.service.counters.journal_dropped == 1)
        assert "No space left on device" in caplog.text
        assert b"warmroute_journal_dropped_total 1" in (await r.admin("GET", "/metrics")).body
