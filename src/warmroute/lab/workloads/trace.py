"""Trace files in Mooncake's format: one JSON object per line (.jsonl or .jsonl.gz), read as a stream.

    {"timestamp": 1200, "input_length": 1950, "output_length": 130, "hash_ids": [4, 5, 17, 18], "session_id": "7"}

timestamp is in milliseconds. hash_ids (optional) are prefix-chained ids of the prompt's blocks of fixed length, usually
512 tokens. They cover the prompt only, so no request of a trace hits the cached answer of another one, unless the trace
states which prompt a prompt follows, as captures do (conversation_answers.py). session_id (optional) names the
conversation.

The system prompt is taken to be the first hash id's tokens. In a trace with sessions it is the prefix that a session's
first request shares with the first requests of earlier sessions, if that is longer. In a capture, every request that
follows no other begins a session.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path

import msgspec

from warmroute.capture.trace_row import TraceRow
from warmroute.fake_engine.core.block_content import BlockContent, TraceContent, mix64, namespace_offset
from warmroute.replay.workloads.conversation_answers import ConversationAnswers
from warmroute.replay.workloads.text_lengths import TextLengths, text_lengths
from warmroute.replay.workloads.trace_files import BadTrace as BadTrace
from warmroute.replay.workloads.trace_files import TraceFiles
from warmroute.replay.workloads.trace_turns import TraceTurns
from warmroute.replay.workloads.workload_prompt import WorkloadPrompt

ID_TOKENS = (512, 64, 16, 32, 128, 256, 1024)
"""Tokens that one hash id may cover, the likeliest first."""
MAX_SYSTEM_IDS = 1 << 20
"""Ids of first requests that are remembered in a trace with ids of few tokens."""


class TraceBlocks(msgspec.Struct, gc=False):
    """The blocks of a trace's prompt. Blocks past its hash ids are unique to it."""

    hash_ids: list[int]
    id_tokens: int
    known_tokens: int
    """Tokens that the ids cover: those of the prompt, in a capture also those of the answer."""
    seed: int

    def content(self, block_size: int) -> BlockContent:
        return TraceContent(self.hash_ids, self.id_tokens, block_size, self.known_tokens, seed=self.seed)


def prompts(path: Path, id_tokens: int | None = None, model: str = "") -> Iterator[WorkloadPrompt]:
    """Return the trace's requests in the order of their times; only those for `model`, if given. Raises BadTrace."""
    files = TraceFiles(path, model)
    rows = files.rows()
    first = list(islice(rows, 64))
    if model and not first:
        raise BadTrace(f"{path}: no request is for the model {model!r}")
    size = id_tokens or tokens_per_id(first, path)
    lengths = text_lengths(files.rows()) if any(row.block_size for row in first) else TextLengths({})
    turns = TraceTurns(size)
    for row, prompt in prompts_of(chain(first, rows), size, lengths):
        prompt.follows, prompt.think_ms = turns.follow(row, prompt.number)
        yield prompt


def prompts_of(
    rows: Iterable[TraceRow], id_tokens: int, lengths: TextLengths
) -> Iterator[tuple[TraceRow, WorkloadPrompt]]:
    """Return rows that are in the order of their times, with their prompts."""
    sessions, answers = _Sessions(), ConversationAnswers(id_tokens)
    for number, row in enumerate(rows):
        lengths.correct(row)
        prompt = _prompt(row, number, id_tokens, sessions, answers)
        prompt.number = number
        yield row, prompt


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
            found = self._system_ids[session] = self.shared_ids(ids)
        return found

    def shared_ids(self, ids: list[int]) -> int:
        """Return the number of leading ids that are those of earlier first requests, at least 1."""
        known = self._first_request_ids
        new = next((at for at, one in enumerate(ids) if one not in known), len(ids))
        if len(known) < MAX_SYSTEM_IDS:
            known.update(ids)
        return max(1, new)


def _prompt(
    row: TraceRow, number: int, id_tokens: int, sessions: _Sessions, answers: ConversationAnswers
) -> WorkloadPrompt:
    ids = row.hash_ids
    tokens, output_tokens = max(1, row.input_length), max(1, row.output_length)
    session = b"" if row.session_id is None else str(row.session_id).encode()
    known_tokens = tokens
    if row.block_size:  # a capture
        turn = answers.read(row, sessions.shared_ids)
        system_ids, ids, known_tokens = turn.system_ids, turn.ids, turn.known_tokens
    else:
        system_ids = sessions.system_ids(session, ids)
    return WorkloadPrompt(
        prompt_tokens=tokens,
        output_tokens=output_tokens,
        blocks=TraceBlocks(ids, id_tokens, known_tokens, mix64(namespace_offset("trace", None), number)),
        at_ms=row.timestamp,
        system_tokens=min(id_tokens * system_ids, tokens - 1) if ids else 0,
        session=session,
        priority=row.priority,
        tenant=row.tenant,
    )


def tokens_per_id(rows: list[TraceRow], path: Path) -> int:
    """Return how many tokens a hash id covers: the size that fits every row, whether or not its last block is full."""
    stated = {row.block_size for row in rows if row.block_size}
    if len(stated) > 1:
        raise BadTrace(f"{path}: its lines have different block sizes: {', '.join(map(str, sorted(stated)))}")
    if stated:
        return stated.pop()
    with_ids = [(row.input_length, len(row.hash_ids)) for row in rows if row.hash_ids]
    if not with_ids:
        return ID_TOKENS[0]
    for size in ID_TOKENS:
        if all(ids in (tokens // size, -(-tokens // size)) for tokens, ids in with_ids):
            return size
    raise BadTrace(f"{path}: the number of hash_ids fits no block size; add id_tokens=N, the tokens that one id covers")


def mean_rate(path: Path, limit: int | None = None, model: str = "") -> float:
    """Return the requests per second of the trace, or of its first `limit` requests. Reads the times only."""
    times_ms = list(islice(TraceFiles(path, model).times_ms(), limit))
    if not times_ms or times_ms[-1] <= times_ms[0]:
        raise BadTrace(f"{path}: cannot compute a rate: all requests have the same time")
    return (len(times_ms) - 1) / (times_ms[-1] - times_ms[0]) * 1000.0
