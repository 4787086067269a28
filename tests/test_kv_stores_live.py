"""A shared KV store over HTTP: simulated engines load what other ones have prefilled, and the router expects it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from support.raw_client import Response, chat, post
from support.running_router import RunningRouter, router

from warmroute.fake_engine.core import EngineConfig
from warmroute.fake_engine.core.shared_store import SharedStore, SharedStoreConfig
from warmroute.fake_engine.profiles import profile
from warmroute.fake_engine.server.engine_server import EngineServer, ServerConfig
from warmroute.fake_engine.server.fake_tokenizer import FakeTokenizer

LONG = "word " * 2000


@asynccontextmanager
async def fleet_with_store(*stores: str) -> AsyncIterator[tuple[RunningRouter, SharedStore]]:
    """`stores`: the store of each node, as the router knows it. All engines share one."""
    store = SharedStore(SharedStoreConfig(), 16, 131_072)
    engine = EngineConfig(num_blocks=4000, block_size=16, max_model_len=32_768, every_token=True)
    servers = [
        EngineServer(
            ServerConfig(
                engine=engine, timing=profile("h200-1.5b").timing, profile="h200-1.5b", tokenizer=FakeTokenizer(),
                port=0, model="m", speed=20.0, store=store,
            )
        )
        for _ in stores
    ]  # fmt: skip
    for server in servers:
        await server.start()
    nodes: list[dict[str, Any]] = [
        {"url": f"http://127.0.0.1:{server.port}", "kv_store": name}
        for server, name in zip(servers, stores, strict=True)
    ]
    tables: dict[str, Any] = {
        "routing": {"policy": "price", "seed": 7}, "kv_stores": [{"name": "shared", "capacity_tokens": 1_000_000}],
        "journal": {"response_headers": "always"},
    }  # fmt: skip
    try:
        async with router(*nodes, **tables) as r:
            yield r, store
    finally:
        for server in servers:
            await server.stop()


async def ask(r: RunningRouter) -> Response:
    body = chat(LONG, max_tokens=4, stream=True, stream_options={"include_usage": True})
    response = await r.request(post(body))
    assert response.status == 200 and response.complete
    return response


async def test_a_node_loads_what_another_one_has_prefilled() -> None:
    async with fleet_with_store("shared", "shared") as (r, store):
        first = (await ask(r)).get("x-warmroute-node")
        assert first is not None and not store.loaded_tokens and len(store)
        await r.admin("POST", f"/admin/nodes/{first}/drain")
        for node in r.service.fleet:
            node.speed.guess(0.2)  # a slow GPU: loading pays off
        response = await ask(r)
        assert response.get("x-warmroute-node") != first and store.loaded_tokens > 1500
        entry = (await r.admin("GET", "/admin/decisions?limit=1")).json["decisions"][0]
        assert entry["store"] == "shared" and entry["store_tokens"] > 1500
        assert "from the store shared" in entry["explanation"]
        assert entry["reported"]["cached_tokens"] > 1500, "the engine did load it"
        page = (await r.admin("GET", "/metrics")).body.decode()
        assert 'warmroute_kv_store_blocks{store="shared"}' in page
        accuracy = r.service.cache_view.stores["shared"].accuracy
        assert accuracy.compared == 1 and accuracy.agreement() > 0.95


async def test_a_reload_attaches_nodes_and_resizes_stores() -> None:
    async with fleet_with_store("shared", "") as (r, _store):
        stores = r.service.cache_view.stores
        assert list(stores["shared"].nodes) == ["node0"]
        r.service.cache_view.set_stores({"shared": 64})
        assert stores["shared"].capacity_tokens == 64
        r.service.watcher.reconfigure(r.service.config)
        assert list(stores["shared"].nodes) == ["node0"]
