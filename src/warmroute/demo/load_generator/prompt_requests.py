"""Converts a workload's prompts to HTTP requests, as messages, text or token ids.

The system message of a chat is the workload's system prompt. The next turn of a conversation contains what the endpoint
really answered, so that it finds this turn's blocks in the engine's cache.
"""

from __future__ import annotations

import msgspec

from warmroute.replay.workloads.prompt_text import Form, system_end, token_ids, words
from warmroute.replay.workloads.workload_prompt import WorkloadPrompt


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str


class ConversationHistory(msgspec.Struct, frozen=True):
    """The messages before the next prompt of a conversation, and how many of the prompt's tokens they represent."""

    messages: tuple[Message, ...] = ()
    tokens: int = 0


def chat_messages(prompt: WorkloadPrompt, history: ConversationHistory) -> tuple[Message, ...]:
    """Return all messages of a prompt: the history, and a new user message."""
    earlier, start = history.messages, history.tokens
    if not earlier and prompt.system_tokens:
        start = system_end(prompt)
        earlier = (Message("system", words(prompt, 0, start)),)
    return (*earlier, Message("user", words(prompt, start, prompt.prompt_tokens)))


def extend_history(prompt: WorkloadPrompt, messages: tuple[Message, ...], response_text: str) -> ConversationHistory:
    """Return the history after a response to `messages`."""
    tokens = prompt.prompt_tokens + prompt.output_tokens
    return ConversationHistory((*messages, Message("assistant", response_text)), tokens)


def build_request(prompt: WorkloadPrompt, messages: tuple[Message, ...], model: str, form: Form) -> tuple[str, bytes]:
    """Return path and body of a streaming request with usage. The output has exactly the workload's length."""
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
        return "/v1/chat/completions", msgspec.json.encode({**fields, "messages": messages})
    text = words if form == "completion" else token_ids
    return "/v1/completions", msgspec.json.encode({**fields, "prompt": text(prompt, 0, prompt.prompt_tokens)})
