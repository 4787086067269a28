"""What operators do through the admin API survives restarts: drains, roles, added nodes."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.fake_kubernetes import FakeCluster
from support.polling import until
from support.raw_client import get, post
from support.running_router import RunningRouter, quick_table, router
from support.scripted_engine import ScriptedEngine, engines
from support.serve_process import ServeProcess, serve

from warmroute.app.node_state import FILE, MAX_FILE_BYTES
from warmroute.config import Config, ConfigError, NodeConfig, from_table
from warmroute.core.cluster.messages import MAX_NODE_BYTES

pytestmark = pytest.mark.usefixtures("experiment")

Node = dict[str, Any]


def write_config(folder: Path, *nodes: str, state: str = "") -> Path:
    """`nodes`: the lines of each one's table."""
    file = folder / "router.toml"
    tables = "".join(f"[[nodes]]\nengine = 'trtllm'\n{node}\n" for node in nodes)  # its role can change
    state = state or f'directory = "{folder / "state"}"'
    times = "[health]\ninterval_s = 0.05\nslow_start_s = 0.0\n"
    file.write_text(f"[state]\n{state}\n[routing]\npolicy = 'round_robin'\n{times}{tables}")
    return file


@asynccontextmanager
async def started(config: Path, *arguments: str) -> AsyncIterator[ServeProcess]:
    async with serve("--config", config, "--port", "0", "--admin-port", "0", *arguments) as process:
        assert process.process.returncode is None, process.lines
        yield process


async def call(process: ServeProcess, method: str, path: str, body: Any = None, status: int = 200) -> Any:
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} /admin/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n\r\n"
    response = await process.request(head.encode() + data, process.admin_port)
    assert response.status == status, response.body
    return json.loads(response.body)


async def ready(process: ServeProcess, *names: str) -> None:
    """Wait until these nodes are up, and all workers serve."""
    async with asyncio.timeout(20):
        while (await process.request(get("/ready"), process.admin_port)).status != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await all_up(process, *names)


async def nodes_of(process: ServeProcess) -> dict[str, Node]:
    return {node["name"]: node for node in (await call(process, "GET", "nodes"))["nodes"]}


async def kill(process: ServeProcess) -> None:
    process.signal(signal.SIGKILL)
    await process.process.wait()


async def all_up(process: ServeProcess, *names: str) -> None:
    async with asyncio.timeout(20):
        while True:
            found = await nodes_of(process)
            if all(found[name]["state"] == "up" for name in names):
                return
            await asyncio.sleep(0.02)


async def served_by(process: ServeProcess, nodes: list[ScriptedEngine]) -> set[int]:
    """Send requests. Return the numbers of the nodes that got any."""
    for node in nodes:
        node.seen.clear()
    for _ in range(8):
        assert (await process.request(post())).status == 200
    return {at for at, node in enumerate(nodes) if node.seen}


@pytest.mark.parametrize("edges", [0, 2])
async def test_drains_roles_and_added_nodes_survive_kill_9(tmp_path: Path, edges: int) -> None:
    more = ("--edges", str(edges)) if edges else ()
    async with engines(3) as nodes:
        config = write_config(tmp_path, *(f'url = "{node.url}"\nname = "n{at}"' for at, node in enumerate(nodes[:2])))
        async with started(config, *more) as first:
            await ready(first, "n0", "n1")
            added = await call(first, "POST", "nodes", {"url": nodes[2].url, "name": "n2", "engine": "trtllm"}, 201)
            assert added["survives_restart"]
            await all_up(first, "n2")
            drained = await call(first, "POST", "nodes/n0/drain")
            assert drained["state"] == "draining" and drained["survives_restart"]
            assert (await call(first, "POST", "nodes/n2/role", {"role": "decode"}))["survives_restart"]
            await call(first, "POST", "nodes/n2/role", {"role": "mixed"})
            assert (await call(first, "POST", "nodes/n1/role", {"role": "decode"}))["survives_restart"]
            assert not first.logged("changes_not_kept")
            await kill(first)
        async with started(config, *more) as second:
            await ready(second, "n1", "n2")
            found = await nodes_of(second)
            assert found["n0"]["state"] == "draining" and "an operator drained it" in found["n0"]["reason"]
            assert [found[name]["role"] for name in ("n1", "n2")] == ["decode", "mixed"]
            assert second.logged("state_restored") and second.logged("drained=n0")
            assert 0 not in await served_by(second, nodes)
            await call(second, "POST", "nodes/n0/undrain")
            await call(second, "POST", "nodes/n1/role", {"role": "mixed"})
            await call(second, "DELETE", "nodes/n2")
            await kill(second)
        async with started(config, *more) as third:
            await ready(third, "n0", "n1")
            assert set(await nodes_of(third)) == {"n0", "n1"}
            assert await served_by(third, nodes) == {0, 1}
            assert json.loads((tmp_path / "state" / FILE).read_text())["nodes"] == []


