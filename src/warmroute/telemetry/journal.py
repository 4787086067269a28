"""The journal: what was decided of late, on what grounds, and how it ended.

An entry costs its request some references: it is put into words when somebody reads it, or in the thread that writes it
to disk. It holds numbers and names, and nothing that a user typed. Prices of the candidates are kept as the kernel made
them; of very large fleets only the best outlive the request. So memory is bounded by `keep`.

Lines go to disk in batches, moments after their requests have ended. A disk that is full, slow or gone costs lines,
which are counted, and never a request.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec

from warmroute.blocking import aside
from warmroute.config import Journal as JournalConfig
from warmroute.fleet.node import Node, Outcome
from warmroute.fleet.ticket import Ticket
from warmroute.routing.price import TERMS
from warmroute.routing.reasons import WHOLE, Grounds, sentence
from warmroute.telemetry.counters import Counters

log = logging.getLogger("warmroute.journal")
PRIORITIES: Final = ("high", "normal", "low")
BATCH_S: Final = 0.25
BATCH: Final = 256
"""Lines that are written at once: so long does the thread keep the interpreter busy."""
MOST_PENDING: Final = 8192
"""Entries that may wait for the disk."""
CLOSE_S: Final = 2.0


End = tuple[Outcome, Node, int, int, float, float]
"""How a request ended, the node that it was sent to last, how many were tried, the status, and when the first byte came
(0.0: never) and the last."""


class Entry(msgspec.Struct, eq=False):
    """One request's decision, and how it ended."""

    request_id: bytes
    tenant: str
    model: str
    route: str
    priority: int
    arrived_s: float
    held_ms: float
    grounds: Grounds
    reported: tuple[int | None, int | None, int | None] = (None, None, None)
    """What the answer said, as far as it did: tokens of the prompt, those that were cached, tokens of the answer."""
    end: End | None = None
    """None while it runs."""


