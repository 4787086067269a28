"""A request's messages as a chat template gets them. Follows vLLM 0.32 (renderers/chat_utils.py).

Content becomes one string, its text parts joined by newlines, or a list of parts, as the template wants it. Arguments
of tool calls become objects. What else a client sends in a message is left out.

Pictures, sound and video become tokens that only the engine can count. In their place stands a mark with the hash of
their content, which tells the reader how far the prompt is sure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

from warmroute.prompt.chat_template import Message
from warmroute.prompt.content_format import ContentFormat

_BILLING_HEADER: Final = "x-anthropic-billing-header"
_TEXT_OF_PART: Final = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_MEDIA_PARTS: Final = frozenset(
    [
        "image_url",
        "input_image",
        "image_embeds",
        "audio_url",
        "input_audio",
        "audio_embeds",
        "video_url",
        "video_embeds",
    ]
)
_KNOWN_PART_FIELDS: Final = frozenset(
    [
        "audio_embeds",
        "audio_url",
        "closed",
        "data",
        "file",
        "image_embeds",
        "image_pil",
        "image_url",
        "input_audio",
        "name",
        "prompt_cache_breakpoint",
        "refusal",
        "text",
        "thinking",
        "type",
        "uuid",
        "video_embeds",
        "video_url",
    ]
)
MEDIA_MARK: Final = "\ue0f0warmroute-media:"
"""Begins the mark of a picture; `i`, `a` or `v` and 32 hexadecimal digits follow. In no vocabulary, in no template."""
MEDIA_MARK_LENGTH: Final = len(MEDIA_MARK) + 33
_MODALITIES: Final = {"i": "image", "a": "audio", "v": "video"}


class NotFollowed(Exception):
    """The request has something that is not followed here: its tokens are not known. The message says what."""


def conversation_message(message: Any, format: ContentFormat, as_typed: bool = True) -> Message:
    """`as_typed`: fields of tool calls are put in the order of vLLM's types, as its chat endpoint does. Raises
    NotFollowed.
    """
    if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
        raise NotFollowed("a message without a role")
    content = message.get("content")
    if type(content) is str and format == "string" and role != "system":
        made: Message = {"role": role, "content": content}  # nearly all of them
    else:
        made = {"role": role, "content": _content(content, role, format)}
    if role == "assistant":
        _add_what_it_did(made, message, as_typed)
    elif role == "tool":
        if "tool_call_id" in message:
            made["tool_call_id"] = message["tool_call_id"]
        if isinstance(made["content"], list):
            made["content"] = _joined_if_text(made["content"])
    for name in ("name", "task"):
        if isinstance(value := message.get(name), str):
            made[name] = value
    if role == "developer":
        made["tools"] = message.get("tools")
    return made


def _content(content: Any, role: str, format: ContentFormat) -> str | list[dict[str, Any]]:
    parts: Iterable[Any]
    if content is None:
        parts = []
    elif isinstance(content, str):
        parts = [{"type": "text", "text": content}]
    elif isinstance(content, list):
        parts = content
    else:
        raise NotFollowed("content that is neither text nor parts")
    if role == "system":
        parts = _without_billing_header(parts)
    if format == "openai":
        return [made for part in parts if (made := _part(part)) is not None]
    texts = [text for part in parts if (text := _text(part))]
    # marks of media go first, as vLLM puts its placeholders
    marks = [text for text in texts if text.startswith(MEDIA_MARK)]
    return "\n".join(marks + [text for text in texts if not text.startswith(MEDIA_MARK)] if marks else texts)


def _kind(part: dict[str, Any]) -> str:
    kind, uuid = part.get("type"), part.get("uuid")
    if isinstance(kind, str) and uuid is None:
        return kind
    for media in (*_MEDIA_PARTS, "tool_reference"):
        if media in part:
            return media
    raise NotFollowed("a part without a type")


def _text(part: Any) -> str | None:
    """A part as text; None where it is left out."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise NotFollowed("a part that is neither text nor an object")
    kind = _kind(part)
    if (field := _TEXT_OF_PART.get(kind)) is not None:
        text = part.get(field)
        if text is not None and not isinstance(text, str):
            raise NotFollowed("a text part without text")
        return text
    if kind in _MEDIA_PARTS:
        return media_mark(part)
    if kind == "tool_reference" and isinstance(name := part.get("name"), str):
        return name
    raise NotFollowed(f"a part of type {kind[:40]!r}")


