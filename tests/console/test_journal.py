"""The decision journal, in memory and on disk."""

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
from support.engine_scripts import (
    CLOSE,
    DONE,
    SSE_HEAD,
    chunk,
    failing,
    hanging,
    http_response,
    normal,
    script,
    sse_event,
    stream,
)
from support.polling import until
from support.raw_client import Response, chat, post
from support.running_router import RunningRouter, router
from support.scripted_engine import engines

from warmroute.app.journal import append
from warmroute.config import Admission, Health, Index, NodeConfig, Routing
from warmroute.config import Journal as JournalConfig
from warmroute.core.admission import Admitter
from warmroute.core.brain import Brain
from warmroute.core.cache_view import CacheView
from warmroute.core.calls import Call, Try
from warmroute.core.decision import Decision
from warmroute.core.decision_record import DecisionRecord
from warmroute.core.fleet import Fleet
from warmroute.core.last_decisions import MAX_PENDING, LastDecisions
from warmroute.core.messages import Arrive, Ended, Lookup, RoutingRequest
from warmroute.core.router import Router
from warmroute.core.routing_context import Query
from warmroute.core.tickets import PromptTicket
from warmroute.core.traffic import Counters

SECRET = "xyzzy-plugh"
LONG = f"{SECRET} " * 700
"""About 2,000 tokens."""
PRICE = {"policy": "price", "seed": 7}
USAGE = json.dumps(
    {
        "choices": [],
        "usage": {"prompt_tokens": 2100, "completion_tokens": 17, "prompt_tokens_details": {"cached_tokens": 1984}},
    }
).encode()


async def decisions(r: RunningRouter, limit: int = 100) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await r.admin("GET", f"/admin/decisions?limit={limit}")).json["decisions"]
    return found


async def send(r: RunningRouter, request_id: str, content: str = LONG, *headers: str, **more: Any) -> Response:
    return await r.request(post(chat(content, **more), headers=[f"X-Request-Id: {request_id}", *headers]))


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


# Entries.


async def test_an_entry_has_the_decision_its_reasons_and_the_outcome() -> None:
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
        assert first["cached_tokens"] == 0 and "no node has any of its" in first["explanation"]
        tokens = second["prompt_tokens"]
        assert tokens > 1000 and second["cached_tokens"] + second["new_tokens"] == tokens
        assert second["cached_tokens"] > 0.9 * tokens
        assert second["node"] == second["answered_by"] == first["node"]
        other = "node1" if second["node"] == "node0" else "node0"
        assert second["explanation"].startswith(
            f"{second['node']}: {second['cached_tokens']:,} of {tokens:,} tokens cached"
        )
        assert second["explanation"].endswith(f"{other} is idle but has none of them cached")
        assert second["candidate_count"] == 2
        best, worse = second["candidates"]
        assert (best["node"], best["chosen"]) == (second["node"], True)
        assert (worse["node"], worse["chosen"]) == (other, False)
        assert best["total_ms"] < worse["total_ms"]
        assert worse["total_ms"] == pytest.approx(sum(worse["terms_ms"].values()), abs=0.1)
        assert (second["outcome"], second["status"], second["attempts"]) == ("ok", 200, 1)
        assert 0 < second["ttft_ms"] <= second["duration_ms"]
        assert second["reported"] == {"prompt_tokens": 2100, "cached_tokens": 1984, "output_tokens": 17}


async def test_a_running_request_has_the_outcome_running() -> None:
    async with engines() as [engine], router(engine) as r:
        gate = asyncio.Event()
        engine.behave = script(SSE_HEAD, chunk(sse_event(0)), gate, DONE)
        peer = await r.connect()
        peer.write(post(headers=["X-Request-Id: slow"]))
        await peer.head()
        entry = (await r.admin("GET", "/admin/decisions/slow")).json
        assert (entry["outcome"], entry["duration_ms"], entry["status"]) == ("running", None, None)
        gate.set()
        await until(lambda: (call := r.service.last_decisions.find(b"slow")) is not None and call.end is not None)
        assert (await decisions(r))[0]["outcome"] == "ok"


