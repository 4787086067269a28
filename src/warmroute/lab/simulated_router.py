"""Production's core fed in virtual time, and other routers' rules in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec

from warmroute.config import Config, Health, Hedging, NodeConfig, Pricing
from warmroute.config.routing import HIGH, LOW, Routes
from warmroute.core.admission import Admitter
from warmroute.core.cache_view import CacheView
from warmroute.core.decision import Decision
from warmroute.core.fleet import Fleet
from warmroute.core.group import Candidates
from warmroute.core.node import EngineCounters, LoadReport, Node
from warmroute.core.node_reports import KvEvents, apply_health_pass, apply_load_report
from warmroute.core.output_length import OutputLengthEstimate
from warmroute.core.policies.price import PricePolicy
from warmroute.core.policy import Policy
from warmroute.core.queue_order import QueueOrder
from warmroute.core.rejections import NodeQueuesFull
from warmroute.core.router import Router
from warmroute.core.routing_context import Query
from warmroute.engines.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    HashesStored,
    NodeKvEvents,
    RankEvents,
)
from warmroute.lab.engine import blocks as simulated
from warmroute.lab.engine.blocks import KvEvent, KvEventSink
from warmroute.lab.engine.values import EngineStats
from warmroute.lab.request_flow import MODEL, RequestFlow, SimulatedRequest
from warmroute.lab.simulated_node import Calendar, Conditions, ProcessState, SimulatedNode

if TYPE_CHECKING:
    from warmroute.lab.world import World


# Polls the simulated nodes' health and load in virtual time. core/node_reports.py decides what the responses do.
#
# One poll covers health and load here. A response is as old as the way back, and older if the conditions say so.


class Polls:
    def __init__(self, world: World, replica: Replica, conditions: Conditions, health: Health) -> None:
        self._world = world
        self._replica = replica
        self._conditions = conditions
        self._timeout_ms = health.timeout_s * 1000.0
        self._random = Random(f"{conditions.seed} polls" + (f" {replica.index}" if replica.index else ""))

    def begin(self, sim: SimulatedNode) -> None:
        """Schedule the first poll somewhere within the first interval, so that nodes are not polled in step."""
        self._world.calendar.after(self._random.random() * self._conditions.poll_interval_s * 1000.0, self._poll, sim)

    def _poll(self, sim: SimulatedNode) -> None:
        world, conditions = self._world, self._conditions
        if sim.node.name not in world.nodes:
            return
        calendar, node = world.calendar, sim.views[self._replica.index]
        waited_ms = 0.0
        if sim.state is ProcessState.SERVING:
            if not conditions.poll_loss or self._random.random() >= conditions.poll_loss:
                if sim.tries:
                    world.advance(sim)
                calendar.after(
                    sim.one_way_ms + conditions.poll_lag_ms, self._respond, sim, _load_report(sim, conditions.streams)
                )
        elif sim.state is ProcessState.DEAD:
            calendar.after(sim.one_way_ms, self._check_failed, node)
        else:
            waited_ms = self._timeout_ms
            calendar.after(waited_ms, self._check_timed_out, node)
        node.drop_stale_load(conditions.stale_s, calendar.now_s)
        jitter = conditions.poll_jitter
        pause_s = conditions.poll_interval_s * (1.0 - jitter + 2.0 * jitter * self._random.random())
        calendar.after(waited_ms + pause_s * 1000.0, self._poll, sim)

    def _respond(self, sim: SimulatedNode, report: LoadReport) -> None:
        replica, now_s = self._replica, self._world.calendar.now_s
        node = sim.views[replica.index]
        apply_health_pass(replica.fleet, node, 2.0 * sim.one_way_ms, now_s)
        replica.requests.fleet_changed()
        apply_load_report(node, report, replica.listener.node_kv_events(node), now_s)

    def _check_failed(self, node: Node) -> None:
        self._replica.fleet.check_failed(node, self._world.calendar.now_s, "connection refused")
        self._replica.requests.fleet_changed()

    def _check_timed_out(self, node: Node) -> None:
        self._replica.fleet.check_timed_out(node, self._world.calendar.now_s)
        self._replica.requests.fleet_changed()


def _load_report(sim: SimulatedNode, streams: bool) -> LoadReport:
    """What the node's metrics page would say now. Times of prefills count only where nothing else shows its speed."""
    engine, spec = sim.engine, sim.spec
    idle = "load" in spec.misreports
    counters = EngineCounters() if idle else _counters(engine.stats)
    if not streams and not idle:
        counters = msgspec.structs.replace(
            counters, prefill_time_s=engine.stats.prefill_time_ms / 1000.0, prefills=engine.stats.prefills,
            prefilled_tokens=engine.stats.prefilled_tokens,
        )  # fmt: skip
    return LoadReport(
        running=0 if idle else engine.num_running,
        waiting=0 if idle else engine.num_waiting,
        kv_usage=0.0 if idle else engine.kv_usage,
        incarnation=float(sim.incarnation),
        block_size=spec.block_size,
        capacity_tokens=(engine.config.num_blocks - 1) * spec.block_size,
        adapters=tuple(engine.running_loras) if spec.adapters else (),
        adapter_slots=spec.max_loras if spec.adapters else 0,
        counters=counters,
    )


