"""One router process: built, started, stopped; nodes added and removed."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from warmroute.app.admin import AdminApi, CaptureStreams, Decisions
from warmroute.app.alert_webhook import create_webhook
from warmroute.app.alerts import ActiveAlerts, FleetAlerts, Rejections, client_error_alerts, discovery_alerts
from warmroute.app.brain_server import BrainServer, LearnedFile
from warmroute.app.capture import TrafficCapture, record_recent_traffic
from warmroute.app.ended_calls import EndedCalls
from warmroute.app.history import History, ScalingChange
from warmroute.app.hit_rate import CacheChanges, Causes, HitRateAlerts
from warmroute.app.journal import JournalFile
from warmroute.app.live_page import LiveFeed, LiveSnapshot
from warmroute.app.metrics.exposition import Scrapes
from warmroute.app.metrics.page import (
    DiscoveryMetrics,
    EdgeMetrics,
    HitRateMetrics,
    InferencePoolMetrics,
    ListenerMetrics,
    MetricsPage,
    QueueMetrics,
    RouterMetrics,
    TrafficMetrics,
    add_process_metrics,
)
from warmroute.app.models import ModelWatch, describe_models
from warmroute.app.node_state import NodeState
from warmroute.app.process import (
    ADMIN_SOCKET,
    LoopDelay,
    Systemd,
    guard_exit,
    log_loop_error,
    log_unraisable,
    run_brain,
    run_clean_up,
    run_ended_calls,
    run_garbage_collection,
    run_history,
)
from warmroute.app.process_seat import Seat
from warmroute.app.prompt_doctor import PromptComparison
from warmroute.app.reload import Certificates, ConfigReload, watch_files
from warmroute.app.replicas.cluster_alerts import cluster_alerts
from warmroute.app.replicas.cluster_member import ClusterMember
from warmroute.app.replicas.cluster_metrics import ClusterMetrics
from warmroute.app.replicas.replica import Replica, create_lease
from warmroute.app.startup import hold_until_started, log_started, url_host
from warmroute.app.tracing import create_tracing
from warmroute.config import Config, ConfigError, Health, Limits, NodeConfig
from warmroute.config.nodes import Role
from warmroute.core.admission import Admitter
from warmroute.core.brain import Brain
from warmroute.core.cache_view import CacheView
from warmroute.core.cluster.shared_nodes import SharedNodes
from warmroute.core.fleet import Fleet
from warmroute.core.health import CHECKS_TIME_OUT, HealthState
from warmroute.core.last_decisions import LastDecisions
from warmroute.core.messages import DUE, Event
from warmroute.core.node import Node
from warmroute.core.rate_limits import RateLimits
from warmroute.core.router import Router
from warmroute.core.tables import FleetTables
from warmroute.core.traffic import Counters, Traffic
from warmroute.edge.async_handler import AsyncHandler
from warmroute.edge.client_connection import Listener
from warmroute.edge.connection_pool import ConnectionPools, NodeClient
from warmroute.edge.proxy import Proxy
from warmroute.edge.sockets import (
    PlainServer,
    PlainSockets,
    Server,
    TlsServer,
    accept_the_last,
    listen_inherited,
    listen_tcp,
    listen_unix,
)
from warmroute.edge.timer_wheel import TimerWheel
from warmroute.engines import KV_TRANSFERS
from warmroute.engines.discovery.sync import DiscoveryService
from warmroute.engines.node_watcher import NodeWatcher
from warmroute.event_log import EventLog
from warmroute.prompt.hub import find_tokenizer_files
from warmroute.prompt.node_tokenizer import RemoteTokenizer
from warmroute.prompt.reader import PromptReader
from warmroute.prompt.registry import TokenizerRegistry
from warmroute.prompt.tokenizer import pack_token_ids
from warmroute.scaling.scaling_service import ScalingService

# The side of the service that clients talk to, HTTP clients or Envoy, and how their requests end when it stops.

CUT_OFF_S: Final = 1.0
"""How long clients may take to read the end of a response that was cut off."""


class Clients(Protocol):
    limits: Limits
    accepted: int

    @property
    def connections(self) -> Sized: ...

    @property
    def busy(self) -> int:
        """Connections with a request."""

    def close_idle(self) -> None:
        """Close the connections that wait for a request now, and the others after their response."""

    async def until_empty(self) -> None: ...

    def cut_off_all(self) -> None:
        """End all requests with an error: the router stops."""

    def abort_all(self) -> None: ...


class EnvoyClients(Clients, Protocol):
    """The picker's gRPC server."""

    port: int

    async def listen(self) -> str:
        """Return the address. Raises ConfigError if it cannot be used."""

    async def close(self) -> None: ...


