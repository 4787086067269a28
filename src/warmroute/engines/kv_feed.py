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
        self._held: dict[int, bytes] = {}
        """Messages that came while something before them was missing."""
        self._replayed: dict[int, int] = {}
        """What a replay brought, by hash: the same may still be on its way as live messages."""
        self.replaying = False
        self.gaps = 0
        self.restarts = 0
        self.applied = 0
        self.incomplete = False
        """Something was lost for good since the source was last forgotten or began anew."""

    @property
    def wants_from(self) -> int | None:
        """The number from which a replay is needed; None where nothing is missing or one is under way."""
        return self._next if self._held and not self.replaying else None

    def message(self, number: int, payload: bytes) -> None:
        """Takes a live message."""
        if number < self._next:
            if self._replayed.pop(number, None) == hash(payload):
                return  # the replay was ahead of it
            self._begin_anew()
        if self.replaying or self._held:
            self._hold(number, payload)
        elif number == self._next:
            self._replayed.clear()
            self._take(number, payload)
        else:
            if self._started:
                self.gaps += 1
            self._hold(number, payload)

    def replay_began(self) -> None:
        self.replaying = True

    def replayed(self, number: int, payload: bytes) -> None:
        """Takes a message of the replay that was asked for."""
        if number < self._next:
            return
        if number > self._next:
            self._lose()
            self._next = number
        self._replayed[number] = hash(payload)
        self._take(number, payload)

    def replay_ended(self) -> None:
        """The replay is over, whether it brought everything or failed: go on with what there is."""
        self.replaying = False
        held, self._held = self._held, {}
        for number in sorted(held):
            if number < self._next:
                continue
            if number > self._next:
                self._lose()
                self._next = number
            self._take(number, held[number])

    def began_anew(self) -> None:
        """Something else tells that the engine's process is another one."""
        if self._started or self._held:
            self._begin_anew()

    def _begin_anew(self) -> None:
        self.restarts += 1
        self._forget()
        self._held.clear()
        self._replayed.clear()
        self._next = 0
        self._started = False
        self.incomplete = False

    def _lose(self) -> None:
        """Messages are gone: removals may have been among them."""
        if self._started:
            self._forget()
        self.incomplete = True

    def _take(self, number: int, payload: bytes) -> None:
        self._next = number + 1
        self._started = True
        self.applied += 1
        self._apply(payload)

    def _hold(self, number: int, payload: bytes) -> None:
        if len(self._held) >= MAX_HELD:
            del self._held[min(self._held)]
        self._held[number] = payload
