"""Requests as bytes: a workload's prompt as messages, text or token ids (`sim.workloads.text`).

A chat's system message is the workload's system prompt, the rest is the user's. A conversation goes on with what the
endpoint really answered, so that the next turn finds this turn's blocks in the engine's cache.
"""

from __future__ import annotations

import msgspec

from warmroute.replay.workloads.prompt_text import Form, system_end, token_ids, words
from warmroute.replay.workloads.workload_prompt import WorkloadPrompt

__all__ = ["Form", "Message", "Talk", "body", "carried_on", "messages"]


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str


class ConversationHistory(msgspec.Struct, frozen=True):
    """What was said before the next prompt of a conversation: its messages, and how many tokens they stand for."""

    messages: tuple[Message, ...] = ()
    tokens: int = 0


def messages(prompt: WorkloadPrompt, talk: ConversationHistory) -> tuple[Message, ...]:
    """All messages of the prompt, those that were said before as they were said."""
    said, start = talk.messages, talk.tokens
    if not said and prompt.system_tokens:
        start = system_end(prompt)
        said = (Message("system", words(prompt, 0, start)),)
    return (*said, Message("user", words(prompt, start, prompt.prompt_tokens)))


def extend_history(prompt: WorkloadPrompt, asked: tuple[Message, ...], answer: str) -> ConversationHistory:
    return ConversationHistory((*asked, Message("assistant", answer)), prompt.prompt_tokens + prompt.output_tokens)


def body(prompt: WorkloadPrompt, asked: tuple[Message, ...], model: str, form: Form) -> tuple[str, bytes]:
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
    text = words if form == "completion" else token_ids
    return "/v1/completions", msgspec.json.encode({**fields, "prompt": text(prompt, 0, prompt.prompt_tokens)})
