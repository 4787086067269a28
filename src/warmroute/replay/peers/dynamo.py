"""Dynamo's KV router: the lowest of

    max(0, (prefill tokens in flight there + this prompt) / block − overlap blocks) + decode blocks there, this prompt's
    new ones included

Overlap from KV events. Prefill tokens in flight: the uncached part of prompts that have no first token yet. Decode
blocks: those of requests that are there, shared ones once. Temperature 0: the lowest, ties by chance.
"""

from __future__ import annotations

from collections import Counter
from random import Random

from warmroute.fake_engine.core.events import KvEvent
from warmroute.fleet.node import Node
from warmroute.replay.peers.choice import lowest, sim
from warmroute.replay.peers.holders import ToldBlocks
from warmroute.replay.world.listener import Listener
from warmroute.replay.world.simulated_request import SimulatedRequest
from warmroute.routing.decision import Decision
from warmroute.routing.query import Query


class _Active:
    """What runs on one node."""

    __slots__ = ("blocks", "prefilling", "prefilling_tokens")

    def __init__(self) -> None:
        self.blocks: Counter[int] = Counter()  # block → requests that hold it
        self.prefilling: dict[int, int] = {}  # request → its uncached tokens
        self.prefilling_tokens = 0


class Dynamo(Listener):
    name = "dynamo"
    wants_tokens = False
    holds = False
    wants_kv_events = True

    def __init__(self, random: Random, *, overlap_weight: float = 1.0) -> None:
        self._random = random
        self._overlap_weight = overlap_weight
        self._block_size = 16
        self._told = ToldBlocks()
        self._active: dict[str, _Active] = {}

    def decide(self, query: Query) -> Decision:
        nodes, size = query.candidates.nodes, self._block_size
        asked = sim(query.request)
        chain = asked.blocks(size)
        depths = self._told.depths(chain, nodes)
        costs: list[float] = []
        for node, depth in zip(nodes, depths, strict=True):
            active = self._active[node.name]
            prefill = (active.prefilling_tokens + asked.prompt_tokens) / size - depth
            held = active.blocks
            new = len(chain) - sum(map(held.__contains__, chain)) if held else len(chain)
            costs.append(self._overlap_weight * max(0.0, prefill) + len(held) + new)
        return lowest(nodes, costs, self._random, self.name, "lowest cost")

    def node_joined(self, node: Node, block_size: int, num_blocks: int) -> None:
        self._block_size = block_size
        self._active.setdefault(node.name, _Active())

    def node_left(self, node: Node) -> None:
        self._told.forget(node)

    def sent(self, request: SimulatedRequest, node: Node, now_s: float) -> None:
        active = self._active[node.name]
        chain = request.blocks(self._block_size)
        depth = self._told.depths(chain, (node,))[0]
        uncached = max(0, request.prompt_tokens - depth * self._block_size)
        active.prefilling[request.number] = uncached
        active.prefilling_tokens += uncached
        active.blocks.update(chain)

    def first_token(self, request: SimulatedRequest, node: Node, cached_tokens: int, now_s: float) -> None:
        active = self._active[node.name]
        active.prefilling_tokens -= active.prefilling.pop(request.number, 0)

    def ended(self, request: SimulatedRequest, node: Node, now_s: float) -> None:
        active = self._active[node.name]
        active.prefilling_tokens -= active.prefilling.pop(request.number, 0)
        held = active.blocks
        for block in request.blocks(self._block_size):
            count = held[block] - 1
            if count:
                held[block] = count
            else:
                del held[block]

    def kv_events(self, node: Node, incarnation: int, sequence: int, events: list[KvEvent], now_s: float) -> None:
        self._told.told(node, incarnation, events)
