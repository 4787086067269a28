"""The KV events of one data-parallel rank, from numbered messages to its NodeCache. No I/O.

Production's sockets and replay's virtual time both deliver messages here. Messages that are in sequence are queued, and
`work` applies them in slices of time, so that neither a flood of messages nor one message with thousands of events
blocks the event loop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from math import inf
from typing import Any, Final, Generic

from warmroute.engines.byte_budget import ByteBudget
from warmroute.engines.kv_event_applier import Applied, KvEventApplier
from warmroute.engines.kv_events import BadPayload, Event
from warmroute.engines.kv_sequence import EventSequence, Payload
from warmroute.event_log import EventLog
from warmroute.index.node_cache import NEVER_S, NodeCache

log = EventLog("warmroute.engines")

EVENTS_PER_CHECK: Final = 16
"""Events applied between two readings of the clock."""
REREAD_INTERVAL_S: Final = 60.0
"""Minimum time between two rereads of a stream whose events contradict each other, and between two warnings."""
DELAY_WINDOW_S: Final = 60.0
START_TIME_ERROR_S: Final = 2.0
"""How much a process's reported start time may be too early: kernels count it from a boot time in whole seconds."""

Decoder = Callable[[Payload], Iterable[Event]]
"""Return a message's events. Raises BadPayload."""


class LeastDelay:
    """The least difference between this clock and the engine's in the last minute or two: that of a message that was
    not late. One message from the future, or a clock that was set, does not make all later ones look late for ever."""

    def __init__(self) -> None:
        self._since_s = NEVER_S
        self._least_s = self._earlier_s = inf

    def least_s(self, delay_s: float, now_s: float) -> float:
        """Add a delay, and return the least one."""
        if now_s - self._since_s >= DELAY_WINDOW_S:
            self._since_s, self._earlier_s, self._least_s = now_s, self._least_s, inf
        self._least_s = min(self._least_s, delay_s)
        return min(self._least_s, self._earlier_s)


