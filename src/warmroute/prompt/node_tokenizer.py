"""What a node's /tokenize answers: tokens of a model without a tokenizer, and a check of the router's own tokens."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import msgspec

from warmroute._kernel import TOKEN_BYTES
from warmroute.event_log import EventLog
from warmroute.prompt.prompt import Prompt
from warmroute.prompt.prompt_tokenizer import TEMPLATE_REJECTS, PromptTokenizer
from warmroute.prompt.tokenizer import pack_token_ids

# Tokens from a node's /tokenize, for models without a tokenizer in the router. Costs a round trip and engine CPU.
#
# Follows vLLM 0.32. Its /tokenize accepts fewer fields than its chat completions, so the missing ones are passed as
# template variables, as vLLM itself does. No tokens are returned where the two endpoints might render differently, or
# where tokens alone do not distinguish two prompts: images and audio, prompts that may be truncated, tools that may be
# left out, embeddings. The router cannot detect gpt-oss models, whose chats vLLM renders in code, and /tokenize by
# template.

log = EventLog("warmroute.engines")

CACHE_BYTES: Final = 32 << 20
"""Memory for tokens that nodes returned."""
TIMEOUT_S: Final = 1.0
"""The request waits for the answer. After this time it is routed by its text."""
CACHE_TTL_S: Final = 600.0
"""How long tokens stay cached: the engine's chat template may change."""
MAX_FAILURES: Final = 3
"""Failures in a row after which the router pauses requests to a node."""
PAUSE_S: Final = 30.0
"""How long a node is not asked after MAX_FAILURES failures in a row."""
_MAX_RESPONSE_RATIO: Final = 16
"""Largest response, in bytes for each byte of its request: a token takes at least one byte of text, and at most 12
digits."""
_RESPONSE_OVERHEAD_BYTES: Final = 1 << 20
"""Allowance on top of _MAX_RESPONSE_RATIO: a short request may have a long chat template."""
_ENTRY_BYTES: Final = 300
"""Memory of a cached entry besides its tokens."""

_TEXT_PARTS: Final = frozenset(("text", "input_text", "output_text", "refusal", "thinking"))
_CHAT_FIELDS: Final = (
    "model",
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "add_special_tokens",
)
_UNSET: Final = (None, "auto")
_CLIENT_ERRORS: Final = (400, 413, 422)
"""Statuses that are the request's fault. They do not count as failures of the node, or a client could pause it."""


Fields = dict[str, msgspec.Raw]
"""A body's fields, not decoded: fields that are passed on keep their bytes."""


class _Response(msgspec.Struct):
    count: int
    tokens: list[int]


class NotTokenizable(Exception):
    """The node's response would not be, or might not be, the prompt's tokens."""


