"""Trace files: found, read as a stream, with turns and answers restored."""

from __future__ import annotations

import gzip
import time
import zlib
from array import array
from calendar import timegm
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from glob import glob, has_magic
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import IO, Any, Final, cast

import msgspec

from warmroute.app.capture import FILE_NAME, capture_files
from warmroute.core.trace_row import TraceRow
from warmroute.lab.engine.blocks import BlockContent, TraceContent, mix64, namespace_offset
from warmroute.lab.workloads.workload_prompt import WorkloadPrompt

# The files of a trace: one file, all captures in a directory, or the files that a pattern matches.
#
# A capture has its requests in the order in which they ended. They are read in the order of their arrival: a first pass
# reads the times, and the second one holds lines back until it is their turn, which are as many as requests ended while
# the longest one ran. Other traces are read once, as they are.
#
# Files of several captures follow each other as their names say when they started.


class BadTrace(ValueError):
    """What is wrong with a trace file."""


class _Time(msgspec.Struct, gc=False):
    timestamp: float
    timestamp_us: int = 0


class _Kind(msgspec.Struct, gc=False):
    block_size: int = 0


class TraceFiles:
    def __init__(self, path: Path, model: str = "") -> None:
        """`model`: read only the requests for this model; empty for all."""
        self.path = path
        self._model = model

    def rows(self) -> Iterator[TraceRow]:
        """Return the requests in the order of their times. Raises BadTrace."""
        files = self._files()
        decoder = msgspec.json.Decoder(TraceRow)
        for file, number, line, offset_ms in self._in_order(files):
            try:
                row = decoder.decode(line)
            except (msgspec.ValidationError, msgspec.DecodeError) as error:
                raise BadTrace(f"{file}, line {number}: {error}") from None
            if self._model and row.model != self._model:
                continue
            row.timestamp += offset_ms + row.timestamp_us / 1000.0
            yield row

    def times_ms(self) -> Iterator[float]:
        """Return the requests' times in their order. Raises BadTrace."""
        if self._model:
            yield from (row.timestamp for row in self.rows())
        else:
            files = self._files()
            times_ms = _times_ms(files)
            yield from sorted(times_ms) if _is_capture(files) else times_ms

    def _files(self) -> list[tuple[Path, float]]:
        """Return the files and how much later than the first one each capture began, in milliseconds."""
        if self.path.is_dir():
            files = capture_files(self.path)
            if not files:
                raise BadTrace(f"{self.path}: the directory has no files of a capture (capture-….jsonl)")
        elif has_magic(str(self.path)) and not self.path.exists():
            files = sorted(Path(name) for name in glob(str(self.path)))
            if not files:
                raise BadTrace(f"{self.path}: no file matches the pattern")
        else:
            return [(self.path, 0.0)]
        starts = [_start_s(file) for file in files]
        known = [start for start in starts if start is not None]
        return [
            (file, 1000.0 * (start - min(known)) if start else 0.0) for file, start in zip(files, starts, strict=True)
        ]

    def _in_order(self, files: list[tuple[Path, float]]) -> Iterator[tuple[Path, int, bytes, float]]:
        lines = _lines(files)
        if not _is_capture(files):
            return lines
        times_ms = array("d", _times_ms(files))
        if all(earlier <= later for earlier, later in pairwise(times_ms)):
            return lines
        return _sorted(lines, times_ms)


def _sorted(
    lines: Iterator[tuple[Path, int, bytes, float]], times_ms: array[float]
) -> Iterator[tuple[Path, int, bytes, float]]:
    order = iter(sorted(range(len(times_ms)), key=times_ms.__getitem__))
    held: dict[int, tuple[Path, int, bytes, float]] = {}
    turn = next(order, -1)
    for index, line in enumerate(lines):
        held[index] = line
        while turn in held:
            yield held.pop(turn)
            turn = next(order, -1)


def _is_capture(files: list[tuple[Path, float]]) -> bool:
    for _file, _number, line, _offset in _lines(files):
        try:
            return msgspec.json.decode(line, type=_Kind).block_size > 0
        except (msgspec.ValidationError, msgspec.DecodeError):
            return False
    return False


def _times_ms(files: list[tuple[Path, float]]) -> Iterator[float]:
    decoder = msgspec.json.Decoder(_Time)
    for file, number, line, offset_ms in _lines(files):
        try:
            time_of = decoder.decode(line)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise BadTrace(f"{file}, line {number}: {error}") from None
        yield time_of.timestamp + offset_ms + time_of.timestamp_us / 1000.0


