"""What a chat template is rendered with: messages in the form that it expects, tools, variables."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any, Final

from warmroute.prompt.chat_template import CachedJsonDict, ChatTemplate, ContentFormat, Message, TemplateRejected

# Convert a request's messages to the form that a chat template expects. Follows vLLM 0.32 (renderers/chat_utils.py).
#
# Content becomes one string (its text parts joined by newlines) or a list of parts, depending on the template.
# Arguments of tool calls become objects. Other fields of a message are dropped.
#
# Only the engine knows how many tokens a picture, sound or video takes. Each is replaced by a mark with a hash of its
# content, so that the tokenizer knows where the certain part of the prompt ends.

BILLING_HEADER: Final = "x-anthropic-billing-header"
_TEXT_FIELDS: Final = {
    "text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking",
}  # fmt: skip
_MEDIA_PARTS: Final = frozenset((
    "image_url", "input_image", "image_embeds", "audio_url", "input_audio", "audio_embeds", "video_url", "video_embeds",
))  # fmt: skip
_KNOWN_PART_FIELDS: Final = frozenset((
    "audio_embeds", "audio_url", "closed", "data", "file", "image_embeds", "image_pil", "image_url", "input_audio",
    "name", "prompt_cache_breakpoint", "refusal", "text", "thinking", "type", "uuid", "video_embeds", "video_url",
))  # fmt: skip
MEDIA_MARK: Final = f"\ue0f0warmroute-media-{token_hex(8)}:"
"""Start of the mark for a picture, sound or video; `i`, `a` or `v` and 32 hexadecimal digits follow. No vocabulary and
no template contains it. It is random in each process, so that no client can write it into a text.
"""
MEDIA_MARK_LENGTH: Final = len(MEDIA_MARK) + 33
_MODALITIES: Final = {"i": "image", "a": "audio", "v": "video"}


class UnsupportedRequest(Exception):
    """The router cannot tell which tokens the engine will make of this request.

    The message says why. It never contains what a user typed.
    """


def template_message(message: Any, format: ContentFormat, sort_tool_calls: bool = True) -> Message:
    """Convert one message. Raises UnsupportedRequest.

    `sort_tool_calls`: put the fields of tool calls into the order of vLLM's types, as its chat endpoint does.
    """
    if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
        raise UnsupportedRequest("a message has no role")
    content = message.get("content")
    if type(content) is str and format == "string" and role != "system":
        result: Message = {"role": role, "content": content}  # nearly all messages
    else:
        result = {"role": role, "content": _content(content, role, format)}
    if role == "assistant":
        _add_tool_calls_and_reasoning(result, message, sort_tool_calls)
    elif role == "tool":
        if "tool_call_id" in message:
            result["tool_call_id"] = message["tool_call_id"]
        if isinstance(result["content"], list):
            result["content"] = _joined_if_text(result["content"])
    for name in ("name", "task"):
        if isinstance(value := message.get(name), str):
            result[name] = value
    if role == "developer":
        result["tools"] = message.get("tools")
    return result


def _content(content: Any, role: str, format: ContentFormat) -> str | list[dict[str, Any]]:
    parts: Iterable[Any]
    if content is None:
        parts = []
    elif isinstance(content, str):
        parts = [{"type": "text", "text": content}]
    elif isinstance(content, list):
        parts = content
    else:
        raise UnsupportedRequest("a message's content is neither text nor a list of parts")
    if role == "system":
        parts = _without_billing_header(parts)
    if format == "openai":
        return [converted for part in parts if (converted := _part(part)) is not None]
    texts = [text for part in parts if (text := _text(part))]
    # vLLM puts its placeholders for media first
    marks = [text for text in texts if text.startswith(MEDIA_MARK)]
    return "\n".join(marks + [text for text in texts if not text.startswith(MEDIA_MARK)] if marks else texts)


def _kind(part: dict[str, Any]) -> str:
    kind, uuid = part.get("type"), part.get("uuid")
    if isinstance(kind, str) and uuid is None:
        return kind
    for media in (*_MEDIA_PARTS, "tool_reference"):
        if media in part:
            return media
    raise UnsupportedRequest("a content part has no type")


def _text(part: Any) -> str | None:
    """Return the part's text, None where the part is dropped."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise UnsupportedRequest("a content part is neither text nor an object")
    kind = _kind(part)
    if (field := _TEXT_FIELDS.get(kind)) is not None:
        text = part.get(field)
        if text is not None and not isinstance(text, str):
            raise UnsupportedRequest("a text part has no text")
        return text
    if kind in _MEDIA_PARTS:
        return media_mark(part)
    if kind == "tool_reference" and isinstance(name := part.get("name"), str):
        return name
    raise UnsupportedRequest("a content part has an unsupported type")