async def test_every_outcome_is_recorded() -> None:
    async with engines(2) as [bad, good], router(bad, good, upstream={"max_attempts": 2}) as r:
        bad.behave = failing(500)
        answers = {(await send(r, f"turn{number}")).status for number in range(2)}
        assert answers == {200}
        moved = next(one for one in await decisions(r) if one["attempts"] == 2)
        assert (moved["node"], moved["answered_by"], moved["outcome"]) == ("node0", "node1", "ok")
        assert moved["explanation"] == (
            "node1: retry after node0 failed; first choice was node0: next in turn (round_robin)"
        )
        bad.behave = good.behave = failing(500)
        assert (await send(r, "nobody")).status == 502
        bad.behave = good.behave = failing(404)
        assert (await send(r, "rejected")).status == 404
        bad.behave = good.behave = script(SSE_HEAD, chunk(sse_event(0)), CLOSE)
        assert not (await send(r, "broken")).complete
        bad.behave = good.behave = hanging
        peer = await r.connect()
        peer.write(post(headers=["X-Request-Id: cancelled"]))
        await until(lambda: r.service.last_decisions.find(b"cancelled"))
        peer.disconnect()
        await until(lambda: r.inflight() == 0)
        ends = {one["request_id"]: (one["outcome"], one["status"], one["answered_by"]) for one in await decisions(r)}
        assert ends["nobody"] == ("failed", 502, None)
        nobody = (await r.admin("GET", "/admin/decisions/nobody")).json["explanation"]
        assert nobody.startswith("no node answered (2 nodes tried); first choice was node")
        assert ends["rejected"][:2] == ("rejected", 404)
        assert ends["broken"][:2] == ("broken", 200)
        assert ends["cancelled"] == ("cancelled", None, None)
        bad.behave = good.behave = normal()


async def test_an_entry_has_the_time_in_the_queue() -> None:
    tables: dict[str, Any] = {"routing": PRICE, "admission": {"max_node_backlog_ms": 0.01}}
    async with engines() as [engine], router(engine, **tables) as r:
        gate = asyncio.Event()
        engine.behave = script(gate, http_response(USAGE))
        peers = [await r.connect() for _ in range(2)]
        for number, peer in enumerate(peers):
            peer.write(post(chat(f"{number}{LONG}", stream=True), headers=[f"X-Request-Id: n{number}"]))
            await until(lambda number=number: len(engine.seen) + r.service.admission.queue.waiting == number + 1)
        await asyncio.sleep(0.05)
        assert r.service.admission.queue.waiting == 1 and len(r.service.last_decisions) == 1
        gate.set()
        for peer in peers:
            assert (await peer.response()).status == 200
        second, first = await decisions(r)
        assert second["queued_ms"] >= 50 > 1 > first["queued_ms"]
        assert second["explanation"].endswith(" ms first") and "; queued for " in second["explanation"]
        assert second["ttft_ms"] > second["queued_ms"]


async def test_the_journal_contains_no_user_text(tmp_path: Path) -> None:
    file = tmp_path / "journal"
    async with engines(2) as both, router(*both, routing=PRICE, journal={"file": str(file)}) as r:
        both[0].behave = both[1].behave = stream(3)
        await send(r, "one", LONG, f"X-Session-Id: {SECRET}", user=SECRET, metadata={"a": SECRET})
        await r.request(post(chat(LONG), path=f"/v1/chat/completions?a={SECRET}"))
        page = await r.admin("GET", "/admin/decisions")
        await until(lambda: r.service.counters.journal_written == 2)
        assert len(page.json["decisions"]) == len(lines(file)) == 2
        assert SECRET.encode() not in page.body and SECRET not in file.read_text()
        assert all(one["prompt_tokens"] > 1000 for one in lines(file))


# Memory.


async def test_the_journal_keeps_the_latest_decisions_newest_first() -> None:
    async with engines() as [engine], router(engine, journal={"max_decisions": 5}) as r:
        for number in range(12):
            await send(r, f"n{number}")
        assert [one["request_id"] for one in await decisions(r)] == [f"n{number}" for number in range(11, 6, -1)]
        assert [one["request_id"] for one in await decisions(r, 2)] == ["n11", "n10"]
        gone = await r.admin("GET", "/admin/decisions/n3")
        assert gone.status == 404 and gone.error["code"] == "unknown_request"
        assert "the last 5 requests" in gone.error["message"]
        await send(r, "n9", model="m")
        assert (await r.admin("GET", "/admin/decisions/n9")).json["time"] == (await decisions(r))[0]["time"]
        for wrong in ("0", "x", "-1", "", "²"):
            error = await r.admin("GET", f"/admin/decisions?limit={wrong.encode().hex() if wrong == '²' else wrong}x")
            assert error.error["code"] == "bad_limit"
        assert (await r.admin("POST", "/admin/decisions")).status == 405


