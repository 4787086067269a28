"""A capture of live traffic: one line for each request, with hashes instead of text."""

from __future__ import annotations

import asyncio
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.engine_scripts import CLOSE, SSE_HEAD, chunk, failing, hanging, normal, script, sse_event
from support.polling import until
from support.raw_client import chat, post
from support.running_router import RunningRouter, router
from support.scripted_engine import engines

from warmroute.config import ConfigError, from_table
from warmroute.core.node import Ticket
from warmroute.core.tickets import PromptTicket
from warmroute.core.trace_row import TraceRow

SECRET = "xyzzy-plugh"
LONG = "the router reads this prompt before it sends it anywhere, block after block. " * 40
USAGE = json.dumps(
    {
        "choices": [],
        "usage": {"prompt_tokens": 2100, "completion_tokens": 17, "prompt_tokens_details": {"cached_tokens": 1984}},
    }
).encode()
PRICE = {"policy": "price", "seed": 7}


async def rows(r: RunningRouter, folder: Path, count: int) -> list[dict[str, Any]]:
    """Return the lines of the capture once there are this many."""

    def found() -> list[dict[str, Any]]:
        return [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]

    r.service.write_ended_calls()
    await r.service.capture.flush()
    await until(lambda: len(found()) >= count)
    assert len(found()) == count
    return found()


async def test_a_line_has_lengths_times_and_what_the_node_reported(tmp_path: Path) -> None:
    folder = tmp_path / "captures"
    async with engines() as [engine], router(engine, routing=PRICE, capture={"directory": str(folder)}) as r:
        engine.behave = normal(USAGE)
        await r.request(post(chat(LONG, stream=True), headers=["X-Priority: high"]))
        [row] = await rows(r, folder, 1)
    assert row["output_length"] == 17
    assert (row["prompt_tokens"], row["cached_tokens"], row["predicted_tokens"]) == (2100, 1984, 0)
    assert (row["model"], row["node"], row["priority"], row["block_size"]) == ("m", "node0", "high", 16)
    assert 0 <= row["timestamp"] < 60_000 and 0 < row["ttft_ms"] <= row["duration_ms"]
    assert len(row["hash_ids"]) == row["input_length"] // 16
    # There is no tokenizer: four bytes count as a token.
    assert row["input_estimated"] and row["input_length"] * 4 - 120 < len(LONG) < row["input_length"] * 4
    assert all(0 <= one < 1 << 48 for one in row["hash_ids"])


async def test_a_capture_contains_nothing_that_a_user_typed(tmp_path: Path) -> None:
    folder = tmp_path / "captures"
    text = f"{SECRET} " * 300
    key = "7a9e5b2f8c3d"
    keys = [{"sha256": sha256(key.encode()).hexdigest(), "tenant": "acme-corporation"}]
    async with engines() as [engine], router(engine, keys=keys, capture={"directory": str(folder)}) as r:
        engine.behave = normal(USAGE)
        headers = [f"Authorization: Bearer {key}", f"X-Session-Id: {SECRET}", f"X-Request-Id: {SECRET}"]
        body = chat(text, user=SECRET, prompt_cache_key=SECRET, metadata={"a": SECRET})
        assert (await r.request(post(body, headers=headers))).status == 200
        assert (await r.request(post(chat(text, model=SECRET), headers=headers))).status == 404
        [row] = await rows(r, folder, 1)
        written = b"".join(file.read_bytes() for file in folder.iterdir())
    assert SECRET.encode() not in written and b"acme" not in written and key.encode() not in written
    assert len(row["tenant"]) == 12 and len(row["session_id"]) == 12


async def test_prompts_share_ids_exactly_as_far_as_they_are_equal(tmp_path: Path) -> None:
    folder = tmp_path / "captures"
    async with engines() as [engine], router(engine, capture={"directory": str(folder)}) as r:
        engine.behave = normal(USAGE)
        same = "a" * 1000
        for end in ("b" * 300, "c" * 300):
            await r.request(post(chat(same + end)))
        first, second = await rows(r, folder, 2)
    shared = [one == two for one, two in zip(first["hash_ids"], second["hash_ids"], strict=True)]
    head = len(b'[{"role": "user", "content": "')
    assert shared.index(False) == (head + 1000) // 64  # a block of text has 64 bytes
    assert not any(shared[shared.index(False) :])


async def test_two_captures_of_the_same_traffic_have_nothing_in_common(tmp_path: Path) -> None:
    found = []
    for name in ("one", "two"):
        folder = tmp_path / name
        async with engines() as [engine], router(engine, capture={"directory": str(folder)}) as r:
            engine.behave = normal(USAGE)
            await r.request(post(chat(LONG, prompt_cache_key="conversation")))
            found += await rows(r, folder, 1)
    first, second = found
    assert len(first["hash_ids"]) == len(second["hash_ids"]) > 10
    assert not set(first["hash_ids"]) & set(second["hash_ids"])
    assert first["session_id"] != second["session_id"]


