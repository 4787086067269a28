"""`serve --workers N`: one port and one admin API; a worker that dies takes only its own connections along."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from support.engine_scripts import DONE, SSE_HEAD, chunk, script, sse_event
from support.polling import until
from support.raw_client import RawConnection, get, post
from support.scripted_engine import ScriptedEngine, engines
from support.serve_process import ServeProcess, serve

PATIENCE_S = 30.0


@asynccontextmanager
async def workers(folder: Path, *nodes: ScriptedEngine, count: int = 2, more: str = "") -> AsyncIterator[ServeProcess]:
    file = folder / "router.toml"
    tables = "".join(f'[[nodes]]\nurl = "{node.url}"\nname = "node-{at}"\n' for at, node in enumerate(nodes))
    file.write_text("[routing]\npolicy = 'least_loaded'\n" + more + tables)
    async with serve("--config", file, "--workers", str(count), "--port", "0", "--admin-port", "0") as router:
        await all_serve(router, count)
        yield router


async def all_serve(router: ServeProcess, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await metric(router, "warmroute_workers") < count or (await admin(router, "/ready"))[0] != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def admin(router: ServeProcess, path: str, method: str = "GET") -> tuple[int, bytes]:
    request = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\r\n".encode()
    response = await router.request(request, router.admin_port)
    return response.status, response.body


async def metric(router: ServeProcess, name: str) -> float:
    """Return the sum over all labels."""
    page = (await admin(router, "/metrics"))[1].decode()
    return sum(float(line.split()[-1]) for line in page.splitlines() if re.match(rf"{name}[ {{]", line))


async def until_known(router: ServeProcess, requests: int) -> None:
    """Wait until the first worker counts this many requests on its nodes, those of the other one included."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            nodes = json.loads((await admin(router, "/admin/nodes"))[1])["nodes"]
            if sum(node["requests_in_flight"] for node in nodes) == requests:
                return
            await asyncio.sleep(0.02)


def worker_pids(router: ServeProcess) -> list[int]:
    children = Path(f"/proc/{router.process.pid}/task/{router.process.pid}/children").read_text()
    return [int(pid) for pid in children.split()]


