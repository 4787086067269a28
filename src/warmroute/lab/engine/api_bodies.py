"""OpenAI's responses API (`/v1/responses`), with vLLM's events. Every response is one message of text."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from warmroute.fake_engine.server import vllm_errors
from warmroute.fake_engine.server.request_bodies import GenerationRequest, MaxTokens
from warmroute.fake_engine.server.response_bodies import Usage
from warmroute.fake_engine.server.vllm_errors import ApiError

_encode = msgspec.json.encode
_INCOMPLETE = {"length": "max_output_tokens", "abort": "abort"}
"""By why the generation ended: what makes the response incomplete."""


class ResponsesRequest(GenerationRequest, kw_only=True):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: MaxTokens | None = None
    tools: list[dict[str, Any]] | None = None
    previous_response_id: str | None = None


def chat_messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    """Return the messages that the template gets. Raises ApiError."""
    if body.previous_response_id is not None:
        raise vllm_errors.unknown_response(body.previous_response_id)
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    start = len(messages)
    for number, item in enumerate(body.input):
        kind = item.get("type", "message")
        is_turn = len(messages) > start and messages[-1]["role"] == "assistant"
        if kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            if not is_turn:
                messages.append({"role": "assistant", "content": None})
            calls = messages[-1].setdefault("tool_calls", [])
            calls.append({"id": item.get("call_id"), "function": function, "type": "function"})
        elif kind == "function_call_output":
            messages.append({"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")})
        elif kind == "message" and isinstance(item.get("role"), str):
            messages.append({"role": item["role"], "content": item.get("content")})
        elif kind != "reasoning":
            raise vllm_errors.bad_body(f"input[{number}] has an unknown type, or no role")
    return messages


def chat_tools(body: ResponsesRequest) -> list[dict[str, Any]] | None:
    """Return the tools that the template gets."""
    return [{"type": "function", "function": tool} for tool in body.tools] if body.tools else None


class ResponsesFormat:
    """Implements response_bodies.ResponseFormat."""

    def __init__(self, request_id: str, created: int, model: str, body: ResponsesRequest) -> None:
        self.id = f"resp_{request_id}"
        self._created = created
        self._model = model
        self._body = body
        self._item = f"msg_{os.urandom(16).hex()}"
        self._number = 0
        place = _encode({"item_id": self._item, "output_index": 0, "content_index": 0})[1:-1]
        self._place = place
        self._delta_end = b'","logprobs":[],' + place + b',"type":"response.output_text.delta"}\n\n'

    def start(self) -> bytes:
        begun = _encode(self._response("in_progress", [], None))
        item = {"id": self._item, "type": "message", "status": "in_progress", "content": [], "role": "assistant"}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return (
            self._event("response.created", b'"response":' + begun)
            + self._event("response.in_progress", b'"response":' + begun)
            + self._event("response.output_item.added", b'"output_index":0,"item":' + _encode(item))
            + self._event("response.content_part.added", self._place + b',"part":' + _encode(part))
        )

    def token(self, text: bytes) -> bytes:
        self._number += 1
        head = b'event: response.output_text.delta\ndata: {"sequence_number":%d,"delta":"' % (self._number - 1)
        return head + text + self._delta_end

    def end(self, text: bytes, generated: str, reason: str, usage: Usage) -> bytes:
        whole = self._response(_status(reason), [self._message(generated, reason)], usage, reason)
        done = _encode({"text": generated, "logprobs": []})[1:-1]
        kind = "response.completed" if whole["status"] == "completed" else "response.incomplete"
        return (
            (self.token(text) if text else b"")
            + self._event("response.output_text.done", self._place + b"," + done)
            + self._event("response.content_part.done", self._place + b',"part":' + _encode(_part(generated)))
            + self._event("response.output_item.done", b'"output_index":0,"item":' + _encode(whole["output"][0]))
            + self._event(kind, b'"response":' + _encode(whole))
        )

    def whole(self, generated: str, reason: str, usage: Usage) -> bytes:
        return _encode(self._response(_status(reason), [self._message(generated, reason)], usage, reason))

    def failed(self, error: ApiError) -> bytes:
        return self._event("error", _encode({"code": str(error.status), "message": str(error), "param": None})[1:-1])

    def _event(self, kind: str, fields: bytes) -> bytes:
        self._number += 1
        name = kind.encode()
        return b'event: %b\ndata: {"sequence_number":%d,%b,"type":"%b"}\n\n' % (name, self._number - 1, fields, name)

    def _message(self, generated: str, reason: str) -> dict[str, Any]:
        return {
            "id": self._item,
            "content": [_part(generated)],
            "role": "assistant",
            "status": _status(reason),
            "type": "message",
        }

    def _response(
        self, status: str, output: list[dict[str, Any]], usage: Usage | None, reason: str = "stop"
    ) -> dict[str, Any]:
        why, body = _INCOMPLETE.get(reason), self._body
        return {
            "id": self.id,
            "created_at": self._created,
            "incomplete_details": {"reason": why} if why else None,
            "instructions": body.instructions,
            "metadata": None,
            "model": self._model,
            "object": "response",
            "output": output,
            "parallel_tool_calls": True,
            "temperature": 1.0,
            "tool_choice": "auto",
            "tools": body.tools or [],
            "top_p": 1.0,
            "background": False,
            "max_output_tokens": body.max_output_tokens,
            "previous_response_id": None,
            "prompt": None,
            "reasoning": None,
            "service_tier": "auto",
            "status": status,
            "text": None,
            "top_logprobs": None,
            "truncation": "disabled",
            "usage": _usage_fields(usage) if usage is not None else None,
            "user": None,
            "kv_transfer_params": None,
        }


def _status(reason: str) -> str:
    return "incomplete" if reason in _INCOMPLETE else "completed"


def _part(generated: str) -> dict[str, Any]:
    return {"type": "output_text", "text": generated, "annotations": [], "logprobs": None}


def _usage_fields(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