class TokenizingNode(Protocol):
    """The core's own node, or a row of an edge's tables."""

    @property
    def number(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def engine(self) -> str: ...


class RemoteTokenizer:
    def __init__(
        self,
        post: Callable[[Any, str, bytes, float], Awaitable[tuple[int, bytes]]],
        pack_token_ids: Callable[[list[int]], bytes],
        cache_bytes: int = CACHE_BYTES,
        timeout_s: float = TIMEOUT_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pack_token_ids` raises OverflowError for an impossible token."""
        self._post = post
        self._pack_token_ids = pack_token_ids
        self._timeout_s = timeout_s
        self._now = now
        self._budget_bytes = cache_bytes
        self._cached: OrderedDict[bytes, tuple[float, bytes]] = OrderedDict()
        """When the tokens arrived, and the tokens, by the hash of the request."""
        self.used_bytes = 0
        self._failures: dict[str, int] = {}
        self._paused_until_s: dict[str, float] = {}

    async def tokenize(self, node: TokenizingNode, path: bytes, body: bytes) -> bytes | None:
        """Return the prompt's tokens, four bytes each, little-endian; None if they are not available."""
        # Other engines' /tokenize takes a text, and has no chat template.
        if node.engine != "vllm":
            return None
        try:
            request = tokenize_request(path, body)
        except (NotTokenizable, msgspec.DecodeError, UnicodeError, RecursionError):
            return None
        if isinstance(request, list):
            return self._packed(request)
        # A hash, not the request: the cache must not keep what users typed.
        key = hashlib.blake2b(request, digest_size=16).digest()
        tokens = self._look_up(key)
        if tokens is None and not self.is_paused(node):
            tokens = await self._request(node, request)
            if tokens is not None:
                self._store(key, tokens)
        return tokens

    async def _request(self, node: TokenizingNode, request: bytes) -> bytes | None:
        try:
            status, body = await self._post(node, "/tokenize", request, self._timeout_s)
        except OSError as error:
            self._count_failure(node, type(error).__name__)
            return None
        if status in _CLIENT_ERRORS:
            return None
        is_too_long = len(body) > _MAX_RESPONSE_RATIO * len(request) + _RESPONSE_OVERHEAD_BYTES
        tokens = self._tokens_in(body) if status == 200 and not is_too_long else None
        if tokens is None:
            self._count_failure(node, "no list of tokens" if status == 200 else f"status {status}")
        else:
            self.reset(node)
        return tokens

    def _tokens_in(self, body: bytes) -> bytes | None:
        try:
            response = msgspec.json.decode(body, type=_Response)
        except (ValueError, RecursionError):
            return None
        return self._packed(response.tokens) if len(response.tokens) == response.count else None

    def _packed(self, ids: list[int]) -> bytes | None:
        try:
            return self._pack_token_ids(ids)
        except OverflowError:
            return None

    def _count_failure(self, node: TokenizingNode, reason: str) -> None:
        failures = self._failures[node.name] = self._failures.get(node.name, 0) + 1
        if failures >= MAX_FAILURES:
            if failures == MAX_FAILURES:
                log.warning(
                    "tokenize_failed", "POST /tokenize failed repeatedly. The router retries it once per pause.",
                    node=node.name, reason=reason, pause_s=PAUSE_S,
                )  # fmt: skip
            self._paused_until_s[node.name] = self._now() + PAUSE_S

    def is_paused(self, node: TokenizingNode) -> bool:
        """Return whether the router sends no requests to a node after too many failures. After a pause, one more
        failure starts the next one."""
        return self._now() < self._paused_until_s.get(node.name, 0.0)

    def reset(self, node: TokenizingNode) -> None:
        """Forget a node's failures: it has succeeded, or left the fleet."""
        self._failures.pop(node.name, None)
        self._paused_until_s.pop(node.name, None)

    def _look_up(self, key: bytes) -> bytes | None:
        found = self._cached.get(key)
        if found is None:
            return None
        arrived_s, tokens = found
        if self._now() - arrived_s > CACHE_TTL_S:
            self._drop(key)
            return None
        self._cached.move_to_end(key)
        return tokens

    def _store(self, key: bytes, tokens: bytes) -> None:
        if key in self._cached:
            self._drop(key)
        self._cached[key] = self._now(), tokens
        self.used_bytes += len(tokens) + _ENTRY_BYTES
        while self.used_bytes > self._budget_bytes:
            self._drop(next(iter(self._cached)))

    def _drop(self, key: bytes) -> None:
        self.used_bytes -= len(self._cached.pop(key)[1]) + _ENTRY_BYTES


def tokenize_request(path: bytes, body: bytes) -> bytes | list[int]:
    """Return the body of the /tokenize request, or the tokens if the client's body contains them.

    Raises NotTokenizable, msgspec.DecodeError."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    transfer = _value(fields, "kv_transfer_params")
    if isinstance(transfer, dict) and transfer.get("prompt_token_ids") is not None:
        raise NotTokenizable("token ids from another prefill node")
    if _value(fields, "truncate_prompt_tokens") is not None:
        raise NotTokenizable("the prompt may be truncated")
    if path == b"/v1/completions":
        return _completion(fields)
    if path == b"/v1/chat/completions":
        return msgspec.json.encode(_chat(fields))
    raise NotTokenizable("/tokenize has no form for this path")


def _value(fields: Fields, name: str) -> Any:
    return msgspec.json.decode(fields[name]) if name in fields else None


def _completion(fields: Fields) -> bytes | list[int]:
    """Return the request for a completion. Several prompts are refused: each would need a request of its own."""
    if any(_value(fields, name) is not None for name in ("prompt_embeds", "suffix")):
        raise NotTokenizable("a completion with more than its prompt")
    prompt = _value(fields, "prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        if len(prompt) > 1:
            raise NotTokenizable("several prompts")
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return prompt
    if not isinstance(prompt, str):
        raise NotTokenizable("a prompt that is neither text nor token ids")
    given = {name: fields[name] for name in ("model", "add_special_tokens") if name in fields}
    return msgspec.json.encode({**given, "prompt": prompt})


def _chat(fields: Fields) -> dict[str, Any]:
    messages = _value(fields, "messages")
    if not isinstance(messages, list) or not all(_is_text_message(message) for message in messages):
        raise NotTokenizable("messages that contain more than text")
    if _value(fields, "tool_choice") == "none" and _value(fields, "tools"):
        # vLLM with --exclude-tools-when-tool-choice-none leaves them out; /tokenize does not
        raise NotTokenizable("tools that may be left out")
    request: dict[str, Any] = {name: fields[name] for name in _CHAT_FIELDS if name in fields}
    if any("reasoning_content" in message for message in messages):
        request["messages"] = [_with_reasoning(message) for message in messages]
    if variables := _variables(fields):
        request["chat_template_kwargs"] = variables
    return request


def _variables(fields: Fields) -> dict[str, Any]:
    given = _value(fields, "chat_template_kwargs") or {}
    if not isinstance(given, dict):
        raise NotTokenizable("chat_template_kwargs is not an object")
    effort = _value(fields, "reasoning_effort")
    over = {"documents": _value(fields, "documents"), "reasoning_effort": effort}
    if effort is not None and "enable_thinking" not in given:
        over["enable_thinking"] = effort != "none"
    return {**given, **{name: value for name, value in over.items() if value not in _UNSET}}


def _is_text_message(message: Any) -> bool:
    if not isinstance(message, dict):
        return False
    content = message.get("content")
    if not isinstance(content, list):
        return content is None or isinstance(content, str)
    return all(
        isinstance(part, str) or (isinstance(part, dict) and part.get("type") in _TEXT_PARTS and "uuid" not in part)
        for part in content
    )


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Rename `reasoning_content`, which chat completions accept and /tokenize does not."""
    if "reasoning_content" not in message:
        return message
    made = {name: value for name, value in message.items() if name != "reasoning_content"}
    if message["reasoning_content"] is not None and made.get("reasoning") is None:
        made["reasoning"] = message["reasoning_content"]
    return made


# Compare the router's tokens of fixed samples with those of a node's /tokenize: a text, and two chats.
#
# Where the text agrees and a chat does not, the chat templates differ. SGLang's /tokenize takes only text.

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
