"""Everything that goes into rendering a chat besides its messages: the template, tools, documents and variables.

Requests with equal contexts render equal messages to equal texts. Variables are combined as in vLLM 0.32.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from warmroute.prompt.chat_template import ChatTemplate, Message, TemplateRejected
from warmroute.prompt.content_format import ContentFormat
from warmroute.prompt.template_environment import CachedJsonDict
from warmroute.prompt.template_messages import UnsupportedRequest, tool_definitions

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
    """In tokens; None where it is unknown."""


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
    """False where the request brought its own template."""

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
        """Equal for contexts that render equal messages to equal texts."""
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
        texts = [_text(message.get("content", "")) for message in as_system if message["role"] == "system"]
        others = [message for message in as_system if message["role"] != "system"]
        return [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *others]


def _text(content: Any) -> str:
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
    merged = {**engine.default_chat_template_kwargs, **merged}
    return {name: value for name, value in merged.items() if name not in _NOT_FOR_THE_TEMPLATE}
