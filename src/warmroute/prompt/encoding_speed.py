"""How much new text can be encoded in a given time, learned from the texts that were encoded.

Text differs: words that the tokenizer has met cost 2 ns a byte, random letters 140. So a slow text counts at once, and
a quick one only a little. A client that sends slow texts after many quick ones delays the event loop once.
"""

from __future__ import annotations

from typing import Final

FIRST_MS_PER_BYTE: Final = 1.0 / (1 << 14)
"""Until a text was measured."""
MIN_MEASURED_BYTES: Final = 2048
"""Shorter texts are not measured: most of their time is the call's."""
MAX_BYTES: Final = 3 << 14
"""The most text that is ever encoded on the event loop: random letters take 7 ms."""
WEIGHT: Final = 1 / 32
"""Of a text that was quicker than expected."""


class EncodingSpeed:
    """Threads may use it: a lost update does no harm."""

    def __init__(self) -> None:
        self.ms_per_byte = FIRST_MS_PER_BYTE

    def max_bytes(self, max_ms: float) -> int:
        """Return the size of the largest text that should take at most this long."""
        return min(MAX_BYTES, int(max_ms / self.ms_per_byte))

    def record(self, size_bytes: int, took_ms: float) -> None:
        """Learn from a text that was encoded. `took_ms`: CPU time."""
        if size_bytes >= MIN_MEASURED_BYTES:
            more = took_ms / size_bytes - self.ms_per_byte
            self.ms_per_byte += more if more > 0.0 else WEIGHT * more
