"""`serve --edges N`: one brain and several edges behind one port; and what a killed or stopped process costs."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.engine_scripts import DONE, SSE_HEAD, chunk, script, sse_event
from support.otlp_collector import otlp_collector
from support.polling import until
from support.raw_client import RawConnection, chat, get, post
from support.scripted_engine import ScriptedEngine, engines
from support.serve_process import ServeProcess, serve

from warmroute.edge.arrival import hash_key

PATIENCE_S = 30.0


@asynccontextmanager
async def edges(
    folder: Path, *nodes: ScriptedEngine, count: int = 2, more: str = "", flags: tuple[str, ...] = ()
) -> AsyncIterator[ServeProcess]:
    file = folder / "router.toml"
    tables = "".join(f'[[nodes]]\nurl = "{node.url}"\nname = "node-{at}"\n' for at, node in enumerate(nodes))
    file.write_text(more + tables)
    async with serve("--config", file, "--edges", str(count), "--port", "0", "--admin-port", "0", *flags) as router:
        await all_serve(router, count)
        yield router


async def all_serve(router: ServeProcess, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while sum("edge_started" in line for line in router.lines) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        while await metric(router, "warmroute_edges") < count or (await router.request(get("/ready"))).status != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def admin(router: ServeProcess, path: str, method: str = "GET", body: bytes = b"") -> tuple[int, Any]:
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    response = await router.request(head + body, router.admin_port)
    return response.status, response.body


async def metric(router: ServeProcess, name: str) -> float:
    """Return the sum over all labels; 0 while the admin port answers nothing."""
    try:
        page = (await admin(router, "/metrics"))[1].decode()
    except (OSError, TimeoutError):
        return 0.0
    return sum(float(line.split()[-1]) for line in page.splitlines() if re.match(rf"{name}[ {{]", line))


def pids(router: ServeProcess) -> dict[str, int]:
    """The processes by the titles that `ps` shows."""
    children = Path(f"/proc/{router.process.pid}/task/{router.process.pid}/children").read_text().split()
    titles = {Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode(): int(pid) for pid in children}
    return {title.removeprefix("warmroute: "): pid for title, pid in titles.items()}


def _runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def in_flight(router: ServeProcess) -> int:
    nodes = json.loads((await admin(router, "/admin/nodes"))[1])["nodes"]
    return sum(node["requests_in_flight"] for node in nodes)


async def until_in_flight(router: ServeProcess, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await in_flight(router) != count:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def begun_streams(router: ServeProcess, count: int) -> list[RawConnection]:
    """Open streams that have their first event."""
    streams = [await router.connect() for _ in range(count)]
    for one in streams:
        one.write(post(chat(stream=True), headers=["Connection: close"]))
    for one in streams:
        assert (await one.head()).status == 200
    return streams


@pytest.mark.processes
async def test_one_brain_decides_for_all_edges(tmp_path: Path) -> None:
    async with engines(2) as both, edges(tmp_path, *both) as router:
        assert set(pids(router)) == {"brain", "edge 1", "edge 2"}
        for _ in range(8):
            assert (await router.request()).status == 200
        await until_metric(router, "warmroute_node_requests_total", 8)
        decisions = json.loads((await admin(router, "/admin/decisions"))[1])
        assert decisions["stored"] == 8, "decisions of all edges are in one place"
        assert (await router.request(get("/v1/models"))).json["data"]
        assert (await router.request(get("/v1/nothing"))).status == 404
        assert (await router.request(post(chat(model="unknown")))).error["code"] == "model_not_found"
        await until_metric(router, "warmroute_errors_total", 2)


async def until_metric(router: ServeProcess, name: str, value: float) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await metric(router, name) != value:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


@pytest.mark.processes
async def test_a_killed_brain_costs_no_stream_and_no_request(tmp_path: Path) -> None:
    async with engines() as [engine], edges(tmp_path, engine) as router:
        release = asyncio.Event()
        engine.behave = script(SSE_HEAD, chunk(sse_event(0)), release, chunk(sse_event(1)), DONE)
        streams = await begun_streams(router, 20)
        await until_in_flight(router, 20)
        os.kill(pids(router)["brain"], signal.SIGKILL)
        engine.behave = script(SSE_HEAD, chunk(sse_event(0)), DONE)
        began_s = time.monotonic()
        assert [(await router.request(post(chat(stream=True)))).status for _ in range(4)] == [200] * 4
        assert time.monotonic() - began_s < 10.0
        await until(lambda: router.logged("edge_resynced"), "", PATIENCE_S)
        await until_in_flight(router, 20)
        release.set()
        assert all([DONE.rstrip() in await one.rest() for one in streams])
        await until_in_flight(router, 0)
        assert (await router.request()).status == 200


@pytest.mark.processes
async def test_a_stopped_brain_is_replaced(tmp_path: Path) -> None:
    async with engines() as [engine], edges(tmp_path, engine) as router:
        release = asyncio.Event()
        engine.behave = script(SSE_HEAD, chunk(sse_event(0)), release, chunk(sse_event(1)), DONE)
        streams = await begun_streams(router, 6)
        os.kill(pids(router)["brain"], signal.SIGSTOP)
        engine.behave = script(SSE_HEAD, chunk(sse_event(0)), DONE)
        assert (await router.request(post(chat(stream=True)))).status == 200
        await until(lambda: router.logged("process_hung"), "", PATIENCE_S)
        release.set()
        assert all([DONE.rstrip() in await one.rest() for one in streams])
        await until(lambda: sum("brain_started" in line for line in router.lines) == 2, "", PATIENCE_S)
        assert (await router.request()).status == 200
        await until_in_flight(router, 0)


@pytest.mark.processes
async def test_the_next_brain_knows_what_operators_did(tmp_path: Path) -> None:
    async with engines(2) as [first, second], edges(tmp_path, first, second) as router:
        assert (await admin(router, "/admin/nodes/node-0/drain", "POST"))[0] == 200
        os.kill(pids(router)["brain"], signal.SIGKILL)
        await until(lambda: sum("brain_started" in line for line in router.lines) == 2, "", PATIENCE_S)
        before = len(first.seen)
        for _ in range(4):
            assert (await router.request()).status == 200
        assert len(first.seen) == before and second.seen


@pytest.mark.processes
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_an_edge_that_ends_takes_only_its_own_clients_along(tmp_path: Path, how: signal.Signals) -> None:
    async with engines() as [engine], edges(tmp_path, engine) as router:
        release = asyncio.Event()
        engine.behave = script(SSE_HEAD, chunk(sse_event(0)), release, chunk(sse_event(1)), DONE)
        streams = await begun_streams(router, 12)
        await until_in_flight(router, 12)
        os.kill(pids(router)["edge 1"], how)
        engine.behave = script(SSE_HEAD, chunk(sse_event(0)), DONE)
        for _ in range(6):
            assert (await router.request()).status == 200, "the other edge accepts, and the one that hangs does not"
        await until(lambda: sum("edge=edge-1 nodes=" in line for line in router.lines) == 2, "", PATIENCE_S)
        release.set()
        ends = [DONE.rstrip() in await one.rest() for one in streams]
        assert 5 <= ends.count(True) <= 7, "connections are shared evenly"
        await until_in_flight(router, 0)
        if how == signal.SIGSTOP:
            assert router.logged("process_hung")


@pytest.mark.processes
async def test_without_a_brain_an_edge_chooses_by_itself(tmp_path: Path) -> None:
    async with engines(2) as both, edges(tmp_path, *both, count=1) as router:
        first = both[0]
        assert (await admin(router, "/admin/nodes/node-0/drain", "POST"))[0] == 200
        await asyncio.sleep(0.2)
        pid = pids(router)["brain"]
        # The supervisor starts a brain again at once. Without a program to start, there is none.
        os.kill(router.process.pid, signal.SIGSTOP)
        try:
            os.kill(pid, signal.SIGKILL)
            before = len(first.seen)
            began_s = time.monotonic()
            for _ in range(4):
                assert (await router.request()).status == 200
            assert time.monotonic() - began_s < 5.0, "only the first request waits for a brain"
            assert len(first.seen) == before, "a drained node stays out"
            await until(lambda: router.logged("edge_alone"), "", PATIENCE_S)
        finally:
            os.kill(router.process.pid, signal.SIGCONT)
        await until(lambda: router.logged("brain_found"), "", PATIENCE_S)
        assert (await router.request()).status == 200


async def test_a_limit_is_exact_over_all_edges(tmp_path: Path) -> None:
    keys = '[[keys]]\ntenant = "a"\nsha256 = "%s"\nrequests_per_min = 20\n'
    async with engines() as [engine], edges(tmp_path, engine, count=3, more=keys % hash_key("k")) as router:
        request = post(headers=["Authorization: Bearer k"])
        statuses = [one.status for one in await asyncio.gather(*[router.request(request) for _ in range(40)])]
        assert 20 <= statuses.count(200) <= 21, "a token may come back meanwhile"
        assert statuses.count(429) == 40 - statuses.count(200)


@pytest.mark.processes
async def test_a_reload_reaches_all_edges(tmp_path: Path) -> None:
    async with engines(2) as [first, second], edges(tmp_path, first) as router:
        for _ in range(4):
            assert (await router.request()).status == 200
        seen = len(first.seen)
        file = tmp_path / "router.toml"
        file.write_text(f'[limits]\nbody_bytes = 2048\n[[nodes]]\nurl = "{second.url}"\n')
        assert (await admin(router, "/admin/reload", "POST"))[0] == 200
        await until(lambda: router.logged("node_up node=127.0.0.1"), "", PATIENCE_S)
        for _ in range(4):
            assert (await router.request()).status == 200
        assert len(first.seen) == seen and second.seen
        large = [await router.request(post(chat("x" * 4000))) for _ in range(6)]
        assert [one.status for one in large] == [413] * 6


@pytest.mark.processes
async def test_it_stops_after_its_requests(tmp_path: Path) -> None:
    async with engines() as [engine], edges(tmp_path, engine) as router:
        release = asyncio.Event()
        engine.behave = script(SSE_HEAD, chunk(sse_event(0)), release, DONE)
        streams = await begun_streams(router, 6)
        children = list(pids(router).values())
        router.signal(signal.SIGTERM)
        await until(lambda: router.logged("service_stopping"), "", PATIENCE_S)
        await asyncio.sleep(0.3)
        release.set()
        assert all([DONE.rstrip() in await one.rest() for one in streams])
        async with asyncio.timeout(PATIENCE_S):
            assert await router.process.wait() == 0
        assert not any(_runs(pid) for pid in children)


async def test_capture_log_explanations_and_traces_are_whole(tmp_path: Path) -> None:
    captured = tmp_path / "captures"
    more = f'[log]\nrequests = true\n[capture]\ndirectory = "{captured}"\n'
    async with engines() as [engine]:
        with otlp_collector() as collector:
            more += f'[tracing]\nenabled = true\nendpoint = "{collector.url}"\nsample_ratio = 1.0\n'
            async with edges(tmp_path, engine, more=more) as router:
                ids = []
                for number in range(6):
                    response = await router.request(post(chat(f"{number} " * 200)))
                    assert response.status == 200
                    ids.append(response.get("x-request-id"))
                for one in ids:
                    status, body = await admin(router, f"/admin/decisions/{one}")
                    assert status == 200 and json.loads(body)["request_id"] == one
                await until(lambda: all(router.logged(f"request_id={one}") for one in ids), "six lines", PATIENCE_S)
                await until(lambda: len(collector.requests_spans()) == 6, "six traces", PATIENCE_S)
                attempts = {span.span_id for span in collector.spans if span.name == "attempt"}
                sent = [re.search(rb"(?i)traceparent: 00-[0-9a-f]+-([0-9a-f]+)-", one.head) for one in engine.seen]
                assert {one[1].decode() for one in sent if one} == attempts, "nodes get the ids that the trace has"
                await until(lambda: len(_lines(captured)) == 6, "six captured requests", PATIENCE_S)
                assert all(json.loads(line)["hash_ids"] for line in _lines(captured))


def _lines(folder: Path) -> list[str]:
    return [line for file in folder.glob("*") for line in file.read_text().splitlines()]


@pytest.mark.processes
async def test_an_edge_that_is_told_to_end_leaves_the_port_to_the_others(tmp_path: Path) -> None:
    async with engines() as [engine], edges(tmp_path, engine) as router:
        os.kill(pids(router)["edge 1"], signal.SIGTERM)
        await until(lambda: sum("edge=edge-1 nodes=" in line for line in router.lines) == 2, "", PATIENCE_S)
        assert [(await router.request()).status for _ in range(8)] == [200] * 8
        assert router.logged("edge_left edge=edge-1")


async def test_a_name_that_cannot_be_sent_costs_its_own_request_only(tmp_path: Path) -> None:
    async with engines() as [engine], edges(tmp_path, engine, count=1) as router:
        bad = post(b'{"model":"\\ud800","messages":[{"role":"user","content":"hi"}]}')
        asked = [router.request(bad if at % 5 == 0 else None) for at in range(20)]
        statuses = [one.status for one in await asyncio.gather(*asked)]
        assert statuses.count(200) == 16 and all(status >= 400 for status in statuses[::5])
        await until_in_flight(router, 0)


@pytest.mark.processes
async def test_a_brain_starts_again_although_its_file_is_broken(tmp_path: Path) -> None:
    async with engines() as [engine], edges(tmp_path, engine) as router:
        (tmp_path / "router.toml").write_text("no configuration")
        os.kill(pids(router)["brain"], signal.SIGKILL)
        await until(lambda: sum("brain_started" in line for line in router.lines) == 2, "", PATIENCE_S)
        assert router.logged("config_rejected") and (await router.request()).status == 200


@pytest.mark.processes
async def test_many_open_calls_reach_the_next_brain(tmp_path: Path) -> None:
    async with engines() as [engine], edges(tmp_path, engine, count=1) as router:
        release = asyncio.Event()
        engine.behave = script(SSE_HEAD, chunk(sse_event(0)), release, chunk(sse_event(1)), DONE)
        text = "word " * 40_000
        streams = [await router.connect() for _ in range(100)]
        for number, one in enumerate(streams):
            one.write(post(chat(f"{number} {text}", stream=True), headers=["Connection: close"]))
        for one in streams:
            assert (await one.head()).status == 200
        os.kill(pids(router)["brain"], signal.SIGKILL)
        await until(lambda: router.logged("edge_resynced edge=edge-1 calls=100"), "", PATIENCE_S)
        release.set()
        assert all([DONE.rstrip() in await one.rest() for one in streams])
        await until_in_flight(router, 0)
