"""Brings a simulated fleet's KV events into the production router's beliefs, as engines/ does on real wires: numbered
messages, gaps, restarts. There is no replay here: what is lost stays lost.
"""

from __future__ import annotations

from warmroute.engines.kv_feed import Feed
from warmroute.fake_engine.core.events import CPU, AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from warmroute.fleet.node import Node
from warmroute.index import Tier
from warmroute.index.cache_view import CacheView
from warmroute.index.node_cache import NodeCache
from warmroute.replay.world.listener import Listener
from warmroute.replay.world.simulated_request import MODEL

RANK = 0


class KvEventsToIndex(Listener):
    def __init__(self, cache_view: CacheView, *, events: bool) -> None:
        self.cache_view = cache_view
        self.wants_kv_events = events
        self._sources: dict[Node, _Source] = {}

    def node_joined(self, node: Node, block_size: int, num_blocks: int) -> None:
        cache = self.cache_view.join(node.name, [MODEL])
        if node.adapter_names:
            self.cache_view.serves(cache, MODEL, (), sorted(node.adapter_names))
        cache.describe(block_size, (num_blocks - 1) * block_size)
        if self.wants_kv_events:
            self._sources[node] = _Source(self.cache_view, cache)

    def node_left(self, node: Node) -> None:
        self._sources.pop(node, None)
        self.cache_view.leave(node.name)

    def polled(self, node: Node, incarnation: float, now_s: float) -> None:
        cache = self.cache_view.cache(node.name)
        if cache is None:
            return
        cache.heard(now_s)
        if node.incarnation and incarnation != node.incarnation:
            cache.restarted()
            node.loaded.forget()
            if node in self._sources:
                self._sources[node].feed.began_anew()

    def kv_events(self, node: Node, incarnation: int, sequence: int, events: list[KvEvent], now_s: float) -> None:
        source = self._sources.get(node)
        if source is not None:
            source.message(sequence, _Message(events), now_s)


class _Message(bytes):
    """Stands for a payload: the events as they are."""

    events: list[KvEvent]

    def __new__(cls, events: list[KvEvent]) -> _Message:
        made = super().__new__(cls)
        made.events = events
        return made

    __hash__ = object.__hash__


class _Source:
    """One node's stream of events."""

    def __init__(self, cache_view: CacheView, cache: NodeCache) -> None:
        self._index = cache_view.index
        self._cache = cache
        cache.follow(RANK)
        cache.tells_all(RANK, True)
        self.feed = Feed(self._apply, self._forget)

    def message(self, number: int, message: _Message, now_s: float) -> None:
        feed = self.feed
        self._cache.heard(now_s)
        feed.message(number, message)
        if feed.wants_from is not None:  # a gap, and nobody replays
            feed.replay_began()
            feed.replay_ended()
        self._cache.tells_all(RANK, not feed.incomplete)

    def _forget(self) -> None:
        self._cache.lost(RANK)

    def _apply(self, payload: bytes) -> None:
        assert isinstance(payload, _Message)
        index, place = self._index, self._cache.ranks[RANK]
        for event in payload.events:
            if isinstance(event, BlockStored):
                if event.medium == CPU:
                    index.store_known(place, event.block_hashes, Tier.CPU)
                elif event.parent_block_hash is None or index.our_hash(place, event.parent_block_hash) is not None:
                    # The engine's hash stands for the block itself: simulated prompts have no tokens.
                    index.store_chain(place, _packed(event.block_hashes), Tier.GPU, event.block_hashes)
            elif isinstance(event, BlockRemoved):
                index.remove(place, event.block_hashes, Tier.CPU if event.medium == CPU else Tier.GPU)
            elif isinstance(event, AllBlocksCleared):
                self._cache.cleared(RANK)


def _packed(hashes: list[int]) -> bytes:
    return b"".join([block.to_bytes(8, "little") for block in hashes])