class RankEvents(Generic[Payload]):
    def __init__(
        self,
        cache: NodeCache,
        rank: int,
        new_decoder: Callable[[], Decoder[Payload]],
        sent_time_s: Callable[[Payload], float | None] = lambda _payload: None,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        budget: ByteBudget | None = None,
        size_bytes: Callable[[Payload], int] = lambda _payload: 0,
    ) -> None:
        """`new_decoder` makes a decoder for each process of the engine; `sent_time_s` returns when a message was sent,
        by the engine's clock; `size_bytes` returns the size of a message, which counts in the node's `budget`."""
        self._cache = cache
        self._rank = rank
        self.log_fields: dict[str, Any] = {"node": cache.name, "rank": rank}
        self._new_decoder = new_decoder
        self._sent_time_s = sent_time_s
        self._now = now
        self._wall = wall
        self._queue: deque[Payload] = deque()
        self._events: Iterator[Event] | None = None
        """The rest of the message that is being applied."""
        self._decode = new_decoder()
        self._applier = KvEventApplier(cache, rank)
        self._delays = LeastDelay()
        self._reread_s = self._warned_s = NEVER_S
        self.first_sent_s: float | None = None
        """When the engine's current process sent its first message, by the engine's clock."""
        self.renumbered_s = NEVER_S
        """When a message last showed a new process: the numbers started again."""
        self.sequence = EventSequence[Payload](self._enqueue, self._forget, budget, size_bytes)
        cache.add_rank(rank)

    @property
    def block_size(self) -> int:
        return self._applier.block_size

    @property
    def is_settled(self) -> bool:
        """Whether no replay is running and all messages are applied."""
        return not self.sequence.replaying and not self._queue and self._events is None

    def receive(self, number: int, payload: Payload) -> None:
        """Handle a live message."""
        self._cache.last_contact_s = self._now()
        sent_s = self._sent_time_s(payload)
        if sent_s is not None:
            delay_s = self._wall() - sent_s
            self._cache.event_lag_s = delay_s - self._delays.least_s(delay_s, self._now())
        self.sequence.receive(number, payload)

    def restart(self) -> None:
        """Something else than a message shows a new process, or another model."""
        self.sequence.restart()
        self.renumbered_s = NEVER_S

    def work(self, until_s: float) -> bool:
        """Apply queued messages until a moment of `time.monotonic`. Return whether some are left."""
        while True:
            if self._events is None:
                if not self._queue:
                    self._cache.set_complete(self._rank, self.sequence.complete)
                    return False
                self._events = self._decoded(self._queue.popleft())
            for done, event in enumerate(self._events, 1):
                applied = self._applier.apply(event)
                if applied is not Applied.DONE and self._handle(applied):
                    break
                if done % EVENTS_PER_CHECK == 0 and time.monotonic() >= until_s:
                    return True
            self._events = None
            if self._queue and time.monotonic() >= until_s:
                return True

    def is_current(self, started_s: float, polled_s: float) -> bool:
        """Whether its events are those of a process that started at `started_s` (see NodeKvEvents.restarted)."""
        sent_s = self.first_sent_s
        if sent_s is not None and sent_s >= started_s + START_TIME_ERROR_S:
            return True
        return self.renumbered_s > polled_s and (sent_s is None or sent_s >= started_s)

    def _enqueue(self, payload: Payload) -> None:
        if self.first_sent_s is None:
            self.first_sent_s = self._sent_time_s(payload)
        self._queue.append(payload)

    def _decoded(self, payload: Payload) -> Iterator[Event]:
        try:
            return iter(self._decode(payload))
        except BadPayload as error:
            if self._now() - self._warned_s >= REREAD_INTERVAL_S:
                self._warned_s = self._now()
                log.warning(
                    "kv_events_unreadable", "The router forgets this node's cached blocks: events are lost.",
                    **self.log_fields, reason=str(error),
                )  # fmt: skip
            after = list(self._queue)
            self.sequence.lose()
            self._queue.extend(after)
            return iter(())

    def _handle(self, applied: Applied) -> bool:
        """Handle a cleared cache or an unknown parent. Return whether the queue was dropped."""
        if applied is Applied.CLEARED:
            self.sequence.mark_empty()
            return False
        if not self.sequence.complete:
            return False  # the parent was stored before this router listened
        if self._now() - self._reread_s >= REREAD_INTERVAL_S:
            self._reread_s = self._now()
            log.info(
                "kv_events_reread", "A stored block has an unknown parent. The router reads this node's events again.",
                **self.log_fields,
            )  # fmt: skip
            self.sequence.reread()
            return True
        self.sequence.incomplete = True
        self._cache.events_lost(self._rank)
        return False

    def _forget(self) -> None:
        self._queue.clear()
        self._events = None
        if self.sequence.incomplete:
            self._cache.events_lost(self._rank)
        else:  # a new process
            self._decode = self._new_decoder()
            self._applier = KvEventApplier(self._cache, self._rank)
            self.first_sent_s = None
            self.renumbered_s = self._now()
            self._cache.all_blocks_cleared(self._rank)
            self._cache.set_complete(self._rank, False)


class NodeKvEvents:
    def __init__(self, cache: NodeCache) -> None:
        self.cache = cache
        self.ranks: dict[int, RankEvents[Any]] = {}

    @property
    def block_size(self) -> int:
        """Block size of its events; 0 before the first."""
        return next((rank.block_size for rank in self.ranks.values()), 0)

    @property
    def is_connected(self) -> bool:
        return bool(self.ranks)

    def restarted(self, started_s: float, polled_s: float = inf) -> list[int]:
        """Forget the blocks of the engine's previous process. Return the ranks whose streams start again at 0.

        `started_s` is the new process's start time by its own clock; `polled_s` is when the previous process was last
        seen. Ranks are current which have sent their first event well after the start, and those whose numbers started
        again since `polled_s`, unless they have sent it before the start."""
        current = [number for number, rank in self.ranks.items() if rank.is_current(started_s, polled_s)]
        self.cache.restarted(current)
        stale = [number for number in self.ranks if number not in current]
        for number in stale:
            self.ranks[number].restart()
        return stale

    def remove_rank(self, number: int) -> None:
        self.ranks.pop(number).sequence.drop_held()
        self.cache.remove_rank(number)
