"""A request body with the positions of its fields. A field's value is parsed only when it is read.

The C scan finds the positions (the outline) in the same pass in which it reads the fields for routing.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from enum import Enum
from typing import Any, Final

from warmroute._kernel import BadBody, Outline, outline_body
from warmroute.prompt.message_spans import decode_json
from warmroute.prompt.prompt import Prompt
from warmroute.prompt.prompt_lists import text_prompts
from warmroute.prompt.template_messages import UnsupportedRequest

_MAX_COMPLETION_TOKENS, _MAX_TOKENS, _MAX_OUTPUT_TOKENS = 1, 2, 4
"""Fields that limit the output, for Outline.parameters."""
_DEFAULT_COMPLETION_TOKENS: Final = 16
"""The maximum output of a completion that does not set max_tokens."""
_MAX_LIST_BYTES: Final = 1 << 20
"""The prompts of a longer list are matched as one text: to find where each one ends would take too long."""
NO_TOKENIZER: Final = "no tokenizer for this model"
_OPTIONS_OF_THE_PROMPT: Final = ("prompt_logprobs", "echo", "truncate_prompt_tokens", "truncation", "padding")
"""Fields that change how the engine uses its cache, or which tokens of the prompt it keeps."""


class Endpoint(Enum):
    CHAT = b"/v1/chat/completions"
    COMPLETION = b"/v1/completions"
    RESPONSES = b"/v1/responses"
    MESSAGES = b"/v1/messages"
    EMBEDDING = b"/v1/embeddings"

    __hash__ = object.__hash__  # Enum's own is slow


_PROMPT_LISTS: Final = {Endpoint.COMPLETION: "prompt", Endpoint.EMBEDDING: "input"}
"""The fields that may contain several prompts."""
_ENDPOINTS: Final = {endpoint.value: endpoint for endpoint in Endpoint}
_OUTPUT_LIMITS: Final[dict[bytes, tuple[int, int | None]]] = {
    Endpoint.CHAT.value: (_MAX_COMPLETION_TOKENS | _MAX_TOKENS, None),
    Endpoint.COMPLETION.value: (_MAX_TOKENS, _DEFAULT_COMPLETION_TOKENS),
    Endpoint.RESPONSES.value: (_MAX_OUTPUT_TOKENS, None),
    Endpoint.MESSAGES.value: (_MAX_TOKENS, None),
}
"""By path: the fields that limit the output, and the limit where there is no `max_tokens`."""
_NO_OUTPUT_LIMIT: Final = (0, None)


class RequestBody:
    __slots__ = ("body", "endpoint", "fields", "outline")

    def __init__(self, endpoint: Endpoint, body: bytes, outline: Outline) -> None:
        self.endpoint = endpoint
        self.body = body
        self.outline = outline
        self.fields = outline.fields
        """Start and end of each field's value."""

    def value(self, name: str) -> Any:
        """Return the field's value, None where the body has no such field. Raises UnsupportedRequest."""
        span = self.fields.get(name)
        return None if span is None else decode_json(self.body, *span)

    def values(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: self.value(name) for name in names if name in self.fields}

    def cache_salt(self) -> str:
        return self.outline.cache_salt

    def skips_cache(self) -> bool:
        """Return whether the engine computes the whole prompt whatever is cached, because it returns the logprobs of
        the prompt's tokens. Follows vLLM 0.32."""
        fields = self.fields
        if "prompt_logprobs" in fields and self.value("prompt_logprobs") is not None:
            return True
        if "echo" not in fields or not self.value("echo"):
            return False
        if self.endpoint is Endpoint.CHAT:
            return "top_logprobs" not in fields or self.value("top_logprobs") is not None
        return self.value("logprobs") is not None

    def may_be_truncated(self, token_count: int, max_model_len: int | None) -> bool:
        """Return whether the request asks the engine to truncate or pad a prompt of this many tokens."""
        fields = self.fields
        if not ("truncate_prompt_tokens" in fields or "truncation" in fields or "padding" in fields):
            return False
        values = self.values(("truncate_prompt_tokens", "truncation", "padding"))
        limit = values.get("truncate_prompt_tokens")
        if self.endpoint is Endpoint.RESPONSES and values.get("truncation", "disabled") != "disabled":
            limit = -1
        if limit == -1:
            return max_model_len is None or token_count >= max_model_len
        if values.get("padding") == "max_length":
            return True
        return limit is not None and (type(limit) is not int or token_count > limit)


def read_request_body(path: bytes, body: bytes, outline: Outline | None = None) -> RequestBody | None:
    """Return None for a path without prompts, or for a body that the scan cannot read."""
    endpoint = _ENDPOINTS.get(path)
    if endpoint is None:
        return None
    if outline is None:
        try:
            outline = outline_body(body)
        except BadBody:
            return None
    return RequestBody(endpoint, body, outline)


def has_prompt(path: bytes) -> bool:
    """Return whether requests to this path have a prompt that the router can read."""
    return path in _ENDPOINTS


def text_prompt(path: bytes, body: bytes, outline: Outline | None = None) -> Prompt | None:
    """Return the prompt for text matching, without a tokenizer: `tokens` are bytes of the prompt's text.

    Return None in the same cases as `read_request_body`.
    """
    endpoint = _ENDPOINTS.get(path)
    if endpoint is None:
        return None
    if outline is None:
        try:
            outline = outline_body(body)
        except BadBody:
            return None
    salt = outline.cache_salt
    if endpoint in _PROMPT_LISTS or outline.has_any(_OPTIONS_OF_THE_PROMPT):
        return text_prompt_of(RequestBody(endpoint, body, outline), NO_TOKENIZER, salt)
    return Prompt(outline.text_as_tokens(), 0, False, NO_TOKENIZER, (), salt)


def text_prompt_of(request: RequestBody, inexact_reason: str, salt: str) -> Prompt:
    """Return the prompt for text matching of any request."""
    prompt = None
    span = request.fields.get(_PROMPT_LISTS.get(request.endpoint, ""))
    if span is not None and span[1] - span[0] <= _MAX_LIST_BYTES:
        prompt = text_prompts(request.body, *span)
    if prompt is None:
        prompt = Prompt(request.outline.text_as_tokens(), 0, False)
    prompt.inexact_reason, prompt.cache_salt = inexact_reason, salt
    for other in prompt.others:
        other.cache_salt = salt
    with suppress(UnsupportedRequest):
        prompt.truncated = request.may_be_truncated(2 * prompt.token_count, None)  # there may be two bytes to a token
        prompt.skips_cache = request.skips_cache()
    return prompt


def generation_options(path: bytes, outline: Outline) -> tuple[int | None, int, bool]:
    """Return maximum output tokens (None: not set), the priority as vLLM reads it, and whether the response streams.

    A request to a path without prompts counts as streaming. Raises BadBody for a value of the wrong type.
    """
    max_output_tokens, priority, streams = outline.parameters(*_OUTPUT_LIMITS.get(path, _NO_OUTPUT_LIMIT))
    return max_output_tokens, priority, streams or path not in _ENDPOINTS
