"""From a real engine process's KV events to what is believed: `warmroute engine`, real sockets, the whole watcher."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from engine_processes import Engine, StartEngine
from harness import until
from told import hit, lookup, prompt

from warmroute.config import from_table
from warmroute.demo.child_processes import free_port
from warmroute.engines.watch import Watcher
from warmroute.fleet.fleet import Fleet
from warmroute.fleet.node import Node
from warmroute.index.cache_view import CacheView
from warmroute.index.node_cache import NodeCache

MODEL = "sim"


async def ask(node: Node, path: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
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


class Listening:
    def __init__(self, *nodes: dict[str, Any]) -> None:
        table = {
            "health": {"interval_s": 0.05, "timeout_s": 1.0, "open_s": 0.05},
            "metrics": {"interval_s": 0.1, "timeout_s": 1.0},
            "nodes": list(nodes),
        }
        self.config = from_table(table)
        self.fleet = Fleet(self.config.health)
        self.cache_view = CacheView(self.config.index)
        self.asked: list[str] = []
        self.watcher = Watcher(
            self.fleet, self.config, self._get, lambda _node: -1e9, cache_view=self.cache_view, post=self._post
        )

    async def _get(self, node: Node, path: str, timeout_s: float) -> tuple[int, bytes]:
        self.asked.append(path)
        return await ask(node, path, None, timeout_s)

    async def _post(self, node: Node, path: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        return await ask(node, path, body, timeout_s)

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

    async def follows(self, number: int = 0, ranks: int = 1) -> None:
        await until(lambda: len(self.cache(number).ranks) == ranks, "events followed")
        await until(lambda: self.node(number).incarnation, "metrics read")


@asynccontextmanager
async def listening(*nodes: Engine | dict[str, Any], **more: Any) -> AsyncIterator[Listening]:
    listed = [
        {"name": f"node{number}", **(node if isinstance(node, dict) else {"url": node.url}), **more}
        for number, node in enumerate(nodes)
    ]
    made = Listening(*listed)
    made.start()
    try:
        yield made
    finally:
        made.watcher.close()


async def complete(engine: Engine, tokens: list[int], rank: int | None = None, **more: Any) -> None:
    """One token more than the blocks, since the last is always computed."""
    headers = {} if rank is None else {"X_data_parallel_rank": str(rank)}
    body = {"prompt": [*tokens, 7], "max_tokens": 1, **more}
    status, answer = await asyncio.to_thread(engine.ask, "/v1/completions", body, **headers)
    assert status == 200, answer


def without_replay(engine: Engine) -> dict[str, Any]:
    return {"url": engine.url, "kv_events": f"tcp://127.0.0.1:{engine.event_ports[0]}"}


async def test_what_an_engine_prefilled_is_found_by_the_same_prompt(start_engine: StartEngine) -> None:
    engine = start_engine()
    await complete(engine, prompt(0))
    async with listening(engine) as r:
        await until(lambda: r.hit(prompt(0)) == 64, "what was before, by replay")
        await complete(engine, prompt(1))
        await until(lambda: r.hit(prompt(1)) == 64, "what comes, live")
        cache = r.cache()
        assert cache.complete and cache.gaps == 0 and cache.model == MODEL and cache.block_size == 16
        await until(lambda: cache.capacity_blocks == 1000)
        assert cache.heard_s > 0 and cache.lag_s < 1.0
        report = r.watcher.report(r.node())
        assert report is not None and report.capacity_tokens == 16_000
        await until(lambda: r.watcher.report(r.node()).prefix_queries >= 65)  # type: ignore[union-attr]
        assert r.hit(prompt(2)) == 0


async def test_evictions_are_followed(start_engine: StartEngine) -> None:
    engine = start_engine(blocks=9)
    async with listening(engine) as r:
        await r.follows()
        await complete(engine, prompt(1))
        await until(lambda: r.hit(prompt(1)) == 64)
        for seed in range(2, 5):
            await complete(engine, prompt(seed))
        await until(lambda: r.hit(prompt(4)) == 64 and r.hit(prompt(1)) == 0)
        assert r.cache_view.index.pairs_of(r.cache().ranks[0]) <= 8


async def test_salts_and_adapters_are_found_by_those_who_use_them(start_engine: StartEngine) -> None:
    engine = start_engine("--lora", "ad1")
    async with listening(engine) as r:
        await complete(engine, prompt(1), cache_salt="s")
        await complete(engine, prompt(1) + prompt(2), cache_salt="s")
        await complete(engine, prompt(3), model="ad1")
        await until(lambda: r.hit(prompt(1) + prompt(2), salt="s") == 128, "a salted conversation that goes on")
        await until(lambda: r.hit(prompt(3), model="ad1") == 64)
        assert r.hit(prompt(1)) == r.hit(prompt(3)) == r.hit(prompt(1), salt="other") == 0


async def test_a_lost_batch_is_made_up_for_within_a_second_of_the_next(start_engine: StartEngine) -> None:
    engine = start_engine()
    async with listening(engine) as r:
        await r.follows()
        await complete(engine, prompt(0))
        await until(lambda: r.hit(prompt(0)) == 64)
        engine.fail("drop_events", share=1)
        for seed in (1, 2):
            await complete(engine, prompt(seed))
        engine.fail("none")
        await complete(engine, prompt(3))
        await until(lambda: [r.hit(prompt(seed)) for seed in range(4)] == [64] * 4, "all of it", patience_s=1.0)
        assert r.cache().complete and r.cache().gaps == 0


async def test_without_replay_a_loss_is_forgotten_not_wrong(start_engine: StartEngine) -> None:
    engine = start_engine()
    async with listening(without_replay(engine)) as r:
        await r.follows()
        await asyncio.sleep(0.3)  # a subscription takes a moment to arrive
        await complete(engine, prompt(0))
        await until(lambda: r.hit(prompt(0)) == 64)
        assert r.cache().complete, "read from its first message"
        engine.fail("drop_events", share=1)
        await complete(engine, prompt(1))
        engine.fail("none")
        await complete(engine, prompt(2))
        await until(lambda: [r.hit(prompt(seed)) for seed in range(3)] == [0, 0, 64])
        assert not r.cache().complete and r.cache().gaps == 1
        assert (await asyncio.to_thread(engine.ask, "/reset_prefix_cache", b"", "POST"))[0] == 200
        await complete(engine, prompt(3))
        await until(lambda: r.cache().complete, "emptied: known in whole again")
        assert [r.hit(prompt(seed)) for seed in range(4)] == [0, 0, 0, 64]


async def test_an_emptied_cache_is_believed_empty(start_engine: StartEngine) -> None:
    engine = start_engine()
    async with listening(engine) as r:
        await complete(engine, prompt(1))
        await until(lambda: r.hit(prompt(1)) == 64)
        await asyncio.to_thread(engine.ask, "/reset_prefix_cache", b"", "POST")
        await complete(engine, prompt(2))
        await until(lambda: r.hit(prompt(2)) == 64 and r.hit(prompt(1)) == 0)


@pytest.mark.parametrize("replays", [True, False])
async def test_a_restart_in_place_forgets_before_the_first_event_of_the_new_life(
    start_engine: StartEngine, replays: bool
) -> None:
    engine = start_engine()
    async with listening(engine if replays else without_replay(engine)) as r:
        await r.follows()
        await asyncio.sleep(0.3)
        for seed in range(3):
            await complete(engine, prompt(seed))
        await until(lambda: r.hit(prompt(2)) == 64)
        engine.fail("restart")
        await until(lambda: not any(r.hit(prompt(seed)) for seed in range(3)), "told by its metrics", patience_s=2.0)
        await complete(engine, prompt(5))
        await until(lambda: r.hit(prompt(5)) == 64)
        assert r.cache().complete and r.hit(prompt(0)) == 0
        before = r.node().incarnation
        engine.fail("restart")
        await complete(engine, prompt(6))
        await until(lambda: r.node().incarnation != before and r.hit(prompt(6)) == 64 and r.hit(prompt(5)) == 0)
        await asyncio.sleep(0.3)
        assert r.hit(prompt(6)) == 64 and r.cache().complete, "its first event had told it; the metrics come after"


async def test_a_process_killed_and_started_again_is_followed_again(start_engine: StartEngine) -> None:
    ports = [free_port(23_600 + 20 * number) for number in range(3)]
    flags = ("--port", str(ports[0]), "--events-port", str(ports[1]), "--replay-port", str(ports[2]))
    engine = start_engine(*flags)
    async with listening(engine) as r:
        await r.follows()
        await complete(engine, prompt(0))
        await until(lambda: r.hit(prompt(0)) == 64)
        engine.child.process.kill()
        engine.child.process.wait()
        await until(lambda: r.node().health.standing.value == "open")
        engine = await asyncio.to_thread(start_engine, *flags)
        await complete(engine, prompt(1))
        await until(lambda: r.hit(prompt(1)) == 64 and r.hit(prompt(0)) == 0)
        await complete(engine, prompt(2))
        await until(lambda: r.hit(prompt(2)) == 64 and r.cache().complete)
        assert r.hit(prompt(0)) == 0


async def test_a_node_that_is_removed_is_listened_to_no_more(start_engine: StartEngine) -> None:
    engine = start_engine()
    async with listening(engine) as r:
        await complete(engine, prompt(0))
        await until(lambda: r.hit(prompt(0)) == 64)
        node = r.fleet.remove("node0")
        r.watcher.forget(node)
        r.cache_view.leave("node0")
        await complete(engine, prompt(1))
        await asyncio.sleep(0.2)
        assert r.cache_view.hits(MODEL, lookup(prompt(0)), 0.0) == {}
        assert r.watcher.events(node) is None and list(r.cache_view) == []


async def test_two_ranks_have_two_caches(start_engine: StartEngine) -> None:
    engine = start_engine("--data-parallel-size", "2")
    async with listening(engine) as r:
        await r.follows(ranks=2)
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
    async with listening(small, large) as r:
        for engine in (small, large):
            await complete(engine, prompt(0, 5))
        await until(lambda: (r.hit(prompt(0, 5), 0), r.hit(prompt(0, 5), 1)) == (80, 64))
        assert (r.cache(0).block_size, r.cache(1).block_size) == (16, 32)
        await asyncio.sleep(0.3)
        assert (r.cache(0).block_size, r.cache(1).block_size) == (16, 32)


async def test_an_engine_without_events_is_not_asked_every_second(start_engine: StartEngine) -> None:
    engine = start_engine()
    async with listening(engine, kv_events="off") as r:
        await until(lambda: r.node().incarnation)
        await asyncio.sleep(0.5)
        assert not r.cache().is_told and r.cache().block_size == 16
        assert "/kv_event_sources" not in r.asked


# A scripted node, for what no simulated engine does.


class Scripted:
    """Answers what it is told to, over a real socket."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, bytes]] = {
            "/health": (200, b""),
            "/v1/models": (200, b'{"data":[{"id":"sim"}]}'),
        }
        self.asked: list[str] = []
        self.bodies: list[bytes] = []

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        path = head.split(b" ")[1].decode()
        self.asked.append(path)
        if path == "/kv_cache_events":
            status, body = 200, self.bodies.pop(0) if self.bodies else b"[]"
        else:
            status, body = self.answers.get(path, (404, b"{}"))
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))
        writer.close()


