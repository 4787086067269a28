"""A request body with the positions of its fields. A field's value is parsed only when it is read.

The C scan finds the positions (the outline) in the same pass in which it reads the fields for routing.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any, Final

from warmroute._kernel import Outline, outline_body
from warmroute.prompt.body_fields import MAX_PARSED_BYTES
from warmroute.prompt.message_spans import decode_json
from warmroute.prompt.prompt import Prompt
from warmroute.prompt.template_messages import UnsupportedRequest

_MAX_OUTPUT_FIELDS: Final = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_DEFAULT_COMPLETION_TOKENS: Final = 16
"""The maximum output of a completion that does not set max_tokens."""
NO_TOKENIZER: Final = "no tokenizer for this model"


class Endpoint(Enum):
    CHAT = b"/v1/chat/completions"
    COMPLETION = b"/v1/completions"
    RESPONSES = b"/v1/responses"
    MESSAGES = b"/v1/messages"
    EMBEDDING = b"/v1/embeddings"

    __hash__ = object.__hash__  # Enum's own is slow


_ENDPOINTS: Final = {endpoint.value: endpoint for endpoint in Endpoint}
_COMPLETION: Final = Endpoint.COMPLETION
"""Looking up a member of an Enum is slow."""


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
        return None if span is None else decode_json(self.body[span[0] : span[1]])

    def values(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: self.value(name) for name in names if name in self.fields}

    def cache_salt(self) -> str:
        return cache_salt(self.endpoint, self.body, self.outline)

    def parse_options(self) -> tuple[str, int | None, int, str, bool]:
        """Return model, maximum output tokens, priority, cache salt, and whether the response streams.

        Outline.about returns the same without a JSON parser, or None where it cannot decide. Invalid values are
        ignored: the engine will refuse them.
        """
        fields = self.fields
        model, priority, salt, stream = "", 0, "", False
        max_output_tokens = None
        if self.endpoint is _COMPLETION and "max_tokens" not in fields:
            max_output_tokens = _DEFAULT_COMPLETION_TOKENS
        try:
            if "model" in fields:
                model = _text(self.value("model"))
            if "cache_salt" in fields:
                salt = _text(self.value("cache_salt"))
            if "stream" in fields:
                stream = self.value("stream") is True
            if "priority" in fields and type(value := self.value("priority")) is int:
                priority = value
            for name in _MAX_OUTPUT_FIELDS:
                if name in fields and type(value := self.value(name)) is int:
                    max_output_tokens = value
                    break
        except UnsupportedRequest:
            return "", max_output_tokens, 0, "", False
        return model, max_output_tokens, priority, salt, stream

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


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def read_request_body(path: bytes, body: bytes, outline: Outline | None = None) -> RequestBody | None:
    """Return None for a path without prompts, or for a body that the scan cannot read."""
    endpoint = _ENDPOINTS.get(path)
    if endpoint is None:
        return None
    if outline is None:
        outline = outline_body(body)
    return None if outline is None else RequestBody(endpoint, body, outline)


def cache_salt(endpoint: Endpoint, body: bytes, outline: Outline) -> str:
    if not outline.has_cache_salt:
        return ""
    found = outline.parameters(None)
    return RequestBody(endpoint, body, outline).parse_options()[3] if found is None else found[3]


def text_prompt(path: bytes, body: bytes, outline: Outline | None = None) -> Prompt | None:
    """Return the prompt for text matching, without a tokenizer: `tokens` are bytes of the prompt's text.

    Return None in the same cases as `read_request_body`.
    """
    endpoint = _ENDPOINTS.get(path)
    if endpoint is None:
        return None
    if outline is None:
        outline = outline_body(body)
        if outline is None:
            return None
    return Prompt(outline.text_as_tokens(), 0, False, NO_TOKENIZER, (), cache_salt(endpoint, body, outline))


def generation_options(path: bytes, body: bytes, outline: Outline | None) -> tuple[int | None, int, bool]:
    """Return maximum output tokens (None: not set), the priority as vLLM reads it, and whether the response streams.

    A request to a path without prompts counts as streaming.
    """
    endpoint = _ENDPOINTS.get(path)
    if endpoint is None:
        return None, 0, True
    if outline is None:
        outline = outline_body(body) if len(body) <= MAX_PARSED_BYTES else None
        if outline is None:
            return None, 0, True
    found = outline.parameters(_DEFAULT_COMPLETION_TOKENS if endpoint is _COMPLETION else None)
    if found is None:
        found = RequestBody(endpoint, body, outline).parse_options()
    return found[1], found[2], found[4]
