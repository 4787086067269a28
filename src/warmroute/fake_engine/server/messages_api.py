"""Anthropic's messages API (`/v1/messages` and its token counts). Every response is one block of text.

`usage.input_tokens` counts the tokens that were not cached, as Anthropic defines it, with the cached ones beside it.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from warmroute.fake_engine.server.request_bodies import GenerationRequest, MaxTokens
from warmroute.fake_engine.server.response_bodies import Usage
from warmroute.fake_engine.server.vllm_errors import ApiError, bad_body

_encode = msgspec.json.encode
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}
_ERROR_TYPES = {400: "invalid_request_error", 404: "not_found_error", 503: "overloaded_error"}
_BILLING_HEADER = "x-anthropic-billing-header"
"""vLLM leaves out a system text that starts with this: it differs from request to request."""


class CountTokensRequest(GenerationRequest, kw_only=True):
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: MaxTokens


class AnthropicError(Exception):
    """An error as Anthropic's API writes it."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(str(error))
        self.status = error.status

    def body(self) -> bytes:
        kind = _ERROR_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return _encode({"type": "error", "error": {"type": kind, "message": str(self)}})


def chat_messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    """Return the messages that the template gets. Raises ApiError."""
    texts = [body.system] if isinstance(body.system, str) else [block.get("text") for block in body.system or ()]
    system = "".join(text for text in texts if isinstance(text, str) and not text.startswith(_BILLING_HEADER))
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for number, message in enumerate(body.messages):
        if message.get("role") not in ("user", "assistant", "system"):
            raise bad_body(f"messages[{number}].role is neither `user` nor `assistant` nor `system`")
        content = message.get("content")
        if isinstance(content, list):
            messages += _from_blocks(message["role"], content)
        else:
            messages.append({"role": message["role"], "content": content})
    return messages


def _from_blocks(role: str, blocks: list[Any]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            parts.append({"type": "text", "text": block.get("text")})
        elif kind == "image":
            parts.append({"type": "image_url", "image_url": block.get("source")})
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": _encode(block.get("input") or {}).decode()}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            content = block.get("content")
            texts = [content] if isinstance(content, str) else [item.get("text") for item in content or ()]
            text = "\n".join(text for text in texts if isinstance(text, str))
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        elif kind not in ("thinking", "redacted_thinking"):
            raise bad_body("a content block has an unknown type")
    message: dict[str, Any] = {"role": role, "content": parts}
    if len(parts) == 1 and parts[0]["type"] == "text":
        message["content"] = parts[0]["text"]
    if calls:
        message["tool_calls"] = calls
    return [*results, message] if parts or calls else results


def chat_tools(body: CountTokensRequest) -> list[dict[str, Any]] | None:
    """Return the tools that the template gets."""
    if not body.tools:
        return None
    names = (("name", "name"), ("description", "description"), ("input_schema", "parameters"))
    return [
        {"type": "function", "function": {to: tool.get(name) for name, to in names}} for tool in body.tools
    ]  # fmt: skip


class MessagesFormat:
    """Implements response_bodies.ResponseFormat."""

    def __init__(self, request_id: str, model: str, prompt_tokens: int) -> None:
        self.id = f"msg_{request_id}"
        self._model = model
        self._prompt_tokens = prompt_tokens

    def start(self) -> bytes:
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        return _event("message_start", {"message": self._message([], None, usage)}) + _event(
            "content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}}
        )

    def token(self, text: bytes) -> bytes:
        return (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
            b'"delta":{"type":"text_delta","text":"%b"}}\n\n' % text
        )

    def end(self, text: bytes, generated: str, reason: str, usage: Usage) -> bytes:
        delta = {"stop_reason": _STOP_REASONS.get(reason), "stop_sequence": None}
        return (
            (self.token(text) if text else b"")
            + _event("content_block_stop", {"index": 0})
            + _event("message_delta", {"delta": delta, "usage": _usage_fields(usage)})
            + _event("message_stop", {})
        )

    def whole(self, generated: str, reason: str, usage: Usage) -> bytes:
        content = [{"type": "text", "text": generated}]
        message = self._message(content, _STOP_REASONS.get(reason), _usage_fields(usage))
        return _encode({**message, "kv_transfer_params": None})

    def failed(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + AnthropicError(error).body() + b"\n\n"

    def _message(self, content: list[dict[str, Any]], reason: str | None, usage: dict[str, int]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self._model,
            "stop_reason": reason,
            "stop_sequence": None,
            "usage": usage,
        }


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))


def _usage_fields(usage: Usage) -> dict[str, int]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
