"""Puts the answers of a captured conversation into its blocks.

An engine caches what it generates, and the next turn's prompt contains it. A capture has the ids of prompts only, but
it states which prompt a prompt follows (`follows`), and how long each answer was:

    turn 1    prompt [b1 b2]   answer of 2 blocks          → [b1 b2 | x1 x2]     x: ids of the answer, made up here
    turn 2    prompt [b1 b2 c3 c4 c5], follows turn 1      → [b1 b2 x1 x2 c5]    c3 and c4 are the answer

Not so if the engine itself found the whole of turn 1 in its cache and nothing after it: then the next prompt does not
contain the answer as it was generated, for example because the client left out the reasoning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from warmroute.capture.trace_row import TraceRow

FIRST_ANSWER_ID: Final = 1 << 48
"""Ids in captures are smaller."""
MAX_TURNS: Final = 1 << 17
"""Turns that are remembered, the latest ones."""
MAX_ANSWER_BLOCKS: Final = 1 << 21
"""Blocks of answers that are remembered, the latest ones."""


class Turn(msgspec.Struct, gc=False):
    ids: list[int]
    """Of the prompt, and of its answer."""
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
        """By the id of the prompt's last full block, and the prompt's length."""
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
