"""The bodies of vLLM's APIs, in and out: OpenAI's completions, chats and responses, Anthropic's messages, errors."""

from __future__ import annotations

import os
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
from msgspec import Meta, Struct

# Error responses with the texts of vLLM 0.32.


class ApiError(Exception):
    """A request whose response is an error."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param

    def body(self) -> bytes:
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}
        return msgspec.json.encode({"error": error})


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, "BadRequestError", message, param)


def bad_body(detail: str) -> ApiError:
    """vLLM's error for an invalid body. Plain FastAPI would return 422."""
    return ApiError(400, "Bad Request", detail)


def unknown_model(model: str) -> ApiError:
    return ApiError(404, "NotFoundError", f"The model `{model}` does not exist.", "model")


def unknown_response(response_id: str) -> ApiError:
    return ApiError(404, "invalid_request_error", f"Response with id '{response_id}' not found.", "response_id")


def too_long(limit: int, prompt_tokens: int, output_tokens: int) -> ApiError:
    total = prompt_tokens + output_tokens
    return bad_request(
        f"This model's maximum context length is {limit} tokens. However, you requested {output_tokens} output tokens "
        f"and your prompt contains {prompt_tokens} input tokens, for a total of {total} tokens. Please reduce the "
        f"length of the input prompt or the number of requested output tokens. "
        f"(parameter=input_tokens, value={prompt_tokens})",
        "input_tokens",
    )


def internal_error() -> ApiError:
    """vLLM's error for a KV cache that it could not load."""
    return ApiError(500, "InternalServerError", "Internal server error")


def engine_failed() -> ApiError:
    return ApiError(
        500, "InternalServerError", "EngineCore encountered an issue. See stack trace (above) for the root cause."
    )


def overloaded() -> ApiError:
    return ApiError(503, "ServiceUnavailableError", "The engine is overloaded; try again later.")


# Request bodies of the OpenAI API. The simulated engine ignores fields that are not listed here.

MaxTokens = Annotated[int, Meta(ge=1)]


class StreamOptions(Struct):
    include_usage: bool = False


class GenerationRequest(Struct, kw_only=True):
    """The common fields of chat and completion requests."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: MaxTokens | None = None
    ignore_eos: bool = False
    n: int | None = 1
    seed: int | None = None
    priority: int = 0
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    max_completion_tokens: MaxTokens | None = None
    add_generation_prompt: bool = True


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: str | list[Any]
    """A text, a list of token ids, or a list of texts or token lists."""
    max_tokens: MaxTokens | None = 16


class TokenizeRequest(Struct):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = True


class DetokenizeRequest(Struct):
    tokens: list[int]
    model: str | None = None


class FetchRequest(Struct):
    """Asks for the KV cache of a request."""

    request_id: str


Body = TypeVar("Body", bound=Struct)


def decode_body(body: bytes, kind: type[Body]) -> Body:
    """Raises ApiError 400."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_body(f"The request body is invalid: {error}") from None


def check_messages(messages: list[dict[str, Any]]) -> None:
    """Raises ApiError 400 for a message that no template can render."""
    for number, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise bad_body(f"messages[{number}].role is missing or not a string")
        if not isinstance(message.get("content"), str | list | None):
            raise bad_body(f"messages[{number}].content is neither a string nor a list of parts")


# Response bodies with vLLM 0.32's fields in its order (tests/fixtures/vllm-0.32 has recorded ones).
#
# The parts that all events of a stream share are encoded once. An event is these parts around the token's text.

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


# Anthropic's messages API (`/v1/messages` and its token counts). Every response is one block of text.
#
# `usage.input_tokens` counts the tokens that were not cached, as Anthropic defines it, with the cached ones beside it.

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


def messages_chat_messages(body: CountTokensRequest) -> list[dict[str, Any]]:
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


def messages_chat_tools(body: CountTokensRequest) -> list[dict[str, Any]] | None:
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
            + _event("message_delta", {"delta": delta, "usage": _messages_usage_fields(usage)})
            + _event("message_stop", {})
        )

    def whole(self, generated: str, reason: str, usage: Usage) -> bytes:
        content = [{"type": "text", "text": generated}]
        message = self._message(content, _STOP_REASONS.get(reason), _messages_usage_fields(usage))
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


def _messages_usage_fields(usage: Usage) -> dict[str, int]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


# OpenAI's responses API (`/v1/responses`), with vLLM's events. Every response is one message of text.

_INCOMPLETE = {"length": "max_output_tokens", "abort": "abort"}
"""By why the generation ended: what makes the response incomplete."""


class ResponsesRequest(GenerationRequest, kw_only=True):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: MaxTokens | None = None
    tools: list[dict[str, Any]] | None = None
    previous_response_id: str | None = None


def responses_chat_messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    """Return the messages that the template gets. Raises ApiError."""
    if body.previous_response_id is not None:
        raise unknown_response(body.previous_response_id)
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
            raise bad_body(f"input[{number}] has an unknown type, or no role")
    return messages


def responses_chat_tools(body: ResponsesRequest) -> list[dict[str, Any]] | None:
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
            "usage": _responses_usage_fields(usage) if usage is not None else None,
            "user": None,
            "kv_transfer_params": None,
        }


def _status(reason: str) -> str:
    return "incomplete" if reason in _INCOMPLETE else "completed"


def _part(generated: str) -> dict[str, Any]:
    return {"type": "output_text", "text": generated, "annotations": [], "logprobs": None}


def _responses_usage_fields(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
