"""What a chat request sets for its whole conversation: the template, its tools, documents and variables.

Two requests with equal settings render equal messages alike. Follows how vLLM 0.32 puts the template's variables
together.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from warmroute.prompt.chat_template import ChatTemplate, Message, Refused
from warmroute.prompt.content_format import ContentFormat
from warmroute.prompt.conversation import NotFollowed, tool_definitions
from warmroute.prompt.template_environment import WrittenOnce

_UNSET: Final = (None, "auto")
_NOT_FOR_THE_TEMPLATE: Final = frozenset(
    ["padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"]
)
_NOT_FOLLOWED: Final = frozenset(
    ["tools", "tokenize", "chat_template", "conversation", "self", "return_assistant_tokens_mask"]
)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How the engine was started, where that changes prompts. The names are vLLM's."""

    chat_template: str = ""
    """Instead of the tokenizer's own: the template's text, or the name of one of the tokenizer's."""
    chat_template_content_format: ContentFormat | None = None
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    trust_request_chat_template: bool = False
    exclude_tools_when_tool_choice_none: bool = False
    max_model_len: int | None = None
    """Tokens; None is unknown."""


class Templates:
    """A tokenizer's chat templates, compiled when they are first needed."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str], engine: EngineOptions) -> None:
        self._sources = sources
        self._special_tokens = special_tokens
        self._engine = engine
        self._compiled: dict[str, ChatTemplate] = {}

    def choose(self, requested: str | None, has_tools: bool) -> ChatTemplate:
        """Raises NotFollowed where there is none, or it is none."""
        wanted = requested or self._engine.chat_template or None
        if wanted is not None:
            source = self._sources.get(wanted, wanted) if set(self._sources) != {"default"} else wanted
        elif has_tools and "tool_use" in self._sources:
            source = self._sources["tool_use"]
        elif "default" in self._sources:
            source = self._sources["default"]
        else:
            raise NotFollowed("the tokenizer has no chat template")
        if requested:
            return self._compile(source)
        if source not in self._compiled:
            self._compiled[source] = self._compile(source)
        return self._compiled[source]

    def _compile(self, source: str) -> ChatTemplate:
        try:
            return ChatTemplate(source, self._special_tokens)
        except Refused:
            raise NotFollowed("the chat template cannot be compiled") from None


class ChatSetting:
    """What stays the same over a conversation. Made once, used by many requests."""

    def __init__(
        self,
        template: ChatTemplate,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Any = None,
        add_generation_prompt: bool = True,
        continues: str = "",
        variables: Mapping[str, Any] | None = None,
        format: ContentFormat | None = None,
        is_the_models_own: bool = True,
    ) -> None:
        self.template = template
        self.tools = tools
        self.documents = documents
        self.add_generation_prompt = add_generation_prompt
        self.continues = continues
        """The field of the last message that is to be continued; empty where a new message begins."""
        self.variables = variables or {}
        self.format: ContentFormat = format or template.content_format
        self.is_the_models_own = is_the_models_own
        """Whether the template is the model's, not the request's."""

    def with_one_tool(self) -> ChatSetting:
        """The same, with the first of its tools only."""
        if self.tools is None or len(self.tools) <= 1:
            return self
        short = copy.copy(self)
        short.tools = self.tools[:1]
        return short

    def identity(self) -> tuple[Any, ...]:
        """Equal for settings that render alike."""
        return (
            self.template.source,
            self.tools,
            self.documents,
            self.add_generation_prompt,
            self.continues,
            sorted(self.variables.items()),
            self.format,
        )

    def render(self, messages: Sequence[Message], generation_prompt: bool | None = None) -> str:
        """Raises Refused."""
        messages = self.for_template(messages)
        if not messages:
            raise Refused("an empty conversation")
        given = {"tools": self.tools, "documents": self.documents, "variables": self.variables}
        if self.continues:
            if self.add_generation_prompt:
                raise Refused("the last message cannot be continued and be followed by another")
            return self.template.render_open(messages, self.continues, **given)
        wanted = self.add_generation_prompt if generation_prompt is None else generation_prompt
        return self.template.render(messages, add_generation_prompt=wanted, **given)

    def for_template(self, messages: Sequence[Message]) -> Sequence[Message]:
        """A template that knows no developer gets its messages as the system's, all in one at the front."""
        if self.template.knows_developer or all(message["role"] != "developer" for message in messages):
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


def chat_setting(fields: Mapping[str, Any], templates: Templates, engine: EngineOptions) -> ChatSetting:
    """From the fields of a chat request. Raises NotFollowed."""
    tools = tool_definitions(fields.get("tools"))
    if fields.get("tool_choice") == "none" and engine.exclude_tools_when_tool_choice_none:
        tools = None
    requested = fields.get("chat_template")
    if requested is not None and not (engine.trust_request_chat_template and isinstance(requested, str)):
        raise NotFollowed("the request brings its own chat template")
    template = templates.choose(requested, tools is not None)
    variables = _variables(fields, engine)
    add_generation_prompt = variables.pop("add_generation_prompt", False)
    continues = variables.pop("continue_final_message", False)
    documents = variables.pop("documents", None)
    return ChatSetting(
        template,
        None if tools is None else [WrittenOnce(tool) for tool in tools],
        documents,
        bool(add_generation_prompt),
        continues if isinstance(continues, str) else "content" if continues else "",
        {name: value for name, value in variables.items() if name in template.variables},
        engine.chat_template_content_format,
        requested is None,
    )


def _variables(fields: Mapping[str, Any], engine: EngineOptions) -> dict[str, Any]:
    own = fields.get("chat_template_kwargs") or {}
    if not isinstance(own, dict) or own.keys() & _NOT_FOLLOWED:
        raise NotFollowed("chat_template_kwargs with a name that is the engine's own")
    effort = fields.get("reasoning_effort")
    over: dict[str, Any] = {
        "add_generation_prompt": fields.get("add_generation_prompt", True),
        "continue_final_message": fields.get("continue_final_message", False),
        "documents": fields.get("documents"),
        "reasoning_effort": effort,
    }
    if effort is not None and "enable_thinking" not in own:
        over["enable_thinking"] = effort != "none"
    merged = {**own, **{name: value for name, value in over.items() if value not in _UNSET}}
    merged = {name: value for name, value in merged.items() if value not in _UNSET}
    merged = {**engine.default_chat_template_kwargs, **merged}
    return {name: value for name, value in merged.items() if name not in _NOT_FOR_THE_TEMPLATE}
