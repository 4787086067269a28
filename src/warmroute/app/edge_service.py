"""One edge process: it has clients, bodies, tokenizers and connections to nodes; the brain, another process, decides.

The brain sends the configuration and what it knows of the fleet, so an edge reads no file, and a reload happens in one
place. It serves once both have come.
"""

from __future__ import annotations

import asyncio
import gc
import random
import signal
import socket
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec

from warmroute.app import log as logs
from warmroute.app.process import (
    LoopDelay,
    guard_exit,
    log_loop_error,
    log_unraisable,
    reconfigure_exit,
    run_garbage_collection,
)
from warmroute.app.process_seat import Seat
from warmroute.app.prompt_doctor.samples import PromptSamples
from warmroute.app.reload import Certificates, watch_files
from warmroute.app.service import (
    GC_THRESHOLD,
    SWITCH_INTERVAL_S,
    WRONG_KEY_DELAY_S,
    cut_off,
    finish_requests,
)
from warmroute.config import Config, Limits
from warmroute.core.messages import RoutingRequest, Tables
from warmroute.core.traffic import Counters
from warmroute.core.wire import COUNTS, GAUGES, ClientErrorCount, ModelCards, Report
from warmroute.edge import alone
from warmroute.edge.arrival import FORWARDED, Kept
from warmroute.edge.balance import Balance
from warmroute.edge.client_connection import Listener
from warmroute.edge.connection_pool import ConnectionPools, NodeClient
from warmroute.edge.link import Address, BrainLink
from warmroute.edge.proxy import Proxy
from warmroute.edge.sockets import PlainServer, PlainSockets, TlsServer, accept_the_last, listen_inherited
from warmroute.edge.timer_wheel import TimerWheel
from warmroute.edge.trace_context import TraceSampling
from warmroute.engines import KV_TRANSFERS
from warmroute.event_log import EventLog
from warmroute.prompt.hub import find_tokenizer_files
from warmroute.prompt.node_tokenizer import RemoteTokenizer
from warmroute.prompt.reader import PromptReader
from warmroute.prompt.registry import TokenizerRegistry
from warmroute.prompt.request_body import has_prompt
from warmroute.prompt.tokenizer import pack_token_ids

log = EventLog("warmroute.edge")

VERIFY_S: Final = 1.0
"""Between two looks whether tokenizers agree with their engines' samples."""


