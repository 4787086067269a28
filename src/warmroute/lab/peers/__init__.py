"""Which nodes hold which blocks, as another router estimates it: from KV events, or from the requests it routed.

Each block has one integer with a bit for each node, so that a match looks at all nodes at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from warmroute.fake_engine.core.kv_event_types import CPU, AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from warmroute.fleet.node import Node


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