def _part(part: Any) -> dict[str, Any] | None:
    """Convert a part for a template that expects parts."""
    text = _text(part)
    if isinstance(part, str):
        return {"type": "text", "text": text}
    if text is None:
        if _kind(part) in ("text", "refusal"):
            return None
        raise UnsupportedRequest("a text part has no text")
    if _kind(part) == "tool_reference":
        return {"type": "tool_reference", "name": text}
    return {"type": "text", "text": text, **{k: v for k, v in part.items() if k not in _KNOWN_PART_FIELDS}}


def media_mark(part: dict[str, Any]) -> str:
    # The whole part counts: the same picture with another level of detail has other tokens.
    content = json.dumps(part, sort_keys=True).encode()
    modality = "a" if "audio" in _kind(part) else "v" if "video" in _kind(part) else "i"
    return MEDIA_MARK + modality + hashlib.blake2b(content, digest_size=16).hexdigest()


def as_media_parts(messages: Sequence[Message]) -> list[Message]:
    """Replace the marks by parts of type image, audio or video, as a template that expects parts gets them."""
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
    """Drop the line in which Claude Code sends a value that changes with every request, as vLLM does."""
    kept: list[Any] = []
    for part in parts:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if isinstance(part, dict) and part.get("type") != "text":
            text = None
        if not isinstance(text, str) or not text.startswith(BILLING_HEADER):
            kept.append(part)
        elif rest := text.partition("\n")[2]:
            kept.append(rest if isinstance(part, str) else {**part, "text": rest})
    return kept


