"""The sequence numbers of one KV event stream: which messages to apply, when some are missing, and when the engine has
restarted. No I/O: the driver delivers live and replayed messages and requests replays.

    number follows the last         apply it
    number skips some               a gap: hold messages back until a replay brings the missing ones
    number is not above the last    the engine restarted: forget its blocks and read its stream from 0;
                                    unless a replay has just brought this very message ahead of the live stream
    first number is not 0           request the messages before it by replay

Without a replay, or if the replay no longer has the missing messages, a gap makes the router forget the blocks of this
stream: a lost store costs a hit, but a lost removal would promise blocks that are gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, TypeVar

from warmroute.engines.byte_budget import ByteBudget

MAX_HELD: Final = 10_000
"""Messages held back during a replay; vLLM's own replay buffer has the same size. Beyond this, or beyond the node's
byte budget, the oldest is dropped: a gap, which the next replay fills."""

Payload = TypeVar("Payload")


class EventSequence(Generic[Payload]):
    def __init__(
        self,
        apply: Callable[[Payload], None],
        forget: Callable[[], None],
        budget: ByteBudget | None = None,
        size_bytes: Callable[[Payload], int] = lambda _payload: 0,
    ) -> None:
        self._apply = apply
        self._forget = forget
        self._budget = budget or ByteBudget()
        self._size_bytes = size_bytes
        self.next_number = 0
        self._started = False
        self._from_start = False
        """Read from its first message on, or from a moment at which the cache was empty."""
        self._reread = False
        """Everything has to be read again, from message 0."""
        self._held: dict[int, Payload] = {}
        """Messages that arrived while an earlier one was missing."""
        self._replayed: dict[int, int] = {}
        """Number → hash of replayed messages, which may still arrive live."""
        self._replay_start = 0
        self._replay_answered = False
        self._replay_cut_off = False
        """The last replay brought messages, but not its end."""
        self.replaying = False
        self.incomplete = False
        """Messages were lost for good since the cache was last empty or the engine started."""

    @property
    def complete(self) -> bool:
        """Whether the messages cover everything that the cache holds."""
        return self._from_start and not self.incomplete

    @property
    def missing_from(self) -> int | None:
        """The number from which a replay is needed; None if nothing is missing or a replay is running."""
        if self.replaying:
            return None
        return 0 if self._reread else self.next_number if self._held or self._replay_cut_off else None

    def receive(self, number: int, payload: Payload) -> None:
        """Handle a live message."""
        if number < self.next_number:
            if number in self._replayed and self._replayed.pop(number) == hash(payload):
                return  # the replay was ahead of it
            self._restart()
        if number == self.next_number and not self._held and not self._reread:
            self._replayed.clear()
            self._take(number, payload)
        else:
            self._hold(number, payload)

    def start_replay(self) -> None:
        self.replaying = True
        if self._reread:
            self._reread = self._started = self.incomplete = False
            self.next_number = 0
            self._replayed.clear()
        self._replay_start = self.next_number
        self._replay_answered = self._replay_cut_off = False

    def receive_replayed(self, number: int, payload: Payload) -> None:
        """Handle a message of the requested replay."""
        is_first, self._replay_answered = not self._replay_answered, True
        if number < self.next_number:
            return
        if number > self.next_number:
            if not is_first:
                self._hold(number, payload)  # the engine's socket dropped messages in the middle of the replay
                return
            self.lose()
            self.next_number = number
        if len(self._replayed) >= MAX_HELD:
            del self._replayed[next(iter(self._replayed))]
        self._replayed[number] = hash(payload)
        self._take(number, payload)

    def end_replay(self, finished: bool = False) -> None:
        """Continue with the messages there are. `finished`: the engine sent the end of the replay."""
        self.replaying = False
        self._replay_cut_off = not finished and self.next_number > self._replay_start
        if finished and self.next_number == 0:
            self._from_start = True  # the engine has not sent anything yet
        if self.next_number > self._replay_start:
            for number in [number for number in self._held if number < self.next_number]:
                self._release(number)
        self._take_held()
        while self._held and self.next_number == self._replay_start:
            self.lose()  # the replay brought none of the missing messages, and never will
            self._replay_start = self.next_number = min(self._held)
            self._take_held()

    def skip_missing(self) -> None:
        """Give up missing messages: there is no replay."""
        if self.missing_from is None:
            return
        self.start_replay()
        self.end_replay()
        for number in sorted(self._held):
            if number > self.next_number:
                self.lose()
                self.next_number = number
            self._take(number, self._release(number))

    def restart(self) -> None:
        """Forget everything, and a running replay: something else shows that the engine runs as a new process."""
        self.replaying = False
        self._restart()

    def _restart(self) -> None:
        self.drop_held()
        self._replayed.clear()
        self.next_number = 0
        self._started = self._from_start = self._reread = self._replay_cut_off = self.incomplete = False
        self._forget()

    def mark_empty(self) -> None:
        """Note that the cache is empty: messages lost before no longer matter."""
        self._from_start = True
        self.incomplete = False

    def reread(self) -> None:
        """Forget everything and read all messages that a replay still has: events contradict earlier ones."""
        self.incomplete = True
        self._from_start = False
        self._reread = True
        self._forget()

    def lose(self) -> None:
        """Note that messages are lost for good, and forget everything before them."""
        self.incomplete = True
        if self._started:
            self._forget()

    def _take_held(self) -> None:
        while self.next_number in self._held:
            self._take(self.next_number, self._release(self.next_number))

    def _take(self, number: int, payload: Payload) -> None:
        self.next_number = number + 1
        self._started = True
        self._from_start = self._from_start or number == 0
        self._apply(payload)

    def _hold(self, number: int, payload: Payload) -> None:
        if number in self._held:
            self._release(number)
        self._held[number] = payload
        self._budget.used_bytes += self._size_bytes(payload)
        while len(self._held) > MAX_HELD or (self._budget.exceeded and len(self._held) > 1):
            self._release(next(iter(self._held)))

    def _release(self, number: int) -> Payload:
        payload = self._held.pop(number)
        self._budget.used_bytes -= self._size_bytes(payload)
        return payload

    def drop_held(self) -> None:
        for number in list(self._held):
            self._release(number)