def _counters(stats: EngineStats) -> EngineCounters:
    return EngineCounters(
        queried_tokens=stats.prefix_cache_queries,
        hit_tokens=stats.prefix_cache_hits,
        preemptions=stats.preemptions,
        queue_time_s=stats.queue_time_ms / 1000.0,
        queue_times=stats.queue_times,
    )


# What a simulated policy learns besides the fleet's own accounting: where requests went, how they ended, KV events.
# For the router's own policies, this brings KV events into the CacheView.


class PolicyListener:
    """Subclass it and override the methods you need."""

    wants_kv_events: bool = False
    tells_replicas: bool = False
    """Whether several routers with this policy tell each other of their requests."""
    poll_interval_s: float | None = None
    """The peer's own interval between two polls of a node; None for the interval of the conditions."""

    def node_joined(self, node: Node, block_size: int, num_blocks: int) -> None:
        """A node joined the fleet, with a cache of this size."""

    def node_left(self, node: Node) -> None:
        """A node left the fleet."""

    def node_kv_events(self, node: Node) -> KvEvents | None:
        """Return the node's KV events if the router's CacheView follows them."""
        return None

    def request_sent(self, request: SimulatedRequest, node: Node, now_s: float) -> None:
        """The router sent a request to a node: once for each node that it tries."""

    def first_token(self, request: SimulatedRequest, node: Node, cached_tokens: int, now_s: float) -> None:
        """The first token reached the router, with the cached tokens that the engine reports."""

    def request_ended(self, request: SimulatedRequest, node: Node, now_s: float) -> None:
        """A request ended on a node, with or without success: once after each `request_sent`."""

    def queues(self, request: SimulatedRequest, now_s: float) -> bool:
        """Return whether this router keeps a new request in a queue of its own. If so, the policy has queued it."""
        return False

    def next_queued(self, now_s: float) -> SimulatedRequest | None:
        """Remove the next request that may leave the router's own queue, and return it."""
        return None

    def client_left(self, request: SimulatedRequest) -> None:
        """The client of a request in the router's own queue went away."""

    def kv_events(self, node: Node, incarnation: int, sequence: int, events: list[KvEvent], now_s: float) -> None:
        """A batch of KV events arrived. Numbers start at 0 for each incarnation; a gap in them is a loss."""


class KvEventDelivery:
    """Delivers the KV events of simulated engines to a listener: delayed, in order, and sometimes lost.

    An engine publishes the events of a prompt at the end of its step. It publishes the blocks filled while decoding
    when the simulation next advances the engine, at the next poll at the latest.
    """

    def __init__(self, calendar: Calendar, conditions: Conditions, listener: PolicyListener, replica: int = 0) -> None:
        self._calendar = calendar
        self._lag_ms = conditions.kv_lag_ms
        self._loss = conditions.kv_loss
        self._random = Random(f"{conditions.seed} kv events" + (f" {replica}" if replica else ""))
        self._listener = listener

    def sink(self, sim: SimulatedNode, replica: int = 0) -> KvEventSink:
        """Return where the node's next incarnation publishes its events to this router."""
        incarnation, next_sequence, node = sim.incarnation + 1, 0, sim.views[replica]

        def publish(at_ms: float, events: list[KvEvent]) -> None:
            nonlocal next_sequence
            sequence = next_sequence
            next_sequence += 1
            if not replica:
                sim.next_event_sequence = next_sequence
            if self._loss and self._random.random() < self._loss:
                return
            due_ms = max(self._calendar.now_ms, at_ms + sim.one_way_ms + self._lag_ms)
            self._calendar.at(due_ms, deliver, sequence, events)

        def deliver(sequence: int, events: list[KvEvent]) -> None:
            self._listener.kv_events(node, incarnation, sequence, events, self._calendar.now_s)

        return publish


RANK = 0