class Journal:
    def __init__(self, config: JournalConfig, counters: Counters, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._counters = counters
        self._random = Random()
        self._entries: deque[Entry] = deque(maxlen=config.keep)
        self._pending: deque[Entry] = deque()
        self._one_writer = threading.Lock()
        self.reconfigure(config)

    def reconfigure(self, config: JournalConfig) -> None:
        self.config = config
        if self._entries.maxlen != config.keep:
            self._entries = deque(self._entries, config.keep)
        self.decided: Callable[[Entry], None] = self._entries.append
        """Told of each request that goes to a node."""
        self.on = bool(config.keep or config.file)
        self._writes = bool(config.file and config.sample)
        self._failing = False

    # While requests run.

    def ended(self, entry: Entry, outcome: Outcome, ticket: Ticket, tried: int, status: int, now_s: float) -> None:
        entry.end = (outcome, ticket.node, tried, status, ticket.first_byte_s, now_s)
        if entry.grounds.considered > WHOLE:
            entry.grounds.cut(self.config.candidates)
        if self._writes and (self.config.sample >= 1.0 or self._random.random() < self.config.sample):
            if len(self._pending) < MOST_PENDING:
                self._pending.append(entry)
            else:
                self._counters.journal_dropped += 1

    # For those who read it.

    def __len__(self) -> int:
        return len(self._entries)

    def latest(self, most: int) -> list[Entry]:
        """The latest first."""
        entries = self._entries
        return [entries[-1 - at] for at in range(min(most, len(entries)))]

    def find(self, request_id: bytes) -> Entry | None:
        """The latest with this id."""
        return next((entry for entry in reversed(self._entries) if entry.request_id == request_id), None)

    def describe(self, entry: Entry) -> dict[str, Any]:
        """An entry in words and numbers. Takes some 100 µs: many of them are for a thread."""
        wall_s = time.time() - self._now()
        grounds = entry.grounds
        outcome, last, tried, status, first_byte_s, ended_s = entry.end or (None, grounds.node, 1, 0, 0.0, 0.0)
        prompt_tokens, cached_tokens, output_tokens = entry.reported
        return {
            "request_id": entry.request_id.decode("ascii", "replace"),
            "time": in_utc(wall_s + entry.arrived_s),
            "tenant": entry.tenant,
            "model": entry.model,
            "route": entry.route,
            "priority": PRIORITIES[entry.priority],
            "sentence": sentence(
                grounds,
                held_ms=entry.held_ms,
                tried=tried,
                last=last,
                failed=outcome is Outcome.FAILED or outcome is Outcome.BUSY,
            ),
            **describe(grounds, self.config.candidates),
            "held_ms": round(entry.held_ms, 3),
            "attempts": tried,
            "answered_by": last.name if first_byte_s else None,
            "outcome": outcome.name.lower() if outcome is not None else "running",
            "status": status or None,
            "first_byte_ms": _since(entry.arrived_s, first_byte_s),
            "took_ms": _since(entry.arrived_s, ended_s),
            "reported": {
                "prompt_tokens": prompt_tokens,
                "cached_tokens": cached_tokens,
                "output_tokens": output_tokens,
            },
        }

    # To disk.

    async def run(self) -> None:
        """Writes what has ended, for as long as it runs."""
        while True:
            await asyncio.sleep(BATCH_S)
            while self._pending:
                await aside(self.write, "journal")

    async def close(self) -> None:
        """Writes what is left, unless the disk takes too long: then it keeps nobody from ending."""
        try:
            async with asyncio.timeout(CLOSE_S):
                while self._pending:
                    await aside(self.write, "journal")
        except TimeoutError:
            log.error("the journal's disk takes too long: %d decisions are not written", len(self._pending))

    def write(self) -> None:
        """Writes a batch; in a thread."""
        with self._one_writer:
            self._write()

    def _write(self) -> None:
        config = self.config
        entries = [self._pending.popleft() for _ in range(min(BATCH, len(self._pending)))]
        count = len(entries)
        if not entries or not config.file:
            return
        try:
            lines = b"".join([msgspec.json.encode(self.describe(entry)) + b"\n" for entry in entries])
            append(Path(config.file), lines, config.max_bytes)
        except Exception as error:
            self._counters.journal_dropped += count
            if not self._failing:  # once, not for each batch
                self._failing = True
                why = error.strerror if isinstance(error, OSError) else repr(error)
                log.error("the journal can't be written to %s: %s; it goes without until it can", config.file, why)
            return
        counters = self._counters
        counters.journal_written += count
        if self._failing:
            self._failing = False
            dropped = counters.journal_dropped
            log.info("the journal is written to %s again; %d decisions were dropped so far", config.file, dropped)


def append(path: Path, lines: bytes, max_bytes: int) -> None:
    """All of the lines or none; begins the file anew where they would make it too large. Raises OSError."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        size = 0
    if size and size + len(lines) > max_bytes:
        path.replace(path.with_name(path.name + ".1"))
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640)
    try:
        before = os.fstat(file).st_size
        try:
            left = memoryview(lines)
            while left:
                left = left[os.write(file, left) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(file, before)
            raise
    finally:
        os.close(file)


def describe(grounds: Grounds, most: int) -> dict[str, Any]:
    """What was decided, and the best candidates term by term."""
    return {
        "node": grounds.node.name,
        "policy": grounds.policy,
        "reason": grounds.reason,
        "prompt_tokens": grounds.tokens or None,
        "cached_tokens": round(grounds.cached) if grounds.tokens else None,
        "new_tokens": grounds.tokens - round(grounds.cached) if grounds.tokens else None,
        "considered": grounds.considered,
        "candidates": [
            {
                "node": node.name,
                "island": node.island,
                "chosen": node is grounds.node,
                "total_ms": round(price.total, 3),
                "terms_ms": {term: round(getattr(price, term), 3) for term in TERMS},
                "cached_tokens": round(price.cached),
                "new_tokens": round(price.new),
                "output_tokens": round(price.output),
            }
            for node, price in grounds.ranked(most)
        ],
    }


def in_utc(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _since(begin_s: float, end_s: float) -> float | None:
    return round((end_s - begin_s) * 1000.0, 3) if end_s else None
