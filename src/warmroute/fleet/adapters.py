"""LoRA adapters: which of them a node has loaded. An engine keeps a few in its GPU's memory; another one takes the
place of the one that was not used for the longest time.

Believed to be loaded is what we sent a request for, and what the engine's metrics say is running, as far as the slots
go. A restart forgets all of it.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from warmroute.fleet.group import Candidates

USUAL_SLOTS: Final = 8
"""Where an engine does not say how many it keeps: SGLang's own default. vLLM says it."""


class Adapters:
    """Of the whole fleet: what loading one takes, and how often what is loaded has changed."""

    __slots__ = ("changes", "load_ms")

    def __init__(self, load_ms: float) -> None:
        self.load_ms = load_ms
        self.changes = 0

    def reconfigure(self, load_ms: float) -> None:
        self.load_ms = load_ms
        self.changes += 1


class Loaded:
    """What one node has loaded."""

    __slots__ = ("_adapters", "_names", "loads", "slots")

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters
        self._names: dict[str, None] = {}  # least recently used first
        self.slots = USUAL_SLOTS
        self.loads = 0
        """Times that one was needed that was not there."""

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def used(self, name: str) -> None:
        """A request for it went there: it is loaded, or will be before the next one."""
        if name in self._names:
            del self._names[name]
        else:
            self.loads += 1
            self._adapters.changes += 1
        self._names[name] = None
        self._make_room()

    def running(self, names: Iterable[str], slots: int) -> None:
        """What the engine says: those that run now, and how many it can keep; 0 where it does not say."""
        if slots and slots != self.slots:
            self.slots = slots
            self._adapters.changes += 1
        for name in names:
            if name in self._names:
                del self._names[name]
            else:
                self._adapters.changes += 1
            self._names[name] = None
        self._make_room()

    def cost(self, name: str) -> int:
        """How many loads a request for it leads to: none where it is loaded; its own; and where another one makes room
        for it, that one's, later."""
        if name in self._names:
            return 0
        return 1 if len(self._names) < self.slots else 2

    def forget(self) -> None:
        """The node has restarted."""
        if self._names:
            self._names.clear()
            self._adapters.changes += 1

    def _make_room(self) -> None:
        names = self._names
        while len(names) > self.slots:
            del names[next(iter(names))]
            self._adapters.changes += 1


class Adapter:
    """The adapter that a group serves: what it costs to load it, for each candidate."""

    __slots__ = ("_adapters", "_known", "name")

    def __init__(self, name: str, adapters: Adapters) -> None:
        self.name = name
        self._adapters = adapters
        self._known: WeakKeyDictionary[Candidates, tuple[int, bytes]] = WeakKeyDictionary()

    def load_ms(self, candidates: Candidates) -> bytes:
        """As doubles. Worked out anew when a node has loaded one, or given one up."""
        changes = self._adapters.changes
        known = self._known.get(candidates)
        if known is not None and known[0] == changes:
            return known[1]
        name, load_ms = self.name, self._adapters.load_ms
        made = array("d", [load_ms * node.loaded.cost(name) for node in candidates.nodes]).tobytes()
        self._known[candidates] = (changes, made)
        return made
