"""Trace files in Mooncake's format: one JSON object per line (.jsonl or .jsonl.gz), read as a stream.

    {"timestamp": 1200, "input_length": 1950, "output_length": 130, "hash_ids": [4, 5, 17, 18], "session_id": "7"}

timestamp is in milliseconds. hash_ids (optional) are prefix-chained ids of the prompt's blocks of fixed length, usually
512 tokens. They cover the prompt only, so no request of a trace hits the cached answer of another one. session_id
(optional) names the conversation.

The system prompt is taken to be the first hash id's tokens. In a trace with sessions it is the prefix that a session's
first request shares with the first requests of earlier sessions, if that is longer.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from warmroute.fake_engine.core.block_content import BlockContent, TraceContent, mix64, namespace_offset
from warmroute.replay.workloads.workload_prompt import WorkloadPrompt

ID_TOKENS = (512, 64, 16, 32, 128, 256, 1024)
"""Tokens that one hash id may cover, the likeliest first."""


class BadTrace(ValueError):
    """What is wrong with a trace file."""


class _Row(msgspec.Struct, gc=False):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []
    session_id: str | int | None = None


class _Time(msgspec.Struct, gc=False):
    timestamp: float


class TraceBlocks(msgspec.Struct, gc=False):
    """The blocks of a trace's prompt. Blocks past its hash ids are unique to it."""

    hash_ids: list[int]
    id_tokens: int
    prompt_tokens: int
    seed: int

    def content(self, block_size: int) -> BlockContent:
        return TraceContent(self.hash_ids, self.id_tokens, block_size, self.prompt_tokens, seed=self.seed)


def prompts(path: Path, id_tokens: int | None = None) -> Iterator[WorkloadPrompt]:
    """Return the trace's requests with its own order and times. Raises BadTrace."""
    rows = _rows(path, msgspec.json.Decoder(_Row))
    first = list(islice(rows, 64))
    size = id_tokens or tokens_per_id([(row.input_length, len(row.hash_ids)) for row in first], path)
    sessions = _Sessions()
    for number, row in enumerate(chain(first, rows)):
        yield _prompt(row, number, size, sessions)


class _Sessions:
    """The number of leading ids that are each session's system prompt. Memory grows with the sessions only."""

    def __init__(self) -> None:
        self._system_ids: dict[bytes, int] = {}
        self._first_request_ids: set[int] = set()

    def system_ids(self, session: bytes, ids: list[int]) -> int:
        if not session:
            return 1
        found = self._system_ids.get(session)
        if found is None:
            new = next((at for at, one in enumerate(ids) if one not in self._first_request_ids), len(ids))
            found = self._system_ids[session] = max(1, new)
            self._first_request_ids.update(ids)
        return found


def _prompt(row: _Row, number: int, id_tokens: int, sessions: _Sessions) -> WorkloadPrompt:
    ids = row.hash_ids
    tokens = max(1, row.input_length)
    session = b"" if row.session_id is None else str(row.session_id).encode()
    return WorkloadPrompt(
        prompt_tokens=tokens,
        output_tokens=max(1, row.output_length),
        blocks=TraceBlocks(ids, id_tokens, tokens, mix64(namespace_offset("trace", None), number)),
        at_ms=row.timestamp,
        system_tokens=min(id_tokens * sessions.system_ids(session, ids), tokens - 1) if ids else 0,
        session=session,
    )


def tokens_per_id(lengths: list[tuple[int, int]], path: Path) -> int:
    """Return how many tokens a hash id covers: the size that fits every row, whether or not its last block is full."""
    with_ids = [(tokens, ids) for tokens, ids in lengths if ids]
    if not with_ids:
        return ID_TOKENS[0]
    for size in ID_TOKENS:
        if all(ids in (tokens // size, -(-tokens // size)) for tokens, ids in with_ids):
            return size
    raise BadTrace(f"{path}: the number of hash_ids fits no block size; add id_tokens=N, the tokens that one id covers")


def mean_rate(path: Path, limit: int | None = None) -> float:
    """Return the requests per second of the trace, or of its first `limit` requests. Reads the times only."""
    times_ms: list[float] = [row.timestamp for row in islice(_rows(path, msgspec.json.Decoder(_Time)), limit)]
    if not times_ms or times_ms[-1] <= times_ms[0]:
        raise BadTrace(f"{path}: cannot compute a rate: all requests have the same time")
    return (len(times_ms) - 1) / (times_ms[-1] - times_ms[0]) * 1000.0


def _rows(path: Path, decoder: msgspec.json.Decoder[Any]) -> Iterator[Any]:
    try:
        with open_text(path) as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        yield decoder.decode(line)
                    except (msgspec.ValidationError, msgspec.DecodeError) as error:
                        raise BadTrace(f"{path}, line {number}: {error}") from None
    except OSError as error:
        raise BadTrace(f"{path}: {error.strerror or error}") from None


def open_text(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")
