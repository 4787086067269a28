"""One router of a simulation: production's Fleet, CacheView, Router and Admission, with its own view of each node.

Several of them serve the same simulated engines. Each polls the nodes and follows their KV events itself, and hears
the rest from the others (simulated_cluster.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from warmroute.config import Config, Health, Hedging, NodeConfig
from warmroute.fleet.fleet import Fleet
from warmroute.fleet.node import Node
from warmroute.index.cache_view import CacheView
from warmroute.replay.simulation.policy_listener import IndexUpdates, KvEventDelivery, PolicyListener
from warmroute.replay.simulation.polls import Polls
from warmroute.replay.simulation.queued_policy import IndexedListener, QueuedPolicy
from warmroute.replay.simulation.request_flow import RequestFlow
from warmroute.replay.simulation.simulated_node import SimulatedNode
from warmroute.replay.simulation.simulated_request import MODEL, SimulatedRequest
from warmroute.routing.admission import Admission
from warmroute.routing.policy import Policy
from warmroute.routing.queued_request import QueueOrder
from warmroute.routing.route_matching import Routes
from warmroute.routing.router import Router

if TYPE_CHECKING:
    from warmroute.replay.simulation.world import World


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
            self.router.policy = policy
        order = queue_order or QueueOrder.GUARANTEED
        self.admission = Admission(self.router, config.admission, config.routes, order)
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

    def request_sent(self, request: SimulatedRequest, sim: SimulatedNode) -> None:
        self._tell("request_sent", request, sim)

    def first_token(self, request: SimulatedRequest, sim: SimulatedNode, cached_tokens: int) -> None:
        self._tell("first_token", request, sim, cached_tokens)

    def request_ended(self, request: SimulatedRequest, sim: SimulatedNode) -> None:
        self._tell("request_ended", request, sim)

    def _tell(self, event: str, request: SimulatedRequest, sim: SimulatedNode, *more: int) -> None:
        """Tell the policy; those of the other routers, too, if they tell each other."""
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
