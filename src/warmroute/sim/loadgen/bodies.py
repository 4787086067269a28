"""Requests as bytes: what stands for a token in a workload becomes a word, the same one wherever the token is the same.

A chat's system message is the workload's system prompt, the rest is the user's. A conversation goes on with what the
endpoint really answered, so that the next turn finds this turn's blocks in the engine's cache.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from warmroute.sim.engine.content import mix64
from warmroute.sim.workloads.prompt import Prompt

Form = Literal["chat", "completion", "tokens"]

_SYLLABLES = "a e i o u an en in on un ar er ir or ur al el il ol ul".split()  # noqa: SIM905
WORDS = tuple(first + last for first in "bdfgklmnprstvwz" for last in _SYLLABLES)
"""Short enough to be one token each for many tokenizers, and for the simulated engine's stand-in always."""

PLAIN_TOKENS = 30_000
"""Token ids are drawn from 1,000 up to here: ordinary words in every vocabulary that is in use."""


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str


class Talk(msgspec.Struct, frozen=True):
    """What was said before the next prompt of a conversation: its messages, and how many tokens they stand for."""

    messages: tuple[Message, ...] = ()
    tokens: int = 0


def words(prompt: Prompt, start: int, stop: int) -> str:
    """The text of the prompt's tokens [start, stop)."""
    identities = prompt.blocks.content(1).hashes(start, stop)
    return " ".join([WORDS[mix64(identity, 0) % len(WORDS)] for identity in identities])


def messages(prompt: Prompt, talk: Talk) -> tuple[Message, ...]:
    """All messages of the prompt, those that were said before as they were said."""
    said, start = talk.messages, talk.tokens
    if not said and prompt.system_tokens:
        start = min(prompt.system_tokens, prompt.prompt_tokens - 1)
        said = (Message("system", words(prompt, 0, start)),)
    return (*said, Message("user", words(prompt, start, prompt.prompt_tokens)))


def carried_on(prompt: Prompt, asked: tuple[Message, ...], answer: str) -> Talk:
    return Talk((*asked, Message("assistant", answer)), prompt.prompt_tokens + prompt.output_tokens)


def body(prompt: Prompt, asked: tuple[Message, ...], model: str, form: Form) -> tuple[str, bytes]:
    """The path and the body of the request: streamed, with usage, of exactly the planned length."""
    fields: dict[str, object] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": prompt.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
    if prompt.session:
        fields["prompt_cache_key"] = prompt.session.decode()
    if prompt.cache_salt:
        fields["cache_salt"] = prompt.cache_salt
    if form == "chat":
        return "/v1/chat/completions", msgspec.json.encode({**fields, "messages": asked})
    if form == "completion":
        text: object = words(prompt, 0, prompt.prompt_tokens)
    else:
        identities = prompt.blocks.content(1).hashes(0, prompt.prompt_tokens)
        text = [1000 + mix64(identity, 0) % (PLAIN_TOKENS - 1000) for identity in identities]
    return "/v1/completions", msgspec.json.encode({**fields, "prompt": text})
