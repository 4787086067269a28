"""Context windows: which nodes of a group can hold a prompt, and how to keep long windows free for long prompts.

A group has a ContextWindows only while its nodes differ in `max_model_len`. Where they do not, engines check the length
themselves, and nothing here runs. A node that does not report its window counts as one that holds every prompt.

A request that fits a short window costs more on a node with a longer one, by the requests that fit nowhere else:

    reserved rate = Σ over longer windows up to the node's: arrivals that need it ÷ nodes that have it       [1/ms]

The price's congestion term counts these arrivals like those of the node itself.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from warmroute.core.demand import ArrivalRate

if TYPE_CHECKING:
    from warmroute.core.group import Candidates
    from warmroute.core.node import Node


UNKNOWN: Final = 1 << 62
"""The window of a node that does not report one."""
RATES_VALID_S: Final = 1.0
"""Time for which computed rates are used again."""


def windows_by_model(cards: Sequence[Mapping[str, object]]) -> dict[str, int]:
    """Return the context window of each model in /v1/models. An adapter has that of its base model; the entry ""
    holds for names without a card."""
    windows: dict[str, int] = {}
    adapters: dict[str, object] = {}
    for card in cards:
        name, window, parent = card.get("id"), card.get("max_model_len"), card.get("parent")
        if not isinstance(name, str):
            continue
        if type(window) is int and window > 0:
            windows[name] = window
            windows.setdefault("", window)
        elif parent:
            adapters[name] = parent
    for name, parent in adapters.items():
        window = windows.get(parent) if isinstance(parent, str) else None
        if window is not None or "" in windows:
            windows[name] = window or windows[""]
    return windows


@dataclass(slots=True, eq=False)
class ContextWindows:
    sizes: list[int]
    """The different windows of the group, in ascending order, at least two."""
    _size_of: dict[Node, int]
    _holders: list[int]
    """For each size, the number of nodes whose window is at least that long."""
    _arrivals: dict[int, ArrivalRate]
    """Requests that need each size."""
    _rates: WeakKeyDictionary[Candidates, dict[int, tuple[float, bytes]]] = field(default_factory=WeakKeyDictionary)

    @classmethod
    def of(cls, model: str, nodes: Iterable[Node], before: ContextWindows | None) -> ContextWindows | None:
        """Return None if all nodes have the same window. `before`: the windows of the group until now."""
        size_of = {node: node.context_window(model) or UNKNOWN for node in nodes}
        sizes = sorted(set(size_of.values()))
        if len(sizes) < 2:
            return None
        arrivals = before._arrivals if before is not None else {}
        holders = [sum(1 for held in size_of.values() if held >= size) for size in sizes]
        return cls(sizes, size_of, holders, {size: arrivals.get(size) or ArrivalRate() for size in sizes})

    @property
    def largest(self) -> int:
        return self.sizes[-1]

    def holds(self, node: Node, tokens: float) -> bool:
        return self._size_of.get(node, UNKNOWN) >= tokens

    def fitting(self, candidates: Candidates, tokens: float) -> Candidates:
        """Return the candidates whose window holds this many tokens. The result is kept with the candidates."""
        at = bisect_left(self.sizes, tokens)
        if not at:
            return candidates
        size = self.sizes[at] if at < len(self.sizes) else UNKNOWN + 1
        return candidates.subset(size, lambda node: self._size_of.get(node, UNKNOWN) >= size)

    def widest(self, candidates: Candidates) -> Candidates:
        """Return the candidates with the longest window among them."""
        longest = max((self._size_of.get(node, UNKNOWN) for node in candidates.nodes), default=0)
        return self.fitting(candidates, longest)

    def tightest(self, nodes: Sequence[Node], among: list[int]) -> list[int]:
        """Return the indexes of the nodes with the shortest window, of those in `among`."""
        sizes = [self._size_of.get(nodes[at], UNKNOWN) for at in among]
        shortest = min(sizes)
        return [at for at, size in zip(among, sizes, strict=True) if size == shortest]

    # Arrivals.

    def record(self, tokens: float, now_s: float) -> None:
        """Count a request with this many prompt and output tokens."""
        at = min(bisect_left(self.sizes, tokens), len(self.sizes) - 1)
        if at:
            self._arrivals[self.sizes[at]].record(now_s)

    def reserved_rates(self, candidates: Candidates, tokens: float, now_s: float) -> bytes:
        """Return, for each candidate, the arrivals per millisecond that need its window while a request with this many
        tokens does not, as packed doubles."""
        needed = bisect_left(self.sizes, tokens)
        known = self._rates.setdefault(candidates, {})
        found = known.get(needed)
        if found is None or not 0.0 <= now_s - found[0] < RATES_VALID_S:
            by_size, rate = {}, 0.0
            for at, size in enumerate(self.sizes):
                if at > needed:
                    rate += self._arrivals[size].per_ms(now_s) / self._holders[at]
                by_size[size] = rate
            rates = [by_size.get(self._size_of.get(node, UNKNOWN), 0.0) for node in candidates.nodes]
            found = known[needed] = (now_s, array("d", rates).tobytes())
        return found[1]
