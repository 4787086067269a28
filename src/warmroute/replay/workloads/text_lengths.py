"""Corrects the lengths of prompts that a capture estimated from their text (four bytes to a token).

Nodes reported the true lengths of some of these prompts. Their ratio to the estimates is the model's mean number of
tokens for each estimated one. It scales all estimated prompts of the model alike, so that equal prefixes stay equal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from warmroute.capture.trace_row import TraceRow
from warmroute.fake_engine.core.block_content import mix64

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
