"""The text of a prompt: what stands for a token in a workload becomes a word, the same wherever the token is the same.

The load generator sends this text, and a router in virtual time goes by the beginning of the very same: both give a
request the same routing key. tests/replay/test_text.py holds them equal.
"""

from __future__ import annotations

from typing import Final, Literal

from warmroute.fake_engine.core.content import mix64
from warmroute.prompt.routing_request import KEY_CHARACTERS
from warmroute.replay.workloads.prompt import Prompt

Form = Literal["chat", "completion", "tokens"]
"""How clients send a prompt: as messages, as text, or as token ids."""

_SYLLABLES = "a e i o u an en in on un ar er ir or ur al el il ol ul".split()  # noqa: SIM905
WORDS = tuple(first + last for first in "bdfgklmnprstvwz" for last in _SYLLABLES)
"""Short enough to be one token each for many tokenizers, and for the simulated engine's stand-in always."""

PLAIN_TOKENS: Final = 30_000
"""Token ids are drawn from 1,000 up to here: ordinary words in every vocabulary that is in use."""

KEY_TOKENS: Final = -(-(KEY_CHARACTERS + 1) // 3)
"""As many as make a routing key's text: a word with its space has three characters at least, an id with its comma 5."""

_KNOWN_BEGINNINGS = 4096
_known: dict[tuple[int, int, Form], bytes] = {}
"""Beginnings by their first and last token, which tell all between them: a token's identity covers those before it."""


def words(prompt: Prompt, start: int, stop: int) -> str:
    """The text of the prompt's tokens [start, stop)."""
    identities = prompt.blocks.content(1).hashes(start, stop)
    return " ".join([WORDS[mix64(identity, 0) % len(WORDS)] for identity in identities])


def token_ids(prompt: Prompt, start: int, stop: int) -> list[int]:
    """The same as token ids."""
    identities = prompt.blocks.content(1).hashes(start, stop)
    return [1000 + mix64(identity, 0) % (PLAIN_TOKENS - 1000) for identity in identities]


def system_end(prompt: Prompt) -> int:
    """Where the system message ends and the first user message begins: a user says one token at least."""
    return min(prompt.system_tokens, prompt.prompt_tokens - 1)


def beginnings(prompt: Prompt, form: Form) -> tuple[bytes | None, bytes]:
    """What `prompt.ask` finds in a request's body: the beginning of its system prompt and of its first user message."""
    if form != "chat":
        return None, _beginning(prompt, 0, prompt.prompt_tokens, form)
    start = system_end(prompt)
    stop = start + prompt.user_tokens if prompt.user_tokens else prompt.prompt_tokens
    system = _beginning(prompt, 0, start, form) if start else None
    return system, _beginning(prompt, start, stop, form)


def _beginning(prompt: Prompt, start: int, stop: int, form: Form) -> bytes:
    stop = min(stop, start + KEY_TOKENS)
    first, last = (prompt.blocks.content(1).hashes(at, at + 1)[0] for at in (start, stop - 1))
    found = _known.get((first, last, form))
    if found is None:
        if form == "tokens":
            text = "".join(f"{token}," for token in token_ids(prompt, start, stop))
        else:
            text = words(prompt, start, stop)
        if len(_known) >= _KNOWN_BEGINNINGS:
            _known.clear()
        found = _known[first, last, form] = text[:KEY_CHARACTERS].encode()
    return found
