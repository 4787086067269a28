"""Requests with several prompts: a list of texts, or a list of lists of token ids (completions, embeddings).

Each prompt is looked up on its own, up to MAX_PROMPTS of them. The length of the others is estimated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from warmroute._kernel import TOKEN_BYTES
from warmroute.prompt.prompt import Prompt

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
