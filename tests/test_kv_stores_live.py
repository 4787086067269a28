"""A shared KV store over HTTP: simulated engines load what other ones have prefilled, and the router expects it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from msgspec.structs import replace
from support.raw_client import Response, chat, post
from support.running_router import RunningRouter, quick_table, router

from warmroute.config import Config, from_table
from warmroute.lab.engine.blocks import SharedStore, SharedStoreConfig
from warmroute.lab.engine.server import EngineServer, ServerConfig
from warmroute.lab.engine.timing import profile
from warmroute.lab.engine.tokenizers import FakeTokenizer
from warmroute.lab.engine.values import EngineConfig

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


async def test_a_reload_changes_stores_and_the_nodes_attached_to_them() -> None:
    def config(stores: dict[str, int], *nodes: dict[str, Any], **island: str) -> Config:
        tables = [{"name": name, "capacity_tokens": tokens, **island} for name, tokens in stores.items()]
        urls = [{"url": f"http://127.0.0.1:{number}", **node} for number, node in enumerate(nodes, 1)]
        return from_table(quick_table(urls, kv_stores=tables), experiment=True)

    async with router(wait=0, config=config({"old": 1000}, {"kv_store": "old"}, {"kv_store": "old"}, {})) as r:

        def reload(changed: Config) -> dict[str, list[str]]:
            r.service.config_reload.read_config = lambda: changed
            assert r.service.reload() is None
            return {name: sorted(store.nodes) for name, store in view.stores.items()}

        view = r.service.cache_view
        store = view.stores["old"]
        assert sorted(store.nodes) == ["node0", "node1"]
        resized = config({"old": 640}, {"kv_store": "old"}, {"kv_store": "old"})
        assert reload(resized) == {"old": ["node0", "node1"]}
        assert view.stores["old"] is store and store.capacity_tokens == 640
        renamed = config({"new": 640}, {"kv_store": "new"}, {"kv_store": "new"})
        assert reload(renamed) == {"new": ["node0", "node1"]} and not store.nodes
        moved = config({"new": 640, "more": 64}, {"kv_store": "more"}, {}, {"kv_store": "new"})
        assert reload(moved) == {"new": ["node2"], "more": ["node0"]}
        of_island = config({"far": 64}, {"island": "i"}, {}, {}, {"island": "i"}, island="i")
        assert reload(of_island) == {"far": ["node0", "node3"]}, "also a node that is new"
        assert reload(config({}, {}, {})) == {}


async def test_a_node_gets_the_store_of_its_island_once_a_source_names_the_island() -> None:
    stores = [{"name": "shared", "capacity_tokens": 1000, "island": "i"}]
    config = from_table(quick_table([{"url": "http://127.0.0.1:1"}], kv_stores=stores), experiment=True)
    async with router(wait=0, config=config) as r:
        fleet, store = r.service.fleet, r.service.cache_view.stores["shared"]
        node = fleet.node("node0")
        fleet.update_config(node, replace(node.config, island="i"))
        assert list(store.nodes) == ["node0"]
        fleet.update_config(node, replace(node.config, island="j"))
        assert not store.nodes
