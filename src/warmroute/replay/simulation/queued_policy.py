"""The router's admission queue in front of any policy, so that an experiment can separate placement from order.

The policy chooses the node. The queue needs the prefill work of a request there, and takes it from `price`, which reads
it from the router's own cache index. So a policy of another router gets the same queue as ours.
"""

from __future__ import annotations

from random import Random

from warmroute.config import Pricing
from warmroute.engines.node_updates import KvEvents
from warmroute.fake_engine.core.kv_event_types import KvEvent
from warmroute.fleet.group import Candidates
from warmroute.fleet.node import Node
from warmroute.index.cache_view import CacheView
from warmroute.replay.simulation.policy_listener import IndexUpdates, PolicyListener
from warmroute.replay.simulation.simulated_request import SimulatedRequest
from warmroute.routing.decision import Decision
from warmroute.routing.output_length import OutputLengthEstimate
from warmroute.routing.policies.price_policy import PricePolicy
from warmroute.routing.policy import Policy
from warmroute.routing.query import Query


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
