"""Other routers' policies and scalers, written from what they publish; this file has what they share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from random import Random

from warmroute.core.decision import Decision
from warmroute.core.messages import RoutingRequest
from warmroute.core.node import Node
from warmroute.lab.engine.blocks import CPU, AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from warmroute.lab.request_flow import SimulatedRequest
from warmroute.lab.simulated_router import PolicyListener

# Which nodes hold which blocks, as another router estimates it: from KV events, or from the requests it routed.
#
# Each block has one integer with a bit for each node, so that a match looks at all nodes at once.


class Holders:
    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity
        """Of each node in blocks, if it is estimated."""
        self._held: dict[int, int] = {}
        self._bits: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._held)

    def _bit(self, node: Node) -> int:
        return self._bits.setdefault(node.name, len(self._bits))

    def store(self, node: Node, hashes: Iterable[int]) -> None:
        held, mask = self._held, 1 << self._bit(node)
        for block in hashes:
            held[block] = held.get(block, 0) | mask

    def remove(self, node: Node, hashes: Iterable[int]) -> None:
        held, mask = self._held, 1 << self._bit(node)
        for block in hashes:
            before = held.get(block, 0)
            if before & mask:
                if before == mask:
                    del held[block]
                else:
                    held[block] = before ^ mask

    def clear(self, node: Node) -> None:
        mask = 1 << self._bit(node)
        self.remove(node, [block for block, holders in self._held.items() if holders & mask])

    def depths(self, chain: Sequence[int], nodes: Sequence[Node]) -> list[int]:
        """Return for each node how many leading blocks of the chain it holds."""
        held = self._held
        bits = [self._bit(node) for node in nodes]
        mask = 0
        for bit in bits:
            mask |= 1 << bit
        depth_of: dict[int, int] = {}
        depth = 0
        for block in chain:
            remaining = held.get(block, 0) & mask
            if remaining != mask:
                missing = mask & ~remaining
                while missing:
                    low = missing & -missing
                    depth_of[low.bit_length() - 1] = depth
                    missing ^= low
                mask = remaining
                if not mask:
                    break
            depth += 1
        return [depth_of.get(bit, depth) for bit in bits]


class RoutedBlocks(Holders):
    """Estimate from routing alone: a node holds the prompts last sent to it, up to `capacity` blocks."""

    def __init__(self, capacity: int = 0) -> None:
        super().__init__(capacity)
        self._recent: dict[str, OrderedDict[int, None]] = {}

    def add(self, node: Node, chain: Sequence[int]) -> None:
        recent = self._recent.setdefault(node.name, OrderedDict())
        new = [block for block in reversed(chain) if block not in recent]
        for block in reversed(chain):  # the tail of a prompt is evicted first
            recent[block] = None
            recent.move_to_end(block)
        self.store(node, new)
        self.remove(node, [recent.popitem(last=False)[0] for _ in range(len(recent) - self.capacity)])

    def clear(self, node: Node) -> None:
        self.remove(node, self._recent.pop(node.name, ()))

    def size(self, node: Node) -> int:
        """Return the estimated number of blocks on the node."""
        return len(self._recent.get(node.name, ()))


class EventBlocks(Holders):
    """Estimate from KV events. As in the routers simulated here, a restart is noticed and a gap is not."""

    def __init__(self) -> None:
        super().__init__()
        self._incarnations: dict[str, int] = {}

    def apply(self, node: Node, incarnation: int, events: list[KvEvent]) -> None:
        if self._incarnations.setdefault(node.name, incarnation) != incarnation:
            self._incarnations[node.name] = incarnation
            self.clear(node)
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.clear(node)
            elif event.medium == CPU:
                continue
            elif isinstance(event, BlockStored):
                self.store(node, event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self.remove(node, event.block_hashes)


# What most peers share: an estimate of which nodes hold which blocks, and the choice of the cheapest node.


def simulated(request: RoutingRequest) -> SimulatedRequest:
    assert isinstance(request, SimulatedRequest), "other routers' policies run in simulations only"
    return request


class PeerPolicy(PolicyListener):
    wants_tokens = False
    queues_at_router = False

    def __init__(self, name: str, random: Random, blocks: RoutedBlocks | EventBlocks) -> None:
        self.name = name
        self.wants_kv_events = isinstance(blocks, EventBlocks)
        self._random = random
        self._blocks = blocks
        self._block_size = 16

    def _depths(self, request: RoutingRequest, nodes: Sequence[Node]) -> tuple[list[int], list[int]]:
        """Return the prompt's blocks, and for each node how many of the first ones it holds."""
        chain = simulated(request).blocks(self._block_size)
        return chain, self._blocks.depths(chain, nodes)

    def _pick_lowest(self, nodes: Sequence[Node], costs: Sequence[float], reason: str) -> Decision:
        """Choose the node with the lowest cost, with ties broken at random. The fallbacks are the others by cost."""
        least = min(costs)
        tied = [node for node, cost in zip(nodes, costs, strict=True) if cost == least]
        chosen = tied[0] if len(tied) == 1 else tied[int(self._random.random() * len(tied))]

        def by_cost() -> list[Node]:
            return [nodes[at] for at in sorted(range(len(nodes)), key=costs.__getitem__)]

        return Decision(chosen, self.name, reason, by_cost)

    def node_joined(self, node: Node, block_size: int, num_blocks: int) -> None:
        self._block_size = block_size
        self._blocks.capacity = max(self._blocks.capacity, num_blocks)

    def node_left(self, node: Node) -> None:
        self._blocks.clear(node)

    def request_sent(self, request: SimulatedRequest, node: Node, now_s: float) -> None:
        if isinstance(self._blocks, RoutedBlocks):
            self._blocks.add(node, request.blocks(self._block_size))

    def kv_events(self, node: Node, incarnation: int, sequence: int, events: list[KvEvent], now_s: float) -> None:
        if isinstance(self._blocks, EventBlocks):
            self._blocks.apply(node, incarnation, events)
