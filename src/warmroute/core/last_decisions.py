"""The journal: recent routing decisions, their reasons, and how the requests ended.

The router builds the text of an entry only when somebody reads it, or in the thread that writes the file, so an entry
costs its request little. An entry contains numbers and names, never user text. `max_decisions` bounds the memory:
entries of fleets with many candidates keep only the best prices once the request has ended.

A thread writes finished entries to the file in batches. If the disk is full, slow or missing, the journal drops and
counts entries; requests never wait for it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec

from warmroute.app.log import append_all, size_of
from warmroute.blocking import run_in_thread
from warmroute.config import Journal as JournalConfig
from warmroute.config.routing import PRIORITY_NAMES
from warmroute.core.calls import Attempts
from warmroute.core.decision_record import KEEP_ALL_UP_TO, TERMS, DecisionRecord, explain_decision
from warmroute.core.failed_tries import FailedTry
from warmroute.core.messages import Outcome
from warmroute.core.node import Node, Ticket
from warmroute.core.traffic import Counters
from warmroute.event_log import EventLog, where_it_failed

log = EventLog("warmroute.journal")

MAX_CANDIDATES: Final = 8
"""Candidates in the description of a decision, the cheapest first."""
WRITE_INTERVAL_S: Final = 0.25
BATCH_ENTRIES: Final = 256
"""Entries that are written at once. More would keep the interpreter lock for too long."""
MAX_PENDING: Final = 8192
"""Entries that may wait for the disk."""
CLOSE_TIMEOUT_S: Final = 2.0
MAX_FAILED: Final = 200
"""Entries of failed requests, and as many of requests that a node rejected, that stay when newer requests have pushed
them out of the others."""

FAILED: Final = (Outcome.FAILED, Outcome.BUSY, Outcome.BROKEN, Outcome.REJECTED)

End = tuple[Outcome, Node, int, int, float, float]
"""The outcome, the node tried last, the number of nodes tried, the status, and the times of the first token (0.0
without one) and of the end."""


class Entry:
    """The decision for one request, and how the request ended."""

    request_id: bytes
    tenant: str
    model: str
    route: str
    priority: int
    arrived_s: float
    queued_ms: float
    record: DecisionRecord
    reported: tuple[int | None, int | None, int | None] = (None, None, None)
    """Prompt tokens, cached tokens and output tokens that the node reported."""
    end: End | None = None
    """None while the request runs."""
    failed_tries: tuple[FailedTry, ...] = ()
    poison: bool = False
    streamed: bool = True
    """Whether the client asked for a stream: else the first token came at the end."""

    def __init__(
        self,
        request_id: bytes,
        tenant: str,
        model: str,
        route: str,
        priority: int,
        arrived_s: float,
        queued_ms: float,
        record: DecisionRecord,
    ) -> None:
        self.request_id = request_id
        self.tenant = tenant
        self.model = model
        self.route = route
        self.priority = priority
        self.arrived_s = arrived_s
        self.queued_ms = queued_ms
        self.record = record


def has_failed(entry: Entry) -> bool:
    """Return whether the client got no response, or an error, or a part of a response that the router ended at a
    deadline. Not where the client left."""
    if entry.end is None:
        return False
    outcome, _, _, status, _, _ = entry.end
    if outcome is Outcome.CANCELLED and entry.failed_tries and entry.failed_tries[-1].outcome is outcome:
        return True
    return outcome in FAILED or status >= 400


class Journal:
    def __init__(self, config: JournalConfig, counters: Counters, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._counters = counters
        self._random = Random()
        self._entries: deque[Entry] = deque(maxlen=config.max_decisions)
        self._failed: deque[Entry] = deque(maxlen=min(MAX_FAILED, config.max_decisions))
        self._rejected: deque[Entry] = deque(maxlen=min(MAX_FAILED, config.max_decisions))
        self._pending: deque[Entry] = deque()
        self._write_lock = threading.Lock()
        self.reconfigure(config)

    def reconfigure(self, config: JournalConfig) -> None:
        self.config = config
        if self._entries.maxlen != config.max_decisions:
            self._entries = deque(self._entries, config.max_decisions)
            self._failed = deque(self._failed, min(MAX_FAILED, config.max_decisions))
            self._rejected = deque(self._rejected, min(MAX_FAILED, config.max_decisions))
        self.add: Callable[[Entry], None] = self._entries.append
        self.on = bool(config.max_decisions or config.file)
        self._writes = bool(config.file and config.sample_ratio)
        self._failing = False

    # Recording.

    def begin(self, attempts: Attempts, queued_ms: float) -> Entry:
        """Start the entry of a request that got a decision."""
        request = attempts.request
        entry = Entry(
            attempts.request_id, request.tenant, request.model, request.route, request.priority, request.arrived_s,
            queued_ms, attempts.decision.record(),
        )  # fmt: skip
        entry.streamed = request.streams
        self.add(entry)
        return entry

    def complete(self, entry: Entry, attempts: Attempts, outcome: Outcome, now_s: float) -> None:
        """Complete the entry of a request that has ended."""
        if attempts.reported is not None:
            entry.reported = attempts.reported
        entry.failed_tries, entry.poison = attempts.failed_tries, attempts.poison
        self.end(entry, outcome, attempts.ticket, attempts.tried, attempts.status, now_s)

    def end(self, entry: Entry, outcome: Outcome, ticket: Ticket, tried: int, status: int, now_s: float) -> None:
        entry.end = (outcome, ticket.node, tried, status, ticket.first_token_s, now_s)
        if entry.record.considered > KEEP_ALL_UP_TO:
            entry.record.keep_best(MAX_CANDIDATES)
        if has_failed(entry):
            (self._rejected if outcome is Outcome.REJECTED else self._failed).append(entry)
        ratio = self.config.sample_ratio
        if self._writes and (ratio >= 1.0 or self._random.random() < ratio):
            if len(self._pending) < MAX_PENDING:
                self._pending.append(entry)
            else:
                self._counters.journal_dropped += 1

    # Reading.

    def __len__(self) -> int:
        return len(self._entries)

    def latest(self, limit: int) -> list[Entry]:
        """Return the latest entries, newest first."""
        entries = self._entries
        return [entries[-1 - at] for at in range(min(limit, len(entries)))]

    def stored(self) -> tuple[list[Entry], list[Entry]]:
        """Return the entries, oldest first, and those of requests that failed or were rejected, which may be older.
        Call this on the event loop, for `search`."""
        return list(self._entries), [*self._failed, *self._rejected]

    def find(self, request_id: bytes) -> Entry | None:
        """Return the latest entry of this request."""
        found = search(self.stored(), 1, request_id=request_id)
        return found[0] if found else None

    def latest_failed(self, limit: int) -> list[Entry]:
        """Return the latest requests that nodes did not complete, newest first."""
        return list(self._failed)[-limit:][::-1]

    def describe(self, entry: Entry) -> dict[str, Any]:
        """Return an entry as JSON values. This takes about 100 µs: describe many entries in a thread."""
        wall_s = time.time() - self._now()
        record = entry.record
        outcome, last, tried, status, first_token_s, ended_s = entry.end or (None, record.node, 1, 0, 0.0, 0.0)
        failed = outcome is Outcome.FAILED or outcome is Outcome.BUSY
        prompt_tokens, cached_tokens, output_tokens = entry.reported
        return {
            "request_id": entry.request_id.decode("ascii", "replace"),
            "time": format_utc(wall_s + entry.arrived_s),
            "tenant": entry.tenant,
            "model": entry.model,
            "route": entry.route,
            "priority": PRIORITY_NAMES[entry.priority],
            "explanation": explain_decision(
                record, queued_ms=entry.queued_ms, tried=tried, last=last, failed=failed, poison=entry.poison
            ),
            **describe_decision(record),
            "queued_ms": round(entry.queued_ms, 3),
            "attempts": tried,
            "answered_by": last.name if first_token_s or outcome is Outcome.BROKEN else None,
            "outcome": outcome.name.lower() if outcome is not None else "running",
            "status": status or None,
            "streamed": entry.streamed,
            "ttft_ms": _ms_between(entry.arrived_s, first_token_s),
            "duration_ms": _ms_between(entry.arrived_s, ended_s),
            "poison": entry.poison,
            "failed_tries": [describe_failed_try(failed) for failed in entry.failed_tries],
            "reported": {
                "prompt_tokens": prompt_tokens,
                "cached_tokens": cached_tokens,
                "output_tokens": output_tokens,
            },
        }

    def describe_failed(self, entry: Entry) -> dict[str, Any]:
        """Return a failed request in brief."""
        wall_s = time.time() - self._now()
        outcome, last, tried, status, _, ended_s = entry.end or (None, entry.record.node, 1, 0, 0.0, 0.0)
        return {
            "request_id": entry.request_id.decode("ascii", "replace"),
            "time": round(wall_s + (ended_s or entry.arrived_s), 1),
            "tenant": entry.tenant,
            "model": entry.model,
            "route": entry.route,
            "node": last.name,
            "attempts": tried,
            "outcome": outcome.name.lower() if outcome is not None else "running",
            "status": status or None,
            "duration_ms": _ms_between(entry.arrived_s, ended_s),
            "poison": entry.poison,
            "failed_tries": [describe_failed_try(failed) for failed in entry.failed_tries],
        }

    # Writing.

    async def run(self) -> None:
        """Write finished entries to the file until the task is cancelled."""
        while True:
            await asyncio.sleep(WRITE_INTERVAL_S)
            while self._pending:
                await run_in_thread(self.write_batch, "journal")

    async def close(self) -> None:
        """Write the remaining entries, or drop them after CLOSE_TIMEOUT_S."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                while self._pending:
                    await run_in_thread(self.write_batch, "journal")
        except TimeoutError:
            log.error(
                "journal_close_timed_out",
                "The disk is too slow; the remaining decisions are not written.",
                file=self.config.file,
                dropped=len(self._pending),
            )

    def write_batch(self) -> None:
        """Write a batch of entries. Called in a thread."""
        with self._write_lock:
            self._write()

    def _write(self) -> None:
        config, counters = self.config, self._counters
        entries = [self._pending.popleft() for _ in range(min(BATCH_ENTRIES, len(self._pending)))]
        if not entries or not config.file:
            return
        try:
            lines = b"".join([msgspec.json.encode(self.describe(entry)) + b"\n" for entry in entries])
            append(Path(config.file), lines, config.file_max_bytes)
        except Exception as error:
            counters.journal_dropped += len(entries)
            if not self._failing:
                self._failing = True
                reason = error.strerror if isinstance(error, OSError) else where_it_failed(error)
                log.error(
                    "journal_write_failed",
                    "The router drops decisions until it can write the file again.",
                    file=config.file,
                    reason=reason,
                )
            return
        counters.journal_written += len(entries)
        if self._failing:
            self._failing = False
            log.info("journal_write_recovered", file=config.file, dropped=counters.journal_dropped)


