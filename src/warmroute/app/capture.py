"""Captures of live traffic: traces in Mooncake's format with hashes instead of text, for `replay` and `plan`."""

from __future__ import annotations

import asyncio
import gzip
import re
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from warmroute._kernel import TOKEN_BYTES, capture_ids
from warmroute.app.log import append_all, size_of
from warmroute.blocking import run_in_thread
from warmroute.config import Capture
from warmroute.config.routing import PRIORITY_NAMES
from warmroute.core.calls import Call
from warmroute.core.messages import MEANINGS, RoutingRequest, Usage
from warmroute.core.trace_row import CaptureOutcome, TraceRow
from warmroute.core.traffic import Counters
from warmroute.edge.arrival import Kept, lookup_of
from warmroute.event_log import EventLog, where_it_failed
from warmroute.prompt.prompt import Prompt
from warmroute.scaling.recent_traffic import BLOCK_TOKENS, RecentTraffic

# Finds the earlier prompt that a prompt continues, token by token.
#
# An engine caches what it generates as well, and the next turn of a conversation contains it. A capture has no tokens
# of responses. It states instead which prompt a prompt follows, and replay concludes that the response lies in between.

MAX_PROMPTS: Final = 65_536
"""Prompts that are remembered, the latest ones."""
MAX_TAILS: Final = 8
"""How many prompts that differ only after their last full block are remembered."""


