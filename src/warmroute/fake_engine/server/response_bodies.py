"""The shapes of vLLM 0.32's answers, field by field in its order (shared/data/vllm-0.32 has recorded ones).

What is the same for every event of a stream is written once; an event is that, the token's text, and an end.
"""

from __future__ import annotations

from typing import Any

import msgspec

FINGERPRINT = "vllm-0.32.0-warmroute-sim"
DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.encode


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    created_cache_tokens: int | None
    """Tokens of full blocks of the prompt that were not cached; only chat says so."""


def _usage(usage: Usage, whole: bool) -> dict[str, Any]:
    """`whole` answers name what they do not know as null; streams leave it out."""
    details: dict[str, Any] = {"cached_tokens": usage.cached_tokens}
    if whole or usage.created_cache_tokens is not None:
        details["created_cache_tokens"] = usage.created_cache_tokens
    if whole:
        details["multimodal_tokens"] = None
    fields: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "completion_tokens": usage.completion_tokens,
        "prompt_tokens_details": details,
    }
    if whole:
        fields["completion_tokens_details"] = None
    return fields


def json_text(text: str) -> bytes:
    """A string as it stands within JSON quotes."""
    return _encode(text)[1:-1]


class StreamForm:
    """The events of one stream."""

    def __init__(self, chat: bool, answer_id: str, created: int, model: str) -> None:
        kind = "chat.completion.chunk" if chat else "text_completion"
        self._head = b"data: " + _encode({"id": answer_id, "object": kind, "created": created, "model": model})[:-1]
        before = b'"delta":{"content":"' if chat else b'"text":"'
        self._before = self._head + b',"choices":[{"index":0,' + before
        if chat:
            self._after = b'"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
        else:
            rest = {"finish_reason": None, "stop_reason": None, "prompt_token_ids": None, "token_ids": None}
            self._after = b'","logprobs":null,' + _encode(rest)[1:] + b"]}\n\n"
        self._chat = chat

    def opening(self) -> bytes:
        """What comes with the first token, before it."""
        if not self._chat:
            return b""
        return self._head + (
            b',"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],'
            b'"prompt_token_ids":null,"prompt_text":null}\n\n'
        )

    def token(self, text: bytes) -> bytes:
        return self._before + text + self._after

    def last_token(self, text: bytes, reason: str, usage_follows: bool) -> bytes:
        fields = b'"logprobs":null,"finish_reason":"%b","stop_reason":null,' % reason.encode()
        if self._chat:
            fields = b'"},' + fields
        else:
            fields = b'",' + fields + b'"prompt_token_ids":null,'
        end = b'"token_ids":null}]'
        if not usage_follows:
            end += b',"system_fingerprint":"%b"' % FINGERPRINT.encode()
        return self._before + text + fields + end + b"}\n\n"

    def usage(self, usage: Usage) -> bytes:
        tail = _encode({"choices": [], "usage": _usage(usage, False), "system_fingerprint": FINGERPRINT})
        return self._head + b"," + tail[1:] + b"\n\n"


def whole_chat(answer_id: str, created: int, model: str, text: str, reason: str, usage: Usage) -> bytes:
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
            "id": answer_id,
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
            "usage": _usage(usage, True),
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "prompt_text": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }
    )


def whole_completion(answer_id: str, created: int, model: str, text: str, reason: str, usage: Usage) -> bytes:
    return _encode(
        {
            "id": answer_id,
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
            "usage": _usage(usage, True),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }
    )
