"""Replicas that find their nodes by discovery, and whose fleet KEDA scales."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from support.polling import until
from support.redis_server import needs_redis, redis_server
from support.scripted_engine import ScriptedEngine, engines
from test_redis_replicas import replicas

pytestmark = needs_redis


def write_targets(path: Path, *engines: ScriptedEngine) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps([{"targets": [f"{engine.host}:{engine.port}" for engine in engines]}]))
    new.rename(path)


async def test_every_replica_computes_the_number_that_keda_reads(tmp_path: Path) -> None:
    scaling = {"enabled": True, "min_nodes": 3, "interval_s": 0.1}
    with redis_server(tmp_path) as server:
        async with engines(1) as nodes, replicas(server, nodes, scaling=scaling) as routers:
            for router in routers:
                found = router.service.scaling
                assert found is not None
                await until(lambda found=found: found.autoscaler.desired_nodes == 3, "the desired number")


async def test_discovered_nodes_join_and_leave_at_every_replica(tmp_path: Path) -> None:
    path = tmp_path / "targets.json"
    with redis_server(tmp_path) as server:
        async with engines(3) as pool:
            write_targets(path, *pool[:2])
            source = {"kind": "file", "file": str(path)}
            async with replicas(server, [], discovery=[source]) as routers:
                fleets = [router.service.fleet for router in routers]
                await until(lambda: [len(fleet) for fleet in fleets] == [2, 2])
                write_targets(path, *pool)
                await until(lambda: [len(fleet) for fleet in fleets] == [3, 3])
                write_targets(path, pool[2])
                await until(lambda: [[node.url for node in fleet] for fleet in fleets] == [[pool[2].url]] * 2, "", 15)
                write_targets(path, pool[2], pool[0])
                await until(lambda: [len(fleet) for fleet in fleets] == [2, 2], "it came back", 15)
                await asyncio.sleep(1)
                assert [len(fleet) for fleet in fleets] == [2, 2]
                for router in routers:
                    assert (await router.request()).status == 200