async def test_the_journal_can_be_disabled() -> None:
    async with engines() as [engine], router(engine, journal={"max_decisions": 0}) as r:
        assert (await send(r, "one")).status == 200
        assert not r.service.last_decisions.on and await decisions(r) == []


async def test_a_reload_changes_how_many_decisions_are_kept() -> None:
    async with engines() as [engine], router(engine) as r:
        for number in range(6):
            await send(r, f"n{number}")
        r.service.last_decisions.reconfigure(JournalConfig(max_decisions=2))
        assert [one["request_id"] for one in await decisions(r)] == ["n5", "n4"]
        r.service.last_decisions.reconfigure(JournalConfig(max_decisions=3))
        for number in range(6, 9):
            await send(r, f"n{number}")
        assert [one["request_id"] for one in await decisions(r)] == ["n8", "n7", "n6"]


async def test_entries_do_not_keep_prompts_or_bodies_in_memory() -> None:
    large = (Lookup, Query, Decision, PromptTicket, Try)
    before = [thing for thing in gc.get_objects() if type(thing) in large]
    others = {id(thing) for thing in before}  # of other test modules
    async with engines(2) as both, router(*both, routing=PRICE) as r:
        for number in range(30):
            await send(r, f"n{number}", f"{number} {LONG}")
        assert len(await decisions(r)) == 30
        await until(lambda: not r.service.listener.connections and not r.service.brain.ended)
        gc.collect()
        alive = [thing for thing in gc.get_objects() if type(thing) in large and id(thing) not in others]
        assert not alive, {type(thing).__name__ for thing in alive}
        calls = [thing for thing in gc.get_objects() if type(thing) is Call]
        assert len(calls) == 30
        assert not [call for call in calls if call.request.prefix_key() or call.request.session_key()]
        reached: set[int] = set()
        ahead: list[object] = list(calls)
        while ahead:  # a call refers to no long text
            thing = ahead.pop()
            for part in gc.get_referents(thing):
                if isinstance(part, bytes | str):
                    assert len(part) < 100, part[:200]
                elif (
                    isinstance(part, Call | DecisionRecord | RoutingRequest | dict | tuple) and id(part) not in reached
                ):
                    reached.add(id(part))
                    ahead.append(part)


def test_memory_is_bounded_on_a_large_fleet() -> None:
    """The prices of 1,000 nodes take 100 KB. Once a request has ended, its entry keeps only the best."""
    fleet, cache_view = Fleet(Health()), CacheView(Index())
    for number in range(1000):
        fleet.check_passed(fleet.add(NodeConfig(url=f"http://n{number}:1", models=("m",))), 0.0)
    router_, counters = Router(fleet, cache_view, Routing(seed=1)), Counters()
    kept = LastDecisions(JournalConfig(max_decisions=20), counters)
    brain = Brain(fleet, router_, Admitter(router_, Admission()), counters, journal=kept)
    tokens = array("I", range(4000))

    def decide(number: int) -> None:
        lookup = Lookup(tokens.tobytes(), len(tokens), 0)
        [send] = brain.handle(Arrive(number, b"%d" % number, RoutingRequest("m", arrived_s=1.0), lookup), 1.0)
        [call] = brain.open.values()
        assert call.decision is not None and len(call.decision.prices or ()) == 1000
        assert not brain.handle(Ended(number, send.try_, 200, 1.5, None), 2.0)  # type: ignore[union-attr]

    decide(-1)
    tracemalloc.start()
    try:
        for number in range(200):
            decide(number)
        gc.collect()
        used_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(kept) == 20
    assert used_bytes < 20 * 16_384


# File.


