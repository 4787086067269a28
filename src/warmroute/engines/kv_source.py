"""One source of KV events, from numbered messages to beliefs. Takes messages and a clock; no I/O.

Messages are queued as the feed lets them through, and applied a slice of time after another: a flood of events, or one
message with thousands of them, never holds the loop.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from warmroute.engines.kv_apply import Applied, Applier
from warmroute.engines.kv_events import BadPayload, Event, read_batch, sent_at_s
from warmroute.engines.kv_feed import Feed
from warmroute.index.node_cache import NodeCache

log = logging.getLogger("warmroute.engines")

AT_ONCE: Final = 16
"""Events applied between two looks at the clock."""
ASTRAY_S: Final = 60.0
"""So often at most everything is read again because something does not fit."""
NEVER_S: Final = -1e9


class KvSource:
    def __init__(
        self,
        cache: NodeCache,
        rank: int,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._cache = cache
        self._rank = rank
        self._now = now
        self._wall = wall
        self._queue: deque[bytes] = deque()
        self._events: Iterator[Event] | None = None
        """What is left of the message that is being applied."""
        self._applier = Applier(cache, rank)
        self._quickest_s = float("inf")
        """Least difference seen between this clock and the engine's: a message that was not late."""
        self._astray_s = self._warned_s = NEVER_S
        self.began_s: float | None = None
        """When the first message since it began (anew) was sent, by the engine's clock."""
        self.orphans = 0
        """Blocks told whose parents were not."""
        self.feed = Feed(self._take, self._forget)
        cache.follow(rank)

    @property
    def block_size(self) -> int:
        return self._applier.block_size

    def heard(self, payload: bytes) -> None:
        """A live message came."""
        self._cache.heard(self._now())
        sent_s = sent_at_s(payload)
        if sent_s is not None:
            difference_s = self._wall() - sent_s
            self._quickest_s = min(self._quickest_s, difference_s)
            self._cache.lag_s = difference_s - self._quickest_s

    def work(self, until_s: float) -> bool:
        """Applies what is queued until a moment of `time.monotonic`; True where something is left."""
        while True:
            if self._events is None:
                if not self._queue:
                    self._cache.tells_all(self._rank, self.feed.complete)
                    return False
                self._events = self._read(self._queue.popleft())
            for done, event in enumerate(self._events, 1):
                applied = self._applier.apply(event)
                if applied is not Applied.DONE and self._notice(applied):
                    break
                if done % AT_ONCE == 0 and time.monotonic() >= until_s:
                    return True
            self._events = None
            if self._queue and time.monotonic() >= until_s:
                return True

    def _take(self, payload: bytes) -> None:
        if self.began_s is None:
            self.began_s = sent_at_s(payload)
        self._queue.append(payload)

    def _read(self, payload: bytes) -> Iterator[Event]:
        try:
            return iter(read_batch(payload).events)
        except BadPayload as error:
            if self._now() - self._warned_s >= ASTRAY_S:
                self._warned_s = self._now()
                log.warning("KV events of node %s can't be read: %s", self._cache.name, error)
            after = list(self._queue)
            self.feed.unreadable()
            self._queue.extend(after)
            return iter(())

    def _notice(self, applied: Applied) -> bool:
        """True where everything was forgotten, what is queued included."""
        if applied is Applied.CLEARED:
            self.feed.emptied()
            return False
        self.orphans += 1
        if not self.feed.complete:
            return False  # its parent was told before this router listened
        if self._now() - self._astray_s >= ASTRAY_S:
            self._astray_s = self._now()
            log.info("node %s told of a block whose parent is not known: reading its events again", self._cache.name)
            self.feed.lost_track()
            return True
        self.feed.incomplete = True
        self._cache.lost(self._rank)
        return False

    def _forget(self) -> None:
        self._queue.clear()
        self._events = None
        if self.feed.incomplete:
            self._cache.lost(self._rank)
        else:
            self._applier.begin_anew()
            self.began_s = None
            self._cache.cleared(self._rank)
            self._cache.tells_all(self._rank, False)