def search(
    stored: tuple[list[Entry], list[Entry]],
    limit: int,
    *,
    failed: bool = False,
    tenant: str | None = None,
    status: int | None = None,
    request_id: bytes | None = None,
) -> list[Entry]:
    """Return the entries with these properties, newest first; without any, the latest ones. `failed`: the client got no
    whole response, or an error. A thread may call this."""
    entries, older = stored
    if failed or tenant is not None or status is not None or request_id is not None:
        known = set(map(id, entries))
        older = sorted([entry for entry in older if id(entry) not in known], key=_arrived_s)
    else:
        older = []
    found: list[Entry] = []
    for entry in chain(reversed(entries), reversed(older)):
        end = entry.end
        if (
            (not failed or has_failed(entry))
            and (tenant is None or entry.tenant == tenant)
            and (status is None or (end is not None and end[3] == status))
            and (request_id is None or entry.request_id == request_id)
        ):
            found.append(entry)
            if len(found) >= limit:
                break
    return found


def _arrived_s(entry: Entry) -> float:
    return entry.arrived_s


def describe_failed_try(failed: FailedTry) -> dict[str, Any]:
    error = failed.error
    return {
        "node": failed.node,
        "role": failed.role,
        "outcome": failed.outcome.name.lower(),
        "status": failed.status or None,
        "reason": failed.reason,
        "duration_ms": _ms_between(failed.opened_s, failed.failed_s),
        "error": None
        if error is None
        else {
            "class": error.kind,
            "type": error.type,
            "code": error.code,
            "length": error.length,
            **({"text": error.text} if error.text else {}),
        },
    }


