"""A prompt: its tokens, how many of them are certain, how long it is, and requests with several prompts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from warmroute._kernel import TOKEN_BYTES

# A prompt: the tokens that an engine will prefill for a request, as far as the request body shows them.


class Prompt(msgspec.Struct, gc=False):
    """One request's prompt; the first one where the request has several (see `others`)."""

    tokens: bytes = b""
    """Token ids, four bytes each, little-endian. Where `exact` is false, these may be bytes of the prompt's text."""
    exact_tokens: int = 0
    """How many leading tokens the engine will certainly have. It may have other tokens after these."""
    exact: bool = True
    """Whether the tokens were made with the model's own tokenizer and chat template."""
    inexact_reason: str = ""
    """Why `exact_tokens` does not cover the whole prompt; empty where it does. Never contains what a user typed."""
    media: tuple[tuple[int, bytes], ...] = ()
    """For each picture, sound or video: the position of the token after it, and a hash of its content. The hash counts
    for all blocks from that position on.
    """
    cache_salt: str = ""
    warm_tokens: int = 0
    """How many leading tokens came from the token cache."""
    skips_cache: bool = False
    """Whether the engine prefills the whole prompt although parts of it are cached: for prompt logprobs."""
    truncated: bool = False
    """Whether the engine may truncate or pad the prompt, so that it may begin with other tokens."""
    others: tuple[Prompt, ...] = ()
    """The request's other prompts, as far as they were read."""
    unread_prompts: int = 0
    """Further prompts, which were not read."""
    unread_tokens: int = 0
    """Estimated tokens of the prompts that were not read."""

    @property
    def token_count(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def total_tokens(self) -> int:
        """Tokens of all prompts of the request."""
        own = len(self.tokens) // TOKEN_BYTES
        return own + sum([other.token_count for other in self.others]) + self.unread_tokens if self.others else own


def exact_prompt(tokens: bytes, warm_tokens: int = 0) -> Prompt:
    """Return a prompt whose tokens are all certain."""
    return Prompt(tokens, len(tokens) // TOKEN_BYTES, warm_tokens=warm_tokens)


# The length of a prompt, for nodes with different context windows: exact, or an estimate that is rather too high.

BYTES_PER_TOKEN: Final = 2
"""Text rarely has fewer bytes to a token. English has four."""
TEMPLATE_TOKENS: Final = 512
"""Tokens that a chat template may add to a request: a system prompt of its own, and marks around messages."""
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
        # `tokens` holds bytes of text here, four of which count as one token.
        return tokens * TOKEN_BYTES // BYTES_PER_TOKEN, False
    return tokens + MEDIA_TOKENS * len(prompt.media), prompt.exact_tokens == tokens


# Requests with several prompts: a list of texts, or a list of lists of token ids (completions, embeddings).
#
# Each prompt is looked up on its own, up to MAX_PROMPTS of them. The length of the others is estimated.

MAX_PROMPTS: Final = 64
"""Prompts of one request that are read."""
_ITEM: Final = re.compile(rb'[ \r\n\t,]*("[^"\\]*(?:\\.[^"\\]*)*"|\[[^\[\]"]*\])', re.DOTALL)
"""A text or a list of numbers, with what comes before it, in JSON that is known to be well-formed."""
_CLOSING: Final = b'"]} \r\n\t'
"""What may close an item; as in `Outline.text_as_tokens`."""


def is_prompt_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], (str, list))


def read_prompts(prompts: Sequence[Any], read: Callable[[Any], Prompt]) -> Prompt:
    """Return the first prompt with the others attached. `read` makes the prompt of one item."""
    first, *others = [read(prompt) for prompt in prompts[:MAX_PROMPTS]]
    first.others = tuple(others)
    unread = prompts[MAX_PROMPTS:]
    if unread:
        read_length = sum(map(len, prompts[:MAX_PROMPTS]))
        unread_length = sum(len(prompt) for prompt in unread if isinstance(prompt, (str, list)))
        first.unread_prompts = len(unread)
        first.unread_tokens = first.total_tokens * unread_length // max(1, read_length)
    return first


def text_prompts(body: bytes, start: int, end: int) -> Prompt | None:
    """Return the prompts of a JSON list for text matching; None if the value is not a list of prompts."""
    if body[start : start + 1] != b"[":
        return None
    at, items = start + 1, list[tuple[int, int]]()
    while len(items) < MAX_PROMPTS and (found := _ITEM.match(body, at, end)) is not None:
        items.append(found.span(1))
        at = found.end()
    if not items:
        return None  # a list of numbers or of objects
    first, *others = [
        Prompt(_as_tokens(body[item_start:item_end].rstrip(_CLOSING)), 0, False) for item_start, item_end in items
    ]
    first.others = tuple(others)
    unread_bytes = len(body[at:end].strip(b" \r\n\t,]"))
    if unread_bytes:
        first.unread_tokens = unread_bytes // TOKEN_BYTES
        first.unread_prompts = max(1, unread_bytes * len(items) // max(1, at - start))
    return first


def _as_tokens(text: bytes) -> bytes:
    return text + bytes(-len(text) % TOKEN_BYTES)
