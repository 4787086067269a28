"""`serve --workers` beside another replica: the parent passes messages on, each of them once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

from support.engine_scripts import DONE, SSE_HEAD, chunk, normal, script, sse_event
from support.polling import until
from support.raw_client import post
from support.redis_server import needs_redis, redis_server
from support.running_router import router
from support.scripted_engine import engines
from support.serve_process import ServeProcess, serve
from test_workers import PATIENCE_S, admin, all_serve, metric, until_known

pytestmark = needs_redis


async def eventually(read: Callable[[], Awaitable[object]], expected: object) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await read() != expected:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def node_states(workers: ServeProcess) -> dict[str, str]:
    nodes = json.loads((await admin(workers, "/admin/nodes"))[1])["nodes"]
    return {node["name"]: node["state"] for node in nodes}


async def test_workers_and_another_replica_share_their_state(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        file = tmp_path / "router.toml"
        async with engines(2) as nodes:
            tables = "".join(f'[[nodes]]\nurl = "{node.url}"\nname = "node{at}"\n' for at, node in enumerate(nodes))
            file.write_text(f'[routing]\npolicy = "least_loaded"\n[cluster]\nurl = "{server.url}"\n{tables}')
            async with (
                serve("--config", file, "--workers", "2", "--port", "0", "--admin-port", "0") as workers,
                router(*nodes, check_leaks=False, cluster={"url": server.url}) as replica,
            ):
                await all_serve(workers, 2)
                member = replica.service.member
                assert member is not None
                await until(lambda: len(member.state.peers) == 2, "it hears both workers", PATIENCE_S)

                release = asyncio.Event()
                nodes[0].behave = nodes[1].behave = script(SSE_HEAD, chunk(sse_event(0)), release, DONE)
                streams = [await workers.connect() for _ in range(4)]
                for one in streams:
                    one.write(post(headers=["Connection: close"]))
                    assert (await one.head()).status == 200
                await until(lambda: sum(node.inflight for node in replica.service.fleet) == 4, "", PATIENCE_S)
                own = await replica.connect()
                own.write(post(headers=["Connection: close"]))
                assert (await own.head()).status == 200
                await until_known(workers, 5)
                release.set()
                for one in (*streams, own):
                    await one.rest()
                await until_known(workers, 0)
                nodes[0].behave = nodes[1].behave = normal()

                assert (await admin(workers, "/admin/nodes/node0/drain", "POST"))[0] == 200
                await until(lambda: replica.service.fleet.node("node0").draining, "", PATIENCE_S)
                assert (await replica.admin("POST", "/admin/nodes/node0/undrain")).status == 200
                assert (await replica.admin("POST", "/admin/nodes/node1/drain")).status == 200
                expected = {"node0": "up", "node1": "draining"}
                await eventually(lambda: node_states(workers), expected)
                seen = len(nodes[1].seen)
                for _ in range(6):
                    assert (await workers.request()).status == 200
                assert len(nodes[1].seen) == seen

                found = json.loads((await admin(workers, "/admin/cluster"))[1])
                assert found["redis"]["connected"] and len(found["peers"]) == 2
                assert await metric(workers, "warmroute_cluster_connected") == 1
                lost = [peer.lost for peer in member.state.peers.values()]
                assert lost == [0, 0] and member.state.rejected == 0  # no message arrived twice
                server.kill()
                await eventually(lambda: metric(workers, "warmroute_cluster_connected"), 0.0)
                assert (await workers.request()).status == 200
                assert (await admin(workers, "/ready"))[0] == 200
                changed = json.loads((await admin(workers, "/admin/nodes/node0/drain", "POST"))[1])["replicas"]
                assert not changed["connected"] and changed["confirmed"] == 1  # by the other worker
