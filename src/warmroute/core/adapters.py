"""LoRA adapters: which of them each node has loaded, and what loading one costs.

An engine keeps a few adapters in GPU memory and evicts the least recently used one. The router infers what is loaded
from the requests it sent and from the engine's metrics. A restart empties a node's list.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from warmroute.core.group import Candidates


DEFAULT_SLOTS: Final = 8
"""SGLang's default, for engines that do not report it. vLLM does."""


@dataclass(slots=True, eq=False)
class FleetAdapters:
    """Shared by all nodes: the cost of a load, and a counter of changes to what nodes have loaded."""

    load_ms: float = 0.0
    changes: int = 0

    def reconfigure(self, load_ms: float) -> None:
        self.load_ms = load_ms
        self.changes += 1


@dataclass(slots=True, eq=False)
class LoadedAdapters:
    _fleet: FleetAdapters
    _names: dict[str, None] = field(default_factory=dict)  # least recently used first
    slots: int = DEFAULT_SLOTS
    load_count: int = 0
    """Requests that needed an adapter which was not loaded."""

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def mark_used(self, name: str) -> None:
        """A request for this adapter was sent to the node, which loads it if needed."""
        self.load_count += name not in self._names
        self.update_running((name,))

    def update_running(self, names: Iterable[str], slots: int = 0) -> None:
        """Take over what the engine reports: adapters in use, and how many it can keep (0: not reported)."""
        if slots and slots != self.slots:
            self.slots = slots
            self._fleet.changes += 1
        for name in names:
            if name in self._names:
                del self._names[name]
            else:
                self._fleet.changes += 1
            self._names[name] = None
        while len(self._names) > self.slots:
            del self._names[next(iter(self._names))]
            self._fleet.changes += 1

    def loads_needed(self, name: str) -> int:
        """Return how many loads a request for this adapter causes.

        0 if it is loaded; 1 for its own load; 2 if it evicts another one, which has to be loaded again later.
        """
        if name in self._names:
            return 0
        return 1 if len(self._names) < self.slots else 2

    def clear(self) -> None:
        """The node has restarted."""
        if self._names:
            self._names.clear()
            self._fleet.changes += 1


@dataclass(slots=True, eq=False)
class GroupAdapter:
    """The adapter that a group serves, and what loading it costs on each candidate."""

    name: str
    _fleet: FleetAdapters
    _known: WeakKeyDictionary[Candidates, tuple[int, bytes]] = field(default_factory=WeakKeyDictionary)

    def load_ms(self, candidates: Candidates) -> bytes:
        """Return the cost for each candidate, as packed doubles. Cached until a node's adapters change."""
        changes = self._fleet.changes
        known = self._known.get(candidates)
        if known is not None and known[0] == changes:
            return known[1]
        name, load_ms = self.name, self._fleet.load_ms
        costs = array("d", [load_ms * node.loaded_adapters.loads_needed(name) for node in candidates.nodes]).tobytes()
        self._known[candidates] = (changes, costs)
        return costs
