"""The text of a request body in parts: system messages, tools, other messages, in the order that most templates have.

The parts are what the client sent, not what the chat template makes of them, so that a position in them means something
to the client's author.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal, NamedTuple

import msgspec

from warmroute._kernel import Outline
from warmroute.prompt.message_spans import decode_json
from warmroute.prompt.request_body import RequestBody, read_request_body
from warmroute.prompt.template_messages import UnsupportedRequest

MAX_CHARACTERS: Final = 96 * 1024
"""The rest of a longer prompt is not compared."""
MAX_VALUE_BYTES: Final = 1 << 20
"""A larger value of the body is not parsed."""
SYSTEM_ROLES: Final = ("system", "developer")

PartKind = Literal["message", "tool", "system", "instructions", "prompt"]


class Part(NamedTuple):
    kind: PartKind
    number: int
    """Position in the list of messages or tools."""
    role: str
    """Role of a message; empty for other parts."""
    text: str


class PromptParts(NamedTuple):
    parts: list[Part]
    is_cut: bool
    """Whether the prompt has more text than the parts."""


def read_parts(path: bytes, body: bytes) -> PromptParts | None:
    """Return None for a body without a prompt that can be read. Takes up to a few milliseconds for a large one."""
    request = read_request_body(path, body)
    if request is None:
        return None
    parts: list[Part] = []
    left = MAX_CHARACTERS
    try:
        for part in _parts(request):
            if len(part.text) >= left:
                parts.append(part._replace(text=part.text[:left]))
                return PromptParts(parts, True)
            left -= len(part.text)
            parts.append(part)
    except UnsupportedRequest:
        return PromptParts(parts, True) if parts else None
    return PromptParts(parts, False) if parts else None


def _parts(request: RequestBody) -> Iterator[Part]:
    fields = request.fields
    if "system" in fields:
        yield Part("system", 0, "", _content(_value(request, "system")))
    if "instructions" in fields:
        yield Part("instructions", 0, "", _content(_value(request, "instructions")))
    messages = _messages(request)
    first: Part | None = None
    for first in messages:
        if first.role not in SYSTEM_ROLES:
            break
        yield first
        first = None
    tools = _value(request, "tools")
    if isinstance(tools, list):
        for number, tool in enumerate(tools):
            yield Part("tool", number, "", _json(tool))
    if first is not None:
        yield first
        yield from messages
    if "messages" not in fields:
        for name in ("prompt", "input"):
            yield from _prompt(_value(request, name))


def _messages(request: RequestBody) -> Iterator[Part]:
    if "messages" not in request.fields:
        return
    outline: Outline = request.outline
    spans = memoryview(outline.message_spans).cast("I")
    for number in range(len(spans) // 2):
        start, end = spans[2 * number], spans[2 * number + 1]
        if end - start > MAX_VALUE_BYTES:
            raise UnsupportedRequest("a message is too large")
        yield _message(number, decode_json(request.body, start, end))


def _message(number: int, message: Any) -> Part:
    if not isinstance(message, dict):
        return Part("message", number, "", _json(message))
    text = _content(message.get("content"))
    for name in ("reasoning_content", "tool_calls", "tool_call_id"):
        if message.get(name):
            text += f"\n{_content(message[name])}"
    return Part("message", number, str(message.get("role", ""))[:20], text)


def _prompt(value: Any) -> Iterator[Part]:
    """Yield a completion's first prompt, or the items of a response's input."""
    if isinstance(value, str):
        yield Part("prompt", 0, "", value)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for number, item in enumerate(value):
            yield _message(number, item)
    elif isinstance(value, list) and value and isinstance(value[0], str):
        yield Part("prompt", 0, "", value[0])


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [one.get("text") if isinstance(one, dict) else None for one in content]
        return "\n".join(
            [text if isinstance(text, str) else _json(one) for text, one in zip(texts, content, strict=True)]
        )
    return "" if content is None else _json(content)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode("utf-8", "replace")[:MAX_CHARACTERS]


def _value(request: RequestBody, name: str) -> Any:
    span = request.fields.get(name)
    if span is None:
        return None
    if span[1] - span[0] > MAX_VALUE_BYTES:
        raise UnsupportedRequest("a value is too large")
    return decode_json(request.body, *span)