async def test_without_a_directory_the_log_says_once_that_changes_will_be_lost(tmp_path: Path) -> None:
    async with engines(1) as nodes:
        config = write_config(tmp_path, f'url = "{nodes[0].url}"\nname = "n0"', state="directory = ''")
        for arguments in ((), ("--edges", "2")):
            async with started(config, *arguments) as process:
                await ready(process, "n0")
                assert not process.logged("changes_not_kept")
                for action in ("drain", "undrain", "drain"):
                    answer = await call(process, "POST", f"nodes/n0/{action}")
                    assert answer["survives_restart"] == (action == "undrain"), "the file lists it, undrained"
                await until(lambda process=process: process.logged("changes_not_kept"))
                assert sum("changes_not_kept" in line for line in process.lines) == 1


async def test_the_file_wins_for_nodes_that_it_lists_except_over_a_drain(tmp_path: Path) -> None:
    async with engines(4) as nodes:
        config = write_config(tmp_path, f'url = "{nodes[0].url}"\nname = "stated"\nrole = "prefill"')
        async with started(config) as first:
            await all_up(first, "stated")
            for at, name in ((1, "same-name"), (2, "same-address"), (3, "only-added")):
                await call(first, "POST", "nodes", {"url": nodes[at].url, "name": name}, 201)
            await all_up(first, "same-name", "same-address", "only-added")
            role = await call(first, "POST", "nodes/stated/role", {"role": "decode"})
            assert not role["survives_restart"], "the file states another one"
            await call(first, "POST", "nodes/stated/drain")
            await call(first, "POST", "nodes/same-name/drain")
            removed = await call(first, "DELETE", "nodes/stated")
            assert not removed["survives_restart"], "the file lists it"
            await call(first, "POST", "nodes", {"url": nodes[0].url, "name": "stated"}, 201)
            await call(first, "POST", "nodes/stated/drain")
            await kill(first)
        write_config(
            tmp_path,
            f'url = "{nodes[0].url}"\nname = "stated"\nrole = "prefill"',
            f'url = "{nodes[1].url}/"\nname = "same-name"\ngpu = "of-the-file"',
            f'url = "{nodes[2].url}"\nname = "other-name"',
        )
        async with started(config) as second:
            await all_up(second, "other-name", "only-added")
            found = await nodes_of(second)
            assert set(found) == {"stated", "same-name", "other-name", "only-added"}
            assert second.logged("node_change_failed") and second.logged("are the same engine")
            assert found["stated"]["role"] == "prefill" and found["stated"]["state"] == "draining"
            assert found["same-name"]["state"] == "draining"
            await call(second, "POST", "nodes/only-added/drain")
            # the file does not list it any more: it is gone, since the file has replaced what the operator added
            write_config(tmp_path, f'url = "{nodes[0].url}"\nname = "stated"')
            second.signal(signal.SIGHUP)
            await until(lambda: second.logged("config_reloaded"))
            assert set(await nodes_of(second)) == {"stated", "only-added"}
            await kill(second)
        async with started(config) as third:
            assert set(await nodes_of(third)) == {"stated", "only-added"}


async def test_a_drain_by_hand_outlives_a_reload_and_a_new_address() -> None:
    async with engines(2) as nodes, router(nodes[0]) as running:
        service = running.service
        assert (await running.admin("POST", "/admin/nodes/node0/drain")).status == 200
        table = quick_table([{"url": nodes[1].url}])
        service.config_reload.read_config = lambda: from_table(table, experiment=True)
        assert service.reload() is None
        assert running.node(0).url == nodes[1].url and running.node(0).draining
        table = quick_table([])
        assert service.reload() is None and not len(service.fleet)
        table = quick_table([{"url": nodes[1].url}])
        assert service.reload() is None and running.node(0).draining
        assert (await running.admin("POST", "/admin/nodes/node0/undrain")).status == 200
        assert not running.node(0).draining


