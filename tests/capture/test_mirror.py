"""`warmroute capture --listen`: mirrored requests are answered at once, captured, and never forwarded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from support.polling import until
from support.raw_client import RawConnection, Response, chat, get, post

from warmroute.app import mirror as mirror_module
from warmroute.app.capture import CaptureFile
from warmroute.app.mirror import Mirror
from warmroute.config import from_table

SMALL_MODEL = Path(__file__).parents[1] / "prompt" / "small-model"
LONG = "the router reads this prompt before it sends it anywhere, block after block. " * 40


class RunningMirror:
    def __init__(self, mirror: Mirror, file: Path) -> None:
        self.mirror = mirror
        self._file = file

    async def connect(self) -> RawConnection:
        return RawConnection(*await asyncio.open_connection("127.0.0.1", self.mirror.port, limit=1 << 24))

    async def request(self, data: bytes) -> Response:
        peer = await self.connect()
        await peer.send(data)
        response = await peer.response()
        peer.close()
        return response

    async def rows(self) -> list[dict[str, Any]]:
        """Return the lines of all requests that were answered."""
        await until(lambda: not self.mirror._reading)
        await self.mirror.capture.flush()
        return [json.loads(line) for line in self._file.read_text().splitlines()] if self._file.exists() else []


@asynccontextmanager
async def mirror(folder: Path, output_tokens: int | None = None, **tables: Any) -> AsyncIterator[RunningMirror]:
    made = Mirror(from_table(tables, experiment=True), output_tokens)
    file = folder / "mirrored.jsonl"
    await made.start("127.0.0.1", 0, CaptureFile(file, 10_000_000))
    try:
        yield RunningMirror(made, file)
    finally:
        await made.close()


async def test_a_mirrored_chat_is_answered_and_captured(tmp_path: Path) -> None:
    async with mirror(tmp_path) as m:
        response = await m.request(post(chat(LONG, max_tokens=40)))
        assert (response.status, response.body) == (200, b"")
        [row] = await m.rows()
    assert (row["model"], row["outcome"], row["output_length"]) == ("m", "mirrored", 40)
    assert row["output_estimated"] and row["input_estimated"]
    assert len(row["hash_ids"]) == row["input_length"] // 16
    assert "duration_ms" not in row and "node" not in row


async def test_prompts_are_read_with_the_models_tokenizer(tmp_path: Path) -> None:
    async with mirror(tmp_path, models=[{"name": "m", "tokenizer": str(SMALL_MODEL)}]) as m:
        await m.request(post(chat(LONG)))
        await m.request(post(chat(LONG), path="/gateway/llm/v1/chat/completions?trace=1"))
        first, second = await m.rows()
    assert "input_estimated" not in first and first["hash_ids"] == second["hash_ids"]


async def test_the_answer_comes_before_the_request_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nginx holds its client's connection until the mirror has answered."""
    gate = asyncio.Event()
    inner = Mirror._capture_request

    async def slow(self: Mirror, *args: Any) -> None:
        await gate.wait()
        await inner(self, *args)

    monkeypatch.setattr(Mirror, "_capture_request", slow)
    async with mirror(tmp_path) as m:
        peer = await m.connect()
        for _ in range(3):  # on one connection
            await peer.send(post(chat(LONG)))
            assert (await peer.response()).status == 200
        assert len(m.mirror._reading) == 3
        gate.set()
        assert len(await m.rows()) == 3
        peer.close()


@pytest.mark.parametrize(
    ("request_bytes", "status", "reason"),
    [
        (post(b"{"), 200, "malformed_json"),
        (post(b"\xff\x00garbage"), 200, "malformed_json"),
        (post(b'{"model":"m"}'), 200, "missing_messages"),
        (post(b'{"model":"m","input":"x"}', path="/v1/audio/transcriptions"), 200, "no_prompt"),
        (post(b'{"a":1}', path="/somewhere/else"), 200, "no_prompt"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}", 200, "no_prompt"),
        (b"not http at all\r\n\r\n", 400, "bad_request"),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n", 413, "request_too_large"),
    ],
)
async def test_what_cannot_be_read_is_counted_and_left_out(
    tmp_path: Path, request_bytes: bytes, status: int, reason: str
) -> None:
    async with mirror(tmp_path) as m:
        assert (await m.request(request_bytes)).status == status
        assert (await m.request(post(chat(LONG)))).status == 200
        assert len(await m.rows()) == 1
        assert m.mirror.unreadable == {reason: 1}


