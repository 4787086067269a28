"""Watches the nodes: health checks, models, load reports and KV events, each node in its own tasks, with jitter."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Any

import msgspec
import zmq

from warmroute.config import Config
from warmroute.engines.engine_detection import detect_engine, load_parser
from warmroute.engines.kv_client import KvEventClient
from warmroute.engines.kv_zmq import Context, SliceScheduler
from warmroute.engines.node_http import Get, Post
from warmroute.engines.node_updates import apply_health_pass, apply_load_report
from warmroute.engines.served_models import ServedModels, parse_model_cards
from warmroute.event_log import EventLog
from warmroute.fleet.fleet import Fleet
from warmroute.fleet.health import HealthState
from warmroute.fleet.node import Node
from warmroute.index.cache_view import CacheView

log = EventLog("warmroute.engines")

MODELS_INTERVAL_S = 30.0
"""Time between two reads of a node's /v1/models."""


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
        self._zmq: tuple[Context, SliceScheduler] | None = None
        self._tasks: dict[Node, list[asyncio.Task[None]]] = {}
        self._kv_clients: dict[Node, KvEventClient] = {}
        self._served: dict[Node, ServedModels] = {}

    def reconfigure(self, config: Config) -> None:
        self._config = config
        for client in self._kv_clients.values():
            client.rediscover()

    def watch(self, node: Node) -> None:
        if self._zmq is None:
            self._zmq = (zmq.Context(), SliceScheduler())
        cache = self._cache_view.add_node(node.name, node.config.models)
        client = self._kv_clients[node] = KvEventClient(
            node, cache, *self._zmq, self._get, self._post, self._now, lambda: self._config.uses_kv_events
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
        client = self._kv_clients.pop(node, None)
        if client is not None:
            client.close()

    def close(self) -> None:
        for node in list(self._tasks):
            self.unwatch(node)
        if self._zmq is not None:
            self._zmq[0].destroy(linger=0)
            self._zmq = None

    async def _pause(self, seconds: float) -> None:
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
            self._fleet.check_timed_out(node, self._now(), self._last_byte_s(node))
            return None
        except OSError:
            return None  # this machine lacks a resource, which says nothing about the node
        if status >= 500:
            self._fleet.check_failed(node, self._now(), f"health check returned status {status}")
            return None
        return (self._now() - asked_s) * 1000.0

    async def _ask_models(self, node: Node) -> bool:
        try:
            status, body = await self._get(node, "/v1/models", self._config.health.timeout_s)
            cards = msgspec.json.decode(body).get("data", []) if status == 200 else None
        except (OSError, msgspec.DecodeError, AttributeError):
            cards = None
        if not isinstance(cards, list):
            since_warning_s = self._now() - self._warned_s.get(node.name, -1e9)
            if node.models is None and since_warning_s >= MODELS_INTERVAL_S:
                self._warned_s[node.name] = self._now()
                log.warning(
                    "node_models_unknown",
                    "GET /v1/models returned no list of models. Set `models` of this node in [[nodes]].",
                    node=node.name,
                )
            return False
        cards = [card for card in cards if isinstance(card, dict) and isinstance(card.get("id"), str)]
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
            node.drop_stale_load(polling.stale_s, self._now())
            node.decay_latency(self._now())
            await self._pause(polling.interval_s)

    async def _request_load(self, node: Node) -> None:
        try:
            status, page = await self._get(node, "/metrics", self._config.health.timeout_s)
        except OSError:
            return
        if status != 200:
            return
        if node.engine == "auto":
            node.engine = detect_engine(page) or "auto"
        parse = load_parser(node.engine)
        if parse is None:
            return
        try:
            report = parse(page)
        except ValueError:
            return
        apply_load_report(node, report, self._kv_clients[node], self._now())