NODE = {"name": "n9", "url": "http://127.0.0.1:9"}


def entry(**more: Any) -> bytes:
    return json.dumps({"format": 1, "nodes": [{"name": "n0", "version": 5, "drained": True, **more}]}).encode()


def contents() -> dict[str, bytes]:
    return {
        "garbage": bytes(Random(7).randbytes(5000)),
        "empty": b"",
        "cut off": entry()[:-9],
        "not a table": b"[]",
        "deep": b'{"format":1,"nodes":' + b"[" * 100_000,
        "deep node": b'{"format":1,"nodes":[{"name":"n","version":1,"node":' + b'{"a":' * 100_000,
        "another format": b'{"format":2,"nodes":[]}',
        "no version": b'{"format":1,"nodes":[{"name":"n0"}]}',
        "negative version": entry(version=-1),
        "huge version": entry(version=1 << 60),
        "long name": entry(name="x" * 600),
        "unknown role": entry(role="king"),
        "lone surrogate": entry(name="x").replace(b'"x"', b'"\\ud800"'),
        "not UTF-8": entry(name="x").replace(b'"x"', b'"\xff"'),
        "too many": b'{"format":1,"nodes":[' + b",".join([b'{"name":"a","version":1}'] * 5000) + b"]}",
        "too large": b" " * (MAX_FILE_BYTES + 1),
    }


@pytest.mark.parametrize("content", contents().values(), ids=contents().keys())
async def test_a_file_that_cannot_be_read_is_moved_aside_and_logged_once(tmp_path: Path, content: bytes) -> None:
    await check_rejected(tmp_path, lambda file: file.write_bytes(content))


def make_pipe(file: Path) -> None:
    os.mkfifo(file)


def make_folder(file: Path) -> None:
    file.mkdir()
    (file / "something").touch()


def make_link(file: Path) -> None:
    file.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [make_pipe, make_folder, make_link])
async def test_what_is_no_file_is_moved_aside(tmp_path: Path, make: Callable[[Path], None]) -> None:
    await check_rejected(tmp_path, make)


async def check_rejected(folder: Path, make: Callable[[Path], object]) -> None:
    (folder / "state").mkdir()
    file = folder / "state" / FILE
    make(file)
    lines: list[str] = []
    async with engines(1) as nodes, kept(folder, nodes, lines) as running:
        assert sum("state_rejected" in line for line in lines) == 1, lines
        assert os.listdir(folder / "state") == [f"{FILE}.bad"]
        assert not running.node(0).draining
        answer = await running.admin("POST", "/admin/nodes/node0/drain")
        assert answer.json["survives_restart"], answer.json
    async with engines(1) as nodes, kept(folder, nodes, lines) as running:
        assert running.node(0).draining
        assert sum("state_rejected" in line for line in lines) == 1


def replica(nodes: list[ScriptedEngine], **state: str) -> AbstractAsyncContextManager[RunningRouter]:
    """A router beside others of the same nodes."""
    return router(*nodes, wait=False, health_checks_hang=True, state=state)


@asynccontextmanager
async def kept(folder: Path, nodes: list[ScriptedEngine], lines: list[str]) -> AsyncIterator[RunningRouter]:
    """A router in this process that keeps its state in the folder. `lines` gets what it logs."""

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler, logger = Lines(), logging.getLogger("warmroute")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        async with replica(nodes, directory=str(folder / "state")) as running:
            yield running
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


