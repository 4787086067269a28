"""The last calls: their decisions, and how they ended. `app/journal.py` puts them into words and writes them to a file.

The ring keeps the calls themselves. A call that has ended holds numbers and names, never user text, and of a fleet with
many candidates only the best prices. `max_decisions` bounds the memory. FAILED says which outcomes count as a failed
answer of a node.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import chain
from random import Random
from typing import TYPE_CHECKING, Final

from warmroute.config import Journal as JournalConfig
from warmroute.core.decision_record import KEEP_ALL_UP_TO
from warmroute.core.messages import Outcome
from warmroute.core.traffic import Counters

if TYPE_CHECKING:
    from warmroute.core.calls import Call

MAX_CANDIDATES: Final = 8
"""Candidates in the description of a decision, the cheapest first."""
MAX_PENDING: Final = 8192
"""Calls that may wait for the disk."""
MAX_FAILED: Final = 200
"""Failed calls, and as many that a node rejected, that stay when newer calls have pushed them out of the ring."""

FAILED: Final = (Outcome.FAILED, Outcome.BUSY, Outcome.BROKEN, Outcome.REJECTED)


def has_failed(call: Call) -> bool:
    """Return whether the client got no response, or an error, or a part of a response that the router ended at a
    deadline. Not where the client left."""
    if call.end is None:
        return False
    outcome, _, _, status, _, _ = call.end
    tries = call.failed_tries
    if outcome is Outcome.CANCELLED and tries and tries[-1].outcome is outcome:
        return True
    return outcome in FAILED or status >= 400


class LastDecisions:
    def __init__(self, config: JournalConfig, counters: Counters) -> None:
        self._counters = counters
        self._random = Random()
        self._calls: deque[Call] = deque(maxlen=config.max_decisions)
        self._failed: deque[Call] = deque(maxlen=min(MAX_FAILED, config.max_decisions))
        self._rejected: deque[Call] = deque(maxlen=min(MAX_FAILED, config.max_decisions))
        self.pending: deque[Call] = deque()
        """Calls that have ended and wait for the file. A thread takes them from the left."""
        self.reconfigure(config)

    def reconfigure(self, config: JournalConfig) -> None:
        self.config = config
        if self._calls.maxlen != config.max_decisions:
            self._calls = deque(self._calls, config.max_decisions)
            self._failed = deque(self._failed, min(MAX_FAILED, config.max_decisions))
            self._rejected = deque(self._rejected, min(MAX_FAILED, config.max_decisions))
        self.add: Callable[[Call], None] = self._calls.append
        """Call it when a call is sent to its first node."""
        self.on = bool(config.max_decisions or config.file)
        """Whether anybody reads the decisions."""
        self.writes = bool(config.file and config.sample_ratio)
        """Whether calls that have ended go to a file."""

    # Recording.

    def complete(self, call: Call) -> None:
        """A call that was sent to a node has ended."""
        record = call.record
        if record is not None and record.considered > KEEP_ALL_UP_TO:
            record.keep_best(MAX_CANDIDATES)
        if call.outcome is not Outcome.OK and has_failed(call):
            (self._rejected if call.outcome is Outcome.REJECTED else self._failed).append(call)
        ratio = self.config.sample_ratio
        if self.writes and (ratio >= 1.0 or self._random.random() < ratio):
            if len(self.pending) < MAX_PENDING:
                self.pending.append(call)
            else:
                self._counters.journal_dropped += 1

    # Reading.

    def __len__(self) -> int:
        return len(self._calls)

    def latest(self, limit: int) -> list[Call]:
        """Return the latest calls, newest first."""
        calls = self._calls
        return [calls[-1 - at] for at in range(min(limit, len(calls)))]

    def stored(self) -> tuple[list[Call], list[Call]]:
        """Return the calls, oldest first, and those that failed or were rejected, which may be older. Call this on the
        event loop, for `search`."""
        return list(self._calls), [*self._failed, *self._rejected]

    def find(self, request_id: bytes) -> Call | None:
        """Return the latest call with this request id."""
        found = search(self.stored(), 1, request_id=request_id)
        return found[0] if found else None

    def latest_failed(self, limit: int) -> list[Call]:
        """Return the latest calls that nodes did not complete, newest first."""
        return list(self._failed)[-limit:][::-1]


def search(
    stored: tuple[list[Call], list[Call]],
    limit: int,
    *,
    failed: bool = False,
    tenant: str | None = None,
    status: int | None = None,
    request_id: bytes | None = None,
) -> list[Call]:
    """Return the calls with these properties, newest first; without any, the latest ones. `failed`: the client got no
    whole response, or an error. A thread may call this."""
    calls, older = stored
    if failed or tenant is not None or status is not None or request_id is not None:
        known = set(map(id, calls))
        older = sorted([call for call in older if id(call) not in known], key=_arrived_s)
    else:
        older = []
    found: list[Call] = []
    for call in chain(reversed(calls), reversed(older)):
        end = call.end
        if (
            (not failed or has_failed(call))
            and (tenant is None or call.request.tenant == tenant)
            and (status is None or (end is not None and end[3] == status))
            and (request_id is None or call.request_id == request_id)
        ):
            found.append(call)
            if len(found) >= limit:
                break
    return found


def _arrived_s(call: Call) -> float:
    return call.request.arrived_s
