"""The text of a workload's prompt: one word for each token, the same word for the same token.

The load generator sends this text, and the simulated router reads the same leading text, so that both give a request
the same routing key. tests/replay/test_prompt_text.py checks this.
"""

from __future__ import annotations

from typing import Final, Literal

from warmroute._kernel import KEY_CHARACTERS
from warmroute.fake_engine.core.block_content import mix64
from warmroute.replay.workloads.workload_prompt import WorkloadPrompt

Form = Literal["chat", "completion", "tokens"]
"""How clients send a prompt: as chat messages, as text, or as token ids."""

_SYLLABLES = "a e i o u an en in on un ar er ir or ur al el il ol ul".split()  # noqa: SIM905
WORDS = tuple(first + last for first in "bdfgklmnprstvwz" for last in _SYLLABLES)
"""Short words: one token each for many tokenizers, and always for the fake engine's."""

MAX_TOKEN_ID: Final = 30_000
"""Token ids are drawn from 1,000 up to here: ordinary words in every common vocabulary."""

KEY_TOKENS: Final = -(-(KEY_CHARACTERS + 1) // 3)
"""Enough tokens for a routing key: a word and its space have at least 3 characters, an id and its comma at least 5."""

_CACHE_SIZE = 4096
_cache: dict[tuple[int, int, Form], bytes] = {}
"""Leading texts by their first and last token. A token's identity covers all tokens before it, so these two suffice."""


def words(prompt: WorkloadPrompt, start: int, stop: int) -> str:
    """Return the text of the prompt's tokens [start, stop)."""
    identities = prompt.blocks.content(1).hashes(start, stop)
    return " ".join([WORDS[mix64(identity, 0) % len(WORDS)] for identity in identities])


def token_ids(prompt: WorkloadPrompt, start: int, stop: int) -> list[int]:
    """Return the prompt's tokens [start, stop) as token ids."""
    identities = prompt.blocks.content(1).hashes(start, stop)
    return [1000 + mix64(identity, 0) % (MAX_TOKEN_ID - 1000) for identity in identities]


def system_end(prompt: WorkloadPrompt) -> int:
    """Return where the first user message begins. It has at least one token."""
    return min(prompt.system_tokens, prompt.prompt_tokens - 1)


def leading_text(prompt: WorkloadPrompt, form: Form) -> tuple[bytes | None, bytes]:
    """Return the leading text of the system prompt and of the first user message, as the router reads them."""
    if form != "chat":
        return None, _leading_part(prompt, 0, prompt.prompt_tokens, form)
    start = system_end(prompt)
    stop = start + prompt.user_tokens if prompt.user_tokens else prompt.prompt_tokens
    system = _leading_part(prompt, 0, start, form) if start else None
    return system, _leading_part(prompt, start, stop, form)


def _leading_part(prompt: WorkloadPrompt, start: int, stop: int, form: Form) -> bytes:
    stop = min(stop, start + KEY_TOKENS)
    first, last = (prompt.blocks.content(1).hashes(at, at + 1)[0] for at in (start, stop - 1))
    found = _cache.get((first, last, form))
    if found is None:
        if form == "tokens":
            text = "".join(f"{token}," for token in token_ids(prompt, start, stop))
        else:
            text = words(prompt, start, stop)
        if len(_cache) >= _CACHE_SIZE:
            _cache.clear()
        found = _cache[first, last, form] = text[:KEY_CHARACTERS].encode()
    return found