class IndexUpdates(PolicyListener):
    """Brings KV events into the router's CacheView, by the code that production runs (engines/).

    Only two things differ from production. Messages arrive in virtual time, and nothing replays a lost one. And
    simulated blocks have no tokens: an engine's block hash is the hash that lookups use.
    """

    def __init__(self, cache_view: CacheView, now_s: Callable[[], float], *, events: bool) -> None:
        self.cache_view = cache_view
        self.wants_kv_events = events
        self._now_s = now_s
        self._nodes: dict[Node, NodeKvEvents] = {}

    def node_joined(self, node: Node, block_size: int, num_blocks: int) -> None:
        cache = self.cache_view.add_node(node.name, [MODEL])
        self.cache_view.attach(node.name, node.config.kv_store)
        if node.adapter_names:
            self.cache_view.set_models(cache, MODEL, (), sorted(node.adapter_names))
        cache.set_size(block_size, (num_blocks - 1) * block_size)
        kv_events = self._nodes[node] = NodeKvEvents(cache)
        if self.wants_kv_events:
            rank = kv_events.ranks[RANK] = RankEvents[_Message](cache, RANK, lambda: _decode, now=self._now_s)
            rank.sequence.mark_empty()
            rank.work(inf)

    def node_left(self, node: Node) -> None:
        del self._nodes[node]
        self.cache_view.remove_node(node.name)

    def node_kv_events(self, node: Node) -> NodeKvEvents | None:
        return self._nodes.get(node)

    def kv_events(self, node: Node, incarnation: int, sequence: int, events: list[KvEvent], now_s: float) -> None:
        if node in self._nodes:
            rank = self._nodes[node].ranks[RANK]
            rank.receive(sequence, _Message(events))
            rank.sequence.skip_missing()
            rank.work(inf)


@dataclass(slots=True, eq=False)
class _Message:
    """The events of one step. Equal only to itself."""

    events: list[KvEvent]


def _decode(message: _Message) -> Iterator[Event]:
    for event in message.events:
        if isinstance(event, simulated.BlockRemoved):
            yield BlockRemoved([*event.block_hashes], event.medium)
        elif isinstance(event, simulated.AllBlocksCleared):
            yield AllBlocksCleared()
        elif event.medium == simulated.CPU:
            yield BlockStored([*event.block_hashes], medium=event.medium)
        else:
            yield HashesStored(event.block_hashes, event.parent_block_hash)


class InformedPolicy:
    """Another router's policy. It keeps its own books of what runs where, so it hears of every ticket before it
    decides: one event can send several requests."""

    def __init__(self, policy: Policy, hear: Callable[[], object]) -> None:
        self.name = policy.name
        self.queues_at_router = policy.queues_at_router
        self.wants_tokens = policy.wants_tokens
        self._policy = policy
        self._hear = hear

    def decide(self, query: Query) -> Decision:
        self._hear()
        return self._policy.decide(query)


# The router's admission queue in front of any policy, so that an experiment can separate placement from order.
#
# The policy chooses the node. The queue needs the prefill work of a request there, and takes it from `price`, which
# reads it from the router's own cache index. So a policy of another router gets the same queue as ours.


class QueuedPolicy:
    """A policy whose requests wait at the router while their node has no room."""

    queues_at_router = True
    wants_tokens = True

    def __init__(self, policy: Policy, cache_view: CacheView, output_lengths: OutputLengthEstimate) -> None:
        self.name = policy.name
        self._policy = policy
        self._price = PricePolicy(cache_view, output_lengths, Pricing(), Random(0))
        self._alone: dict[Node, Candidates] = {}

    def decide(self, query: Query) -> Decision:
        chosen = self._policy.decide(query)
        node, candidates = chosen.node, query.candidates
        alone = self._alone.get(node)
        if alone is None or alone.shared_by != len(candidates):
            alone = self._alone[node] = Candidates((node,), len(candidates))
        query.candidates = alone
        try:
            prices = self._price.prices(query)
        finally:
            query.candidates = candidates
        return Decision(node, chosen.policy, chosen.reason, chosen.fallbacks, prices, (node,), 0)


class IndexedListener(PolicyListener):
    """Tells another router's policy what it needs, and keeps the router's cache index up to date beside it."""

    wants_kv_events = True

    def __init__(self, listener: PolicyListener, index: IndexUpdates) -> None:
        self._listener = listener
        self._index = index
        self.tells_replicas = listener.tells_replicas
        self.poll_interval_s = listener.poll_interval_s

    def node_joined(self, node: Node, block_size: int, num_blocks: int) -> None:
        self._listener.node_joined(node, block_size, num_blocks)
        self._index.node_joined(node, block_size, num_blocks)

    def node_left(self, node: Node) -> None:
        self._listener.node_left(node)
        self._index.node_left(node)

    def node_kv_events(self, node: Node) -> KvEvents | None:
        return self._index.node_kv_events(node)

    def request_sent(self, request: SimulatedRequest, node: Node, now_s: float) -> None:
        self._listener.request_sent(request, node, now_s)

    def first_token(self, request: SimulatedRequest, node: Node, cached_tokens: int, now_s: float) -> None:
        self._listener.first_token(request, node, cached_tokens, now_s)

    def request_ended(self, request: SimulatedRequest, node: Node, now_s: float) -> None:
        self._listener.request_ended(request, node, now_s)

    def kv_events(self, node: Node, incarnation: int, sequence: int, events: list[KvEvent], now_s: float) -> None:
        if self._listener.wants_kv_events:
            self._listener.kv_events(node, incarnation, sequence, events, now_s)
        self._index.kv_events(node, incarnation, sequence, events, now_s)


