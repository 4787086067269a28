"""Compare the router's tokens of fixed samples with those of a node's /tokenize: a text, and two chats.

Where the text agrees and a chat does not, the chat templates differ. SGLang's /tokenize takes only text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from warmroute._kernel import TOKEN_BYTES
from warmroute.prompt.prompt import Prompt
from warmroute.prompt.prompt_tokenizer import TEMPLATE_REJECTS, PromptTokenizer
from warmroute.prompt.tokenizer import pack_token_ids

_SYSTEM: Final = {"role": "system", "content": "You are a helpful assistant. Answer in one sentence."}
_QUESTION: Final = {"role": "user", "content": "What is 12 + 30? Write it as 'x = 42'.\n"}
_ANSWER: Final = {"role": "assistant", "content": "x = 42"}
_COMPLETION, _CHAT = b"/v1/completions", b"/v1/chat/completions"
_SAMPLES: Final[tuple[tuple[bytes, dict[str, Any]], ...]] = (
    (_COMPLETION, {"prompt": "The quick brown fox: 1,234.5 jumps…\n\n\tÜber 你好"}),
    (_CHAT, {"messages": [_SYSTEM, _QUESTION]}),
    (_CHAT, {"messages": [_QUESTION, _ANSWER, {"role": "user", "content": "And 7 * 6?"}]}),
)
_NO_ENDPOINT: Final = (404, 405, 501)
_CANNOT_ANSWER: Final = (401, 403, 429)

Tokenize = Callable[[bytes, bytes], Awaitable[tuple[int, bytes]]]
"""Takes the path and body of a request. Returns status and body of the node's /tokenize for it. Raises OSError."""


class _Answer(msgspec.Struct):
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Agreement:
    state: Literal["agrees", "differs", "unavailable", "not_comparable"]
    """`unavailable`: the node has no /tokenize. `not_comparable`: the router makes no tokens for such prompts."""
    differs: Literal["", "tokenizer", "chat_template"] = ""
    reason: str = ""
    chats: bool = True
    """Whether chats were compared, not only a text."""


class NodeDidNotAnswer(Exception):
    """The node is slow, broken or busy; the comparison can be repeated."""


async def compare_tokens(
    model: str, prompt_tokenizer: PromptTokenizer, tokenize: Tokenize, with_chats: bool
) -> Agreement:
    """Raises NodeDidNotAnswer."""
    for path, fields in _SAMPLES if with_chats else _SAMPLES[:1]:
        body = msgspec.json.encode({"model": model, **fields})
        prompt = await asyncio.to_thread(prompt_tokenizer.tokenize, path, body)
        if prompt is None or (_is_text(prompt, prompt_tokenizer) and prompt.inexact_reason != TEMPLATE_REJECTS):
            return Agreement("not_comparable", reason=prompt.inexact_reason if prompt is not None else "")
        try:
            status, answer = await tokenize(path, body)
        except OSError as error:
            raise NodeDidNotAnswer(f"POST /tokenize failed: {error or type(error).__name__}") from None
        if status in _NO_ENDPOINT:
            return Agreement("unavailable", reason=f"POST /tokenize answers {status}")
        if status >= 500 or status in _CANNOT_ANSWER:
            raise NodeDidNotAnswer(f"POST /tokenize answers {status}")
        reason = _difference(prompt, status, answer)
        if reason:
            return Agreement("differs", "chat_template" if path == _CHAT else "tokenizer", reason)
    return Agreement("agrees", chats=with_chats)


def _is_text(prompt: Prompt, prompt_tokenizer: PromptTokenizer) -> bool:
    tokenizer = prompt_tokenizer.tokenizer
    return tokenizer is None or (not prompt.exact and prompt.inexact_reason != tokenizer.inexact_reason)


def _difference(prompt: Prompt, status: int, answer: bytes) -> str:
    """Return how the node's answer differs from the router's prompt; empty where it does not."""
    we_reject = prompt.inexact_reason == TEMPLATE_REJECTS
    if status != 200:
        return "" if we_reject else f"the node rejects a sample with status {status}"
    if we_reject:
        return "the router's chat template rejects a sample that the node accepts"
    try:
        theirs = pack_token_ids(msgspec.json.decode(answer, type=_Answer).tokens)
    except (msgspec.DecodeError, OverflowError):
        return "the node's /tokenize returns no list of tokens"
    ours = prompt.tokens
    if ours == theirs:
        return ""
    ours_count, theirs_count = len(ours) // TOKEN_BYTES, len(theirs) // TOKEN_BYTES
    equal = next(
        (at for at in range(min(ours_count, theirs_count)) if _token(ours, at) != _token(theirs, at)),
        min(ours_count, theirs_count),
    )
    return f"the node makes {theirs_count} tokens of a sample, the router {ours_count}; the first {equal} are equal"


def _token(tokens: bytes, at: int) -> bytes:
    return tokens[at * TOKEN_BYTES : (at + 1) * TOKEN_BYTES]