class Conversations:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._tails: dict[int, list[bytes]] = {}
        """The tokens after a prompt's last full block, by the id of that block."""

    def follows(self, tokens: bytes, ids: list[int], is_text: bool) -> int:
        """Return the length in tokens of the longest earlier prompt that this one begins with and exceeds; 0 if there
        is none. Remember this prompt. `is_text`: the tokens are bytes of its text, the last one padded."""
        if not ids:
            return 0
        tails = self._tails
        found = 0 if tails.keys().isdisjoint(ids) else self._search(tokens, ids)
        last, tail = ids[-1], tokens[len(ids) * self._block_size * TOKEN_BYTES :]
        if is_text:
            tail = tail.rstrip(b"\0")
        known = tails.pop(last, None)
        if known is None:
            known = [tail]
            if len(tails) >= MAX_PROMPTS:
                del tails[next(iter(tails))]
        elif tail not in known:
            known.append(tail)
            del known[:-MAX_TAILS]
        tails[last] = known  # as the latest
        return found

    def _search(self, tokens: bytes, ids: list[int]) -> int:
        start, block_bytes = len(ids) * self._block_size * TOKEN_BYTES, self._block_size * TOKEN_BYTES
        for known in map(self._tails.get, reversed(ids)):
            if known is not None:
                longest = -1
                for tail in known:
                    if longest < len(tail) < len(tokens) - start and tokens.startswith(tail, start):
                        longest = len(tail)
                if longest >= 0:
                    return -(-(start + longest) // TOKEN_BYTES)
            start -= block_bytes
        return 0


# What a capture writes instead of content and names: a keyed hash of each block, tenant and session.
#
# The key is random, belongs to one capture and exists only in memory. Without it, a reader cannot test whether a known
# text or name is in a capture, or compare two captures.

NAME_BYTES = 6
"""48 bits: among MAX_NAMES names, two are equal in one of 30 million captures."""
MAX_NAMES = 4096
"""Names that are remembered with their hash. Others are hashed again."""


class Pseudonyms:
    def __init__(self) -> None:
        self._block_key = secrets.token_bytes(16)
        self._name_key = secrets.token_bytes(32)
        self._names: dict[bytes, str] = {}
        """The latest pseudonyms."""

    def blocks(self, model: str, prompt: Prompt, block_size: int) -> list[int]:
        """Return the ids of the prompt's full blocks. They depend on the model and on everything before the block."""
        return capture_ids(lookup_of(prompt, "").blocks(model, "", block_size), self._block_key)

    def name(self, name: bytes) -> str:
        """Return the pseudonym of a name; empty for an empty one."""
        found = self._names.get(name)
        if found is None:
            found = blake2b(name, key=self._name_key, digest_size=NAME_BYTES).hexdigest() if name else ""
            if len(self._names) >= MAX_NAMES:
                self._names.clear()
            self._names[name] = found
        return found


# One capture: turns finished requests into the lines of a trace. A thread calls it.

BYTES_PER_TOKEN: Final = 4
"""Bytes that count as a token in a prompt that was not read. English text has about as many."""
MAX_NAME: Final = 200
"""Characters of a model's name in a line: a client may invent any name."""


class CapturedCall(msgspec.Struct, gc=False, eq=False):
    """What a capture needs of a request that has ended."""

    request: RoutingRequest
    session: bytes
    """The conversation, as the client names it."""
    prompt: Prompt | None
    body_bytes: int
    outcome: CaptureOutcome
    ended_s: float
    output_tokens: float
    """Output tokens as the node reported them, or an estimate."""
    output_estimated: bool
    reported: Usage = (None, None, None)
    predicted: int | None = None
    node: str = ""
    attempts: int = 1
    first_token_s: float = 0.0
    answer_tokens: int = 0
    """Estimated tokens of the last answer that a mirrored request's prompt contains."""


class CaptureRun:
    def __init__(self, block_size: int, now_s: float) -> None:
        """`now_s`: the start on the router's clock. Requests that arrived before it are left out."""
        self.started_s = now_s
        self.started_unix_s = time.time()
        self._block_size = block_size
        self._pseudonyms = Pseudonyms()
        self._conversations = Conversations(block_size)
        self._encoder = msgspec.json.Encoder()
        self.requests = 0
        """Requests that became lines."""

    def lines(self, ended: Sequence[CapturedCall]) -> bytes:
        """Return a line for each request that arrived after the start."""
        encode = self._encoder.encode
        rows = [encode(self._row(one)) for one in ended if one.request.arrived_s >= self.started_s]
        self.requests += len(rows)
        return b"\n".join([*rows, b""])

    def _row(self, ended: CapturedCall) -> TraceRow:
        request, prompt = ended.request, ended.prompt
        prompt_tokens, cached_tokens, _ = ended.reported
        ids: list[int] = []
        follows = 0
        if prompt is None:
            tokens = prompt_tokens or ended.body_bytes // BYTES_PER_TOKEN
        else:
            ids = self._pseudonyms.blocks(request.model, prompt, self._block_size)
            tokens = prompt.total_tokens
            if not prompt.others:
                follows = self._conversations.follows(prompt.tokens, ids, not prompt.exact)
                if prompt.exact and prompt_tokens:
                    tokens = prompt_tokens
        arrived_s = request.arrived_s
        arrived_us = int((arrived_s - self.started_s) * 1e6 + 0.5)
        first_token_s = ended.first_token_s if request.streams else 0.0
        return TraceRow(  # by position, in the order of its fields: by name it would take five times as long
            arrived_us // 1000,
            tokens if tokens > 1 else 1,
            max(1, round(ended.output_tokens)),
            ids,
            self._block_size,
            arrived_us % 1000,
            self._pseudonyms.name(ended.session) or None,
            follows,
            ended.answer_tokens if follows else 0,
            prompt_tokens is None if prompt is None else not prompt.exact,
            ended.output_estimated,
            request.model[:MAX_NAME].encode("utf-8", "replace").decode(),
            self._pseudonyms.name(request.tenant.encode("utf-8", "surrogatepass")),
            request.route,
            PRIORITY_NAMES[request.priority],
            ended.outcome,
            ended.node,
            ended.attempts,
            prompt_tokens,
            cached_tokens,
            ended.predicted,
            _tenths_ms(first_token_s - arrived_s) if first_token_s else None,
            _tenths_ms(ended.ended_s - arrived_s) if ended.outcome != "mirrored" else None,
        )


def _tenths_ms(seconds: float) -> float:
    """Return milliseconds with one digit after the point. Faster than `round`."""
    return int(seconds * 10_000.0 + 0.5) / 10.0


# Where a capture is written: a file, or a directory of rotating files. Both are bounded on disk.
#
#     capture-20261116T050000Z-3f9a.0001.jsonl        start in UTC, a random part, the number of the file
#
# A write that fails loses its lines and nothing else: the next one tries again.

log = EventLog("warmroute.capture")

FILE_NAME: Final = re.compile(r"capture-(\d{8}T\d{6}Z)-[0-9a-f]{4}\.(\d{4,})\.jsonl(\.gz)?")
"""The start of the capture and the number of the file. Names sort by time."""


class CaptureFull(OSError):
    """The file has its maximum size."""


class CaptureFile:
    """One file. `.gz` files are compressed, one member for each write."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self._max_bytes = max_bytes

    def write(self, lines: bytes) -> None:
        """Raises OSError; CaptureFull if the file would become too large."""
        data = gzip.compress(lines, 6) if self.path.suffix == ".gz" else lines
        if size_of(self.path) + len(data) > self._max_bytes:
            raise CaptureFull(0, f"it has its maximum of {self._max_bytes:,} bytes")
        append_all(self.path, data)


class CaptureDirectory:
    """Rotating files. Old ones are removed, also those of earlier captures in the same directory."""

    def __init__(self, directory: Path, file_max_bytes: int, max_files: int, started_unix_s: float) -> None:
        self._directory = directory
        self._file_max_bytes = file_max_bytes
        self._max_files = max_files
        started = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(started_unix_s))
        self._prefix = f"capture-{started}-{secrets.token_hex(2)}"
        self._number = 0
        self.path = directory

    def write(self, lines: bytes) -> None:
        """Raises OSError. The next call then tries the same file again."""
        size = size_of(self.path) if self._number else 0
        if not self._number or (size and size + len(lines) > self._file_max_bytes):
            self._next_file()
        elif not size:
            self._directory.mkdir(exist_ok=True)  # the directory may have been removed
        append_all(self.path, lines)

    def _next_file(self) -> None:
        self._directory.mkdir(exist_ok=True)
        files = capture_files(self._directory)
        for old in files[: max(0, len(files) - self._max_files + 1)]:
            old.unlink(missing_ok=True)
        self._number += 1
        self.path = self._directory / f"{self._prefix}.{self._number:04d}.jsonl"


def capture_files(directory: Path) -> list[Path]:
    """Return the files of captures in the directory, the oldest first. Raises OSError."""
    return sorted(file for file in directory.iterdir() if FILE_NAME.fullmatch(file.name))


# What is captured now: to the files of `[capture]`, and to clients of the admin API. Each has a key of its own.
#
# While nothing is captured, a request pays one comparison. Otherwise it pays for one object, and if its policy needs no
# tokens, for reading its prompt. A thread computes the hashes and writes the lines a moment after the request has
# ended. If that is too slow, or the disk is full or missing, requests are dropped from the capture and counted; none
# waits.

WRITE_INTERVAL_S: Final = 0.25
"""A crash loses this much. Shorter intervals write smaller pieces, which compress worse."""
MAX_PENDING: Final = 8192
"""Requests that may wait for the thread."""
MAX_PENDING_BYTES: Final = 128 << 20
"""Tokens of their prompts, four bytes each."""
WRITE_REQUESTS: Final = 128
"""Requests that are written at once."""
CLOSE_TIMEOUT_S: Final = 2.0
"""How long the end of a capture waits for a disk that hangs."""


class Sink(Protocol):
    """Takes the lines of one capture, in a thread."""

    @property
    def path(self) -> Path: ...

    def write(self, lines: bytes) -> None:
        """Raises OSError."""


class _Target:
    """One capture and where it goes."""

    def __init__(self, run: CaptureRun, sink: Sink, internal: bool = False) -> None:
        self.run = run
        self.sink = sink
        self.internal = internal
        """Whether the router itself uses it: then no operator started it, and it is not counted."""
        self.failing = False
        self.written = self.written_bytes = self.dropped = 0


class TrafficCapture:
    def __init__(self, config: Capture, counters: Counters, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._counters = counters
        self._pending: list[CapturedCall] = []
        self._pending_bytes = 0
        self._targets: tuple[_Target, ...] = ()
        self._file: _Target | None = None
        self._overloaded = False
        self._write_lock = threading.Lock()
        self.on = False
        """Whether anything is captured."""
        self.config = Capture()
        self.reconfigure(config)

    def reconfigure(self, config: Capture) -> None:
        """A changed configuration ends the capture to files and begins another one, with a new key."""
        before, self.config = self.config, config
        if config == before:
            return
        if self._file is not None:
            self.stop(self._file)
            self._file = None
        if config.directory:
            run = CaptureRun(config.block_size, self._now())
            files = CaptureDirectory(
                Path(config.directory), config.file_max_bytes, config.max_files, run.started_unix_s
            )
            self._file = self.start(files, run)
            log.info("capture_started", directory=config.directory)

    def start(self, sink: Sink, run: CaptureRun | None = None, internal: bool = False) -> _Target:
        """Begin a capture. Requests that arrive from now on are in it. `internal`: the router itself uses it."""
        target = _Target(run or CaptureRun(self.config.block_size, self._now()), sink, internal)
        self._targets = (*self._targets, target)
        self.on = True
        return target

    def stop(self, target: _Target) -> None:
        self._targets = tuple(one for one in self._targets if one is not target)
        self.on = bool(self._targets)

    # From the event loop.

    def call_ended(self, call: Call, expected_output: float) -> None:
        """Add a call that was to be captured from its arrival on. `expected_output`: tokens, if none are reported."""
        outcome, request, history = call.outcome, call.request, call.history
        if outcome is not None and (call.left is None or call.status < 500):
            name = MEANINGS[outcome].captured
        else:  # no node got it, or the router itself ended it with an error
            # A mistake of the client is not in a capture: no fleet would have served it, and its model may be what a
            # user typed.
            name = None if 400 <= call.status < 500 and call.status != 429 else "not_admitted"
        if name is None:
            return
        reported = call.usage or (None, None, None)
        output = reported[2]
        ended = CapturedCall(
            request, request.session_key(), call.kept.prompt, call.kept.body_bytes, name, call.ended_s,
            expected_output if output is None else output, output is None, reported,
        )  # fmt: skip
        if name != "not_admitted" and call.end is not None and history is not None:
            _, node, ended.attempts, _, ended.first_token_s, _ = call.end
            ended.node, ended.predicted = node.name, history.predicted
        self.add(ended)

    def client_left(self, request: RoutingRequest, kept: Kept, expected_output: float, now_s: float) -> None:
        """Add a request whose client left before it asked for a node."""
        self.add(
            CapturedCall(
                request, request.session_key(), kept.prompt, kept.body_bytes, "cancelled", now_s, expected_output, True
            )
        )

    def add(self, ended: CapturedCall) -> None:
        """Add a request to all captures, or count it as dropped if too many wait for the thread."""
        pending = self._pending
        if len(pending) >= MAX_PENDING or self._pending_bytes > MAX_PENDING_BYTES:
            self._counters.capture_dropped += 1
            if not self._overloaded:
                self._overloaded = True
                log.warning("capture_overloaded", "The capture lacks requests that ended meanwhile.")
            return
        if ended.prompt is not None:
            self._pending_bytes += len(ended.prompt.tokens)
        pending.append(ended)

    # Writing.

    async def run(self) -> None:
        """Write ended requests until the task is cancelled."""
        while True:
            await asyncio.sleep(WRITE_INTERVAL_S)
            await self.flush()

    async def flush(self) -> None:
        ended, self._pending, self._pending_bytes = self._pending, [], 0
        if ended and self._targets:
            try:
                await run_in_thread(partial(self._write, ended, self._targets), "capture")
            except RuntimeError:  # the system cannot start another thread
                self._counters.capture_dropped += len(ended)
            else:
                self._overloaded = False

    async def close(self) -> None:
        """Write the remaining requests, or drop them after CLOSE_TIMEOUT_S."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.flush()
        except TimeoutError:
            log.error("capture_close_timed_out", "The disk is too slow; the last requests are not written.")

    def _write(self, ended: list[CapturedCall], targets: tuple[_Target, ...]) -> None:
        with self._write_lock:
            for at in range(0, len(ended), WRITE_REQUESTS):
                for target in targets:
                    self._write_to(target, ended[at : at + WRITE_REQUESTS])

    def _write_to(self, target: _Target, ended: list[CapturedCall]) -> None:
        counters, run = self._counters, target.run
        before = run.requests
        try:
            lines = run.lines(ended)
            if not lines:
                return
            target.sink.write(lines)
        except Exception as error:
            target.dropped += len(ended)
            counters.capture_dropped += len(ended)
            if not target.failing:
                target.failing = True
                _log_failure(target.sink.path, error)
            return
        target.written += run.requests - before
        target.written_bytes += len(lines)
        if not target.internal:
            counters.capture_written += run.requests - before
        if target.failing:
            target.failing = False
            log.info("capture_write_recovered", file=target.sink.path, dropped=target.dropped)

    # For the admin API.

    def describe(self) -> dict[str, Any]:
        return {
            "captures": [
                {
                    "to": str(target.sink.path),
                    "seconds": round(self._now() - target.run.started_s, 1),
                    "requests": target.written,
                    "bytes": target.written_bytes,
                    "dropped": target.dropped,
                    "failing": target.failing,
                }
                for target in self._targets
                if not target.internal
            ]
        }


def _log_failure(path: Path, error: Exception) -> None:
    if isinstance(error, CaptureFull):
        log.warning("capture_full", "Requests are served, but no longer captured.", file=path, reason=error.strerror)
        return
    log.error(
        "capture_write_failed",
        "Requests are served, but not captured, until the file can be written again.",
        file=path,
        reason=error.strerror if isinstance(error, OSError) else where_it_failed(error),
    )


# Lets the capture record the recent traffic for scaling by replay.


def record_recent_traffic(capture: TrafficCapture, traffic: RecentTraffic | None) -> None:
    """`traffic`: None if the autoscaler goes by thresholds only."""
    if traffic is not None:
        capture.start(traffic, CaptureRun(BLOCK_TOKENS, traffic.started_s), internal=True)