def _lines(files: list[tuple[Path, float]]) -> Iterator[tuple[Path, int, bytes, float]]:
    """Return each line with its file, its number and the offset of its times."""
    for file, offset_ms in files:
        try:
            with _open(file) as lines:
                for number, line in enumerate(lines, 1):
                    text = line.rstrip()
                    is_cut_off = not text.endswith(b"}") and FILE_NAME.fullmatch(file.name)  # by a crash
                    if text and not is_cut_off:
                        yield file, number, line, offset_ms
        except OSError as error:
            raise BadTrace(f"{file}: {error.strerror or error}") from None
        except (EOFError, zlib.error) as error:
            raise BadTrace(f"{file}: the compressed file is damaged: {error}") from None


def _open(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _start_s(file: Path) -> float | None:
    """Return when a capture began, from the name of its file."""
    match = FILE_NAME.fullmatch(file.name)
    return float(timegm(time.strptime(match[1], "%Y%m%dT%H%M%SZ"))) if match else None


# Finds the turns of conversations in a trace: which request waited for the answer of an earlier one.
#
# A capture states it (`follows`). In other traces a request follows the latest earlier one whose whole prompt it begins
# with, if
#
# 1. the last full block of that prompt was new in it: a system prompt that many share connects no prompts, and
# 2. it is longer by the answer at least, so that it can contain it, and
# 3. both have the same session_id, if the trace has sessions.
#
# The think time is what the trace leaves between the two, less the time of the answer, which traces do not have:
# ANSWER_MS_PER_TOKEN for each of its tokens.

ANSWER_MS_PER_TOKEN: Final = 20.0
"""What an answer is assumed to take for each token, if the trace does not say when it ended."""
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
        """The last request of each conversation, by the id of the last full block of its prompt."""
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


# Corrects the lengths of prompts that a capture estimated from their text (four bytes to a token).
#
# Nodes reported the true lengths of some of these prompts. Their ratio to the estimates is the model's mean number of
# tokens for each estimated one. It scales all estimated prompts of the model alike, so that equal prefixes stay equal.

MIN_RATIO: Final = 0.1
MAX_RATIO: Final = 4.0
TOLERANCE: Final = 0.02
"""A ratio this near to 1 changes nothing."""
_ID_MASK: Final = (1 << 48) - 1


class TextLengths:
    def __init__(self, ratios: dict[str, float]) -> None:
        """`ratios`: tokens for each estimated token, by model."""
        self._ratios = ratios

    def correct(self, row: TraceRow) -> None:
        """Scale the lengths and the ids of a row whose length is estimated."""
        ratio = self._ratios.get(row.model) if row.input_estimated else None
        if ratio is None:
            return
        size, ids = row.block_size, row.hash_ids
        row.input_length = max(1, _scaled(row.input_length, size, ratio))
        row.follows = _scaled(row.follows, size, ratio)
        row.answer_length = round(row.answer_length * ratio)
        # A block gets the id that its last token has.
        row.hash_ids = [
            mix64(ids[min(len(ids) - 1, int(((at + 1) * size - 1) / (size * ratio)))], at) & _ID_MASK
            for at in range(int(len(ids) * ratio))
        ]


def text_lengths(rows: Iterable[TraceRow]) -> TextLengths:
    """Return the ratios of a capture."""
    reported: defaultdict[str, int] = defaultdict(int)
    estimated: defaultdict[str, int] = defaultdict(int)
    for row in rows:
        if row.input_estimated and row.prompt_tokens and row.hash_ids:
            reported[row.model] += row.prompt_tokens
            estimated[row.model] += row.input_length
    ratios = {model: min(MAX_RATIO, max(MIN_RATIO, reported[model] / estimated[model])) for model in reported}
    return TextLengths({model: ratio for model, ratio in ratios.items() if abs(ratio - 1.0) > TOLERANCE})


def _scaled(tokens: int, size: int, ratio: float) -> int:
    """Return a length with as many full blocks as there are ids for it."""
    return int(tokens // size * ratio) * size + tokens % size


# Puts the answers of a captured conversation into its blocks.
#
# An engine caches what it generates, and the next turn's prompt contains it. A capture has the ids of prompts only, but
# it states which prompt a prompt follows (`follows`), and how long each answer was:
#
#     turn 1    prompt [b1 b2]   answer of 2 blocks          → [b1 b2 | x1 x2]     x: ids of the answer, made up here
#     turn 2    prompt [b1 b2 c3 c4 c5], follows turn 1      → [b1 b2 x1 x2 c5]    c3 and c4 are the answer
#
# Not so if the engine itself found the whole of turn 1 in its cache and nothing after it: then the next prompt does not
# contain the answer as it was generated, for example because the client left out the reasoning.

FIRST_ANSWER_ID: Final = 1 << 48
"""Ids in captures are smaller."""
MAX_TURNS: Final = 1 << 17
"""Turns that are remembered, the latest ones."""
MAX_ANSWER_BLOCKS: Final = 1 << 21
"""Blocks of answers that are remembered, the latest ones."""


class Turn(msgspec.Struct, gc=False):
    ids: list[int]
    """Block ids of the prompt, and of its answer."""
    known_tokens: int
    """Tokens that they cover."""
    system_ids: int
    """Leading ids that are the conversation's system prompt."""
    output_tokens: int = 0
    output_estimated: bool = False
    node: str = ""


class ConversationAnswers:
    def __init__(self, id_tokens: int) -> None:
        self._id_tokens = id_tokens
        self._next_id = FIRST_ANSWER_ID
        self._turns: dict[tuple[int, int], Turn] = {}
        """The turns by the id of the prompt's last full block, and the prompt's length."""
        self._answer_ids: dict[int, int] = {}
        """The id of an answer's block, by the id that later prompts have for it."""

    def read(self, row: TraceRow, system_ids: Callable[[list[int]], int]) -> Turn:
        """Return the ids of a captured request. `system_ids` is asked for the first turn of a conversation."""
        size = self._id_tokens
        before = None
        if 0 < row.follows // size <= len(row.hash_ids):
            before = self._turns.get((row.hash_ids[row.follows // size - 1], row.follows))
        answer_tokens = _answer_tokens(row, before, size) if before is not None else 0
        if before is not None and answer_tokens:
            first, last = row.follows // size, (row.follows + answer_tokens) // size
            for later, answer in zip(row.hash_ids[first:last], before.ids[first:last], strict=False):
                _remember(self._answer_ids, later, answer, MAX_ANSWER_BLOCKS)
        answers = self._answer_ids
        ids = [answers.get(one, one) for one in row.hash_ids] if answers else list(row.hash_ids)
        turn = Turn(ids, row.input_length, before.system_ids if before is not None else system_ids(row.hash_ids))
        if len(ids) == row.input_length // size and row.outcome in ("ok", "mirrored"):
            turn.known_tokens = row.input_length + row.output_length
            turn.output_tokens, turn.output_estimated = row.output_length, row.output_estimated
            turn.node = row.node
            blocks = turn.known_tokens // size - len(ids)
            ids += range(self._next_id, self._next_id + blocks)
            self._next_id += blocks
        if row.hash_ids:
            _remember(self._turns, (row.hash_ids[-1], row.input_length), turn, MAX_TURNS)
        return turn


def _answer_tokens(row: TraceRow, before: Turn, id_tokens: int) -> int:
    """Return how many tokens of the earlier turn's answer the prompt contains."""
    answer, cached = before.output_tokens, row.cached_tokens
    is_same_node = cached is not None and row.node == before.node
    if before.output_estimated:
        found = max(0, cached - row.follows) if cached is not None and is_same_node else 0
        answer = min(answer, row.answer_length or found)
    if row.input_length < row.follows + answer:
        return 0
    if cached is not None and is_same_node and row.follows - 2 * id_tokens < cached <= row.follows:
        return 0
    return answer


def _remember(table: dict[Any, Any], key: object, value: object, limit: int) -> None:
    table.pop(key, None)
    table[key] = value
    if len(table) > limit:
        del table[next(iter(table))]


# Trace files in Mooncake's format: one JSON object per line (.jsonl or .jsonl.gz), read as a stream.
#
#     {"timestamp": 1200, "input_length": 1950, "output_length": 130, "hash_ids": [4, 5, 17, 18], "session_id": "7"}
#
# timestamp is in milliseconds. hash_ids (optional) are prefix-chained ids of the prompt's blocks of fixed length,
# usually 512 tokens. They cover the prompt only, so no request of a trace hits the cached answer of another one, unless
# the trace states which prompt a prompt follows, as captures do. session_id (optional) names the
# conversation.
#
# The system prompt is taken to be the first hash id's tokens. In a trace with sessions it is the prefix that a
# session's first request shares with the first requests of earlier sessions, if that is longer. In a capture, every
# request that follows no other begins a session.

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
