"""How long a text takes to encode, so that no text holds the event loop for long.

Texts differ. With fastokens, 40 KB take 0.1 ms if it has met all their words before, 1 ms for base64 or for words that
are all new, and up to 6 ms for random letters or a single character. So two estimates exist:

- the worst: at the rate of the slowest kinds of text, measured for each tokenizer when it is loaded
- by samples: short pieces from random places of the text are encoded, which is measured and thrown away

A sampled estimate may be wrong, so it counts twice, and texts above MAX_SAMPLED_BYTES have none. Pieces are cut between
words: parts of words would be new to fastokens. A piece of few words says nothing: it may be part of one long word,
which costs more than its parts do once fastokens has these in its cache.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from random import Random, random
from time import thread_time
from typing import Final

LOOP_MS: Final = 1.0
"""Prompts that are estimated to take longer are read in a thread."""
MAX_SAMPLED_BYTES: Final = 40 << 10
"""Samples of a longer text would be too far apart to say much."""
MIN_WORST_MS_PER_BYTE: Final = 1.25e-4
"""Smallest worst rate: some text may be slower than the measured ones."""
_PIECES: Final = 16
_PIECE_BYTES: Final = 128
_PIECE_WORDS: Final = 5
"""Fewest words of a piece. They also have to be at least half of it."""
_DOUBT: Final = 2.0
"""Factor on a sampled estimate, because a sample may miss the slow parts."""
_WORST_TEXT_BYTES: Final = 4096
_REPETITIONS: Final = 3
_SEED: Final = 11

Encode = Callable[[str], bytes]
Span = tuple[int, int]
"""Where a text begins and ends in a request's body."""


class EncodingTime:
    """Estimates for one tokenizer. Thread-safe."""

    def __init__(self, encode: Encode, has_cache: bool) -> None:
        """Measure the worst rate, which takes some milliseconds.

        `has_cache`: whether the tokenizer is quicker with words that it has met before. Samples are of use only then.
        """
        self._takes_samples = has_cache
        self.worst_ms_per_byte = max(MIN_WORST_MS_PER_BYTE, _worst_ms_per_byte(encode))

    def estimate_ms(self, encode: Encode, body: bytes, spans: Sequence[Span]) -> float:
        """Return how long these parts of a body take. Takes samples where that may spare the way to a thread."""
        size = 0
        for start, end in spans:
            size += end - start
        worst_ms = size * self.worst_ms_per_byte
        if worst_ms <= LOOP_MS or not self._takes_samples or size > MAX_SAMPLED_BYTES:
            return worst_ms
        sample = _sample(body, spans, size)
        if sample is None:
            return worst_ms
        started_s = thread_time()
        encode(sample.decode("utf-8", "ignore"))
        sample_ms = (thread_time() - started_s) * 1000.0
        return min(worst_ms, _DOUBT * sample_ms * size / len(sample))


def _sample(body: bytes, spans: Sequence[Span], size: int) -> bytes | None:
    """Return pieces of a text: one from a random place of each sixteenth. None if one of them has too few words."""
    pieces: list[bytes] = []
    stride = size / _PIECES
    at, span_start = 0, 0  # the current span, and where it begins in the text
    for number in range(_PIECES):
        place = int((number + random()) * stride)
        while place >= span_start + spans[at][1] - spans[at][0] and at < len(spans) - 1:
            span_start += spans[at][1] - spans[at][0]
            at += 1
        start, end = spans[at]
        start = max(start, min(start + place - span_start, end - _PIECE_BYTES))
        piece = body[start : min(start + _PIECE_BYTES, end)]
        if len(piece) == _PIECE_BYTES:
            first, last = piece.find(b" "), piece.rfind(b" ")
            if last - first < _PIECE_BYTES // 2 or len(piece.split(None, _PIECE_WORDS)) < _PIECE_WORDS:
                return None
            piece = piece[first:last]
        pieces.append(piece)
    return b"".join(pieces)


def _worst_ms_per_byte(encode: Encode) -> float:
    rng = Random(_SEED)

    def text(characters: str) -> str:
        return "".join([rng.choice(characters) for _ in range(_WORST_TEXT_BYTES)])

    worst_ms = 0.0
    for characters in (string.ascii_lowercase, string.punctuation, "=", " "):
        best_ms = float("inf")
        for number in range(_REPETITIONS):
            slow = text(characters)[number:]  # another length: the tokenizer must not know it
            started_s = thread_time()
            encode(slow)
            # CPU time, and the best of three: other threads and a cold cache must not make the rate look worse.
            best_ms = min(best_ms, (thread_time() - started_s) * 1000.0)
        worst_ms = max(worst_ms, best_ms)
    return worst_ms / _WORST_TEXT_BYTES
