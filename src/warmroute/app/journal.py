"""The journal: the last decisions in words, and the file that they are written to.

The router builds the text of a decision only when somebody reads it, or in the thread that writes the file, so a
decision costs its request little. A description contains numbers and names, never user text.

The thread writes calls that have ended in batches. If the disk is full, slow or missing, the journal drops and counts
decisions; requests never wait for it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from warmroute.app.log import append_all, size_of
from warmroute.blocking import run_in_thread
from warmroute.core.decision_record import TERMS, DecisionRecord, explain_decision
from warmroute.core.failed_tries import FailedTry
from warmroute.core.last_decisions import MAX_CANDIDATES, LastDecisions
from warmroute.core.messages import Outcome
from warmroute.core.node import Node
from warmroute.core.traffic import Counters
from warmroute.event_log import EventLog, where_it_failed

if TYPE_CHECKING:
    from warmroute.core.calls import Call

log = EventLog("warmroute.journal")

WRITE_INTERVAL_S: Final = 0.25
"""A crash loses this much of the journal."""
BATCH_ENTRIES: Final = 256
"""Decisions that are written at once. More would keep the interpreter lock for too long."""
CLOSE_TIMEOUT_S: Final = 2.0
"""How long the end of the process waits for a disk that hangs."""


# The file.


class JournalFile:
    """Writes the decisions of calls that have ended."""

    def __init__(self, decisions: LastDecisions, counters: Counters, now: Callable[[], float] = time.monotonic) -> None:
        self._decisions = decisions
        self._counters = counters
        self._now = now
        self._write_lock = threading.Lock()
        self._failing = False

    async def run(self) -> None:
        """Write decisions to the file until the task is cancelled."""
        while True:
            await asyncio.sleep(WRITE_INTERVAL_S)
            while self._decisions.pending:
                await run_in_thread(self.write_batch, "journal")

    async def close(self) -> None:
        """Write the remaining decisions, or drop them after CLOSE_TIMEOUT_S."""
        pending = self._decisions.pending
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                while pending:
                    await run_in_thread(self.write_batch, "journal")
        except TimeoutError:
            log.error(
                "journal_close_timed_out",
                "The disk is too slow; the remaining decisions are not written.",
                file=self._decisions.config.file,
                dropped=len(pending),
            )

    def write_batch(self) -> None:
        """Write a batch of decisions. Called in a thread."""
        with self._write_lock:
            self._write()

    def _write(self) -> None:
        config, counters, pending = self._decisions.config, self._counters, self._decisions.pending
        calls = [pending.popleft() for _ in range(min(BATCH_ENTRIES, len(pending)))]
        if not calls or not config.file:
            return
        wall_s = time.time() - self._now()
        try:
            lines = b"".join([msgspec.json.encode(describe(call, wall_s)) + b"\n" for call in calls])
            append(Path(config.file), lines, config.file_max_bytes)
        except Exception as error:
            counters.journal_dropped += len(calls)
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
        counters.journal_written += len(calls)
        if self._failing:
            self._failing = False
            log.info("journal_write_recovered", file=config.file, dropped=counters.journal_dropped)


def append(path: Path, lines: bytes, max_bytes: int) -> None:
    """Append all lines or none. Rotate the file first if it would become too large. Raises OSError."""
    size = size_of(path)
    if size and size + len(lines) > max_bytes:
        path.replace(path.with_name(path.name + ".1"))
    append_all(path, lines)


# In words. `wall_s` is the Unix time at which the router's clock was 0.


def describe(call: Call, wall_s: float) -> dict[str, Any]:
    """Return a call that was sent to a node as JSON values. This takes about 100 µs: describe many in a thread."""
    request, record = call.request, call.record
    assert record is not None
    outcome, last, tried, status, first_token_s, ended_s = call.end or (None, record.node, 1, 0, 0.0, 0.0)
    failed = outcome is Outcome.FAILED or outcome is Outcome.BUSY
    prompt_tokens, cached_tokens, output_tokens = call.usage or (None, None, None)
    return {
        "request_id": call.request_id.decode("ascii", "replace"),
        "time": format_utc(wall_s + request.arrived_s),
        **request.facts(),
        "explanation": explain_decision(
            record, queued_ms=call.queued_ms, tried=tried, last=last, failed=failed, poison=call.poison
        ),
        **describe_decision(record),
        "queued_ms": round(call.queued_ms, 3),
        "attempts": tried,
        "answered_by": last.name if first_token_s or outcome is Outcome.BROKEN else None,
        "outcome": outcome.name.lower() if outcome is not None else "running",
        "status": status or None,
        "streamed": request.streams,
        "ttft_ms": _ms_between(request.arrived_s, first_token_s),
        "duration_ms": _ms_between(request.arrived_s, ended_s),
        "poison": call.poison,
        "failed_tries": [describe_failed_try(failed) for failed in call.failed_tries],
        "reported": {
            "prompt_tokens": prompt_tokens,
            "cached_tokens": cached_tokens,
            "output_tokens": output_tokens,
        },
    }


def describe_failed(call: Call, wall_s: float) -> dict[str, Any]:
    """Return a failed call in brief."""
    request, record = call.request, call.record
    assert record is not None
    outcome, last, tried, status, _, ended_s = call.end or (None, record.node, 1, 0, 0.0, 0.0)
    return {
        "request_id": call.request_id.decode("ascii", "replace"),
        "time": round(wall_s + (ended_s or request.arrived_s), 1),
        "tenant": request.tenant,
        "model": request.model,
        "route": request.route,
        "node": last.name,
        "attempts": tried,
        "outcome": outcome.name.lower() if outcome is not None else "running",
        "status": status or None,
        "duration_ms": _ms_between(request.arrived_s, ended_s),
        "poison": call.poison,
        "failed_tries": [describe_failed_try(failed) for failed in call.failed_tries],
    }


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