async def test_a_health_check_is_answered_and_not_counted(tmp_path: Path) -> None:
    async with mirror(tmp_path) as m:
        assert (await m.request(get("/health"))).status == 200
        assert await m.rows() == [] and m.mirror.received == 0 and not m.mirror.unreadable


async def test_half_open_and_broken_connections_leave_nothing(tmp_path: Path) -> None:
    async with mirror(tmp_path, limits={"body_timeout_s": 0.1, "header_timeout_s": 0.1}) as m:
        whole = post(chat(LONG))
        slow = await m.connect()
        slow.write(whole[: len(whole) // 2])
        assert (await slow.response()).status == 408
        for part in (whole[:20], whole[:-10]):
            peer = await m.connect()
            await peer.send(part)
            peer.disconnect()
        await m.request(whole)
        assert len(await m.rows()) == 1
        slow.disconnect()
        await until(lambda: not m.mirror._listener.connections)
        assert m.mirror._listener.buffered_bytes == 0


async def test_a_large_body_is_read_in_a_thread(tmp_path: Path) -> None:
    async with mirror(tmp_path) as m:
        await m.request(post(chat("word " * 200_000)))
        [row] = await m.rows()
    assert 200_000 < row["input_length"] < 300_000


async def test_more_requests_than_can_be_read_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror_module, "MAX_UNREAD_REQUESTS", 1)
    gate = asyncio.Event()
    inner = Mirror._capture_request

    async def slow(self: Mirror, *args: Any) -> None:
        await gate.wait()
        await inner(self, *args)

    monkeypatch.setattr(Mirror, "_capture_request", slow)
    async with mirror(tmp_path) as m:
        for _ in range(3):
            assert (await m.request(post(chat(LONG)))).status == 200
        gate.set()
        assert len(await m.rows()) == 1 and m.mirror.counters.capture_dropped == 2


async def test_output_lengths_are_learned_from_answers_in_later_turns(tmp_path: Path) -> None:
    answer = "x" * 400
    messages = [{"role": "user", "content": LONG}]
    later = [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": "and then?"}]
    async with mirror(tmp_path) as m:
        for body in ({"messages": messages}, {"messages": later}, {"messages": messages, "max_tokens": 30}):
            await m.request(post(json.dumps({"model": "m", **body}).encode()))
        first, second, third = await m.rows()
    assert first["output_length"] == 256  # nothing is known yet
    assert second["output_length"] == second["answer_length"] == 100
    assert second["follows"] == first["input_length"]
    assert third["output_length"] == 30


async def test_a_configured_output_length_is_at_most_what_the_request_allows(tmp_path: Path) -> None:
    async with mirror(tmp_path, output_tokens=77) as m:
        await m.request(post(chat(LONG)))
        await m.request(post(chat(LONG, max_tokens=50)))
        assert [row["output_length"] for row in await m.rows()] == [77, 50]


async def test_the_owners_of_keys_are_told_apart_and_not_named(tmp_path: Path) -> None:
    async with mirror(tmp_path) as m:
        for key in ("sk-one", "sk-two", "sk-one"):
            await m.request(post(chat(LONG), headers=[f"Authorization: Bearer {key}"]))
        one, two, again = await m.rows()
    assert one["tenant"] == again["tenant"] != two["tenant"]
    assert "sk-" not in json.dumps([one, two])


async def test_configured_keys_name_the_tenants_and_others_are_left_out(tmp_path: Path) -> None:
    keys = [{"sha256": sha256(key.encode()).hexdigest(), "tenant": "acme"} for key in ("a", "b")]
    async with mirror(tmp_path, keys=keys) as m:
        for key in ("a", "b", "wrong"):
            assert (await m.request(post(chat(LONG), headers=[f"Authorization: Bearer {key}"]))).status == 200
        one, two = await m.rows()
        assert one["tenant"] == two["tenant"] and m.mirror.unreadable == {"invalid_api_key": 1}


async def test_a_model_name_that_is_no_text_is_written_as_text(tmp_path: Path) -> None:
    async with mirror(tmp_path) as m:
        await m.request(post(chat(LONG, model="\ud800" + "x" * 500)))
        await m.request(post(chat(LONG)))
        first, second = await m.rows()
    assert first["model"] == "?" + "x" * 199 and second["model"] == "m"


async def test_a_bug_in_reading_costs_one_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with mirror(tmp_path) as m:
        with monkeypatch.context() as patch:
            patch.setattr(mirror_module, "_last_answer_tokens", lambda *_args: 1 // 0)
            assert (await m.request(post(chat(LONG)))).status == 200
            await until(lambda: not m.mirror._reading)
        await m.request(post(chat(LONG)))
        assert len(await m.rows()) == 1