def pool_name(service: Service) -> str | None:
    """Return the name of the picker's InferencePool for the metrics; None if the service is not a picker."""
    pools = (one.inference_pool for one in service.config.discovery if one.inference_pool)
    return None if service.picker is None else next(pools, "default")


async def finish_requests(clients: Clients, stop_now: asyncio.Event, deadline_s: float) -> None:
    """Wait until all clients have left, at most until the deadline or `stop_now`."""
    endings = [asyncio.create_task(clients.until_empty()), asyncio.create_task(stop_now.wait())]
    await asyncio.wait(endings, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
    for ending in endings:
        ending.cancel()


async def cut_off(clients: Clients) -> None:
    """End running requests with an error, and give their clients a moment to read it."""
    clients.cut_off_all()
    try:
        async with asyncio.timeout(CUT_OFF_S):
            await clients.until_empty()
    except TimeoutError:
        clients.abort_all()


# Adds nodes to the running service, removes them, and logs changes of their health.

log = EventLog("warmroute.service")


class ServiceNodes:
    def __init__(self, service: Service) -> None:
        self._service = service

    def add_node(self, config: NodeConfig) -> Node:
        """Raises ConfigError or NameTaken."""
        if config.api_key_env and config.api_key_env not in self._service.config_reload.api_key_envs():
            raise ConfigError("api_key_env must be a variable that a configured node, source or provisioner uses")
        node = self._service.fleet.add(config)
        self._service.watcher.watch(node)
        log.info("node_added", node=node.name, url=node.url)
        self._service.shared_nodes.joined(node)
        return node

    def remove_node(self, name: str) -> Node:
        """Remove a node. Requests without a response move to other nodes, the others finish. Raises UnknownNode."""
        node = self._service.fleet.remove(name)
        self._forget(node)
        log.info(
            "node_removed", "Requests without a response moved to other nodes; the others finish.", node=node.name,
            requests_in_flight=node.inflight,
        )  # fmt: skip
        return node

    def drain_node(self, name: str, draining: bool, by_hand: bool = False) -> Node:
        """Send a node no new requests, or send it requests again. Only an operator ends a drain `by_hand`. Raises
        UnknownNode."""
        node = self._service.fleet.drain(name, draining, by_hand)
        if node.draining and not draining:
            log.info("node_stays_drained", "An operator drained it, and has not ended that.", node=node.name)
        elif draining:
            log.info(
                "node_draining", "It gets no new requests; running ones finish.", node=node.name,
                requests_in_flight=node.inflight,
            )  # fmt: skip
        else:
            log.info("node_undrained", "It gets requests again.", node=node.name)
            self._service.wake()
        return node

    def set_role(self, name: str, role: Role) -> Node:
        """Give a node another role. Its requests continue. Raises UnknownNode."""
        before = self._service.fleet.node(name).role
        node = self._service.fleet.set_role(name, role)
        if before != role:
            log.info("node_role_changed", "Its requests continue.", node=node.name, role=role, previous=before)
            self._service.wake()
        return node

    def reconfigure(self, nodes: Sequence[NodeConfig], health: Health) -> tuple[int, int]:
        """Apply the configured nodes. Return how many were added and removed."""
        added, removed = self._service.fleet.reconfigure(nodes, health)
        for node in removed:
            self._forget(node)
        for node in added:
            self._service.watcher.watch(node)
            self._service.shared_nodes.joined(node)
        self._service.shared_nodes.drop_configured()
        return len(added), len(removed)

    def _forget(self, node: Node) -> None:
        service = self._service
        service.tell(DUE)  # requests without a response leave it
        if service.edges is not None:
            service.edges.cards_changed(node.name, ())
        service.watcher.unwatch(node)
        service.cache_view.remove_node(node.name)
        service.tokenizer_registry.remove_node(node.name)
        service.remote_tokenizer.reset(node)
        service.pools.remove(node)


def log_health_change(node: Node, before: HealthState) -> None:
    state = node.health.state
    fields: dict[str, object] = {"node": node.name, "previous": before.value, "reason": node.health.reason}
    if state is HealthState.EJECTED:
        duration_s = node.health.ejection_s
        log.warning("node_ejected", "The router sends it no requests for a while.", duration_s=duration_s, **fields)
    elif before is HealthState.EJECTED and state is HealthState.UP:
        log.info("node_returned", **fields)
    elif state is not HealthState.DOWN:
        log.info(f"node_{state.value}", **fields)
    elif node.draining:  # a node that still loads, or is about to be removed
        log.info("node_down", "The node is draining.", **fields)
    else:
        log.warning("node_down", _until_when(node, before), **fields)


def _until_when(node: Node, before: HealthState) -> str:
    """Return the sentence for a node that goes down: it says when the node gets requests again."""
    health = node.health
    if health.confirmed or health.reason == CHECKS_TIME_OUT:
        return "The router sends it no requests until a health check passes."
    failures = health.config.consecutive_failures
    if before is HealthState.HALF_OPEN:
        cause = "The trial request failed."
    else:
        cause = "A request failed." if failures == 1 else f"{failures:,} requests in a row failed."
    return (
        f"{cause} The router sends it no requests until its breaker is over and a health check passes; then one trial "
        "request."
    )


# The service: one router process. It builds all parts, connects them, starts and stops them.

NODE_BITS: Final = 20
"""A brain numbers its nodes from its fencing number on, shifted by this many bits: no edge takes one for another's."""
GC_THRESHOLD = 20_000
"""How many more objects there must be than at the last garbage collection: requests in flight alone start none."""
SOURCES_S: Final = 0.02
WRONG_KEY_DELAY_S = 0.5
"""How long a client with a wrong key waits for its 401: one that repeats it in a loop then costs little."""
SWITCH_INTERVAL_S = 0.0005
"""Longest time for which a thread that tokenizes a prompt keeps the interpreter lock from the event loop."""


class Service:
    """Create it, call `start` in a running event loop, and `stop` at the end."""

    def __init__(
        self, read_config: Callable[[], Config], config_file: Path | None = None,
        create_picker: Callable[[Service], EnvoyClients] | None = None, seat: Seat | None = None,
    ) -> None:  # fmt: skip
        """`create_picker`: Envoy asks it for nodes, and it serves no HTTP clients. `seat`: it is the brain of edges in
        other processes, and has no clients."""
        self.seat = seat
        self.config_reload = ConfigReload(self, read_config)
        self._config_file = config_file
        self.systemd = Systemd(os.environ)
        config, now = self.config, time.monotonic
        self.counters = Counters()
        fence = seat.fence if seat is not None else 0
        self.fleet = Fleet(config.health, log_health_change, config.outlier_detection, fence << NODE_BITS)
        self.fleet.islands.reconfigure(config.islands, config.island_affinity)
        self.cache_view = CacheView(config.index)
        self.cache_view.set_stores({one.name: one.capacity_tokens for one in config.kv_stores})
        self.tokenizer_registry = TokenizerRegistry(config.prompts, config.models, locate=find_tokenizer_files)
        self.prompt_reader = PromptReader(
            self.tokenizer_registry, config.prompts, self.counters, self._fetch_tokens,
            is_served=self._is_served,
        )  # fmt: skip
        self.router = Router(self.fleet, self.cache_view, config.routing, config.price, config.routes)
        self.admission = Admitter(self.router, config.admission, config.routes)
        self.rate_limits = RateLimits(config.keys, now())
        self.traffic = Traffic()
        self.last_decisions = LastDecisions(config.journal, self.counters)
        self.journal_file = JournalFile(self.last_decisions, self.counters, now)
        self.brain = Brain(
            self.fleet, self.router, self.admission, self.counters, traffic=self.traffic,
            journal=self.last_decisions, max_attempts=config.upstream.max_attempts, hedging=config.hedging,
            ticks_always=True, rate_limits=self.rate_limits,
        )  # fmt: skip
        self.fleet.observe_health(lambda _node, _before: self.wake())
        self._waking = False
        self.timers = TimerWheel(now)
        self.plain_sockets = PlainSockets()
        self.pools = ConnectionPools(config.upstream, self.timers, self.plain_sockets)
        self.capture = TrafficCapture(config.capture, self.counters, now)
        tracing = create_tracing(config.tracing, self.counters)
        self.trace_sampling = tracing[0] if tracing is not None else None
        self._trace_exporter = tracing[1] if tracing is not None else None
        self.prompt_doctor = PromptComparison(self.traffic.requests, self._looks_up_caches, now)
        self.ended_calls = EndedCalls(
            config, self.capture, self.prompt_doctor, self._trace_exporter, self.router.output_lengths, self._is_served
        )
        brain = self.brain
        self.tables = tables = FleetTables(self.fleet, self.router, self.admission, self.cache_view)
        self.proxy = Proxy(
            config, brain.handle, lambda: brain.due_now, tables.current, self.prompt_reader,
            self.pools, self.counters, keep=self.ended_calls.keep, tracing=self.trace_sampling,
            kv_transfers=KV_TRANSFERS, now=now,
        )  # fmt: skip
        self.listener = Listener(self.proxy, config.limits, self.timers, WRONG_KEY_DELAY_S)
        self.edges = BrainServer(self, Path(seat.brain_socket), seat.fence) if seat is not None else None
        node_client = NodeClient(self.pools)
        self.watcher = NodeWatcher(
            self.fleet,
            config,
            node_client.get,
            self._last_byte_s,
            now,
            cache_view=self.cache_view,
            post=node_client.post,
            on_models=self._models_reported,
        )
        self.remote_tokenizer = RemoteTokenizer(node_client.post, pack_token_ids)
        self.model_watch = ModelWatch(self.fleet, self.tokenizer_registry, node_client.post, lambda: self.config)
        self.nodes = ServiceNodes(self)
        self.shared_nodes = SharedNodes(self.fleet, self.nodes, int(1000.0 * time.time()))
        self.node_state = NodeState(config, seat.folder if seat is not None else "")
        self.node_state.on_late_load = self.shared_nodes.restore
        self.shared_nodes.keep = self.node_state.keep
        self.member: ClusterMember | None = None
        self._replica: Replica | None = None
        self.discovery = DiscoveryService(self.fleet, self.nodes)
        self.certificates = Certificates(self)
        self.scaling = self._create_scaling(config, node_client) if config.scaling.enabled else None
        self.loop_delay = LoopDelay()
        changes = CacheChanges(self.fleet, self.cache_view)
        causes = Causes(self.fleet, self.cache_view, changes, lambda key: self.prompt_doctor.reports.get(key))
        hit_rates = HitRateAlerts(self.traffic, changes, causes, lambda: self.prompt_doctor.findings)
        self.rejections = Rejections(self.counters)
        self.alerts = ActiveAlerts(
            lambda now_s: client_error_alerts(self.proxy.client_errors, now_s),
            FleetAlerts(self.fleet, self.cache_view),
            self.rejections,
            hit_rates,
            lambda _now_s: discovery_alerts(self.discovery),
            lambda now_s: cluster_alerts(self.member, now_s),
            self.config_reload.alerts,
        )
        self.alert_webhook = create_webhook(config.alerts)
        page = MetricsPage(
            self.fleet,
            self.cache_view,
            self.counters,
            self._count_clients,
            lambda: (self.admission.queue.waiting, self.admission.queue.queued_total),
            now,
            lambda: self.scaling.stats() if self.scaling is not None else None,
            (
                TrafficMetrics(self.traffic, self.counters),
                QueueMetrics(self.admission.queue),
                HitRateMetrics(hit_rates, self.prompt_doctor),
                RouterMetrics(
                    self.config_reload.reloads,
                    self.loop_delay,
                    self.alerts,
                    self.brain.decisions,
                    self.alert_webhook,
                    self.trace_sampling,
                ),
                DiscoveryMetrics(self.discovery.stats),
                ClusterMetrics(lambda: self.member.figures() if self.member is not None else None),
                InferencePoolMetrics(self.fleet, lambda: self.admission.queue.waiting, lambda: pool_name(self)),
                ListenerMetrics(self.listener) if self.edges is None else EdgeMetrics(self.edges),
                add_process_metrics,
            ),
        )
        queue = self.admission.queue
        self.scrapes = Scrapes(page.render)
        self.history = History(self.traffic, self.counters, self.fleet, lambda: queue.waiting, self._last_scaling)
        snapshot = LiveSnapshot(
            self.fleet, self.cache_view, queue, self.traffic, self.history, self.alerts,
            self.proxy.client_errors, self.last_decisions,
            lambda: self.config.routing.policy, self.config_reload.describe_last, self.describe_scaling,
            self.describe_prompts, now,
        )  # fmt: skip
        self.live_feed = LiveFeed(snapshot)
        self.describe_alerts = snapshot.describe_alerts
        decisions = Decisions(self.last_decisions, self.proxy, self.brain)
        admin = AdminApi(
            self.fleet, self.cache_view, self.scrapes, decisions, self.live_feed, CaptureStreams(self.capture), self,
            config.admin.token_sha256,
        )  # fmt: skip
        handler = AsyncHandler(admin.answer, admin.check_head, self.proxy.client_errors)
        self.admin_listener = Listener(handler, config.limits, self.timers)
        self.add_node, self.remove_node = self.shared_nodes.add_by_hand, self.shared_nodes.remove_node
        self.drain_node, self.set_role = self.shared_nodes.drain_node, self.shared_nodes.set_role_by_hand
        self.reload, self.describe_reload = self.config_reload.reload, self.config_reload.describe
        self.readiness = self.proxy.own_endpoints.readiness
        self.describe_discovery = self.discovery.describe
        self.picker = create_picker(self) if create_picker is not None else None
        self.clients: Clients = self.picker or self.listener
        self._servers: list[Server] = []
        self._inherited = False
        """The clients' socket is systemd's."""
        self._tasks: list[asyncio.Task[None]] = []
        self._stop_now = asyncio.Event()
        self.port = 0
        self.admin_port = 0

    @property
    def config(self) -> Config:
        return self.config_reload.current

    def _looks_up_caches(self, route: str) -> bool:
        routing = self.config.routing
        return next((one.routing(routing) for one in self.config.routes if one.name == route), routing).looks_up_caches

    def _create_scaling(self, config: Config, node_client: NodeClient) -> ScalingService:
        scaling = ScalingService(
            config, self.fleet, self.cache_view, self.shared_nodes, node_client.post,
            lambda: self.admission.queue.waiting, partial(setattr, self.admission.without_node, "first_node_wait_s"),
            create_lease(config, self.seat),
        )  # fmt: skip
        self.router.demand_meter, self.router.hot = scaling.demand_meter, scaling.hot
        self.router.may_serve = self._may_serve
        record_recent_traffic(self.capture, scaling.traffic)
        return scaling

    def _last_byte_s(self, node: Node) -> float:
        """When the node last sent a byte of a response that still runs."""
        if self.edges is not None:
            return self.edges.last_byte_s(node.number)
        return self.pools.for_node(node).last_byte_s

    def _count_clients(self) -> tuple[int, int]:
        """Return how many clients are connected, and how many ever were."""
        if self.edges is not None:
            return self.edges.gauge("connections"), self.edges.total("accepted")
        return len(self.clients.connections), self.clients.accepted

    def tell(self, event: Event) -> None:
        """Tell the brain something that no client's request has caused."""
        if self.edges is not None:
            self.edges.tell(event)
        else:
            self.proxy.tell(event)

    def _models_reported(self, node: Node, cards: Sequence[dict[str, Any]]) -> None:
        if window := node.config.max_model_len:
            cards = [{**card, "max_model_len": window} for card in cards]
        self.tokenizer_registry.set_model_cards(node.name, cards)
        if self.edges is not None:
            self.edges.cards_changed(node.name, cards)

    def _may_serve(self, model: str) -> bool:
        """Return whether a new node might serve this model. All nodes of a scaled fleet serve the same models: those
        served before and those configured. Before the first node, every model is possible."""
        served = self.fleet.models_ever_served
        return not served or model in served or any(one.name == model for one in self.config.models)

    def _is_served(self, model: str) -> bool:
        return self.fleet.group(model) is not None

    def wake(self) -> None:
        """Something has changed apart from requests: let the brain act on it in this turn of the event loop."""
        if self.brain.due_now and not self._waking:
            self._waking = True
            asyncio.get_running_loop().call_soon(self._tell_due)

    def _tell_due(self) -> None:
        self._waking = False
        self.tell(DUE)

    def write_ended_calls(self) -> None:
        """Write down what is to be kept of the requests that have ended since the last call."""
        ended = list(self.brain.ended)
        self.brain.ended.clear()
        self.ended_calls.write(ended, self.proxy.take_ended_early(), time.monotonic())

    def describe_scaling(self) -> dict[str, Any]:
        return self.scaling.describe() if self.scaling is not None else {"enabled": False}

    def describe_cluster(self) -> dict[str, Any]:
        return self.member.describe() if self.member is not None else {"enabled": False}

    async def confirm_changes(self, node: Node) -> dict[str, Any]:
        """Wait until the change of this node is kept, and other replicas know it, but less than a second."""
        replicas = asyncio.ensure_future(self.member.confirm_changes()) if self.member is not None else None
        kept = await self.node_state.all_kept() and self.node_state.survives_restart
        status = self.member.read_status() if self.member is not None else None
        survives = kept or (status is not None and status.writable) or self._is_as_configured(node)
        if self.fleet.is_configured(node.name):  # the file wins, except over a drain by hand
            role_is_set = node.role != node.config.role
            survives = survives and self.fleet.find(node.name) is node
            survives = survives and not (role_is_set and self.shared_nodes.configured_role(node))
        found: dict[str, Any] = {"survives_restart": survives}
        return found if replicas is None else found | {"replicas": await replicas}

    def _is_as_configured(self, node: Node) -> bool:
        """Return whether a restart without kept changes, `[state]` or Redis, leaves the node as it is."""
        started = self.config_reload.started_with
        if started.state.directory or started.state.config_map or started.cluster.url:
            return False
        return self.fleet.is_configured(node.name) and not node.draining and node.role == node.config.role

    def _last_scaling(self) -> ScalingChange | None:
        last = self.scaling.autoscaler.last_decision if self.scaling is not None else None
        return None if last is None else ScalingChange(last.at_s, last.nodes, last.desired_nodes, last.reasons)

    def describe_prompts(self, show_text: bool = False) -> dict[str, Any]:
        return self.prompt_doctor.describe(time.time() - time.monotonic(), show_text)

    def describe_models(self) -> list[dict[str, Any]]:
        models = {model.name: model for model in self.config.models}
        return describe_models(
            self.fleet, self.tokenizer_registry, self.model_watch, self.counters, models,
            self.config.prompts.remote_tokenize,
        )  # fmt: skip

    async def _fetch_tokens(self, model: str, path: bytes, body: bytes) -> bytes | None:
        """Return the tokens of a prompt, from the least loaded vLLM node of its model."""
        group = self.fleet.group(model)
        remote = self.remote_tokenizer
        up = group.up.nodes if group else ()
        nodes = [node for node in up if node.engine == "vllm" and not remote.is_paused(node)]
        return await remote.tokenize(min(nodes, key=lambda node: node.load), path, body) if nodes else None

    # Start.

    async def start(self) -> None:
        """Raises ConfigError if an address cannot be used."""
        config = self.config
        self.tokenizer_registry.start_loading()
        if config.startup.max_wait_s:
            self.proxy.own_endpoints.starting = self.tables.starting = True
            self.proxy.hold_requests()
        operators_changes = await self.node_state.load()
        address = await self._listen()
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self.timers.run()),
            loop.create_task(self.loop_delay.run()),
            loop.create_task(run_clean_up(self.cache_view, self.tokenizer_registry)),
            loop.create_task(run_garbage_collection()),
            loop.create_task(run_brain(self.tell, lambda: self.brain.next_due_s)),
            loop.create_task(run_ended_calls(self.write_ended_calls, self.brain.failed_tries)),
            loop.create_task(self.model_watch.run()),
            loop.create_task(self.journal_file.run()),
            loop.create_task(self.capture.run()),
            loop.create_task(run_history(self.history, self.alerts, self.alert_webhook)),
            loop.create_task(self.prompt_doctor.run()),
        ]
        if self.edges is not None:
            assert self.seat is not None
            self._tasks.append(loop.create_task(self.edges.run()))
            self._tasks.append(loop.create_task(LearnedFile(self, Path(self.seat.folder)).run()))
        if (file := self._config_file) is not None:
            changed = watch_files(lambda: [file], lambda: self.config_reload.file_changed(file))
            self._tasks.append(loop.create_task(changed))
        self._tasks.append(
            loop.create_task(watch_files(lambda: self.certificates.files, self.config_reload.certificates_changed))
        )
        if self._trace_exporter is not None:
            self._trace_exporter.start()
        if self.alert_webhook is not None:
            self.alert_webhook.start()
        self.nodes.reconfigure(config.nodes, config.health)
        self.shared_nodes.restore(operators_changes)
        self.discovery.reconfigure(config.discovery)
        if config.cluster.url:
            self._replica = Replica(self)
            self.member = self._replica.member
        if self.scaling is not None:
            await self.scaling.start()
        if config.startup.max_wait_s:
            self._tasks.append(loop.create_task(hold_until_started(self)))
        if self.seat is not None and self.edges is not None:
            self._tasks.append(loop.create_task(self.seat.give_signs()))
            if self.seat.fence > 1:  # the edges hold nothing back for this brain
                await self._until_sources_listed(config.startup.max_wait_s)
            self.edges.listen()
            self.seat.serves()
            log.info("brain_started", nodes=len(self.fleet), fence=self.seat.fence)
            return
        log_started(config, address, self.admin_port, len(self.fleet))

    async def _until_sources_listed(self, within_s: float) -> None:
        """Wait until the sources have listed their nodes."""
        until_s = time.monotonic() + within_s
        while self.discovery.pending and time.monotonic() < until_s:  # noqa: ASYNC110
            await asyncio.sleep(SOURCES_S)

    async def _listen(self) -> str:
        """Open the listeners. Return the address for clients."""
        listen, admin = self.config.listen, self.config.admin
        tls, plain = self.certificates.load(), self.plain_sockets
        plain.start()
        if self.edges is not None:
            assert self.seat is not None  # edges may come once the sources have listed their nodes
            address = f"unix:{self.seat.brain_socket}"
        elif self.picker is not None:
            address = await self.picker.listen()
            self.port = self.picker.port
        elif (inherited := self.systemd.take_socket()) is not None:
            self._inherited = True
            self._servers.append(await listen_inherited(self.listener, inherited, tls, plain))
            name = inherited.getsockname()
            self.port = name[1] if isinstance(name, tuple) else 0
            scheme = "https" if tls else "http"
            address = f"{scheme}://{url_host(name[0])}:{self.port}" if self.port else f"unix:{name}"
        elif listen.unix_socket:
            self._servers.append(await listen_unix(self.listener, listen.unix_socket, tls, plain))
            address = f"unix:{listen.unix_socket}"
        else:
            server = await listen_tcp(self.listener, listen.host, listen.port, tls, plain)
            self._servers.append(server)
            self.port = server.sockets[0].getsockname()[1]
            address = f"{'https' if tls else 'http'}://{url_host(listen.host)}:{self.port}"
        if admin.enabled:
            inherited = self.systemd.take_socket(ADMIN_SOCKET)
            if self.seat is not None:
                inherited = self.seat.take_admin_socket()
            if inherited is not None:
                server = await listen_inherited(self.admin_listener, inherited, None, plain)
            else:
                server = await listen_tcp(self.admin_listener, admin.host, admin.port, None, plain)
            self._servers.append(server)
            self.admin_port = server.sockets[0].getsockname()[1]
        return address

    # Stop.

    async def stop(self) -> None:
        """Report not ready, stop accepting connections, let running requests finish, and close everything."""
        shutdown = self.config.shutdown
        self.proxy.own_endpoints.stopping = True
        try:
            async with asyncio.timeout(shutdown.delay_s if self.edges is None else 0.0):  # edges have waited
                await self._stop_now.wait()
        except TimeoutError:
            pass
        if self.picker is None and self.edges is None:
            for server in self._servers[:1]:
                await self._stop_accepting(server)
        self.clients.close_idle()
        await finish_requests(self.clients, self._stop_now, shutdown.deadline_s)
        if self.clients.connections:
            log.warning(
                "requests_cut_off",
                "A second signal arrived."
                if self._stop_now.is_set()
                else "They did not finish before shutdown.deadline_s.",
                requests=self.clients.busy,
                deadline_s=shutdown.deadline_s,
            )
            await cut_off(self.clients)
        self.proxy.client_errors.log_rest()
        self.rejections.log_rest()
        if self.picker is not None:
            await self.picker.close()
        if self.edges is not None:
            self.edges.close()
        self.admin_listener.abort_all()
        for server in self._servers:
            server.close()
        await self.discovery.close()
        if self.scaling is not None:
            await self.scaling.close()
        if self._replica is not None:
            await self._replica.close()
        await self.node_state.close()
        self.watcher.close()
        self.prompt_reader.close()
        self.proxy.body_scanner.close()
        self.tokenizer_registry.close()
        self.pools.close()
        for task in self._tasks:
            task.cancel()
        self.brain.failed_tries.write()
        self.write_ended_calls()
        await self.journal_file.close()
        await self.capture.close()
        if self._trace_exporter is not None:
            await self._trace_exporter.close()
        if self.alert_webhook is not None:
            await self.alert_webhook.close()
        await asyncio.sleep(0)
        self.plain_sockets.close()

    async def _stop_accepting(self, server: Server) -> None:
        """Close the listener for clients. What waits in systemd's socket stays there for the next process."""
        if not self._inherited and server.is_serving():
            if isinstance(server, PlainServer | TlsServer):
                server.remove_file()
            await accept_the_last(server.sockets)
        server.close()

    def stop_now(self) -> None:
        """Let `stop` cut off running requests now."""
        self._stop_now.set()

    async def run_until_signal(self) -> None:
        """Start, serve until SIGTERM or SIGINT, and stop. A second signal cuts off running requests."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        loop = asyncio.get_running_loop()
        signaled = asyncio.Event()
        threads = ThreadPoolExecutor(thread_name_prefix="warmroute")
        loop.set_default_executor(threads)
        await self.start()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, signaled.set)
        guard_exit(self.config.shutdown)
        loop.add_signal_handler(signal.SIGHUP, self.reload, "SIGHUP")
        loop.set_exception_handler(log_loop_error)
        sys.unraisablehook = log_unraisable
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD)
        self.systemd.ready(f"{len(self.fleet)} nodes")
        watchdog = loop.create_task(self.systemd.keep_alive())
        await signaled.wait()
        self.systemd.stopping()
        log.info("service_stopping", "Running requests finish first.", deadline_s=self.config.shutdown.deadline_s)
        stopping = loop.create_task(self.stop())
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop_now)
        await stopping
        watchdog.cancel()
        threads.shutdown(wait=False, cancel_futures=True)