async def test_finished_requests_are_written_one_per_line(tmp_path: Path) -> None:
    file = tmp_path / "journal.jsonl"
    async with engines(2) as both, router(*both, routing=PRICE, journal={"file": str(file), "max_decisions": 3}) as r:
        for number in range(10):
            await send(r, f"n{number}")
        counters = r.service.counters
        await until(lambda: counters.journal_written == 10)
        written = lines(file)
        assert [one["request_id"] for one in written] == [f"n{number}" for number in range(10)]
        assert written[-1] == {**(await decisions(r))[0], "time": written[-1]["time"]}
        page = (await r.admin("GET", "/metrics")).body
        assert b"warmroute_journal_decisions_written_total 10" in page
        assert b"warmroute_journal_decisions_dropped_total 0" in page
        await send(r, "last")
    assert lines(file)[-1]["request_id"] == "last", "the remaining entries are written at the end"
    assert file.stat().st_mode & 0o007 == 0


async def test_a_sample_is_written(tmp_path: Path) -> None:
    counters = Counters()
    decisions = LastDecisions(JournalConfig(file=str(tmp_path / "f"), sample_ratio=0.25), counters)
    async with engines() as [engine], router(engine) as r:
        await send(r, "one")
        call = r.service.last_decisions.find(b"one")
        assert call is not None and call.end is not None
        for _ in range(4000):
            decisions.complete(call)
        assert 800 < len(decisions.pending) < 1200
        decisions.reconfigure(JournalConfig(file=str(tmp_path / "f"), sample_ratio=0.0))
        before = len(decisions.pending)
        decisions.complete(call)
        assert len(decisions.pending) == before
        decisions.reconfigure(JournalConfig(file=str(tmp_path / "f")))
        for _ in range(MAX_PENDING):
            decisions.complete(call)
        assert len(decisions.pending) == MAX_PENDING, "memory is bounded if the disk hangs"
        assert counters.journal_dropped == before


def test_a_large_file_is_rotated(tmp_path: Path) -> None:
    file = tmp_path / "j"
    for number in range(10):
        append(file, b"%d%b\n" % (number, b"x" * 28), 100)
    assert file.read_bytes().count(b"\n") == 1 and file.read_bytes()[:1] == b"9"
    older = tmp_path / "j.1"
    assert [line[:1] for line in older.read_bytes().splitlines()] == [b"6", b"7", b"8"]
    assert {path.name for path in tmp_path.iterdir()} == {"j", "j.1"}
    append(file, b"y" * 500 + b"\n", 100)
    assert file.stat().st_size == 501, "a batch is never split"


@pytest.mark.interpreted
async def test_a_disk_that_hangs_does_not_delay_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warmroute.app.journal.CLOSE_TIMEOUT_S", 0.2)
    file = tmp_path / "j"
    os.mkfifo(file)  # opening it waits for a reader
    async with engines() as [engine], router(engine, journal={"file": str(file)}) as r:
        await send(r, "one")
    writers = [thread for thread in threading.enumerate() if thread.name == "warmroute-journal"]
    assert writers and all(thread.daemon for thread in writers)
    with file.open("rb") as reader:  # unblocks the thread
        assert b'"one"' in reader.readline()
    for thread in writers:
        thread.join(10)
        assert not thread.is_alive()


async def test_a_disk_error_affects_no_request_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "later" / "journal"
    caplog.set_level(logging.INFO)
    async with engines() as [engine], router(engine, journal={"file": str(file)}) as r:
        counters = r.service.counters
        for number in range(3):
            assert (await send(r, f"n{number}")).status == 200
            await until(lambda number=number: counters.journal_dropped == number + 1)
        logged = [record for record in caplog.records if "journal_write_failed" in record.getMessage()]
        assert len(logged) == 1 and "No such file or directory" in logged[0].getMessage()
        file.parent.mkdir()
        await send(r, "n3")
        await until(lambda: counters.journal_written == 1)
        assert [one["request_id"] for one in lines(file)] == ["n3"]
        assert len(await decisions(r)) == 4
        assert f"journal_write_recovered file={file} dropped=3" in caplog.text


async def test_a_full_disk_is_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    async with engines() as [engine], router(engine, journal={"file": "/dev/full"}) as r:
        assert (await send(r, "one")).status == 200
        await until(lambda: r.service.counters.journal_dropped == 1)
        await until(lambda: "No space left on device" in caplog.text)
        assert b"warmroute_journal_decisions_dropped_total 1" in (await r.admin("GET", "/metrics")).body
