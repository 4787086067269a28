"""Replicas of the router that share their state through a real Redis server."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.engine_scripts import DONE, SSE_HEAD, chunk, normal, script, sse_event
from support.polling import until
from support.raw_client import post
from support.redis_server import RedisServer, needs_redis, redis_server
from support.running_router import RunningRouter, router
from support.scripted_engine import ScriptedEngine, engines

pytestmark = needs_redis


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as server:
        yield server


@asynccontextmanager
async def replicas(
    server: RedisServer, nodes: list[ScriptedEngine], count: int = 2, **tables: Any
) -> AsyncIterator[list[RunningRouter]]:
    """Run several replicas in this process, and wait until they hear each other."""
    async with AsyncExitStack() as stack:
        found: list[RunningRouter] = []
        for _ in range(count):
            found += [await stack.enter_async_context(replica(server, nodes, **tables))]
        await until(lambda: all(len(peers(one)) == count - 1 for one in found), "they hear each other")
        yield found


def replica(
    server: RedisServer, nodes: list[ScriptedEngine], wait: bool | int = True, **tables: Any
) -> AbstractAsyncContextManager[RunningRouter]:
    return router(*nodes, wait=wait, check_leaks=False, cluster={"url": server.url}, **tables)


def peers(router: RunningRouter) -> list[str]:
    member = router.service.member
    assert member is not None
    return list(member.state.peers)


async def cluster(router: RunningRouter) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((await router.admin("GET", "/admin/cluster")).body)
    return found


async def metric(router: RunningRouter, name: str) -> float:
    page = (await router.admin("GET", "/metrics")).body.decode()
    return sum(float(line.split()[-1]) for line in page.splitlines() if re.match(rf"{name}[ {{]", line))


async def test_replicas_count_each_others_requests_and_know_each_others_changes_of_nodes(server: RedisServer) -> None:
    async with engines(3) as nodes, replicas(server, nodes[:2]) as [a, b]:
        release = asyncio.Event()
        nodes[0].behave = nodes[1].behave = script(SSE_HEAD, chunk(sse_event(0)), release, DONE)
        stream = await a.connect()
        stream.write(post(headers=["Connection: close"]))
        assert (await stream.head()).status == 200
        await until(lambda: sum(node.inflight for node in b.service.fleet) == 1, "b counts the request of a")
        release.set()
        await stream.rest()
        nodes[0].behave = nodes[1].behave = normal()
        await until(lambda: not any(node.inflight for node in b.service.fleet))

        drained = json.loads((await a.admin("POST", "/admin/nodes/node0/drain")).body)
        assert b.service.fleet.node("node0").draining  # the reply comes once the other replica knows
        assert drained["replicas"] == {"connected": True, "confirmed": 1, "unconfirmed": []}
        before = len(nodes[0].seen)
        for router in (a, b):
            for _ in range(4):
                assert (await router.request()).status == 200
        assert len(nodes[0].seen) == before

        new = json.dumps({"url": nodes[2].url, "name": "new", "island": "eu"}).encode()
        assert (await b.admin("POST", "/admin/nodes", new)).status == 201
        await until(lambda: "new" in {node.name for node in a.service.fleet})
        assert a.service.fleet.node("new").config.island == "eu"
        assert (await a.admin("DELETE", "/admin/nodes/node1")).status == 200
        await until(lambda: "node1" not in {node.name for node in b.service.fleet})

        async with replica(server, nodes[:2], wait=False) as late:
            await until(lambda: {node.name for node in late.service.fleet} == {"node0", "new"}, "it gets all changes")
            assert late.service.fleet.node("node0").draining
            assert (await late.admin("POST", "/admin/nodes/node0/undrain")).status == 200
            await until(lambda: not any(one.service.fleet.node("node0").draining for one in (a, b)))
        await until(lambda: len(peers(a)) == 1, "the late one said goodbye")
        assert len((await cluster(a))["node_changes"]) == 3


async def test_changes_of_nodes_outlive_all_replicas_and_a_flushed_server(server: RedisServer) -> None:
    async with engines(2) as nodes:
        async with replicas(server, nodes, 1) as [a]:
            assert (await a.admin("POST", "/admin/nodes/node0/drain")).status == 200
            await until(lambda: server.command("HLEN", "warmroute:nodes") == 1)
            server.command("FLUSHALL")
            await until(lambda: server.command("HLEN", "warmroute:nodes") == 1, "it is stored again")
        async with replicas(server, nodes, 1) as [b]:
            await until(lambda: b.service.fleet.node("node0").draining)


async def test_without_the_server_replicas_go_on_alone_and_come_back_by_themselves(server: RedisServer) -> None:
    async with engines() as nodes, replicas(server, nodes) as [a, b]:
        assert await metric(a, "warmroute_cluster_connected") == await metric(a, "warmroute_cluster_writable") == 1
        server.signal(signal.SIGSTOP)
        member = a.service.member
        assert member is not None
        await until(lambda: not (status := member.read_status()) or not status.connected, "a notices it")
        began_s = time.monotonic()
        for router in (a, b):
            assert (await router.request()).status == 200
            assert (await router.admin("GET", "/ready")).status == 200
        assert time.monotonic() - began_s < 5.0
        await until(lambda: not peers(a))
        assert await metric(a, "warmroute_cluster_connected") == 0
        assert await metric(a, "warmroute_cluster_limit_fraction") == 0.5
        found = await cluster(a)
        assert not found["redis"]["connected"] and found["redis"]["reason"]
        a.service.alerts.update(time.monotonic())
        a.service.alerts.update(time.monotonic() + 3.0)
        assert any(alert.id == "cluster_disconnected" for alert in a.service.alerts.current)

        server.kill()
        assert (await a.request()).status == 200
        server.start()
        await until(lambda: len(peers(a)) == len(peers(b)) == 1, "they hear each other again")
        await until(lambda: (limits := member.state.shared_limits) is not None and limits.fraction == 1.0)
        server.command("CONFIG", "SET", "maxmemory", "1")
        await until(lambda: (status := member.read_status()) is not None and not status.writable, "it is full")
        assert (await a.request()).status == 200
        await until(lambda: len(peers(a)) == 1, "messages still pass")
        server.command("CONFIG", "SET", "maxmemory", "0")
        await until(lambda: (status := member.read_status()) is not None and status.writable)
