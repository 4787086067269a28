"""One source of KV events (a node, or a rank of it) as a numbered stream: what to apply, when something is missing, and
when the engine has begun anew. No I/O: the driver brings messages and replays, and does what it is told.

    number follows the last        applied
    number skips some              a gap: nothing more is applied until a replay has brought what is missing
    number is not above the last   the engine has begun anew: what it held is forgotten, its stream is read from 0;
                                   unless it is what a replay has just brought, which was ahead of the live stream
    first number is not 0          what came before is asked for by replay

Without a replay, or where it no longer reaches back, what the source was believed to hold is forgotten at a gap: a lost
store costs a hit, a lost removal would be a lie.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

MAX_HELD: Final = 10_000
"""Messages held while a replay is under way; vLLM's own buffer holds as many."""


class Feed:
    def __init__(self, apply: Callable[[bytes], None], forget: Callable[[], None]) -> None:
        self._apply = apply
        self._forget = forget
        self._next = 0
        self._started = False
        self._from_zero = False
        """Read from its first message on, or from a moment at which the cache was known to be empty."""
        self._astray = False
        self._held: dict[int, bytes] = {}
        """Messages that came while something before them was missing."""
        self._replayed: dict[int, int] = {}
        """What a replay brought, by hash: the same may still be on its way as live messages."""
        self._asked_from = 0
        self._answering = False
        self._broke_off = False
        """The last replay brought something, but not its end."""
        self.replaying = False
        self.gaps = 0
        self.restarts = 0
        self.applied = 0
        self.incomplete = False
        """Something was lost for good since the source was last empty or began anew."""

    @property
    def complete(self) -> bool:
        """Everything that the source holds has been told."""
        return self._from_zero and not self.incomplete

    @property
    def next_number(self) -> int:
        return self._next

    @property
    def wants_from(self) -> int | None:
        """The number from which a replay is needed; None where nothing is missing or one is under way."""
        if self.replaying:
            return None
        return 0 if self._astray else self._next if self._held or self._broke_off else None

    def message(self, number: int, payload: bytes) -> None:
        """Takes a live message."""
        if number < self._next:
            if self._replayed.pop(number, None) == hash(payload):
                return  # the replay was ahead of it
            self._begin_anew()
        if number == self._next and not self._held and not self._astray:
            self._replayed.clear()
            self._take(number, payload)
        elif self.replaying or self._held or self._astray:
            self._hold(number, payload)
        else:
            if self._started:
                self.gaps += 1
            self._hold(number, payload)

    def replay_began(self) -> None:
        self.replaying = True
        if self._astray:
            self._astray = self._started = self.incomplete = False
            self._next = 0
            self._replayed.clear()
        self._asked_from = self._next
        self._answering = self._broke_off = False

    def replayed(self, number: int, payload: bytes) -> None:
        """Takes a message of the replay that was asked for."""
        reaches_back, self._answering = self._answering, True
        if number < self._next:
            return
        if number > self._next:
            if reaches_back:
                self._hold(number, payload)  # lost between the two: an engine that replays drops what it can't send
                return
            self._lose()
            self._next = number
        self._replayed[number] = hash(payload)
        self._take(number, payload)

    def replay_ended(self, answered: bool = False) -> None:
        """The replay is over: go on with what there is. `answered`: the engine said that this is all."""
        self.replaying = False
        self._broke_off = not answered and self._next > self._asked_from
        if answered and self._next == 0:
            self._from_zero = True  # it has said nothing yet
        self._held = {number: payload for number, payload in self._held.items() if number >= self._next}
        self._take_held()
        while self._held and self._next == self._asked_from:
            self._lose()  # the replay brought nothing of what is missing, and never will
            self._asked_from = self._next = min(self._held)
            self._take_held()

    def _take_held(self) -> None:
        while self._next in self._held:
            self._take(self._next, self._held.pop(self._next))

    def began_anew(self) -> None:
        """Something else tells that the engine's process is another one."""
        self._begin_anew()

    def emptied(self) -> None:
        """The source told that its cache is empty: what was lost before no longer matters."""
        self._from_zero = True
        self.incomplete = False

    def lost_track(self) -> None:
        """What is told does not fit what was told: forget it, and read again whatever a replay still has."""
        self.gaps += 1
        self.incomplete = True
        self._from_zero = False
        self._astray = True
        self._forget()

    def unreadable(self) -> None:
        """A message could not be read: removals may have been in it."""
        self.gaps += 1
        self._lose()

    def _begin_anew(self) -> None:
        self.restarts += 1
        self._held.clear()
        self._replayed.clear()
        self._next = 0
        self._started = self._from_zero = self._astray = self._broke_off = self.incomplete = False
        self._forget()

    def _lose(self) -> None:
        """Messages are gone: removals may have been among them."""
        self.incomplete = True
        if self._started:
            self._forget()

    def _take(self, number: int, payload: bytes) -> None:
        self._next = number + 1
        self._started = True
        self._from_zero = self._from_zero or number == 0
        self.applied += 1
        self._apply(payload)

    def _hold(self, number: int, payload: bytes) -> None:
        if len(self._held) >= MAX_HELD:
            del self._held[next(iter(self._held))]
        self._held[number] = payload
