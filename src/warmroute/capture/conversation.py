"""Finds the earlier prompt that a prompt continues, token by token.

An engine caches what it generates as well, and the next turn of a conversation contains it. A capture has no tokens of
responses. It states instead which prompt a prompt follows, and replay concludes that the response lies in between.
"""

from __future__ import annotations

from typing import Final

from warmroute._kernel import TOKEN_BYTES

MAX_PROMPTS: Final = 65_536
"""Prompts that are remembered, the latest ones."""
MAX_TAILS: Final = 8
"""Of prompts that differ only after their last full block, this many are remembered."""


class Conversations:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._tails: dict[int, list[bytes]] = {}
        """By the id of a prompt's last full block: the tokens after it."""

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