class EdgeService:
    """Create it, call `start` in a running event loop, and `stop` at the end."""

    def __init__(self, seat: Seat, brains: Sequence[Address], sockets: Sequence[socket.socket]) -> None:
        """`brains`: where they listen. `sockets`: listening ones for clients, which other edges serve, too."""
        self._seat = seat
        self.name = seat.name
        self._sockets = sockets
        self.timers = TimerWheel(time.monotonic)
        self.plain_sockets = PlainSockets()
        self.link = BrainLink(self.name, seat.number, brains, self, self.plain_sockets)
        self._config = Config()
        self.proxy: Proxy
        self._is_built = False
        self._servers: list[PlainServer | TlsServer] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._stop_now = asyncio.Event()

    def _build(self, config: Config) -> None:
        self.counters = Counters()
        self.pools = ConnectionPools(config.upstream, self.timers, self.plain_sockets)
        self.tokenizer_registry = TokenizerRegistry(config.prompts, config.models, locate=find_tokenizer_files)
        self.tokenizer_registry.start_loading()
        self.remote_tokenizer = RemoteTokenizer(NodeClient(self.pools).post, pack_token_ids)
        self.prompt_reader = PromptReader(
            self.tokenizer_registry, config.prompts, self.counters, self._fetch_tokens,
            is_served=lambda model: model in self.link.tables.serving,
        )  # fmt: skip
        self._samples = PromptSamples()
        self.trace_sampling = TraceSampling(config.tracing) if config.tracing.enabled else None
        link = self.link
        self.proxy = Proxy(
            config, link.handle, lambda: False, lambda: link.tables, self.prompt_reader, self.pools, self.counters,
            keep=self._keep, tracing=self.trace_sampling, kv_transfers=KV_TRANSFERS, first_id=link.first_id,
        )  # fmt: skip
        self.proxy.client_errors.fresh = {}
        self.proxy.own_endpoints.starting = True
        self.proxy.hold_requests()
        self.listener = Listener(self.proxy, self._share_of(config.limits), self.timers, WRONG_KEY_DELAY_S)
        self.certificates = Certificates(self)
        self._is_built = True

    @property
    def config(self) -> Config:
        """The brain's."""
        return self._config

    def _share_of(self, limits: Limits) -> Limits:
        """Return this edge's part of what all edges together may hold."""
        edges = self._seat.edges
        return msgspec.structs.replace(
            limits, connections=-(-limits.connections // edges), buffered_bytes=-(-limits.buffered_bytes // edges),
            unread_bytes=-(-limits.unread_bytes // edges),
        )  # fmt: skip

    # What the brain sends.

    def settings_came(self, config: bytes) -> None:
        before, self._config = self._config, msgspec.json.decode(config, type=Config)
        if not self._is_built:
            logs.set_up(self.config.log, self.name)
            self._build(self.config)
        elif self.config != before:
            self._reconfigure(self.config, before)

    def _reconfigure(self, config: Config, before: Config) -> None:
        limits = self.listener.limits = self._share_of(config.limits)
        self.listener.unread.limit = limits.unread_bytes
        if config.prompts != before.prompts or config.models != before.models:
            self.prompt_reader.reconfigure(config.prompts)
            self.tokenizer_registry.reconfigure(config.prompts, config.models)
        if config.log != before.log:
            logs.set_up(config.log, self.name)
        if config.shutdown != before.shutdown:
            reconfigure_exit(config.shutdown)
        if config.upstream != before.upstream:
            self.pools.reconfigure(config.upstream)
        self.proxy.reconfigure(config)
        self.pools.drop_changed_keys(self.link.tables.nodes.values())

    def cards_came(self, cards: ModelCards) -> None:
        if cards.cards:
            self.tokenizer_registry.set_model_cards(cards.node, cards.cards)
        else:
            self.tokenizer_registry.remove_node(cards.node)

    def tables_came(self, tables: Tables, renumbered: bool) -> None:
        if renumbered:
            self.pools.renumber(tables.nodes.values())
        for number in self.pools.by_number.keys() - tables.nodes.keys():
            self.pools.remove_number(number)
        if self.proxy.own_endpoints.starting and not tables.starting:
            self.proxy.own_endpoints.starting = False
            self.proxy.release_requests()

    # What the brain gets.

    def report(self, tables: int) -> Report:
        counters, listener = self.counters, self.listener
        limited = self.trace_sampling.limited if self.trace_sampling is not None else 0
        counts = {
            "disconnects": counters.disconnects, "stale_connections": counters.stale_connections,
            "prompts_in_threads": counters.prompts_in_threads, "prompts_not_tokenized": counters.prompts_not_tokenized,
            "accepted": listener.accepted, "too_slow": listener.too_slow, "traces_limited": limited,
            "times_alone": self.link.times_alone,
        }  # fmt: skip
        gauges = {
            "connections": len(listener.connections), "busy": listener.busy,
            "body_bytes": listener.bodies.total_bytes, "unread_bytes": listener.unread.bytes,
        }  # fmt: skip
        now_s = time.monotonic()
        silent = [(number, now_s - pool.last_byte_s) for number, pool in self.pools.by_number.items() if pool.busy]
        known = self.proxy.client_errors
        errors, known.fresh = known.fresh or {}, {}
        return Report(
            tables, [(status, code, count) for (status, code), count in counters.errors.items()],
            dict(counters.route_requests), [(model, how, count) for (model, how), count in counters.prompts.items()],
            tuple([counts[name] for name in COUNTS]), tuple([gauges[name] for name in GAUGES]), silent,
            [ClientErrorCount(*key, count) for key, count in errors.items()],
        )  # fmt: skip

    def limits(self) -> dict[str, alone.Limits]:
        found: dict[str, alone.Limits] = {}
        for key in self.config.keys:
            requests, tokens = found.get(key.tenant, (0, 0))
            found[key.tenant] = (key.requests_per_min or requests, key.tokens_per_min or tokens)
        return {tenant: both for tenant, both in found.items() if any(both)}

    def _keep(self, request: RoutingRequest, path: bytes, body: bytes) -> Kept | None:
        """Return what the brain wants of a request that has just arrived; None if nothing is."""
        captures = self.link.tables.captures and has_prompt(path)
        sample = None
        if self.config.prompt_doctor.enabled and path in FORWARDED:
            sample = self._samples.offer(request, path, body)
        if not captures and sample is None and not self.config.log.requests:
            return None
        return Kept(body_bytes=len(body) if captures else -1, sample=sample)

    async def _fetch_tokens(self, model: str, path: bytes, body: bytes) -> bytes | None:
        """Return the tokens of a prompt, from a vLLM node of its model."""
        tables, remote = self.link.tables, self.remote_tokenizer
        rows = [tables.nodes[number] for number in tables.serving.get(model, ()) if number in tables.nodes]
        rows = [row for row in rows if row.engine == "vllm" and not remote.is_paused(row)]
        return await remote.tokenize(random.choice(rows), path, body) if rows else None

    # Start and stop.

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self.plain_sockets.start()
        self._tasks = [
            loop.create_task(self._seat.give_signs()), loop.create_task(self.timers.run()),
            loop.create_task(self.link.run()),
        ]  # fmt: skip
        await self.link.configured.wait()
        tls = self.certificates.load()
        for one in self._sockets:
            server = await listen_inherited(self.listener, one, tls, self.plain_sockets)
            assert isinstance(server, PlainServer | TlsServer)
            self._servers.append(server)
        seat = self._seat
        balance = self.listener.balance = Balance(seat.memory_fd, seat.event_fds, seat.number - 1, self._servers)
        balance.start()
        self._tasks += [
            loop.create_task(balance.run()),
            loop.create_task(LoopDelay().run()),
            loop.create_task(run_garbage_collection()),
            loop.create_task(self._verify_tokenizers()),
            loop.create_task(
                watch_files(lambda: self.certificates.files, self.certificates.reload)
            ),
        ]  # fmt: skip
        self._seat.serves()
        log.info("edge_started", edge=self.name, nodes=len(self.link.tables.nodes))

    async def _verify_tokenizers(self) -> None:
        while True:
            await asyncio.sleep(VERIFY_S)
            try:
                await self.tokenizer_registry.verify_samples()
            except Exception:
                log.exception("clean_up_failed", "The edge tries again.")

    async def stop(self) -> None:
        """Report not ready, stop accepting connections, let running requests finish, and close everything."""
        if self._is_built:
            shutdown = self.config.shutdown
            self.proxy.own_endpoints.stopping = True
            try:
                async with asyncio.timeout(shutdown.delay_s):
                    await self._stop_now.wait()
            except TimeoutError:
                pass
            balance, self.listener.balance = self.listener.balance, None
            if balance is not None:
                balance.close()
            for server in self._servers:
                if not self._seat.keeps_waiting:
                    server.resume_accepting()
                    await accept_the_last(server.sockets, alone=False)  # at a stop of all, the parent drops handshakes
                server.close()
            self.listener.close_idle()
            await finish_requests(self.listener, self._stop_now, shutdown.deadline_s)
            if self.listener.connections:
                log.warning(
                    "requests_cut_off",
                    "A second signal arrived."
                    if self._stop_now.is_set()
                    else "They did not finish before shutdown.deadline_s.",
                    requests=self.listener.busy, deadline_s=shutdown.deadline_s,
                )  # fmt: skip
                await cut_off(self.listener)
            self.proxy.client_errors.log_rest()
            self.prompt_reader.close()
            self.proxy.body_scanner.close()
            self.tokenizer_registry.close()
            self.pools.close()
        await self.link.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.sleep(0)
        self.plain_sockets.close()

    async def run_until_signal(self) -> None:
        """Serve until SIGTERM or SIGINT, and stop. A second signal cuts off running requests."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        loop = asyncio.get_running_loop()
        signaled = asyncio.Event()
        threads = ThreadPoolExecutor(thread_name_prefix="warmroute-edge")
        loop.set_default_executor(threads)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, signaled.set)
        loop.set_exception_handler(log_loop_error)
        sys.unraisablehook = log_unraisable
        starting = loop.create_task(self.start())
        stopping = loop.create_task(signaled.wait())
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            guard_exit(self.config.shutdown)
            gc.collect()
            gc.freeze()
            gc.set_threshold(GC_THRESHOLD)
            await signaled.wait()
        starting.cancel()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop_now.set)
        await self.stop()
        threads.shutdown(wait=False, cancel_futures=True)
