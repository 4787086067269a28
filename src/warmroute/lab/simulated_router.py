"""What a simulated policy learns besides the fleet's own accounting: where requests went, how they ended, KV events.
For the router's own policies, this brings KV events into the CacheView.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from random import Random

from warmroute.engines.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Event, HashesStored
from warmroute.engines.kv_rank import NodeKvEvents, RankEvents
from warmroute.engines.node_updates import KvEvents
from warmroute.fake_engine.core import kv_event_types as simulated
from warmroute.fake_engine.core.kv_event_types import KvEvent, KvEventSink
from warmroute.fleet.node import Node
from warmroute.index.cache_view import CacheView
from warmroute.replay.simulation.calendar import Calendar
from warmroute.replay.simulation.conditions import Conditions
from warmroute.replay.simulation.simulated_node import SimulatedNode
from warmroute.replay.simulation.simulated_request import MODEL, SimulatedRequest


class PolicyListener:
    """Subclass it and override the methods you need."""

    wants_kv_events: bool = False
    tells_replicas: bool = False
    """Whether several routers with this policy tell each other of their requests."""
    poll_interval_s: float | None = None
    """Its own interval between two polls of a node; None for that of the conditions."""

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
