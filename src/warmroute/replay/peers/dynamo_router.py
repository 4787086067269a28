"""Dynamo's KV router chooses the node with the lowest

    max(0, (prefill tokens in flight + prompt tokens) / block size − overlap blocks) + decode blocks

The overlap comes from KV events. Prefill tokens in flight are the uncached tokens of prompts without a first token.
Decode blocks are the blocks of the node's running requests and of this one, shared blocks counted once. The temperature
is 0: the lowest cost always wins, with ties broken at random.
"""

from __future__ import annotations

from collections import Counter
from random import Random

from warmroute.fake_engine.core.kv_event_types import KvEvent
from warmroute.fleet.node import Node
from warmroute.replay.peers.block_holders import EventBlocks
from warmroute.replay.peers.lowest_cost import pick_lowest, simulated
from warmroute.replay.simulation.policy_listener import PolicyListener
from warmroute.replay.simulation.simulated_request import SimulatedRequest
from warmroute.routing.decision import Decision
from warmroute.routing.query import Query


class _Active:
    """The running requests of one node."""

    __slots__ = ("blocks", "prefilling", "prefilling_tokens")

    def __init__(self) -> None:
        self.blocks: Counter[int] = Counter()  # block → requests that use it
        self.prefilling: dict[int, int] = {}  # request → uncached tokens
        self.prefilling_tokens = 0


class Dynamo(PolicyListener):
    name = "dynamo"
    wants_tokens = False
    queues_at_router = False
    wants_kv_events = True

    def __init__(self, random: Random, *, overlap_weight: float = 1.0) -> None:
        self._random = random
        self._overlap_weight = overlap_weight
        self._block_size = 16
        self._from_events = EventBlocks()
        self._active: dict[str, _Active] = {}

    def decide(self, query: Query) -> Decision:
        nodes, size = query.candidates.nodes, self._block_size
        request = simulated(query.request)
        chain = request.blocks(size)
        depths = self._from_events.depths(chain, nodes)
        costs: list[float] = []
        for node, depth in zip(nodes, depths, strict=True):
            active = self._active[node.name]
            prefill = (active.prefilling_tokens + request.prompt_tokens) / size - depth
            held = active.blocks
            new = len(chain) - sum(map(held.__contains__, chain)) if held else len(chain)
            costs.append(self._overlap_weight * max(0.0, prefill) + len(held) + new)
        return pick_lowest(nodes, costs, self._random, self.name, "lowest cost")

    def node_joined(self, node: Node, block_size: int, num_blocks: int) -> None:
        self._block_size = block_size
        self._active.setdefault(node.name, _Active())

    def node_left(self, node: Node) -> None:
        self._from_events.forget(node)

    def request_sent(self, request: SimulatedRequest, node: Node, now_s: float) -> None:
        active = self._active[node.name]
        chain = request.blocks(self._block_size)
        depth = self._from_events.depths(chain, (node,))[0]
        uncached = max(0, request.prompt_tokens - depth * self._block_size)
        active.prefilling[request.number] = uncached
        active.prefilling_tokens += uncached
        active.blocks.update(chain)

    def first_token(self, request: SimulatedRequest, node: Node, cached_tokens: int, now_s: float) -> None:
        active = self._active[node.name]
        active.prefilling_tokens -= active.prefilling.pop(request.number, 0)

    def request_ended(self, request: SimulatedRequest, node: Node, now_s: float) -> None:
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
        self._from_events.apply(node, incarnation, events)