async def test_retries_make_one_line_and_every_outcome_has_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "captures"
    tables: dict[str, Any] = {"upstream": {"max_attempts": 2}, "capture": {"directory": str(folder)}}
    async with engines(2) as [bad, good], router(bad, good, **tables) as r:
        bad.behave, good.behave = failing(500), normal(USAGE)
        for _ in range(2):
            assert (await r.request(post(chat(LONG)))).status == 200
        bad.behave = good.behave = failing(500)
        assert (await r.request(post(chat(LONG)))).status == 502
        bad.behave = good.behave = failing(400)
        assert (await r.request(post(chat(LONG)))).status == 400
        bad.behave = good.behave = script(SSE_HEAD, chunk(sse_event(0)), CLOSE)
        assert not (await r.request(post(chat(LONG, stream=True)))).complete
        bad.behave = good.behave = hanging
        peer = await r.connect()
        peer.write(post(chat(LONG)))
        await until(lambda: r.inflight() == 1)
        peer.disconnect()
        await until(lambda: r.inflight() == 0)
        bad.behave = good.behave = normal(USAGE)
        found = await rows(r, folder, 5)
    assert [row.get("outcome", "ok") for row in found] == ["ok", "ok", "failed", "broken", "cancelled"]
    assert sorted(row.get("attempts", 1) for row in found[:2]) == [1, 2]
    assert found[4]["output_estimated"] and "ttft_ms" not in found[4]


async def test_a_request_that_admission_rejects_is_demand_and_is_captured(tmp_path: Path) -> None:
    folder = tmp_path / "captures"
    tables: dict[str, Any] = {
        "routing": PRICE,
        "admission": {"max_node_backlog_ms": 0.01},
        "capture": {"directory": str(folder)},
    }
    async with engines() as [engine], router(engine, **tables) as r:
        gate = asyncio.Event()
        engine.behave = script(gate, b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        peer = await r.connect()
        peer.write(post(chat(LONG, stream=True)))
        await until(lambda: engine.seen)
        refused = await r.request(post(chat(f"2{LONG}", stream=True), headers=["X-Queue: no"]))
        assert refused.status == 429
        gate.set()
        assert (await peer.response()).status == 200
        found = await rows(r, folder, 2)
    assert [row.get("outcome", "ok") for row in found] == ["not_admitted", "ok"]
    assert found[0]["hash_ids"] and "node" not in found[0]


async def test_a_capture_does_not_change_how_a_policy_without_tokens_works(tmp_path: Path) -> None:
    folder = tmp_path / "captures"
    async with engines() as [engine], router(engine, capture={"directory": str(folder)}) as r:
        engine.behave = normal(USAGE)
        kinds: list[type[Ticket]] = []
        inner = r.service.router.open_ticket
        r.service.router.open_ticket = lambda *args: kinds.append(type(found := inner(*args))) or found  # type: ignore
        await r.request(post(chat(LONG)))
        [row] = await rows(r, folder, 1)
    assert kinds == [Ticket] and not issubclass(Ticket, PromptTicket)
    assert row["hash_ids"] and row["cached_tokens"] == 1984 and "predicted_tokens" not in row


async def test_nothing_is_kept_of_requests_while_nothing_is_captured() -> None:
    async with engines() as [engine], router(engine, routing=PRICE) as r:
        engine.behave = normal(USAGE)
        await r.request(post(chat(LONG)))
        assert not r.service.capture.on and not r.service.capture._pending


async def test_a_conversation_names_the_prompt_that_it_continues(tmp_path: Path) -> None:
    folder = tmp_path / "captures"
    async with engines() as [engine], router(engine, capture={"directory": str(folder)}) as r:
        engine.behave = normal(USAGE)
        messages = [{"role": "user", "content": LONG}]
        for answer in ("first answer", "second answer"):
            await r.request(post(json.dumps({"model": "m", "messages": messages}).encode()))
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": LONG[:700]}]
        await r.request(post(json.dumps({"model": "m", "messages": messages}).encode()))
        other = [{"role": "user", "content": f"{LONG}, or not"}]
        await r.request(post(json.dumps({"model": "m", "messages": other}).encode()))
        one, two, three, fourth = await rows(r, folder, 4)
    assert "follows" not in one
    assert (two["follows"], three["follows"]) == (one["input_length"], two["input_length"])
    assert fourth["follows"] == one["input_length"]  # it begins with the same text


async def test_a_reload_starts_and_stops_the_capture(tmp_path: Path) -> None:
    folder = tmp_path / "captures"
    async with engines() as [engine], router(engine) as r:
        engine.behave = normal(USAGE)
        reload = r.service.config_reload
        before = r.service.config
        with_capture = msgspec.structs.replace(
            before, capture=msgspec.structs.replace(before.capture, directory=str(folder))
        )
        reload.read_config = lambda: with_capture
        assert r.service.reload() is None
        await r.request(post(chat(LONG)))
        await rows(r, folder, 1)
        reload.read_config = lambda: before
        assert r.service.reload() is None
        await r.request(post(chat(LONG)))
        await rows(r, folder, 1)
        assert not r.service.capture.on


def test_a_block_size_that_no_engine_has_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"capture\.block_size: 24 is not a power of two"):
        from_table({"capture": {"block_size": 24}}, experiment=True)


def test_the_format_is_mooncakes_with_optional_fields() -> None:
    required = {"timestamp", "input_length", "output_length"}
    assert set(TraceRow.__struct_fields__) - set(TraceRow.__struct_fields__[3:]) == required
    line = json.dumps({"timestamp": 0, "input_length": 10, "output_length": 2, "hash_ids": [1]})
    assert msgspec.json.decode(line, type=TraceRow).hash_ids == [1]