def describe_last_failure(node: Node, wall_s: float) -> dict[str, Any] | None:
    """Return the last failed try on a node. `wall_s`: the Unix time at which the router's clock was 0."""
    failed = node.last_failure
    if failed is None:
        return None
    return {"time": round(wall_s + failed.failed_s, 1), **describe_failed_try(failed)}


def append(path: Path, lines: bytes, max_bytes: int) -> None:
    """Append all lines or none. Rotate the file first if it would become too large. Raises OSError."""
    size = size_of(path)
    if size and size + len(lines) > max_bytes:
        path.replace(path.with_name(path.name + ".1"))
    append_all(path, lines)


def describe_decision(record: DecisionRecord) -> dict[str, Any]:
    """Return the decision and the terms of its best candidates as JSON values."""
    return {
        "node": record.node.name,
        "policy": record.policy,
        "reason": record.reason,
        "prompt_tokens": record.tokens or None,
        "cached_tokens": round(record.cached) if record.tokens else None,
        "new_tokens": record.tokens - round(record.cached) if record.tokens else None,
        **({"store": record.store, "store_tokens": record.store_tokens} if record.store_tokens else {}),
        **_describe_pair(record),
        "candidate_count": record.considered,
        "candidates": [
            {
                "node": node.name,
                "island": node.island,
                "chosen": node is record.node,
                "total_ms": round(price.total, 3),
                "terms_ms": {term: round(getattr(price, term), 3) for term in TERMS},
                "cached_tokens": round(price.cached),
                "new_tokens": round(price.new),
                "output_tokens": round(price.output),
            }
            for node, price in record.ranked(MAX_CANDIDATES)
        ],
    }


def _describe_pair(record: DecisionRecord) -> dict[str, Any]:
    """Return what is known about the prefill node; nothing if one node serves the request."""
    pair = record.pair
    if pair is None:
        return {}
    return {
        "prefill_node": pair.prefill_node.name,
        "transfer_tokens": round(pair.transfer_tokens),
        "transfer_ms": round(pair.transfer_ms, 3),
        "pair_total_ms": round(pair.price.total, 3) if pair.price is not None else None,
        "alone_total_ms": round(pair.alone_ms, 3) if pair.price is not None else None,
    }


def format_utc(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _ms_between(start_s: float, end_s: float) -> float | None:
    return round((end_s - start_s) * 1000.0, 3) if end_s else None
