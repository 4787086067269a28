"""The length of a prompt, for nodes with different context windows: exact, or an estimate that is rather too high."""

from __future__ import annotations

from typing import Final

from warmroute._kernel import TOKEN_BYTES
from warmroute.prompt.prompt import Prompt

BYTES_PER_TOKEN: Final = 2
"""Text rarely has fewer bytes to a token. English has four."""
TEMPLATE_TOKENS: Final = 512
"""Tokens that a chat template may add to a request."""
MEDIA_TOKENS: Final = 1500
"""Tokens of a picture, sound or video. Only the engine knows them."""


def most_tokens(body_bytes: int) -> int:
    """Return what a prompt in a body of this size cannot exceed: every token has at least one byte."""
    return body_bytes + TEMPLATE_TOKENS


def estimated_tokens(body_bytes: int) -> int:
    """Return the estimated length of a prompt that was not read."""
    return body_bytes // BYTES_PER_TOKEN


def longest_prompt(prompt: Prompt) -> tuple[int, bool]:
    """Return the length of a request's longest prompt, and whether it is exact; 0 if the engine may truncate it."""
    if prompt.truncated:
        return 0, False
    lengths = [_length(one) for one in (prompt, *prompt.others)]
    return max(length for length, _ in lengths), all(exact for _, exact in lengths) and not prompt.unread_prompts


def _length(prompt: Prompt) -> tuple[int, bool]:
    tokens = prompt.token_count
    if not prompt.exact:
        return tokens * TOKEN_BYTES // BYTES_PER_TOKEN, False
    return tokens + MEDIA_TOKENS * len(prompt.media), prompt.exact_tokens == tokens