def none_runs(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


async def test_one_port_one_admin_api_and_a_killed_worker_loses_only_its_own_connections(tmp_path: Path) -> None:
    async with engines() as [engine]:
        release = asyncio.Event()
        async with workers(tmp_path, engine) as router:
            for _ in range(6):
                assert (await router.request()).status == 200
            assert await metric(router, "warmroute_node_requests_total") == 6
            decisions = json.loads((await admin(router, "/admin/decisions"))[1])
            assert len(decisions["decisions"]) == decisions["stored"] == 6
            found = decisions["decisions"][0]["request_id"]
            assert (await admin(router, f"/admin/decisions/{found}"))[0] == 200

            engine.behave = script(SSE_HEAD, chunk(sse_event(0)), release, chunk(sse_event(1)), DONE)
            streams = [await router.connect() for _ in range(4)]
            for one in streams:
                one.write(post(headers=["Connection: close"]))
                assert (await one.head()).status == 200
            # Each worker knows of the requests of the other.
            await until_known(router, 4)
            assert await metric(router, "warmroute_node_requests_in_flight") == 4
            assert await metric(router, "warmroute_client_connections") == 4

            os.kill(worker_pids(router)[0], signal.SIGKILL)
            await until(lambda: router.logged("worker_ended"))
            engine.behave = script(SSE_HEAD, chunk(sse_event(0)), DONE)
            assert (await router.request()).status == 200  # the other worker serves
            release.set()
            ends = [DONE.rstrip() in await one.rest() for one in streams]
            assert 1 <= ends.count(True) <= 3  # two each, unless a worker still counted an earlier connection
            assert await metric(router, "warmroute_node_requests_total") >= 6  # a counter never falls
            assert await metric(router, "warmroute_worker_restarts_total") == 1
            await all_serve(router, 2)
            assert await metric(router, "warmroute_node_requests_total") >= 6
            counted = await metric(router, "warmroute_node_requests_total")
            assert (await router.request()).status == 200
            assert await metric(router, "warmroute_node_requests_total") == counted + 1


async def test_changes_reach_all_workers_also_those_that_start_later(tmp_path: Path) -> None:
    async with engines(2) as [first, second], workers(tmp_path, first, second) as router:
        assert (await admin(router, "/admin/capture/stream"))[0] == 409
        assert (await admin(router, "/admin/nodes/node-0/drain", "POST"))[0] == 200
        for _ in range(6):
            assert (await router.request()).status == 200
        assert not first.seen
        for pid in worker_pids(router):
            os.kill(pid, signal.SIGKILL)
        for _ in range(4):  # connections wait until a worker serves again
            assert (await router.request()).status == 200
        assert not first.seen
        await all_serve(router, 2)

        file = tmp_path / "router.toml"
        file.write_text(file.read_text().partition("[[nodes]]")[0] + f'[[nodes]]\nurl = "{first.url}"\n')
        assert (await admin(router, "/admin/reload", "POST"))[0] == 200
        await until(lambda: sum("config_reloaded" in line for line in router.lines) == 2, "", PATIENCE_S)
        file.write_text("no configuration")
        assert (await admin(router, "/admin/reload", "POST"))[0] == 400
        assert len(json.loads((await admin(router, "/admin/nodes"))[1])["nodes"]) == 1

        release = asyncio.Event()
        first.behave = script(SSE_HEAD, chunk(sse_event(0)), release, DONE)
        stream = await router.connect()
        stream.write(post())
        assert (await stream.head()).status == 200
        pids = worker_pids(router)
        router.signal(signal.SIGTERM)
        await until(lambda: router.logged("service_stopping"))
        release.set()
        assert DONE.rstrip() in await stream.rest()
        await router.process.wait()
        assert router.process.returncode == 0
        assert none_runs(pids)


async def test_explain_and_the_live_feed_show_all_workers_as_one_router(tmp_path: Path) -> None:
    async with engines(2) as nodes, workers(tmp_path, *nodes) as router:
        for _ in range(4):
            assert (await router.request()).status == 200
        body = json.dumps({"body": {"model": "m", "messages": [{"role": "user", "content": "hello"}]}}).encode()
        request = f"POST /admin/explain HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        explained = await router.request(request + body, router.admin_port)
        assert explained.status == 200 and json.loads(explained.body)["node"] in ("node-0", "node-1")

        viewer = await router.connect(router.admin_port)
        viewer.write(b"GET /admin/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert (await viewer.head()).status == 200
        async with asyncio.timeout(PATIENCE_S):
            seen = b""
            while (found := re.search(rb"data: (\{.*?\})\n\n", seen, re.S)) is None:
                seen += await viewer.reader.read(65536)
        first = json.loads(re.sub(rb"\r\n[0-9a-f]+\r\n", b"", found[1]))
        assert {node["name"] for node in first["nodes"]} == {"node-0", "node-1"}
        assert first["totals"]["requests"] == 4 and sum(node["ok"] for node in first["nodes"]) == 4
        viewer.close()


async def test_a_webhook_gets_each_alert_once(tmp_path: Path) -> None:
    async with engines(2) as [engine, receiver]:
        more = f"[alerts]\nwebhook_url = 'http://127.0.0.1:{receiver.port}/hook'\n"
        async with workers(tmp_path, engine, more=more) as router:
            await ready_everywhere(router)
            assert (await admin(router, "/admin/nodes/node-0/drain", "POST"))[0] == 200
            await until(lambda: len(receiver.seen) == 1, patience_s=PATIENCE_S)
            assert (await admin(router, "/admin/nodes/node-0/undrain", "POST"))[0] == 200
            await until(lambda: len(receiver.seen) == 2, patience_s=PATIENCE_S)
            sent = [json.loads(seen.body)["alerts"] for seen in receiver.seen]
            assert [[alert["id"] for alert in alerts] for alerts in sent] == [["no_node"], ["no_node"]]
            assert sent[0][0]["ended"] is None and sent[1][0]["ended"] is not None
            assert await metric(router, "warmroute_alert_webhook_changes_total") == 2


async def test_the_list_of_alerts_is_that_of_one_router(tmp_path: Path) -> None:
    async def alerts_until(known: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                found: list[dict[str, Any]] = json.loads((await admin(router, "/admin/alerts"))[1])["alerts"]
                if known(found):
                    return found
                await asyncio.sleep(0.1)

    async with engines() as [engine], workers(tmp_path, engine) as router:
        await ready_everywhere(router)
        assert json.loads((await admin(router, "/admin/alerts"))[1]) == {"alerts": []}
        assert (await admin(router, "/admin/nodes/node-0/drain", "POST"))[0] == 200
        found = await alerts_until(lambda alerts: alerts != [])
        assert [(alert["id"], alert["ended"]) for alert in found] == [("no_node", None)]
        assert (await admin(router, "/admin/nodes/node-0/undrain", "POST"))[0] == 200
        found = await alerts_until(lambda alerts: alerts[0]["ended"] is not None)
        assert [alert["id"] for alert in found] == ["no_node"] and found[0]["ended"] >= found[0]["since"]
        for _ in range(300):  # each worker has counted some of them
            assert (await router.request(post(path="/v2"))).status == 404
        found = await alerts_until(lambda alerts: alerts[0]["count"] == 300)
        assert (found[0]["name"], found[0]["source"], found[0]["ended"]) == ("client_errors", "127.0.0.1", None)
        assert found[0]["title"] == "300 requests were rejected with 404 (not_found)"
        assert [alert["id"] for alert in found] == ["client_errors 404 not_found", "no_node"]


async def test_plain_http_on_the_tls_port_of_workers_gets_an_answer(
    tmp_path: Path, certificate: dict[str, Any]
) -> None:
    listen = certificate["listen"]
    file = tmp_path / "router.toml"
    file.write_text(f'[listen]\ntls_cert = "{listen["tls_cert"]}"\ntls_key = "{listen["tls_key"]}"\n')
    async with serve("--config", file, "--workers", "2", "--port", "0", "--admin-port", "0") as router:
        await until(lambda: sum("worker_ready" in line for line in router.lines) == 2, "", PATIENCE_S)
        for _ in range(4):
            response = await router.request()
            assert response.status == 400 and response.error["code"] == "http_on_tls_port"
            peer = RawConnection(
                *await asyncio.open_connection("127.0.0.1", router.port, ssl=certificate["trusting"])
            )  # fmt: skip
            peer.write(get("/health"))
            assert (await peer.response()).status == 200
            peer.close()
        await until(lambda: router.logged("reason=http_on_tls_port count="), "", PATIENCE_S)


async def test_a_worker_that_hangs_holds_up_neither_the_admin_api_nor_clients_nor_the_end(tmp_path: Path) -> None:
    async def ask(path: str, method: str = "GET") -> dict[str, object]:
        """Return the answer, which came long before the 10 s that the parent waits for a worker that runs."""
        async with asyncio.timeout(5.0):
            status, body = await admin(router, path, method)
        assert status == 200, body
        answer: dict[str, object] = json.loads(body)
        return answer

    async with engines() as [engine], workers(tmp_path, engine) as router:
        await ready_everywhere(router)
        hung, other = sorted(worker_pids(router))
        number = next(at for at in (0, 1) if router.logged(f"worker_ready worker={at} pid={hung}"))
        os.kill(hung, signal.SIGSTOP)
        for path in ("/ready", "/admin/nodes", "/admin/nodes/node-0", "/admin/models", "/admin/decisions"):
            assert (await ask(path))["workers_not_answering"] == [number], path
        for _ in range(2):  # whichever worker's turn it is
            drained = await ask("/admin/nodes/node-0/drain", "POST")
            assert drained["state"] == "draining" and drained["workers_not_answering"] == [number]
            assert (await ask("/admin/nodes/node-0/undrain", "POST"))["state"] == "up"
        assert await metric(router, f'warmroute_worker_answers{{worker="{number}"}}'.replace("{", r"\{")) == 0
        assert await metric(router, "warmroute_worker_answers") == 1 and await metric(router, "warmroute_workers") == 2
        for _ in range(4):  # no connection goes to it
            assert (await router.request()).status == 200
        file = tmp_path / "router.toml"
        file.write_text(file.read_text() + "[limits]\nbody_bytes = 99\n")
        assert (await ask("/admin/reload", "POST"))["workers_not_answering"] == [number]
        await until(lambda: router.logged("worker_hung"), "the hung worker is noticed", PATIENCE_S)

        os.kill(hung, signal.SIGCONT)
        await until(lambda: router.logged("worker_answers"), "it answers again", PATIENCE_S)
        reloaded = lambda: sum("limits.body_bytes 33554432 -> 99" in line for line in router.lines) == 2  # noqa: E731
        await until(reloaded, "it has reloaded the configuration, too", PATIENCE_S)
        assert "workers_not_answering" not in await ask("/admin/nodes")
        assert sum("worker_hung" in line for line in router.lines) == 1

        os.kill(hung, signal.SIGSTOP)
        router.signal(signal.SIGTERM)
        async with asyncio.timeout(25.0):  # shutdown.deadline_s is 30 s
            assert await router.process.wait() == 0
        assert router.logged(f"worker_killed worker={number}") and none_runs([hung, other])


async def ready_everywhere(router: ServeProcess) -> None:
    """Wait until every worker knows its nodes."""
    await until(lambda: sum("startup_complete" in line for line in router.lines) == 2, "all are ready", PATIENCE_S)


async def test_workers_end_when_their_parent_has_ended(tmp_path: Path) -> None:
    async with engines() as [engine], workers(tmp_path, engine) as router:
        pids = worker_pids(router)
        assert len(pids) == 2
        router.signal(signal.SIGKILL)
        await until(lambda: none_runs(pids), "they end", PATIENCE_S)


async def test_a_configuration_for_one_process_ends_the_parent(tmp_path: Path) -> None:
    file = tmp_path / "router.toml"
    file.write_text("[capture]\ndirectory = '.'\n")
    async with serve("--config", file, "--workers", "2", "--port", "0", "--admin-port", "0") as router:
        assert await router.process.wait() == 2
