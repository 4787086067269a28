"""Response bodies with vLLM 0.32's fields in its order (tests/fixtures/vllm-0.32 has recorded ones).

The parts that all events of a stream share are encoded once. An event is these parts around the token's text.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from warmroute.fake_engine.server.vllm_errors import ApiError

FINGERPRINT = "vllm-0.32.0-warmroute-sim"
DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.encode


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    created_cache_tokens: int | None
    """Tokens in full blocks of the prompt that were not cached. Only chat responses have it."""


def _usage_fields(usage: Usage, with_nulls: bool) -> dict[str, Any]:
    """`with_nulls`: include unknown fields as null, as vLLM does unless it streams."""
    details: dict[str, Any] = {"cached_tokens": usage.cached_tokens}
    if with_nulls or usage.created_cache_tokens is not None:
        details["created_cache_tokens"] = usage.created_cache_tokens
    if with_nulls:
        details["multimodal_tokens"] = None
    fields: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "completion_tokens": usage.completion_tokens,
        "prompt_tokens_details": details,
    }
    if with_nulls:
        fields["completion_tokens_details"] = None
    return fields


def json_text(text: str) -> bytes:
    """Encode a string as JSON, without the quotes."""
    return _encode(text)[1:-1]


class ResponseFormat(Protocol):
    """Encodes one response of an API: as events, or as a whole."""

    id: str

    def start(self) -> bytes:
        """The events before the first token; empty if the API has none."""

    def token(self, text: bytes) -> bytes:
        """The event of a token. `text`: encoded by `json_text`."""

    def end(self, text: bytes, generated: str, reason: str, usage: Usage) -> bytes:
        """The events that end the stream. `text`: of the last token, `generated`: the whole text."""

    def whole(self, generated: str, reason: str, usage: Usage) -> bytes:
        """The response if it does not stream."""

    def failed(self, error: ApiError) -> bytes:
        """The events that end a stream with an error."""


class OpenAIFormat:
    """Responses of chat completions and completions. Implements ResponseFormat."""

    def __init__(self, chat: bool, request_id: str, created: int, model: str, include_usage: bool) -> None:
        self.id = response_id = f"{'chatcmpl' if chat else 'cmpl'}-{request_id}"
        self._created = created
        self._model = model
        self._include_usage = include_usage
        kind = "chat.completion.chunk" if chat else "text_completion"
        self._head = b"data: " + _encode({"id": response_id, "object": kind, "created": created, "model": model})[:-1]
        before = b'"delta":{"content":"' if chat else b'"text":"'
        self._before = self._head + b',"choices":[{"index":0,' + before
        if chat:
            self._after = b'"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
        else:
            rest = {"finish_reason": None, "stop_reason": None, "prompt_token_ids": None, "token_ids": None}
            self._after = b'","logprobs":null,' + _encode(rest)[1:] + b"]}\n\n"
        self._chat = chat

    def start(self) -> bytes:
        if not self._chat:
            return b""
        return self._head + (
            b',"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],'
            b'"prompt_token_ids":null,"prompt_text":null}\n\n'
        )

    def token(self, text: bytes) -> bytes:
        return self._before + text + self._after

    def end(self, text: bytes, generated: str, reason: str, usage: Usage) -> bytes:
        events = self._last_token(text, reason)
        return (events + self._usage(usage) if self._include_usage else events) + DONE

    def whole(self, generated: str, reason: str, usage: Usage) -> bytes:
        encode = chat_response if self._chat else completion_response
        return encode(self.id, self._created, self._model, generated, reason, usage)

    def failed(self, error: ApiError) -> bytes:
        return self.start() + b"data: %b\n\n" % error.body() + DONE

    def _last_token(self, text: bytes, reason: str) -> bytes:
        fields = b'"logprobs":null,"finish_reason":"%b","stop_reason":null,' % reason.encode()
        if self._chat:
            fields = b'"},' + fields
        else:
            fields = b'",' + fields + b'"prompt_token_ids":null,'
        end = b'"token_ids":null}]'
        if not self._include_usage:
            end += b',"system_fingerprint":"%b"' % FINGERPRINT.encode()
        return self._before + text + fields + end + b"}\n\n"

    def _usage(self, usage: Usage) -> bytes:
        fields = _usage_fields(usage, with_nulls=False)
        tail = _encode({"choices": [], "usage": fields, "system_fingerprint": FINGERPRINT})
        return self._head + b"," + tail[1:] + b"\n\n"


def chat_response(response_id: str, created: int, model: str, text: str, reason: str, usage: Usage) -> bytes:
    message = {
        "role": "assistant",
        "content": text,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": None,
    }
    return _encode(
        {
            "id": response_id,
            "object": "chat.completion",
            "created": created,
            "model": model,
            "choices": [
                {
                    "index": 0,
                    "message": message,
                    "logprobs": None,
                    "finish_reason": reason,
                    "stop_reason": None,
                    "token_ids": None,
                    "routed_experts": None,
                }
            ],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": _usage_fields(usage, with_nulls=True),
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "prompt_text": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }
    )


def completion_response(response_id: str, created: int, model: str, text: str, reason: str, usage: Usage) -> bytes:
    return _encode(
        {
            "id": response_id,
            "object": "text_completion",
            "created": created,
            "model": model,
            "choices": [
                {
                    "index": 0,
                    "text": text,
                    "logprobs": None,
                    "finish_reason": reason,
                    "stop_reason": None,
                    "token_ids": None,
                    "prompt_logprobs": None,
                    "prompt_token_ids": None,
                    "routed_experts": None,
                }
            ],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": _usage_fields(usage, with_nulls=True),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }
    )