def _joined_if_text(parts: list[Any]) -> str | list[Any]:
    if any(part.get("type") != "text" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _add_tool_calls_and_reasoning(result: Message, message: dict[str, Any], sort_fields: bool) -> None:
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise UnsupportedRequest("tool_calls is not a list")
        if calls:
            result["tool_calls"] = [_tool_call(call, sort_fields) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise UnsupportedRequest("reasoning is not text")
        result["reasoning"] = result["reasoning_content"] = reasoning


def _tool_call(call: Any, sort_fields: bool) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise UnsupportedRequest("a tool call is not a function call")
    if sort_fields:
        call, function = _with_first(call, ("id", "function", "type")), _with_first(function, ("arguments", "name"))
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _with_first(fields: dict[str, Any], first: tuple[str, ...]) -> dict[str, Any]:
    return {**{name: fields[name] for name in first if name in fields}, **fields}


def _arguments(arguments: Any) -> dict[str, Any]:
    """Return the arguments as an object, an empty one if they are not valid JSON, as vLLM does."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return {}
    return arguments if isinstance(arguments, dict) else {}


def tool_definitions(tools: Any) -> list[dict[str, Any]] | None:
    """Return tools as vLLM passes them to a template: its own fields in its own order. Raises UnsupportedRequest."""
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise UnsupportedRequest("tools is not a list")
    return [_tool_definition(tool) for tool in tools]


def _tool_definition(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UnsupportedRequest("a tool is not a function")
    fields = {name: function.get(name) for name in ("name", "description", "parameters")}
    if function.get("strict") is not None:
        fields["strict"] = function["strict"]
    outer, inner = tool.get("defer_loading"), function.get("defer_loading")
    if (inner := outer if inner is None else inner) is not None:
        fields["defer_loading"] = inner
    definition: dict[str, Any] = {"type": tool.get("type", "function"), "function": fields}
    if outer is not None:
        definition["defer_loading"] = outer
    return definition


# Everything that goes into rendering a chat besides its messages: the template, tools, documents and variables.
#
# Requests with equal contexts render equal messages to equal texts. Variables are combined as in vLLM 0.32.

_UNSET: Final = (None, "auto")
_NOT_FOR_THE_TEMPLATE: Final = frozenset(
    ["padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"]
)
_RESERVED_KWARGS: Final = frozenset(
    ["tools", "tokenize", "chat_template", "conversation", "self", "return_assistant_tokens_mask"]
)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The engine's start options that change prompts. The names are vLLM's."""

    chat_template: str = ""
    """Replaces the tokenizer's template: a template's text, or the name of one of the tokenizer's templates."""
    chat_template_content_format: ContentFormat | None = None
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    trust_request_chat_template: bool = False
    exclude_tools_when_tool_choice_none: bool = False
    max_model_len: int | None = None
    """The context window in tokens; None where it is unknown."""


class Templates:
    """A tokenizer's chat templates, compiled on first use."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str], engine: EngineOptions) -> None:
        self._sources = sources
        self._special_tokens = special_tokens
        self._engine = engine
        self._compiled: dict[str, ChatTemplate] = {}

    def choose(self, requested: str | None, has_tools: bool) -> ChatTemplate:
        """Raises UnsupportedRequest where there is no template, or it cannot be compiled."""
        named = requested or self._engine.chat_template or None
        if named is not None:
            source = self._sources.get(named, named) if set(self._sources) != {"default"} else named
        elif has_tools and "tool_use" in self._sources:
            source = self._sources["tool_use"]
        elif "default" in self._sources:
            source = self._sources["default"]
        else:
            raise UnsupportedRequest("the tokenizer has no chat template")
        if requested:
            return self._compile(source)
        if source not in self._compiled:
            self._compiled[source] = self._compile(source)
        return self._compiled[source]

    @property
    def disabled_reason(self) -> str:
        """Why one of the model's own templates is no longer used; empty if all are."""
        return next((one.disabled_reason for one in self._compiled.values() if one.disabled_reason), "")

    def _compile(self, source: str) -> ChatTemplate:
        try:
            return ChatTemplate(source, self._special_tokens)
        except TemplateRejected:
            raise UnsupportedRequest("the chat template cannot be compiled") from None


@dataclass(slots=True, eq=False)
class RenderContext:
    """Stays the same over a conversation. Built once, used by many requests."""

    template: ChatTemplate
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Any = None
    add_generation_prompt: bool = True
    continued_field: str = ""
    """The field of the last message that the model continues; empty where the model starts a new message."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    engine_format: ContentFormat | None = None
    """The content format that the engine was started with; None: it follows the template."""
    uses_model_template: bool = True
    """Whether the template is the model's. A request may bring its own."""

    @property
    def content_format(self) -> ContentFormat:
        return self.engine_format or self.template.content_format

    def with_one_tool(self) -> RenderContext:
        """Return the same context with only the first tool."""
        if self.tools is None or len(self.tools) <= 1:
            return self
        short = copy.copy(self)
        short.tools = self.tools[:1]
        return short

    def identity(self) -> tuple[Any, ...]:
        """Return a value that is equal for contexts that render equal messages to equal texts."""
        return (
            self.template.source,
            self.tools,
            self.documents,
            self.add_generation_prompt,
            self.continued_field,
            sorted(self.variables.items()),
            self.content_format,
        )

    def text_message(self, role: str, text: str) -> Message:
        """Return a message with this text, in the format that the template expects."""
        return {"role": role, "content": [{"type": "text", "text": text}] if self.content_format == "openai" else text}

    def render(self, messages: Sequence[Message], generation_prompt: bool | None = None) -> str:
        """`generation_prompt` overrides `add_generation_prompt`. Raises TemplateRejected."""
        messages = self.map_developer_role(messages)
        if not messages:
            raise TemplateRejected("the conversation is empty")
        options = {"tools": self.tools, "documents": self.documents, "variables": self.variables}
        if self.continued_field:
            if self.add_generation_prompt:
                raise TemplateRejected("continue_final_message and add_generation_prompt exclude each other")
            return self.template.render_continued(messages, self.continued_field, **options)
        add = self.add_generation_prompt if generation_prompt is None else generation_prompt
        return self.template.render(messages, add_generation_prompt=add, **options)

    def map_developer_role(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Turn developer messages into one system message at the front, if the template does not know that role."""
        if self.template.supports_developer_role or all(message["role"] != "developer" for message in messages):
            return messages
        as_system = [
            {k: "system" if k == "role" else v for k, v in message.items() if k != "tools"}
            if message["role"] == "developer"
            else message
            for message in messages
        ]
        if all(message["role"] != "system" for message in as_system[1:]):
            return as_system
        texts = [_content_text(message.get("content", "")) for message in as_system if message["role"] == "system"]
        others = [message for message in as_system if message["role"] != "system"]
        return [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *others]


def _content_text(content: Any) -> str:
    if not isinstance(content, list):
        return content or ""
    return "\n".join(part["text"] for part in content if "text" in part)


def render_context(fields: Mapping[str, Any], templates: Templates, engine: EngineOptions) -> RenderContext:
    """Build the context from the fields of a chat request. Raises UnsupportedRequest."""
    tools = tool_definitions(fields.get("tools"))
    if fields.get("tool_choice") == "none" and engine.exclude_tools_when_tool_choice_none:
        tools = None
    requested = fields.get("chat_template")
    if requested is not None and not (engine.trust_request_chat_template and isinstance(requested, str)):
        raise UnsupportedRequest("the request brings its own chat template")
    template = templates.choose(requested, tools is not None)
    variables = _variables(fields, engine)
    add_generation_prompt = variables.pop("add_generation_prompt", False)
    continues = variables.pop("continue_final_message", False)
    documents = variables.pop("documents", None)
    return RenderContext(
        template,
        None if tools is None else [CachedJsonDict(tool) for tool in tools],
        documents,
        bool(add_generation_prompt),
        continues if isinstance(continues, str) else "content" if continues else "",
        {name: value for name, value in variables.items() if name in template.variables},
        engine.chat_template_content_format,
        requested is None,
    )


def _variables(fields: Mapping[str, Any], engine: EngineOptions) -> dict[str, Any]:
    kwargs = fields.get("chat_template_kwargs") or {}
    if not isinstance(kwargs, dict) or kwargs.keys() & _RESERVED_KWARGS:
        raise UnsupportedRequest("chat_template_kwargs contains a reserved name")
    effort = fields.get("reasoning_effort")
    overrides: dict[str, Any] = {
        "add_generation_prompt": fields.get("add_generation_prompt", True),
        "continue_final_message": fields.get("continue_final_message", False),
        "documents": fields.get("documents"),
        "reasoning_effort": effort,
    }
    if effort is not None and "enable_thinking" not in kwargs:
        overrides["enable_thinking"] = effort != "none"
    merged = {**kwargs, **{name: value for name, value in overrides.items() if value not in _UNSET}}
    merged = {name: value for name, value in merged.items() if value not in _UNSET}
    # The request's values win over the engine's defaults; unset ones do not count, or `null` would switch a default
    # off.
    merged = {**engine.default_chat_template_kwargs, **merged}
    return {name: value for name, value in merged.items() if name not in _NOT_FOR_THE_TEMPLATE}
