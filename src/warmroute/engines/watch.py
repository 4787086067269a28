"""Watches the nodes: health, models, load and KV events, each node by itself, with jitter, off the request path."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Any

import msgspec
import zmq

from warmroute.config import Config
from warmroute.engines.dialects import load_reader, recognise
from warmroute.engines.kv_stream import Context, Turns
from warmroute.engines.kv_watch import NodeEvents, Post
from warmroute.engines.report import LoadReport
from warmroute.engines.served import Served, read_cards
from warmroute.fleet.fleet import Fleet
from warmroute.fleet.health import Standing
from warmroute.fleet.node import Node
from warmroute.index.cache_view import CacheView

log = logging.getLogger("warmroute.engines")


Fetch = Callable[[Node, str, float], Awaitable[tuple[int, bytes]]]
"""GET a path of a node: status and body. Raises TimeoutError where it is slow, ConnectionRefusedError where nobody
listens, ConnectionError where the answer broke, another OSError where this machine lacks something."""

HeardAt = Callable[[Node], float]
"""When a node last sent anything of an answer that is still running: busy is not dead."""


class Watcher:
    def __init__(
        self,
        fleet: Fleet,
        config: Config,
        fetch: Fetch,
        heard_s: HeardAt,
        now: Callable[[], float] = time.monotonic,
        *,
        cache_view: CacheView | None = None,
        post: Post | None = None,
        on_models: Callable[[Node, Sequence[dict[str, Any]]], None] = lambda _node, _cards: None,
    ) -> None:
        """With `beliefs`, it tells them what the nodes' caches hold; `post` is for engines whose events are fetched;
        `on_models` is told what a node says it serves."""
        self._fleet = fleet
        self._config = config
        self._fetch = fetch
        self._heard_s = heard_s
        self._now = now
        self._random = Random()
        self._warned_s: dict[str, float] = {}
        self._cache_view = cache_view
        self._post = post
        self._on_models = on_models
        self._zmq: tuple[Context, Turns] | None = None
        self._tasks: dict[Node, list[asyncio.Task[None]]] = {}
        self._events: dict[Node, NodeEvents] = {}
        self._reports: dict[Node, LoadReport] = {}
        self._served: dict[Node, Served] = {}

    def reconfigure(self, config: Config) -> None:
        """A node's own changed settings count from the next look at it, which is at once."""
        self._config = config
        for events in self._events.values():
            events.look_again()

    def watch(self, node: Node) -> None:
        loop = asyncio.get_running_loop()
        tasks = self._tasks[node] = [
            loop.create_task(self._for_ever(node, self._check_health)),
            loop.create_task(self._for_ever(node, self._poll_load)),
        ]
        if self._cache_view is not None:
            cache = self._cache_view.join(node.name, node.config.models)
            if self._zmq is None:
                self._zmq = (zmq.Context(), Turns())
            events = self._events[node] = NodeEvents(
                node, cache, *self._zmq, self._fetch, self._post, self._now, self._wants_events
            )
            tasks.append(loop.create_task(self._for_ever(node, lambda _node: events.listen())))

    def _wants_events(self) -> bool:
        return self._config.uses_events

    def forget(self, node: Node) -> None:
        """Nothing is asked of it any more. What is believed of its cache stays: `CacheView.leave` forgets it."""
        for task in self._tasks.pop(node, ()):
            task.cancel()
        self._reports.pop(node, None)
        self._served.pop(node, None)
        events = self._events.pop(node, None)
        if events is not None:
            events.close()

    def close(self) -> None:
        for node in list(self._tasks):
            self.forget(node)
        if self._zmq is not None:
            self._zmq[0].destroy(linger=0)
            self._zmq = None

    def report(self, node: Node) -> LoadReport | None:
        """What its metrics last said."""
        return self._reports.get(node)

    def events(self, node: Node) -> NodeEvents | None:
        return self._events.get(node)

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds * (0.8 + 0.4 * self._random.random()))

    async def _for_ever(self, node: Node, watch: Callable[[Node], Awaitable[None]]) -> None:
        """Whatever a node answers, it goes on being watched."""
        while True:
            try:
                await watch(node)
            except Exception:
                log.exception("watching node %s failed; trying again", node.name)
                await self._pause(self._config.health.interval_s)

    # Health and models.

    async def _check_health(self, node: Node) -> None:
        asked_models_s = -1e9
        while True:
            health = self._config.health
            before = node.health.standing
            passed = await self._passes(node)
            passed_s = self._now()
            if passed:
                came_back = before is Standing.OPEN
                due = self._now() - asked_models_s >= self._config.metrics.models_interval_s
                if (node.models is None or came_back or due) and await self._ask_models(node):
                    asked_models_s = self._now()
                self._fleet.check_passed(node, passed_s)
                if came_back and node in self._events:
                    self._events[node].look_again()
            await self._pause(health.interval_s)

    async def _passes(self, node: Node) -> bool:
        health = self._config.health
        asked_s = self._now()
        try:
            status, _body = await self._fetch(node, health.path, health.timeout_s)
        except ConnectionRefusedError as error:
            self._fleet.check_refused(node, self._now(), str(error))
            return False
        except (TimeoutError, ConnectionError):
            self._fleet.check_slow(node, self._now(), self._heard_s(node))
            return False
        except OSError:
            return False  # what this machine lacks says nothing about the node
        if status >= 500:
            self._fleet.check_refused(node, self._now(), f"its health check says {status}")
            return False
        now_s = self._now()
        self._fleet.islands.answered(node, (now_s - asked_s) * 1000.0, now_s)
        return True

    async def _ask_models(self, node: Node) -> bool:
        try:
            status, body = await self._fetch(node, "/v1/models", self._config.health.timeout_s)
            cards = msgspec.json.decode(body).get("data", []) if status == 200 else None
        except (OSError, msgspec.DecodeError, AttributeError):
            cards = None
        if not isinstance(cards, list):
            silent_s = self._now() - self._warned_s.get(node.name, -1e9)
            if node.models is None and silent_s >= self._config.metrics.models_interval_s:
                self._warned_s[node.name] = self._now()
                log.warning("node %s does not say which models it serves (GET /v1/models); set nodes.models", node.name)
            return False
        cards = [card for card in cards if isinstance(card, dict) and isinstance(card.get("id"), str)]
        self._fleet.saw_models(node, [card["id"] for card in cards], cards)
        self._tell_served(node, cards)
        self._on_models(node, cards)
        return True

    def _tell_served(self, node: Node, cards: Sequence[dict[str, Any]]) -> None:
        served = read_cards(cards)
        cache = self._cache_view.cache(node.name) if self._cache_view is not None else None
        if served is None or cache is None or self._cache_view is None:
            return
        before, known = cache.model, self._served.get(node)
        if served == known:
            return
        self._served[node] = served
        aliases = {*served.aliases, *node.config.models} - {served.base}
        self._cache_view.serves(cache, served.base, aliases, served.adapters)
        if before != served.base and node in self._events:
            if before:
                self._events[node].renamed()
            self._events[node].look_again()

    # Load.

    async def _poll_load(self, node: Node) -> None:
        while True:
            metrics = self._config.metrics
            if node.health.standing is not Standing.OPEN:
                await self._read_load(node)
            if self._now() - node.polled_s > metrics.stale_s:
                node.lost_sight_of_load()
            node.age_latency(self._now())
            await self._pause(metrics.interval_s)

    async def _read_load(self, node: Node) -> None:
        try:
            status, page = await self._fetch(node, "/metrics", self._config.metrics.timeout_s)
        except OSError:
            return
        if status != 200:
            return
        if node.engine == "auto":
            node.engine = recognise(page) or "auto"
        read = load_reader(node.engine)
        if read is None:
            return
        try:
            report = read(page)
        except ValueError:
            return
        node.saw_load(report.running, report.waiting, report.kv_usage, self._now())
        before, node.incarnation = node.incarnation, report.incarnation
        self._reports[node] = report
        if before and report.incarnation and report.incarnation != before:
            node.loaded.forget()
        node.loaded.running(report.adapters, report.adapter_slots)
        if self._cache_view is not None:
            self._tell_beliefs(self._cache_view, node, report, before)

    def _tell_beliefs(self, cache_view: CacheView, node: Node, report: LoadReport, incarnation: float) -> None:
        cache, events = cache_view.cache(node.name), self._events.get(node)
        if cache is None or events is None:
            return
        if incarnation and report.incarnation and report.incarnation != incarnation:
            log.info("node %s has restarted: its cache is empty", node.name)
            events.restarted(report.incarnation)
        cache.heard(self._now())
        cache.lag_s *= 0.5  # nothing that comes late has come since
        size = events.block_size
        if not size and (events.sources or not cache.is_told):
            size = report.block_size  # what tells of blocks knows better
        cache.describe(size, report.capacity_tokens)
