"""From a real engine process's KV events to hits: `warmroute engine`, real sockets, the whole node watcher."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from kv_event_factory import hit, lookup, prompt
from support.engine_processes import FakeEngine, StartEngine
from support.polling import until

from warmroute.config import from_table
from warmroute.core.cache_view import CacheView
from warmroute.core.fleet import Fleet
from warmroute.core.node import Node
from warmroute.core.node_cache import NodeCache
from warmroute.engines.node_watcher import NodeWatcher
from warmroute.lab.demo.processes import free_port

MODEL = "sim"


async def request(node: Node, path: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(node.host, node.port)
        try:
            method = b"GET" if body is None else b"POST"
            head = b"%b %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
            writer.write(head % (method, path.encode(), len(body or b"")) + (body or b""))
            head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.close()
    if not head:
        raise ConnectionError("no answer")
    return int(head.split(b" ")[1]), rest


class WatchedFleet:
    def __init__(self, *nodes: dict[str, Any]) -> None:
        table = {
            "health": {"interval_s": 0.05, "timeout_s": 1.0, "breaker_open_s": 0.05},
            "polling": {"interval_s": 0.1},
            "nodes": list(nodes),
        }
        self.config = from_table(table, experiment=True)
        self.fleet = Fleet(self.config.health)
        self.cache_view = CacheView(self.config.index)
        self.requested: list[str] = []
        self.watcher = NodeWatcher(
            self.fleet, self.config, self._get, lambda _node: -1e9, cache_view=self.cache_view, post=self._post
        )

    async def _get(self, node: Node, path: str, timeout_s: float) -> tuple[int, bytes]:
        self.requested.append(path)
        return await request(node, path, None, timeout_s)

    async def _post(self, node: Node, path: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        return await request(node, path, body, timeout_s)

    def start(self) -> None:
        for node in self.fleet.reconfigure(self.config.nodes, self.config.health)[0]:
            self.watcher.watch(node)

    def cache(self, number: int = 0) -> NodeCache:
        found = self.cache_view.cache(f"node{number}")
        assert found is not None
        return found

    def node(self, number: int = 0) -> Node:
        return self.fleet.node(f"node{number}")

    def hit(self, tokens: Sequence[int], number: int = 0, model: str = MODEL, salt: str = "") -> int:
        return hit(self.cache_view, tokens, model, salt, f"node{number}")

    async def until_subscribed(self, number: int = 0, ranks: int = 1) -> None:
        await until(lambda: len(self.cache(number).ranks) == ranks, "events subscribed")
        await until(lambda: self.node(number).incarnation, "metrics read")


@asynccontextmanager
async def watching(*nodes: FakeEngine | dict[str, Any], **more: Any) -> AsyncIterator[WatchedFleet]:
    listed = [
        {"name": f"node{number}", **(node if isinstance(node, dict) else {"url": node.url}), **more}
        for number, node in enumerate(nodes)
    ]
    fleet = WatchedFleet(*listed)
    fleet.start()
    try:
        yield fleet
    finally:
        fleet.watcher.close()


async def complete(engine: FakeEngine, tokens: list[int], rank: int | None = None, **more: Any) -> None:
    """Request a completion with one more token than the blocks, since the last one is always computed."""
    headers: dict[str, Any] = {} if rank is None else {"X_data_parallel_rank": str(rank)}
    body = {"prompt": [*tokens, 7], "max_tokens": 1, **more}
    status, answer = await asyncio.to_thread(engine.request, "/v1/completions", body, **headers)
    assert status == 200, answer


def without_replay(engine: FakeEngine) -> dict[str, Any]:
    return {"url": engine.url, "kv_events": f"tcp://127.0.0.1:{engine.event_ports[0]}"}


async def test_prefilled_prompts_are_hits(start_engine: StartEngine) -> None:
    engine = start_engine()
    await complete(engine, prompt(0))
    async with watching(engine) as r:
        await until(lambda: r.hit(prompt(0)) == 64, "earlier events, by replay")
        await complete(engine, prompt(1))
        await until(lambda: r.hit(prompt(1)) == 64, "live events")
        cache = r.cache()
        assert cache.complete and cache.gaps == 0 and cache.model == MODEL and cache.block_size == 16
        await until(lambda: cache.capacity_blocks == 1000)
        assert cache.last_contact_s > 0 and cache.event_lag_s < 1.0
        assert r.hit(prompt(2)) == 0


async def test_evicted_blocks_are_no_hits(start_engine: StartEngine) -> None:
    engine = start_engine(blocks=9)
    async with watching(engine) as r:
        await r.until_subscribed()
        await complete(engine, prompt(1))
        await until(lambda: r.hit(prompt(1)) == 64)
        for seed in range(2, 5):
            await complete(engine, prompt(seed))
        await until(lambda: r.hit(prompt(4)) == 64 and r.hit(prompt(1)) == 0)
        assert r.cache_view.index.pair_count(r.cache().ranks[0]) <= 8


async def test_salted_prompts_and_adapters_match_only_themselves(start_engine: StartEngine) -> None:
    engine = start_engine("--lora", "ad1")
    async with watching(engine) as r:
        await complete(engine, prompt(1), cache_salt="s")
        await complete(engine, prompt(1) + prompt(2), cache_salt="s")
        await complete(engine, prompt(3), model="ad1")
        await until(lambda: r.hit(prompt(1) + prompt(2), salt="s") == 128, "the second turn of a salted conversation")
        await until(lambda: r.hit(prompt(3), model="ad1") == 64)
        assert r.hit(prompt(1)) == r.hit(prompt(3)) == r.hit(prompt(1), salt="other") == 0


async def test_lost_events_are_replayed_within_a_second_of_the_next_one(start_engine: StartEngine) -> None:
    engine = start_engine()
    async with watching(engine) as r:
        await r.until_subscribed()
        await complete(engine, prompt(0))
        await until(lambda: r.hit(prompt(0)) == 64)
        engine.fail("drop_events", share=1)
        for seed in (1, 2):
            await complete(engine, prompt(seed))
        engine.fail("none")
        await complete(engine, prompt(3))
        await until(lambda: [r.hit(prompt(seed)) for seed in range(4)] == [64] * 4, "all events", patience_s=1.0)
        assert r.cache().complete and r.cache().gaps == 0


async def test_lost_events_without_replay_forget_the_cache(start_engine: StartEngine) -> None:
    engine = start_engine()
    async with watching(without_replay(engine)) as r:
        await r.until_subscribed()
        await asyncio.sleep(0.3)  # a subscription takes a moment to arrive
        await complete(engine, prompt(0))
        await until(lambda: r.hit(prompt(0)) == 64)
        assert r.cache().complete, "the events were read from the first one on"
        engine.fail("drop_events", share=1)
        await complete(engine, prompt(1))
        engine.fail("none")
        await complete(engine, prompt(2))
        await until(lambda: [r.hit(prompt(seed)) for seed in range(3)] == [0, 0, 64])
        assert not r.cache().complete and r.cache().gaps == 1
        assert (await asyncio.to_thread(engine.request, "/reset_prefix_cache", b"", "POST"))[0] == 200
        await complete(engine, prompt(3))
        await until(lambda: r.cache().complete, "complete again after the reset")
        assert [r.hit(prompt(seed)) for seed in range(4)] == [0, 0, 0, 64]


async def test_a_reset_prefix_cache_is_empty(start_engine: StartEngine) -> None:
    engine = start_engine()
    async with watching(engine) as r:
        await complete(engine, prompt(1))
        await until(lambda: r.hit(prompt(1)) == 64)
        await asyncio.to_thread(engine.request, "/reset_prefix_cache", b"", "POST")
        await complete(engine, prompt(2))
        await until(lambda: r.hit(prompt(2)) == 64 and r.hit(prompt(1)) == 0)


@pytest.mark.parametrize("replays", [True, False])
async def test_a_restart_empties_the_cache_before_the_first_event(start_engine: StartEngine, replays: bool) -> None:
    engine = start_engine()
    async with watching(engine if replays else without_replay(engine)) as r:
        await r.until_subscribed()
        await asyncio.sleep(0.3)
        for seed in range(3):
            await complete(engine, prompt(seed))
        await until(lambda: r.hit(prompt(2)) == 64)
        engine.fail("restart")
        await until(
            lambda: not any(r.hit(prompt(seed)) for seed in range(3)), "the metrics show the restart", patience_s=2.0
        )
        await complete(engine, prompt(5))
        await until(lambda: r.hit(prompt(5)) == 64)
        assert r.cache().complete and r.hit(prompt(0)) == 0
        before = r.node().incarnation
        engine.fail("restart")
        await complete(engine, prompt(6))
        await until(lambda: r.node().incarnation != before and r.hit(prompt(6)) == 64 and r.hit(prompt(5)) == 0)
        await asyncio.sleep(0.3)
        assert r.hit(prompt(6)) == 64 and r.cache().complete, "the first event had shown the restart before the metrics"


async def test_a_killed_process_is_subscribed_again_after_its_restart(start_engine: StartEngine) -> None:
    ports = [free_port(23_600 + 20 * number) for number in range(3)]
    flags = ("--port", str(ports[0]), "--events-port", str(ports[1]), "--replay-port", str(ports[2]))
    engine = start_engine(*flags)
    async with watching(engine) as r:
        await r.until_subscribed()
        await complete(engine, prompt(0))
        await until(lambda: r.hit(prompt(0)) == 64)
        engine.child.process.kill()
        engine.child.process.wait()
        await until(lambda: r.node().health.state.value == "down")
        engine = await asyncio.to_thread(start_engine, *flags)
        await complete(engine, prompt(1))
        await until(lambda: r.hit(prompt(1)) == 64 and r.hit(prompt(0)) == 0)
        await complete(engine, prompt(2))
        await until(lambda: r.hit(prompt(2)) == 64 and r.cache().complete)
        assert r.hit(prompt(0)) == 0


async def test_a_removed_node_is_unsubscribed(start_engine: StartEngine) -> None:
    engine = start_engine()
    async with watching(engine) as r:
        await complete(engine, prompt(0))
        await until(lambda: r.hit(prompt(0)) == 64)
        node = r.fleet.remove("node0")
        r.watcher.unwatch(node)
        r.cache_view.remove_node("node0")
        await complete(engine, prompt(1))
        await asyncio.sleep(0.2)
        assert r.cache_view.hits(MODEL, lookup(prompt(0)), 0.0) == {}
        assert node not in r.watcher._kv_clients and list(r.cache_view) == []


async def test_two_ranks_have_two_caches(start_engine: StartEngine) -> None:
    engine = start_engine("--data-parallel-size", "2")
    async with watching(engine) as r:
        await r.until_subscribed(ranks=2)
        await complete(engine, prompt(0), rank=0)
        await complete(engine, prompt(1), rank=1)
        await until(lambda: r.hit(prompt(0)) == r.hit(prompt(1)) == 64)
        ranks = [r.cache_view.hits(MODEL, lookup(prompt(seed)), 0.0)["node0"].rank for seed in (0, 1)]
        assert ranks == [0, 1] and r.cache().complete
        await until(lambda: r.cache().capacity_blocks == 2000)
        engine.fail("restart")
        await until(lambda: r.hit(prompt(0)) == r.hit(prompt(1)) == 0)


async def test_two_block_sizes_in_one_fleet(start_engine: StartEngine) -> None:
    small, large = start_engine(), start_engine("--block-size", "32")
    async with watching(small, large) as r:
        for engine in (small, large):
            await complete(engine, prompt(0, 5))
        await until(lambda: (r.hit(prompt(0, 5), 0), r.hit(prompt(0, 5), 1)) == (80, 64))
        assert (r.cache(0).block_size, r.cache(1).block_size) == (16, 32)
        await asyncio.sleep(0.3)
        assert (r.cache(0).block_size, r.cache(1).block_size) == (16, 32)


async def test_a_node_with_events_off_is_not_asked_for_them(start_engine: StartEngine) -> None:
    engine = start_engine()
    async with watching(engine, kv_events="off") as r:
        await until(lambda: r.node().incarnation)
        await asyncio.sleep(0.5)
        assert not r.cache().has_events and r.cache().block_size == 16
        assert "/kv_event_sources" not in r.requested


async def test_a_policy_without_events_says_nothing_about_the_node(
    start_engine: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "warmroute")
    async with watching(start_engine()) as r:
        await r.until_subscribed()
        r.watcher.reconfigure(from_table({"routing": {"policy": "round_robin"}}, experiment=True))
        await until(lambda: not r.cache().ranks, "events unsubscribed")
        r.watcher.reconfigure(r.config)
        await r.until_subscribed()
        assert "kv_events_absent" not in caplog.text and caplog.text.count("kv_events_found") == 2


# A scripted node, for responses that no simulated engine sends.


class ScriptedNode:
    """Sends scripted responses over a real socket."""

    def __init__(self) -> None:
        self.responses: dict[str, tuple[int, bytes]] = {
            "/health": (200, b""),
            "/v1/models": (200, b'{"data":[{"id":"sim"}]}'),
        }
        self.requested: list[str] = []
        self.bodies: list[bytes] = []

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._respond, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    async def _respond(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        path = head.split(b" ")[1].decode()
        self.requested.append(path)
        if path == "/kv_cache_events":
            status, body = 200, self.bodies.pop(0) if self.bodies else b"[]"
        else:
            status, body = self.responses.get(path, (404, b"{}"))
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))
        writer.close()


async def test_tensorrt_llm_is_polled() -> None:
    from test_trtllm import CREATED, chain

    node = ScriptedNode()
    tokens = prompt(1, 2, 32)
    events = [{"event_id": 0, "data": CREATED}, {"event_id": 1, "data": chain(1, tokens)}]
    node.bodies.append(json.dumps(events).encode())
    async with node.serving() as url, watching({"url": url, "engine": "trtllm"}) as r:
        await until(lambda: r.hit(tokens) == 64)
        node.bodies.append(json.dumps([{"event_id": 2, "data": {"type": "removed", "block_hashes": [2]}}]).encode())
        await until(lambda: r.hit(tokens) == 32)
        assert r.cache().complete and r.cache().last_contact_s > 0


async def test_sglang_endpoints_are_discovered(start_engine: StartEngine) -> None:
    engine = start_engine()
    node = ScriptedNode()
    events = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": engine.event_ports[0], "dp_size": 1}
    flag = json.dumps({"replay_endpoint": f"tcp://*:{engine.replay_ports[0]}"})
    node.responses["/server_info"] = (200, json.dumps({"kv_events": events, "kv_events_config": flag}).encode())
    await complete(engine, prompt(0))
    async with node.serving() as url, watching({"url": url}) as r:
        await until(lambda: r.hit(prompt(0)) == 64)
        node.responses["/server_info"] = (200, b"{}")
        client = r.watcher._kv_clients[r.node()]
        assert client.is_connected
        client.rediscover()
        await until(lambda: not r.cache().has_events, "the subscription ends with its endpoint")
        assert r.hit(prompt(0)) == 0


async def test_discovery_backs_off() -> None:
    node = ScriptedNode()
    async with node.serving() as url, watching({"url": url}) as r:
        await until(lambda: "/server_info" in node.requested)
        await asyncio.sleep(2.0)
        assert node.requested.count("/kv_event_sources") <= 3 and not r.cache().has_events
