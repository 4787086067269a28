"""Watches the nodes: health checks, models, load reports and KV events, each node in its own tasks, with jitter.

It only asks: engines/__init__.py reads the answers of /v1/models and of the metrics page.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Any

from warmroute.config import Config
from warmroute.config.nodes import kv_store_of
from warmroute.core.cache_view import CacheView
from warmroute.core.fleet import Fleet
from warmroute.core.health import HealthState
from warmroute.core.node import Node
from warmroute.core.node_reports import apply_health_pass, apply_load_report
from warmroute.engines import (
    Get,
    Post,
    ServedModels,
    detect_engine,
    engine_of,
    engine_of_cards,
    parse_model_cards,
    read_cards,
)
from warmroute.engines.kv_subscription import KvEventClient, SliceScheduler
from warmroute.engines.vllm import KV_CONNECTOR_METRICS
from warmroute.event_log import EventLog

log = EventLog("warmroute.engines")

MODELS_INTERVAL_S = 30.0
"""Time between two reads of a node's /v1/models. Adapters are loaded at run time."""


class NodeWatcher:
    def __init__(
        self,
        fleet: Fleet,
        config: Config,
        get: Get,
        last_byte_s: Callable[[Node], float],
        now: Callable[[], float] = time.monotonic,
        *,
        cache_view: CacheView,
        post: Post,
        on_models: Callable[[Node, Sequence[dict[str, Any]]], None] = lambda _node, _cards: None,
    ) -> None:
        """`last_byte_s` returns when a node last sent a byte of a running response, since a busy node is not dead.
        `on_models` receives the model cards of a node."""
        self._fleet = fleet
        self._config = config
        self._get = get
        self._last_byte_s = last_byte_s
        self._now = now
        self._random = Random()
        self._warned_s: dict[str, float] = {}
        self._cache_view = cache_view
        self._post = post
        self._on_models = on_models
        self._scheduler: SliceScheduler | None = None
        """Shared by all nodes. Made with the first node, because it needs the running event loop."""
        self._tasks: dict[Node, list[asyncio.Task[None]]] = {}
        self._kv_clients: dict[Node, KvEventClient] = {}
        self._served: dict[Node, ServedModels] = {}
        self._checked: set[Node] = set()
        """Nodes whose first health check has passed or failed."""
        self._warned_engine: set[Node] = set()
        fleet.observe_config(self._attach_store)

    def reconfigure(self, config: Config) -> None:
        self._config = config
        for client in self._kv_clients.values():
            client.rediscover()

    def attach_stores(self) -> None:
        """Attach the nodes to their shared KV stores. To be called after a change of the stores."""
        for node in self._kv_clients:
            self._attach_store(node)

    def _attach_store(self, node: Node) -> None:
        self._cache_view.attach(node.name, kv_store_of(node.config, self._config.kv_stores))

    def watch(self, node: Node) -> None:
        if self._scheduler is None:
            self._scheduler = SliceScheduler()
        cache = self._cache_view.add_node(node.name, node.config.models)
        self._attach_store(node)
        client = self._kv_clients[node] = KvEventClient(
            node, cache, self._scheduler, self._get, self._post, self._now, lambda: self._config.uses_kv_events
        )
        loop = asyncio.get_running_loop()
        self._tasks[node] = [
            loop.create_task(self._keep_running(node, self._check_health)),
            loop.create_task(self._keep_running(node, self._poll_load)),
            loop.create_task(self._keep_running(node, lambda _node: client.run())),
        ]

    def unwatch(self, node: Node) -> None:
        """Stop watching a node. `CacheView.remove_node` forgets its cache."""
        for task in self._tasks.pop(node, ()):
            task.cancel()
        self._served.pop(node, None)
        self._checked.discard(node)
        self._warned_engine.discard(node)
        client = self._kv_clients.pop(node, None)
        if client is not None:
            client.close()

    def is_settled(self, node: Node) -> bool:
        """Whether the node was checked, and the KV events that it sent before are applied."""
        if node not in self._checked:
            return False
        client = self._kv_clients[node]
        return node.health.state is HealthState.DOWN or not client.cache.model or client.is_settled

    def close(self) -> None:
        for node in list(self._tasks):
            self.unwatch(node)

    async def _pause(self, seconds: float) -> None:
        # Jitter: hundreds of nodes that were added at once must not be asked at once for ever.
        await asyncio.sleep(seconds * (0.8 + 0.4 * self._random.random()))

    async def _keep_running(self, node: Node, watch: Callable[[Node], Awaitable[None]]) -> None:
        """Run a task for ever: no response of a node may end it."""
        while True:
            try:
                await watch(node)
            except Exception:
                log.exception("node_watch_failed", "The router tries again.", node=node.name)
                await self._pause(self._config.health.interval_s)

    # Health and models.

    async def _check_health(self, node: Node) -> None:
        asked_models_s = -1e9
        while True:
            interval_s = self._config.health.interval_s
            was_down = node.health.state is HealthState.DOWN
            round_trip_ms = await self._request_health(node)
            passed_s = self._now()
            if round_trip_ms is not None:
                due = passed_s - asked_models_s >= MODELS_INTERVAL_S
                if (node.models is None or was_down or due) and await self._ask_models(node):
                    asked_models_s = self._now()
                apply_health_pass(self._fleet, node, round_trip_ms, passed_s)
                if was_down:
                    self._kv_clients[node].rediscover()
            self._checked.add(node)
            await self._pause(interval_s)

    async def _request_health(self, node: Node) -> float | None:
        """Return the round trip in milliseconds if the health check passes."""
        health = self._config.health
        asked_s = self._now()
        try:
            status, _body = await self._get(node, health.path, health.timeout_s)
        except ConnectionRefusedError as error:
            self._fleet.check_failed(node, self._now(), str(error))
            return None
        except (TimeoutError, ConnectionError):
            # A slow /health under load is no failure while the node sends bytes of its responses (busy is not dead).
            self._fleet.check_timed_out(node, self._now(), self._last_byte_s(node))
            return None
        except OSError:
            return None  # this machine lacks a resource, which says nothing about the node
        # 401, 404 and 429 come from an engine that runs. Only 5xx says that it cannot serve.
        if status >= 500:
            self._fleet.check_failed(node, self._now(), f"health check returned status {status}")
            return None
        return (self._now() - asked_s) * 1000.0

    async def _ask_models(self, node: Node) -> bool:
        try:
            status, body = await self._get(node, "/v1/models", self._config.health.timeout_s)
            cards = read_cards(body, node.reported) if status == 200 else None
        except (OSError, ValueError):
            cards = None
        if cards is None:
            # The health check repeats this each second while the models are unknown: one line each half minute is
            # enough.
            since_warning_s = self._now() - self._warned_s.get(node.name, -1e9)
            if node.models is None and since_warning_s >= MODELS_INTERVAL_S:
                self._warned_s[node.name] = self._now()
                log.warning(
                    "node_models_unknown",
                    "GET /v1/models returned no list of models. Set `models` of this node in [[nodes]].",
                    node=node.name,
                )
            return False
        if node.engine == "auto" and (engine := engine_of_cards(cards)) is not None:
            self._set_engine(node, engine)
        self._fleet.update_models(node, [card["id"] for card in cards], cards)
        self._update_cached_models(node, cards)
        self._on_models(node, cards)
        return True

    def _update_cached_models(self, node: Node, cards: Sequence[dict[str, Any]]) -> None:
        served = parse_model_cards(cards)
        cache = self._cache_view.cache(node.name)
        if served is None or cache is None or served == self._served.get(node):
            return
        before = cache.model
        self._served[node] = served
        aliases = {*served.aliases, *node.config.models} - {served.base}
        self._cache_view.set_models(cache, served.base, aliases, served.adapters)
        if before != served.base:
            if before:
                self._kv_clients[node].model_changed()
            self._kv_clients[node].rediscover()

    # Load.

    async def _poll_load(self, node: Node) -> None:
        while True:
            polling = self._config.polling
            if node.health.state is not HealthState.DOWN:
                await self._request_load(node)
                self._warn_of_unknown_engine(node)
            node.drop_stale_load(polling.stale_s, self._now())
            node.decay_latency(self._now())
            await self._pause(polling.interval_s)

    def _warn_of_unknown_engine(self, node: Node) -> None:
        """Warn once, after the node was asked for its models and its metrics, that its engine is unknown: a node in a
        pair needs its engine's protocol."""
        if node.engine != "auto" or node.role == "mixed" or node not in self._checked or node in self._warned_engine:
            return
        self._warned_engine.add(node)
        node.engine_undetected = True
        self._fleet.transfers_changed(node)
        log.warning(
            "kv_transfer_engine_unknown",
            "The node has a role, but takes part in no pair: its engine is not known. Set `engine` in [[nodes]].",
            node=node.name,
        )

    async def _request_load(self, node: Node) -> None:
        for path in engine_of(node.engine).metrics_paths:
            try:
                status, page = await self._get(node, path, self._config.health.timeout_s)
            except OSError:
                return
            if status != 200:
                if node.engine == "auto":
                    return  # every engine that the router detects has the first path
                continue
            if node.engine == "auto" and (engine := detect_engine(page)) is not None:
                self._set_engine(node, engine)
            report = engine_of(node.engine).parse_load(page)
            if report is not None:
                has_connector = KV_CONNECTOR_METRICS in page
                if has_connector != node.kv_connector:
                    node.kv_connector = has_connector
                    self._fleet.transfers_changed(node)
                apply_load_report(node, node.reported.check(report), self._kv_clients[node], self._now())
                return

    def _set_engine(self, node: Node, engine: str) -> None:
        """Remember which engine a node runs, and look for its KV events where this engine publishes them."""
        node.engine = engine
        self._fleet.transfers_changed(node)
        log.info("engine_detected", node=node.name, engine=engine)
        self._kv_clients[node].rediscover()