async def test_tensorrt_llm_is_fetched_from() -> None:
    from test_trtllm import CREATED, chain

    node = Scripted()
    tokens = prompt(1, 2, 32)
    told = [{"event_id": 0, "data": CREATED}, {"event_id": 1, "data": chain(1, tokens)}]
    node.bodies.append(json.dumps(told).encode())
    async with node.serving() as url, listening({"url": url, "engine": "trtllm"}) as r:
        await until(lambda: r.hit(tokens) == 64)
        node.bodies.append(json.dumps([{"event_id": 2, "data": {"type": "removed", "block_hashes": [2]}}]).encode())
        await until(lambda: r.hit(tokens) == 32)
        assert r.cache().complete and r.cache().heard_s > 0


async def test_sglangs_description_is_followed(start_engine: StartEngine) -> None:
    engine = start_engine()
    node = Scripted()
    events = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": engine.event_ports[0], "dp_size": 1}
    flag = json.dumps({"replay_endpoint": f"tcp://*:{engine.replay_ports[0]}"})
    node.answers["/server_info"] = (200, json.dumps({"kv_events": events, "kv_events_config": flag}).encode())
    await complete(engine, prompt(0))
    async with node.serving() as url, listening({"url": url}) as r:
        await until(lambda: r.hit(prompt(0)) == 64)
        node.answers["/server_info"] = (200, b"{}")
        events_of = r.watcher.events(r.node())
        assert events_of is not None and len(events_of.sources) == 1
        events_of.look_again()
        await until(lambda: not r.cache().is_told, "a source that vanishes is followed no more")
        assert r.hit(prompt(0)) == 0


async def test_discovery_backs_off() -> None:
    node = Scripted()
    async with node.serving() as url, listening({"url": url}) as r:
        await until(lambda: "/server_info" in node.asked)
        await asyncio.sleep(2.0)
        assert node.asked.count("/kv_event_sources") <= 3 and not r.cache().is_told
