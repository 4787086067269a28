"""Tokens from a node's own /tokenize: where the router has no tokenizer. Costs a round trip and the engine's CPU.

Follows vLLM 0.32. Its /tokenize takes fewer fields than its chat completions, so what is missing there goes by way of
the template's variables, as vLLM itself would put it. Where the two would not render alike, or where tokens alone do
not tell two prompts apart, there is no answer: pictures and sound, prompts that may be cut, tools that are perhaps
left out, embeddings. What cannot be seen from here: a gpt-oss model, whose chats vLLM renders by code, and whose
/tokenize renders them by template.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import time
from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from warmroute.fleet.node import Node

log = logging.getLogger("warmroute.engines")

Post = Callable[[Node, str, bytes, float], Awaitable[tuple[int, bytes]]]
"""POST a JSON body to a path of a node, within so many seconds: status and body. Raises OSError (TimeoutError,
ConnectionError, …) where there is no answer. To be sent with `Content-Type: application/json`: vLLM insists on it."""

CACHE_BYTES: Final = 32 << 20
TIMEOUT_S: Final = 1.0
KEPT_S: Final = 600.0
"""How long an answer is believed: the engine may have been given another template since."""
FAILURES: Final = 3
"""In a row, before a node is rested."""
REST_S: Final = 30.0
_ENTRY_BYTES: Final = 300
"""Of an answer in the cache, beside its tokens."""

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
_REQUESTS_FAULT: Final = (400, 413, 422)
"""What says nothing about the node: nobody may switch it off by asking nonsense."""


Fields = dict[str, msgspec.Raw]
"""A body's fields, not parsed: what is passed on stays as it was written."""


class _Answer(msgspec.Struct):
    count: int
    tokens: list[int]


class NotAsked(Exception):
    """The node's answer would not be, or may not be, the prompt's tokens."""


