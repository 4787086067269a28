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
        block_bytes = self._block_size * TOKEN_BYTES
        found = 0
        tails = self._tails
        may_follow = not tails.keys().isdisjoint(ids)
        for at in range(len(ids) - 1, -1, -1) if may_follow else ():
            known = tails.get(ids[at])
            if known is not None:
                start = (at + 1) * block_bytes
                lengths = [len(tail) for tail in known if tokens.startswith(tail, start)]
                longest = max((n for n in lengths if start + n < len(tokens)), default=-1)
                if longest >= 0:
                    found = -(-(start + longest) // TOKEN_BYTES)
                    break
        if ids:
            tail = tokens[len(ids) * block_bytes :]
            self._remember(ids[-1], tail.rstrip(b"\0") if is_text else tail)
        return found

    def _remember(self, last: int, tail: bytes) -> None:
        tails = self._tails
        known = tails.pop(last, None) or []
        if tail not in known:
            known.append(tail)
            del known[:-MAX_TAILS]
        tails[last] = known
        if len(tails) > MAX_PROMPTS:
            del tails[next(iter(tails))]