# One router of a simulation: production's Fleet, CacheView, Router and Admission, with its own view of each node.
#
# Several of them serve the same simulated engines. Each polls the nodes and follows their KV events itself, and hears
# the rest from the others (simulated_cluster.py).


class Replica:
    def __init__(
        self,
        world: World,
        index: int,
        config: Config,
        health: Health,
        policy: Policy | None,
        listener: PolicyListener | None,
        queue_order: QueueOrder | None = None,
    ) -> None:
        self.index = index
        self._world = world
        calendar, conditions = world.calendar, world.conditions
        self.fleet = Fleet(health)
        self.fleet.islands.reconfigure(config.islands, config.island_affinity)
        self.cache_view = CacheView(config.index)
        self.cache_view.set_stores({one.name: one.capacity_tokens for one in conditions.kv_stores})
        # With a seed of 0, production's router would take one from the operating system.
        seed = config.routing.seed or (conditions.seed + 1000 * index) * 2 + 1
        routing = msgspec.structs.replace(config.routing, seed=seed)
        self.router = Router(self.fleet, self.cache_view, routing, config.price, config.routes)
        self.hedging = config.hedging if policy is None else Hedging(max_ratio=0.0)  # other routers do not hedge
        if policy is not None:
            self.router.policy = InformedPolicy(policy, lambda: self.requests.hear())
        order = queue_order or QueueOrder.GUARANTEED
        self.admission = Admitter(self.router, config.admission, config.routes, order)
        if listener is None and (self.router.policy.wants_tokens or (config.routes and config.uses_kv_events)):
            listener = IndexUpdates(self.cache_view, lambda: calendar.now_s, events=config.uses_kv_events)
        if queue_order is not None and not self.router.policy.queues_at_router:
            self.router.policy = QueuedPolicy(self.router.policy, self.cache_view, self.router.output_lengths)
            if not isinstance(listener, IndexUpdates):
                updates = IndexUpdates(self.cache_view, lambda: calendar.now_s, events=True)
                listener = IndexedListener(listener, updates) if listener is not None else updates
        self.listener = listener = listener or PolicyListener()
        self.feed = KvEventDelivery(calendar, conditions, listener, index) if listener.wants_kv_events else None
        self.requests = RequestFlow(world, self, Routes(config.routes))
        self.polls = Polls(world, self, conditions, health)

    def tell_policy(self, event: str, request: SimulatedRequest, sim: SimulatedNode, *more: int) -> None:
        """Tell the policy; those of the other routers, too, if they tell each other. `event`: a PolicyListener's."""
        calendar = self._world.calendar
        getattr(self.listener, event)(request, sim.views[self.index], *more, calendar.now_s)
        conditions = self._world.conditions
        if not (self.listener.tells_replicas and conditions.shares):
            return
        for other in self._world.replicas:
            if other is not self:
                node, listener = sim.views[other.index], other.listener
                calendar.after(conditions.sync_lag_ms, _call, getattr(listener, event), request, node, *more, calendar)

    def add(self, config: NodeConfig, adapters: tuple[str, ...]) -> Node:
        node = self.fleet.add(config)
        if adapters:
            cards: list[dict[str, object]] = [{"id": MODEL}]
            cards += [{"id": name, "parent": MODEL} for name in adapters]
            self.fleet.update_models(node, config.models, cards)
        return node


def _call(listener: Callable[..., None], *args: Any) -> None:
    *before, calendar = args
    listener(*before, calendar.now_s)


# Admission by queue threshold, wrapped around any policy, so that an experiment can compare policies under the same
# rule: nodes with `threshold` requests or more receive no request, and a request is rejected with 429 when all nodes
# are over the threshold. High-priority requests are never rejected. Low-priority requests see half the threshold.


class QueueThresholdPolicy:
    def __init__(self, policy: Policy, threshold: float) -> None:
        self.name = policy.name
        self.queues_at_router = policy.queues_at_router
        self.wants_tokens = policy.wants_tokens
        self._policy = policy
        self._threshold = threshold

    def decide(self, query: Query) -> Decision:
        priority = query.request.priority
        threshold = self._threshold / 2 if priority == LOW else self._threshold
        nodes = query.candidates.nodes
        open_nodes = [node for node in nodes if node.load < threshold]
        if len(open_nodes) < len(nodes):
            if open_nodes:
                query.candidates = Candidates(open_nodes)
            elif priority != HIGH:
                raise NodeQueuesFull(1.0)
        return self._policy.decide(query)