async def test_one_bad_node_does_not_lose_the_others(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    file = tmp_path / "state" / FILE
    bad = [
        {"name": "n1", "version": 1, "node": {"url": "ftp://x", "name": "n1"}},
        {"name": "n2", "version": 1, "node": {"url": "http://127.0.0.1:1", "name": "other"}},
        {"name": "n3", "version": 1, "node": {"url": "http://127.0.0.1:1", "name": "n3", "of_the_future": 1}},
        {"name": "n4", "version": 1, "node": {"url": "http://127.0.0.1:1", "name": "n4", "gpu": "x" * MAX_NODE_BYTES}},
    ]
    good = [{"name": "node0", "version": 1, "drained": True}, {"name": "n9", "version": 1, "node": NODE}]
    before = json.dumps({"format": 1, "nodes": [*bad, *good]})
    file.write_text(before)
    lines: list[str] = []
    async with engines(1) as nodes, kept(tmp_path, nodes, lines) as running:
        assert running.node(0).draining
        assert {node.name for node in running.service.fleet} == {"node0", "n9"}
        assert sum("state_rejected" in line for line in lines) == 1
        assert file.with_name(f"{FILE}.bad").read_text() == before
        await running.service.node_state.all_kept()
    assert {one["name"] for one in json.loads(file.read_text())["nodes"]} == {"node0", "n9"}


async def test_a_router_that_is_killed_at_any_moment_keeps_what_it_confirmed(tmp_path: Path) -> None:
    """The kill comes while changes are written. What was confirmed before holds, and the file can always be read."""
    random = Random(3)
    tables = [f'url = "http://127.0.0.1:{port}"\nname = "n{port}"' for port in range(1, 5)]
    config = write_config(tmp_path, *tables)
    drained: dict[str, bool] = {}
    for _ in range(6):
        async with started(config) as process:
            found = await nodes_of(process)
            assert not process.logged("state_rejected"), process.lines
            assert all((found[name]["state"] == "draining") == wanted for name, wanted in drained.items())
            open_: dict[str, bool] = {}

            async def change(process: ServeProcess = process, open_: dict[str, bool] = open_) -> None:
                while True:
                    name, wanted = f"n{random.randrange(1, 5)}", random.random() < 0.5
                    open_[name] = wanted
                    answer = await call(process, "POST", f"nodes/{name}/{'drain' if wanted else 'undrain'}")
                    assert answer["survives_restart"]
                    drained[name] = open_.pop(name)

            changing = asyncio.ensure_future(change())
            await asyncio.sleep(random.uniform(0.05, 0.3))
            process.signal(signal.SIGKILL)
            await process.process.wait()
            with pytest.raises(Exception):  # noqa: B017  whatever a lost connection raises
                await changing
            for name in open_:  # not confirmed: it may hold or not
                drained.pop(name, None)
    assert drained


async def test_a_directory_that_cannot_be_written_is_logged_once_and_tried_again(tmp_path: Path) -> None:
    lines: list[str] = []
    (tmp_path / "state").write_text("a file, where the directory should be")
    async with engines(1) as nodes, kept(tmp_path, nodes, lines) as running:
        for action in ("drain", "undrain", "drain"):
            answer = await running.admin("POST", f"/admin/nodes/node0/{action}")
            assert answer.status == 200 and not answer.json["survives_restart"]
        assert sum("state_not_read" in line or "state_not_kept" in line for line in lines) == 1, lines
        (tmp_path / "state").unlink()
        await until(lambda: any("state_kept" in line for line in lines))
        answer = await running.admin("POST", "/admin/nodes/node0/drain")
        assert answer.json["survives_restart"]
    assert json.loads((tmp_path / "state" / FILE).read_text())["nodes"][0]["drained"]


async def test_the_admin_api_does_not_wait_for_a_disk_that_hangs(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    lines: list[str] = []
    async with engines(1) as nodes, kept(tmp_path, nodes, lines) as running:
        directory = os.open(tmp_path / "state", os.O_RDONLY)  # another process that writes, and does not go on
        fcntl.flock(directory, fcntl.LOCK_EX)
        async with asyncio.timeout(5):
            answer = await running.admin("POST", "/admin/nodes/node0/drain")
        assert answer.status == 200 and not answer.json["survives_restart"]
        os.close(directory)
        await until(lambda: any("state_kept" in line for line in lines))
        assert await running.service.node_state.all_kept()


async def test_routers_that_overlap_in_an_update_lose_nothing(tmp_path: Path) -> None:
    lines: list[str] = []
    async with engines(2) as nodes, kept(tmp_path, nodes, lines) as old:
        await old.admin("POST", "/admin/nodes/node0/drain")
        async with kept(tmp_path, nodes, lines) as new:
            assert new.node(0).draining
            await new.admin("POST", "/admin/nodes/node1/drain")
            await old.admin("POST", "/admin/nodes", json.dumps(NODE).encode())
    async with engines(2) as nodes, kept(tmp_path, nodes, lines) as next_one:
        assert next_one.node(0).draining and next_one.node(1).draining
        assert next_one.service.fleet.find("n9") is not None


async def test_what_the_autoscaler_does_is_not_kept(tmp_path: Path) -> None:
    lines: list[str] = []
    async with engines(3) as nodes, kept(tmp_path, nodes[:2], lines) as running:
        shared = running.service.shared_nodes
        shared.add_node(NodeConfig(url=nodes[2].url, name="machine"))
        shared.drain("machine", True)
        shared.set_role("node0", "decode")
        shared.set_role_by_hand("node1", "decode")
        await running.admin("POST", "/admin/nodes/machine/drain")
        assert await running.service.node_state.all_kept()
    stored = {one.pop("name"): one for one in json.loads((tmp_path / "state" / FILE).read_text())["nodes"]}
    assert {name: set(one) & {"node", "drained", "role"} for name, one in stored.items()} == {
        "machine": {"drained"}, "node1": {"role"},
    }  # fmt: skip
    async with router(*({"url": node.url} for node in nodes[:2]), wait=False) as running:
        shared = running.service.shared_nodes
        shared.add_node(NodeConfig(url=nodes[2].url, name="machine"))
        shared.set_role("node0", "decode")
        shared.drain("node1", True)
        assert not running.service.node_state._warned, "no operator did anything"


async def test_a_config_map_keeps_the_state_of_replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster(tmp_path)
    monkeypatch.setenv("KUBECONFIG", cluster.kubeconfig("router"))
    cluster.request("POST", "/api/v1/namespaces/default/configmaps", {"metadata": {"name": "changes"}})
    path = "/api/v1/namespaces/default/configmaps/changes"
    try:
        async with engines(2) as nodes:
            async with replica(nodes, config_map="changes") as a, replica(nodes, config_map="changes") as b:
                answers = await asyncio.gather(
                    a.admin("POST", "/admin/nodes/node0/drain"), b.admin("POST", "/admin/nodes/node1/drain")
                )
                assert all(answer.json["survives_restart"] for answer in answers)
            async with replica(nodes, config_map="changes") as c:
                assert c.node(0).draining and c.node(1).draining
                cluster.fails_with = 503
                await c.admin("POST", "/admin/nodes/node0/undrain")
                cluster.fails_with = 0
            cluster.request("PATCH", path, {"data": {FILE: "garbage"}}, "application/merge-patch+json")
            async with replica(nodes, config_map="changes") as d:
                assert not d.node(0).draining and not d.node(1).draining
                assert cluster.request("GET", path)["data"] == {FILE: "", f"{FILE}.bad": "garbage"}
    finally:
        cluster.close()


async def test_the_state_arrives_after_a_start_without_the_api_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = FakeCluster(tmp_path)
    monkeypatch.setenv("KUBECONFIG", cluster.kubeconfig("router"))
    try:
        async with engines(3) as nodes, replica(nodes, config_map="changes") as running:
            await running.admin("POST", "/admin/nodes/node1/drain")  # the ConfigMap does not exist yet
            stored = [{"name": f"node{at}", "version": 5, "drained": at != 1} for at in range(2)]
            data = {FILE: json.dumps({"format": 1, "nodes": stored})}
            body = {"metadata": {"name": "changes"}, "data": data}
            cluster.request("POST", "/api/v1/namespaces/default/configmaps", body)
            await until(lambda: running.node(0).draining)
            assert running.node(1).draining, "what an operator did since the start is later"
            await until(lambda: running.service.node_state._written)
            found = cluster.request("GET", "/api/v1/namespaces/default/configmaps/changes")["data"][FILE]
            assert [one["name"] for one in json.loads(found)["nodes"] if one.get("drained")] == ["node0", "node1"]
    finally:
        cluster.close()


def test_one_place_for_the_state() -> None:
    with pytest.raises(ConfigError, match=r"state\.directory and state\.config_map"):
        from_table({"state": {"directory": "/x", "config_map": "y"}})
    assert Config().state.directory == ""
