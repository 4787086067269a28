"""Finds the turns of conversations in a trace: which request waited for the answer of an earlier one.

A capture states it (`follows`). In other traces a request follows the latest earlier one whose whole prompt it begins
with, if

1. the last full block of that prompt was new in it: a system prompt that many share connects no prompts, and
2. it is longer by the answer at least, so that it can contain it, and
3. both have the same session_id, if the trace has sessions.

The think time is what the trace leaves between the two, less the time of the answer, which traces do not have:
ANSWER_MS_PER_TOKEN for each of its tokens.
"""

from __future__ import annotations

from typing import Final

import msgspec

from warmroute.capture.trace_row import TraceRow

ANSWER_MS_PER_TOKEN: Final = 20.0
MAX_REQUESTS: Final = 1 << 17
"""Requests that a later one can follow, the latest ones."""

MAX_KNOWN_IDS: Final = 1 << 22
"""Ids of blocks that are remembered, the first ones."""


class _Earlier(msgspec.Struct, gc=False):
    number: int
    at_ms: float
    tokens: int
    output_tokens: int
    session: str | int | None


class TraceTurns:
    def __init__(self, id_tokens: int) -> None:
        self._id_tokens = id_tokens
        self._last: dict[int, _Earlier] = {}
        """By the id of the last full block of its prompt."""
        self._known: set[int] = set()
        """Ids of all blocks so far."""

    def follow(self, row: TraceRow, number: int) -> tuple[int, float]:
        """Return the number of the request that this one follows and the think time in milliseconds; -1 if none."""
        before = self._before(row)
        full = row.input_length // self._id_tokens
        if 0 < full <= len(row.hash_ids):
            last = row.hash_ids[full - 1]
            if row.block_size or last not in self._known:
                self._last.pop(last, None)
                self._last[last] = _Earlier(number, row.timestamp, row.input_length, row.output_length, row.session_id)
                if len(self._last) > MAX_REQUESTS:
                    del self._last[next(iter(self._last))]
        if not row.block_size and len(self._known) < MAX_KNOWN_IDS:
            self._known.update(row.hash_ids)
        if before is None:
            return -1, 0.0
        answer_ms = before.output_tokens * ANSWER_MS_PER_TOKEN
        return before.number, max(0.0, row.timestamp - before.at_ms - answer_ms)

    def _before(self, row: TraceRow) -> _Earlier | None:
        if row.block_size:
            at = row.follows // self._id_tokens
            found = self._last.get(row.hash_ids[at - 1]) if 0 < at <= len(row.hash_ids) else None
            return found if found is not None and found.tokens == row.follows else None
        for one in reversed(row.hash_ids):
            found = self._last.get(one)
            if (
                found is not None
                and found.session == row.session_id
                and row.input_length >= found.tokens + found.output_tokens
            ):
                return found
        return None