def _part(part: Any) -> dict[str, Any] | None:
    """A part as a template that takes parts gets it."""
    text = _text(part)
    if isinstance(part, str):
        return {"type": "text", "text": text}
    if text is None:
        if _kind(part) in ("text", "refusal"):
            return None
        raise NotFollowed("a text part without text")
    if _kind(part) == "tool_reference":
        return {"type": "tool_reference", "name": text}
    return {"type": "text", "text": text, **{k: v for k, v in part.items() if k not in _KNOWN_PART_FIELDS}}


def media_mark(part: dict[str, Any]) -> str:
    """Stands for a picture, sound or video."""
    content = json.dumps(part, sort_keys=True).encode()
    modality = "a" if "audio" in _kind(part) else "v" if "video" in _kind(part) else "i"
    return MEDIA_MARK + modality + hashlib.blake2b(content, digest_size=16).hexdigest()


def as_media_parts(messages: Sequence[Message]) -> list[Message]:
    """The conversation with parts of media in place of their marks, as a template that takes parts gets it."""
    return [
        {**message, "content": [_as_media_part(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _as_media_part(part: dict[str, Any]) -> dict[str, Any]:
    text = part.get("text")
    if not isinstance(text, str) or not text.startswith(MEDIA_MARK) or len(text) != MEDIA_MARK_LENGTH:
        return part
    return {**{k: v for k, v in part.items() if k != "text"}, "type": _MODALITIES[text[len(MEDIA_MARK)]]}


def _without_billing_header(parts: Iterable[Any]) -> list[Any]:
    """Claude Code's first line changes with every request; vLLM drops it."""
    kept: list[Any] = []
    for part in parts:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if isinstance(part, dict) and part.get("type") != "text":
            text = None
        if not isinstance(text, str) or not text.startswith(_BILLING_HEADER):
            kept.append(part)
        elif rest := text.partition("\n")[2]:
            kept.append(rest if isinstance(part, str) else {**part, "text": rest})
    return kept


def _joined_if_text(parts: list[Any]) -> str | list[Any]:
    if any(part.get("type") != "text" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _add_what_it_did(made: Message, message: dict[str, Any], as_typed: bool) -> None:
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise NotFollowed("tool calls that are no list")
        if calls:
            made["tool_calls"] = [_tool_call(call, as_typed) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise NotFollowed("reasoning that is no text")
        made["reasoning"] = made["reasoning_content"] = reasoning


def _tool_call(call: Any, as_typed: bool) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise NotFollowed("a tool call that calls no function")
    if as_typed:
        call, function = _in_order(call, ("id", "function", "type")), _in_order(function, ("arguments", "name"))
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _in_order(fields: dict[str, Any], first: tuple[str, ...]) -> dict[str, Any]:
    return {**{name: fields[name] for name in first if name in fields}, **fields}


def _arguments(arguments: Any) -> dict[str, Any]:
    """An object; what is none becomes an empty one, so that the conversation can go on."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return {}
    return arguments if isinstance(arguments, dict) else {}


def tool_definitions(tools: Any) -> list[dict[str, Any]] | None:
    """Tools as vLLM hands them to a template: its own fields in its own order. Raises NotFollowed."""
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise NotFollowed("tools that are no list")
    return [_tool_definition(tool) for tool in tools]


def _tool_definition(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise NotFollowed("a tool that is no function")
    made = {name: function.get(name) for name in ("name", "description", "parameters")}
    if function.get("strict") is not None:
        made["strict"] = function["strict"]
    late = tool.get("defer_loading")
    inner = function.get("defer_loading")
    if (inner := late if inner is None else inner) is not None:
        made["defer_loading"] = inner
    definition: dict[str, Any] = {"type": tool.get("type", "function"), "function": made}
    if late is not None:
        definition["defer_loading"] = late
    return definition
