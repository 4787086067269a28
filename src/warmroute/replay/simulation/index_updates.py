"""Brings the KV events of simulated engines into the router's CacheView, by the code that production runs (engines/).

Only two things differ from production. Messages arrive in virtual time, and nothing replays a lost one. And simulated
blocks have no tokens: an engine's block hash is the hash that lookups use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf

from warmroute.engines.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Event, HashesStored
from warmroute.engines.kv_rank import NodeKvEvents, RankEvents
from warmroute.fake_engine.core import kv_event_types as simulated
from warmroute.fleet.node import Node
from warmroute.index.cache_view import CacheView
from warmroute.replay.simulation.policy_listener import PolicyListener
from warmroute.replay.simulation.simulated_request import MODEL

RANK = 0


class IndexUpdates(PolicyListener):
    def __init__(self, cache_view: CacheView, now_s: Callable[[], float], *, events: bool) -> None:
        self.cache_view = cache_view
        self.wants_kv_events = events
        self._now_s = now_s
        self._nodes: dict[Node, NodeKvEvents] = {}

    def node_joined(self, node: Node, block_size: int, num_blocks: int) -> None:
        cache = self.cache_view.add_node(node.name, [MODEL])
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

    def kv_events(
        self, node: Node, incarnation: int, sequence: int, events: list[simulated.KvEvent], now_s: float
    ) -> None:
        if node in self._nodes:
            rank = self._nodes[node].ranks[RANK]
            rank.receive(sequence, _Message(events))
            rank.sequence.skip_missing()
            rank.work(inf)


class _Message:
    """The events of one step. Equal only to itself."""

    __slots__ = ("events",)

    def __init__(self, events: list[simulated.KvEvent]) -> None:
        self.events = events


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
