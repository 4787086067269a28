"""`warmroute capture` and the admin API's capture."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from support.engine_scripts import normal
from support.polling import until
from support.raw_client import chat, post
from support.running_router import RunningRouter, router
from support.scripted_engine import engines

from warmroute.app import admin
from warmroute.app.main import main
from warmroute.lab.demo.processes import Children, free_port

LONG = "the router reads this prompt before it sends it anywhere, block after block. " * 40


async def capture(r: RunningRouter, *flags: str) -> asyncio.Task[int]:
    """Start the command, and wait until the router captures."""
    arguments = ["capture", "--admin", f"http://127.0.0.1:{r.service.admin_port}", *flags]
    task = asyncio.get_running_loop().create_task(asyncio.to_thread(main, arguments))
    await until(lambda: r.service.capture.on)
    return task


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
async def test_the_command_writes_what_a_running_router_serves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    out = tmp_path / name
    async with engines() as [engine], router(engine) as r:
        engine.behave = normal()
        task = await capture(r, "--out", str(out))
        for _ in range(3):
            await r.request(post(chat(LONG)))
        await until(lambda: r.service.counters.capture_written == 3)
        await asyncio.sleep(0.05)  # the lines are sent
        r.service.admin_listener.abort_all()
        assert await task == 0
        await until(lambda: not r.service.capture.on)
    data = gzip.decompress(out.read_bytes()) if out.suffix == ".gz" else out.read_bytes()
    rows = [json.loads(line) for line in data.splitlines()]
    assert len(rows) == 3 and len({tuple(row["hash_ids"]) for row in rows}) == 1
    printed = capsys.readouterr().out
    assert (
        f"3 requests in {out} (the router closed the connection)." in printed and f"warmroute replay {out}" in printed
    )


async def test_the_command_ends_after_its_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with engines() as [engine], router(engine) as r:
        assert await (await capture(r, "--out", str(tmp_path / "trace.jsonl"), "--minutes", "0.001")) == 0
        await until(lambda: not r.service.capture.on)
    printed = capsys.readouterr().out
    assert "0 requests in" in printed and "0.001 minutes are over" in printed


async def test_a_full_trace_ends_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "trace.jsonl"
    async with engines() as [engine], router(engine) as r:
        engine.behave = normal()
        task = await capture(r, "--out", str(out), "--max-mb", "1")
        large = chat("word " * 40_000)
        while not task.done():
            await r.request(post(large))
        assert await task == 0
    assert "(the trace has 1 MB before compression)" in capsys.readouterr().out
    assert 1_000_000 <= out.stat().st_size < 1_200_000


async def test_a_disk_that_is_full_ends_the_command_with_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = normal()
        task = await capture(r, "--out", "/dev/full")
        while not task.done():
            await r.request(post(chat(LONG)))
            await asyncio.sleep(0.01)
        assert await task == 2
        await until(lambda: not r.service.capture.on)
    assert capsys.readouterr().err == "warmroute: cannot write /dev/full: No space left on device\n"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ([], "give the file to write with --out FILE"),
        (["--out", "FILE", "--tokenizer", "m=/x"], "--tokenizer needs --listen PORT"),
        (["--out", "FILE", "--output-tokens", "7"], "--output-tokens needs --listen PORT"),
        (["--listen", "0"], "give the file to write with --out FILE, or directory in [capture]"),
        (["--listen", "0", "--out", "FILE", "--tokenizer", "m"], "expected MODEL=PATH"),
        (["--listen", "0", "--out", "FILE", "--tokenizer", "m=/nowhere"], "cannot load the tokenizer of 'm'"),
        (["--out", "FILE", "--admin", "http://127.0.0.1:9"], "no router answers"),
    ],
)
def test_wrong_options_are_reported_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], problem: str
) -> None:
    file = tmp_path / "trace.jsonl"
    assert main(["capture", *(str(file) if flag == "FILE" else flag for flag in flags)]) == 2
    assert problem in capsys.readouterr().err
    assert not file.exists()


# The admin API.


async def test_the_status_names_each_capture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "captures"
    async with engines() as [engine], router(engine, capture={"directory": str(folder)}) as r:
        engine.behave = normal()
        await r.request(post(chat(LONG)))
        r.service.write_ended_calls()
        await r.service.capture.flush()
        status = await asyncio.to_thread(
            main, ["capture", "--status", "--admin", f"http://127.0.0.1:{r.service.admin_port}"]
        )
        [described] = (await r.admin("GET", "/admin/capture")).json["captures"]
    assert status == 0
    assert described["requests"] == 1 and described["to"].startswith(str(folder)) and described["bytes"] > 500
    assert "1 requests, 0.0 MB in" in capsys.readouterr().out
    async with engines() as [engine], router(engine) as r:
        await asyncio.to_thread(main, ["capture", "--status", "--admin", f"127.0.0.1:{r.service.admin_port}"])
    assert "The router captures nothing." in capsys.readouterr().out


async def test_a_stream_ends_with_its_client_and_has_its_own_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "MAX_STREAMS", 2)
    async with engines() as [engine], router(engine) as r:
        engine.behave = normal()
        peers = [await r.connect(r.service.admin_port) for _ in range(2)]
        for peer in peers:
            await peer.send(b"GET /admin/capture/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert (await peer.head()).status == 200
        refused = await r.admin("GET", "/admin/capture/stream")
        assert (refused.status, refused.error["code"]) == (503, "too_many_captures")
        assert (await r.admin("POST", "/admin/capture")).status == 405
        assert (await r.admin("DELETE", "/admin/capture/stream")).status == 405
        await r.request(post(chat(LONG)))
        r.service.write_ended_calls()
        await r.service.capture.flush()
        ids = []
        for peer in peers:
            data = b""
            while b"}" not in data:
                data += await peer.reader.read(65_536)
            ids.append(json.loads(data[data.index(b"{") : data.rindex(b"}") + 1])["hash_ids"])
        assert len(ids[0]) == len(ids[1]) and not set(ids[0]) & set(ids[1])
        for peer in peers:
            peer.disconnect()
        await until(lambda: not r.service.capture.on)


async def test_a_client_that_does_not_read_loses_requests_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "MAX_UNREAD_BYTES", 1)
    async with engines() as [engine], router(engine) as r:
        engine.behave = normal()
        peer = await r.connect(r.service.admin_port)
        await peer.send(b"GET /admin/capture/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        await peer.head()
        target = r.service.capture._targets[0]
        target.sink._unsent_bytes = 10  # type: ignore[attr-defined]
        assert (await r.request(post(chat(LONG)))).status == 200
        r.service.write_ended_calls()
        await r.service.capture.flush()
        assert (target.dropped, target.failing) == (1, True)
        peer.disconnect()


# A mirror as a process.


def test_a_mirror_as_a_process_writes_its_trace_when_it_is_stopped(tmp_path: Path) -> None:
    out, port = tmp_path / "trace.jsonl.gz", free_port(19_300)
    with Children() as children:
        child = children.start("capture", "--listen", str(port), "--out", str(out))
        body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": LONG}]}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        for attempt in range(200):
            try:
                with urllib.request.urlopen(request, timeout=5) as response:
                    assert response.status == 200
                break
            except OSError:
                assert attempt < 199 and not child.has_ended(), child.stderr_text()
                time.sleep(0.05)
        os.kill(child.process.pid, signal.SIGTERM)
        assert child.process.wait(10) == 0
        assert child.process.stdout is not None
        assert b"1 requests in" in child.process.stdout.read()
    [line] = gzip.decompress(out.read_bytes()).splitlines()
    assert json.loads(line)["outcome"] == "mirrored"
