"""The service: puts the rooms together and holds them together, from start over reloads to shutdown."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from warmroute.config import Config, ConfigError, NodeConfig, is_loopback, needing_restart
from warmroute.console.admin import Admin
from warmroute.console.decisions import Decisions
from warmroute.edge.deadlines import Deadlines
from warmroute.edge.fetch import fetch, post
from warmroute.edge.listen import listen_tcp, listen_unix, server_tls
from warmroute.edge.plain import PlainHandler
from warmroute.edge.pools import Pools
from warmroute.edge.proxy import Proxy
from warmroute.edge.reading import PromptReader
from warmroute.edge.server import Listener
from warmroute.engines.remote_tokens import RemoteTokens
from warmroute.engines.watch import Watcher
from warmroute.fleet.fleet import Fleet
from warmroute.fleet.health import Standing
from warmroute.fleet.node import Node
from warmroute.index.cache_view import CacheView
from warmroute.prompt.tokenizer_registry import TokenizerRegistry
from warmroute.routing.admission import Admission
from warmroute.routing.router import Router
from warmroute.scaling.live import LiveScaling
from warmroute.telemetry import log as logs
from warmroute.telemetry.counters import Counters
from warmroute.telemetry.journal import Journal
from warmroute.telemetry.loop_delay import watch_loop_delay
from warmroute.telemetry.prometheus import MetricsPage

log = logging.getLogger("warmroute")
FILE_CHECK_S = 0.5
TIDY_S = 0.25
ADMIT_S = 0.05
SWITCH_S = 0.0005
"""How long a thread that reads a prompt keeps the interpreter from the loop, at most."""


class Service:
    """One router process. Build it, `start` it within a running loop, `stop` it."""

    def __init__(self, read_config: Callable[[], Config], config_file: Path | None = None) -> None:
        self._read_config = read_config
        self._config_file = config_file
        self.config = self._started_with = config = read_config()
        now = time.monotonic
        self.deadlines = Deadlines(now)
        self.counters = Counters()
        self.fleet = Fleet(config.health, _say_standing)
        self.fleet.islands.reconfigure(config.islands, config.crossing)
        self.cache_view = CacheView(config.index)
        self.library = TokenizerRegistry(config.prompts, config.models)
        self.readings = PromptReader(self.library, config.prompts, self.counters, self._ask_tokens)
        self.router = Router(self.fleet, self.cache_view, config.routing, config.price, config.routes)
        self.admission = Admission(self.router, config.admission, config.routes)
        self.pools = Pools(config.upstream, self.deadlines)
        self.journal = Journal(config.journal, self.counters, now)
        self.proxy = Proxy(
            config, self.fleet, self.router, self.admission, self.readings, self.pools, self.counters, self.journal, now
        )
        self.listener = Listener(self.proxy, config.limits, self.deadlines)
        self.watcher = Watcher(
            self.fleet,
            config,
            lambda node, path, timeout_s: fetch(self.pools, node, path, timeout_s),
            lambda node: self.pools.of(node).heard_s,
            now,
            cache_view=self.cache_view,
            post=lambda node, path, body, timeout_s: post(self.pools, node, path, body, timeout_s),
            on_models=lambda node, cards: self.library.saw_models(cards, node.name),
        )
        self._remote = RemoteTokens(lambda node, path, body, timeout_s: post(self.pools, node, path, body, timeout_s))
        self.scaling: LiveScaling | None = None
        if config.scaling.enabled:
            self.scaling = LiveScaling(
                config,
                self.fleet,
                self.cache_view,
                self,
                lambda node, path, body, timeout_s: post(self.pools, node, path, body, timeout_s),
                lambda: self.admission.waiting,
                self._hold,
            )
            self.router.demand_meter, self.router.hot = self.scaling.demand_meter, self.scaling.hot
            self.router.may_serve = self._may_serve
        page = MetricsPage(
            self.fleet,
            self.cache_view,
            self.counters,
            lambda: (len(self.listener.connections), self.listener.accepted),
            lambda: (self.admission.waiting, self.admission.held),
            now,
            lambda: self.scaling.figures() if self.scaling is not None else None,
        )
        decisions = Decisions(self.journal, self.proxy)
        self.admin = Admin(self.fleet, self.cache_view, page, decisions, self, config.admin.token_sha256)
        self.admin_listener = Listener(PlainHandler(self.admin.answer, self.admin.admit), config.limits, self.deadlines)
        self._servers: list[asyncio.Server] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._hurry = asyncio.Event()
        self.port = 0
        self.admin_port = 0

    # Start.

    async def start(self) -> None:
        """Raises ConfigError where it can't listen, or a tokenizer can't be read."""
        config = self.config
        await self.library.load_configured()
        listen = config.listen
        tls = server_tls(listen.tls_cert, listen.tls_key)
        if listen.unix:
            server = await listen_unix(self.listener, listen.unix, listen.backlog, tls)
            where = f"unix:{listen.unix}"
        else:
            server = await listen_tcp(self.listener, listen.host, listen.port, listen.backlog, tls)
            self.port = server.sockets[0].getsockname()[1]
            where = f"{'https' if tls else 'http'}://{_shown(listen.host)}:{self.port}"
        self._servers.append(server)
        if config.admin.enabled:
            server = await listen_tcp(self.admin_listener, config.admin.host, config.admin.port, listen.backlog)
            self.admin_port = server.sockets[0].getsockname()[1]
            self._servers.append(server)
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self.deadlines.run()),
            loop.create_task(watch_loop_delay(self.counters)),
            loop.create_task(self._tidy()),
            loop.create_task(self._admit()),
            loop.create_task(self.journal.run()),
        ]
        if self._config_file is not None:
            self._tasks.append(loop.create_task(self._watch_file(self._config_file)))
        added, _removed = self.fleet.reconfigure(config.nodes, config.health)
        for node in added:
            self.watcher.watch(node)
        if self.scaling is not None:
            await self.scaling.start()
        log.info(
            "warmroute listens on %s%s; %d nodes, policy %s",
            where,
            f", admin on http://{_shown(config.admin.host)}:{self.admin_port}" if config.admin.enabled else "",
            len(self.fleet),
            config.routing.policy,
        )
        if not config.keys and not listen.unix and not is_loopback(listen.host):
            log.warning("anybody who reaches %s may use the fleet: no keys are configured ([[keys]])", where)
        if not config.nodes and not config.provisioners:
            log.warning("no nodes are configured: add [[nodes]], --node URL, or POST /admin/nodes")

    async def _ask_tokens(self, model: str, path: bytes, body: bytes) -> bytes | None:
        """The tokens of a prompt, from the least loaded node of its model that can tell."""
        group = self.fleet.group(model)
        nodes = group.up.nodes if group is not None else ()
        able = [node for node in nodes if node.engine == "vllm" and not self._remote.rests(node)]
        return await self._remote.tokens(min(able, key=lambda node: node.load), path, body) if able else None

    # While it runs.

    def add_node(self, config: NodeConfig) -> Node:
        """Raises ConfigError, NameTaken."""
        known = {node.api_key_env for node in self.config.nodes}
        provisioners = (*self.config.provisioners, *self._started_with.provisioners)  # these count until a restart
        known |= {provisioner.api_key_env for provisioner in provisioners}
        if config.api_key_env and config.api_key_env not in known:
            raise ConfigError("api_key_env may only name a variable that a configured node or provisioner names")
        node = self.fleet.add(config)
        self.watcher.watch(node)
        log.info("node %s was added (%s)", node.name, node.url)
        return node

    def remove_node(self, name: str) -> Node:
        node = self.fleet.remove(name)
        self._let_go(node)
        log.info("node %s was removed; %d running requests finish", node.name, node.inflight)
        return node

    def _let_go(self, node: Node) -> None:
        self.watcher.forget(node)
        self.cache_view.leave(node.name)
        self.library.forget_node(node.name)
        self._remote.forget(node)
        self.pools.remove(node)

    def _hold(self, seconds: float) -> None:
        """So long requests wait for a first node from now on."""
        self.admission.node_wait_s = seconds

    def _may_serve(self, model: str) -> bool:
        """Whether a node that comes would serve it. The nodes of a fleet that is scaled serve the same models, so those
        that were served before are all there are, and those that are configured; before the first nobody knows."""
        served = self.fleet.served
        return not served or model in served or any(one.name == model for one in self.config.models)

    def describe_scaling(self) -> dict[str, Any]:
        return self.scaling.describe() if self.scaling is not None else {"enabled": False}

    def readiness(self) -> tuple[int, bytes]:
        return self.proxy.readiness()

    def reload(self) -> str | None:
        """Takes a changed configuration without dropping a request; a bad one is said and not taken."""
        before = self.config
        try:
            config = self._read_config()
            if config.upstream != before.upstream:
                self.pools.reconfigure(config.upstream)
        except ConfigError as error:
            log.error("the configuration was not taken, the old one stays: %s", error)
            return str(error)
        if config == before:
            return None
        self.config = config
        if waits := self.needs_restart():
            log.warning("changed, and counts only after a restart: %s", ", ".join(waits))
        self.listener.limits = self.admin_listener.limits = config.limits
        rerouted = config.routes != before.routes
        if config.routing != before.routing or config.price != before.price or rerouted:
            self.router.reconfigure(config.routing, config.price, config.routes)
        if config.admission != before.admission or rerouted:
            self.admission.reconfigure(config.admission, config.routes)
        if config.index != before.index:
            self.cache_view.reconfigure(config.index)
        if config.prompts != before.prompts or config.models != before.models:
            self.readings.reconfigure(config.prompts)
            self.library.reconfigure(config.prompts, config.models)
        if config.log != before.log:
            logs.set_up(config.log)
        self.journal.reconfigure(config.journal)
        if config.islands != before.islands or config.crossing != before.crossing:
            self.fleet.islands.reconfigure(config.islands, config.crossing)
        if config.scaling.enabled and self.scaling is not None:
            self.scaling.reconfigure(config)
        self.proxy.reconfigure(config)
        self.watcher.reconfigure(config)
        added, removed = self.fleet.reconfigure(config.nodes, config.health)
        for node in removed:
            self._let_go(node)
        for node in added:
            self.watcher.watch(node)
        self.pools.take_new_keys()
        log.info("the configuration was reloaded: %d nodes added, %d removed", len(added), len(removed))
        return None

    def needs_restart(self) -> list[str]:
        """Values that are others than at the start, and count only after a restart."""
        return needing_restart(self._started_with, self.config)

    async def _admit(self) -> None:
        """Lets those through for whom a node has room by itself: a poll, a node that came."""
        while True:
            await asyncio.sleep(ADMIT_S)
            try:
                self.admission.tick(list(self.fleet), time.monotonic())
            except Exception:
                log.exception("looking at those who wait failed; trying again")

    async def _tidy(self) -> None:
        """What is done now and then, off the requests' way."""
        said: set[str] = set()
        silent: set[str] = set()
        while True:
            await asyncio.sleep(TIDY_S)
            try:
                self.cache_view.tidy(time.monotonic())
                before, silent = silent, {cache.name for cache in self.cache_view.silent()}
                for name in sorted(silent - before):
                    log.warning(
                        "node %s prefills prompts and tells of none: its KV events are lost on the way; it is routed "
                        "to by what was sent there until they come again",
                        name,
                    )
                for cache in self.cache_view.doubted():
                    if cache.name not in said:
                        said.add(cache.name)
                        log.warning(
                            "node %s reads prompts of model %s in other tokens than this router: it is routed to by "
                            "what was sent there, not by its events; set tokenizer and chat_template in [[models]]",
                            cache.name,
                            cache.model,
                        )
                await self.library.audit()
            except Exception:
                log.exception("tidying up failed; trying again")

    async def _watch_file(self, path: Path) -> None:
        taken = before = _stamp(path)
        while True:
            await asyncio.sleep(FILE_CHECK_S)
            stamp = _stamp(path)
            settled, before = stamp == before, stamp  # a file that still changes may be half written
            if stamp != taken and settled:
                taken = stamp
                try:
                    self.reload()
                except Exception:
                    log.exception("reloading the configuration failed")

    # The end.

    async def stop(self) -> None:
        """Says it is not ready, stops accepting, lets running requests finish, and ends."""
        shutdown = self.config.shutdown
        self.proxy.stopping = True
        await self._unless_hurried(shutdown.delay_s)
        for server in self._servers[:1]:
            server.close()
        self.listener.close_idle()
        try:
            async with asyncio.timeout(0 if self._hurry.is_set() else shutdown.deadline_s):
                await self.listener.until_empty()
        except TimeoutError:
            log.warning("cut %d requests that did not finish in %g s", self.listener.busy, shutdown.deadline_s)
            self.listener.abort_all()
        self.admin_listener.abort_all()
        for server in self._servers:
            server.close()
        if self.scaling is not None:
            await self.scaling.close()
        self.watcher.close()
        self.readings.close()
        self.library.close()
        self.pools.close()
        for task in self._tasks:
            task.cancel()
        await self.journal.close()
        await asyncio.sleep(0)

    async def _unless_hurried(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._hurry.wait()
        except TimeoutError:
            pass

    def hurry(self) -> None:
        """Ends the stopping at once."""
        self._hurry.set()
        self.listener.abort_all()

    async def run_until_told(self) -> None:
        """Starts, serves until SIGTERM or SIGINT, stops. A second signal ends it at once."""
        sys.setswitchinterval(SWITCH_S)
        loop = asyncio.get_running_loop()
        told = asyncio.Event()
        await self.start()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, told.set)
        loop.add_signal_handler(signal.SIGHUP, self.reload)
        gc.collect()
        gc.freeze()
        await told.wait()
        log.info("stopping: running requests have %g s to finish", self.config.shutdown.deadline_s)
        stopping = loop.create_task(self.stop())
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.hurry)
        await stopping


def _say_standing(node: Node, before: Standing) -> None:
    """One that takes no requests anyway (it still loads, or is given back) is no cause for alarm."""
    now = node.health.standing
    level = logging.WARNING if now is Standing.OPEN and not node.draining else logging.INFO
    log.log(level, "node %s is %s (was %s): %s", node.name, now.value, before.value, node.health.reason)


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