class RemoteTokens:
    """Asks nodes, and remembers their answers for a while."""

    def __init__(
        self,
        post: Post,
        cache_bytes: int = CACHE_BYTES,
        timeout_s: float = TIMEOUT_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._post = post
        self._timeout_s = timeout_s
        self._now = now
        self._budget_bytes = cache_bytes
        self._known: OrderedDict[bytes, tuple[float, bytes]] = OrderedDict()
        """When they were told, and the tokens."""
        self.used_bytes = 0
        self._failures: dict[str, int] = {}
        self._rests_until_s: dict[str, float] = {}
        self.asked = 0
        self.failed = 0
        self.hits = 0

    async def tokens(self, node: Node, path: bytes, body: bytes) -> bytes | None:
        """The prompt's tokens, four bytes each, little-endian. None where they can't be had, for whatever reason."""
        if node.engine != "vllm":
            return None
        try:
            made = tokenize_request(path, body)
        except (NotAsked, msgspec.DecodeError, UnicodeError, RecursionError):
            return None
        if isinstance(made, list):
            return _packed(made)
        key = hashlib.blake2b(made, digest_size=16).digest()
        tokens = self._remembered(key)
        if tokens is None and not self.rests(node):
            tokens = await self._ask(node, made)
            if tokens is not None:
                self._remember(key, tokens)
        return tokens

    # ---- Asking ----

    async def _ask(self, node: Node, request: bytes) -> bytes | None:
        self.asked += 1
        try:
            status, answer = await self._post(node, "/tokenize", request, self._timeout_s)
        except OSError as error:
            self._fails(node, type(error).__name__)
            return None
        if status in _REQUESTS_FAULT:
            return None
        tokens = _tokens_in(answer) if status == 200 else None
        if tokens is None:
            self._fails(node, "no list of tokens" if status == 200 else f"status {status}")
        else:
            self.forget(node)
        return tokens

    def _fails(self, node: Node, reason: str) -> None:
        self.failed += 1
        failures = self._failures[node.name] = self._failures.get(node.name, 0) + 1
        if failures >= FAILURES:
            if failures == FAILURES:
                log.warning(
                    "node %s does not tell tokens (POST /tokenize: %s): it is asked every %g s until it does",
                    node.name,
                    reason,
                    REST_S,
                )
            self._rests_until_s[node.name] = self._now() + REST_S

    def rests(self, node: Node) -> bool:
        """Whether it is not asked, since it has failed too often. After its rest, one failure is enough."""
        return self._now() < self._rests_until_s.get(node.name, 0.0)

    def forget(self, node: Node) -> None:
        """That it has failed: it has answered, or left the fleet."""
        self._failures.pop(node.name, None)
        self._rests_until_s.pop(node.name, None)

    # ---- Remembering ----

    def _remembered(self, key: bytes) -> bytes | None:
        found = self._known.get(key)
        if found is None:
            return None
        told_s, tokens = found
        if self._now() - told_s > KEPT_S:
            self._drop(key)
            return None
        self._known.move_to_end(key)
        self.hits += 1
        return tokens

    def _remember(self, key: bytes, tokens: bytes) -> None:
        if key in self._known:
            self._drop(key)
        self._known[key] = self._now(), tokens
        self.used_bytes += len(tokens) + _ENTRY_BYTES
        while self.used_bytes > self._budget_bytes:
            self._drop(next(iter(self._known)))

    def _drop(self, key: bytes) -> None:
        self.used_bytes -= len(self._known.pop(key)[1]) + _ENTRY_BYTES


def tokenize_request(path: bytes, body: bytes) -> bytes | list[int]:
    """What to ask /tokenize for this body; or the tokens, where the body brings them. Raises NotAsked,
    msgspec.DecodeError.
    """
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    transfer = _value(fields, "kv_transfer_params")
    if isinstance(transfer, dict) and transfer.get("prompt_token_ids") is not None:
        raise NotAsked("token ids from a prefill elsewhere")
    if _value(fields, "truncate_prompt_tokens") is not None:
        raise NotAsked("the prompt may be cut")
    if path == b"/v1/completions":
        return _completion(fields)
    if path == b"/v1/chat/completions":
        return msgspec.json.encode(_chat(fields))
    raise NotAsked("no path that /tokenize knows prompts of")


def _value(fields: Fields, name: str) -> Any:
    return msgspec.json.decode(fields[name]) if name in fields else None


def _completion(fields: Fields) -> bytes | list[int]:
    """Of several prompts, the first."""
    if any(_value(fields, name) is not None for name in ("prompt_embeds", "suffix")):
        raise NotAsked("a completion with more than its prompt")
    prompt = _value(fields, "prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return prompt
    if not isinstance(prompt, str):
        raise NotAsked("a prompt that is neither text nor token ids")
    given = {name: fields[name] for name in ("model", "add_special_tokens") if name in fields}
    return msgspec.json.encode({**given, "prompt": prompt})


def _chat(fields: Fields) -> dict[str, Any]:
    messages = _value(fields, "messages")
    if not isinstance(messages, list) or not all(_is_text(message) for message in messages):
        raise NotAsked("messages that are not text alone")
    if _value(fields, "tool_choice") == "none" and _value(fields, "tools"):
        # --exclude-tools-when-tool-choice-none leaves them out, which /tokenize does not know of
        raise NotAsked("tools that are perhaps left out")
    request: dict[str, Any] = {name: fields[name] for name in _CHAT_FIELDS if name in fields}
    if any("reasoning_content" in message for message in messages):
        request["messages"] = [_with_reasoning(message) for message in messages]
    if variables := _variables(fields):
        request["chat_template_kwargs"] = variables
    return request


def _variables(fields: Fields) -> dict[str, Any]:
    own = _value(fields, "chat_template_kwargs") or {}
    if not isinstance(own, dict):
        raise NotAsked("chat_template_kwargs that are no object")
    effort = _value(fields, "reasoning_effort")
    over = {"documents": _value(fields, "documents"), "reasoning_effort": effort}
    if effort is not None and "enable_thinking" not in own:
        over["enable_thinking"] = effort != "none"
    return {**own, **{name: value for name, value in over.items() if value not in _UNSET}}


def _is_text(message: Any) -> bool:
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
    """Chat completions take an old name, too; /tokenize does not."""
    if "reasoning_content" not in message:
        return message
    made = {name: value for name, value in message.items() if name != "reasoning_content"}
    if message["reasoning_content"] is not None and made.get("reasoning") is None:
        made["reasoning"] = message["reasoning_content"]
    return made


def _tokens_in(answer: bytes) -> bytes | None:
    try:
        told = msgspec.json.decode(answer, type=_Answer)
    except msgspec.DecodeError:
        return None
    return _packed(told.tokens) if len(told.tokens) == told.count else None


def _packed(ids: list[int]) -> bytes | None:
    """As prompt.tokenizer.packed does; that room is not known here."""
    try:
        tokens = array("I", ids)
    except OverflowError:
        return None
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes()
