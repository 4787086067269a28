"""Render only the last messages of a conversation, without its beginning.

A cached prefix ends with a user's message or with a tool result. The messages after it are the tail, which starts with
the assistant's. To render the tail, the renderer puts it after a stub: a few placeholder messages that end like the
prefix. The tail's text is what the template prints after the stub's text. This is right only for templates whose text
for a message does not depend on messages far before it. tail_check.py finds out which templates are like that.

There are two kinds of prefixes, because some templates (Qwen3's) print the assistant's messages differently once the
user has sent another message. After a prefix that ends with a user's message, any tail can be rendered. After one that
ends with a tool result, only a tail without a user's message can.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from warmroute.prompt.chat_template import Message, TemplateRejected
from warmroute.prompt.render_context import RenderContext

_TAIL_ROLES: Final = frozenset(("user", "assistant", "tool"))
"""Roles that may follow the first message of a conversation whose prefixes are cached."""
_TOOL_CALL: Final = {"id": "call_1", "function": {"arguments": {}, "name": "f"}, "type": "function"}


class TailRenderer:
    def __init__(
        self, context: RenderContext, non_question_literals: Collection[str], short_stub_suffices: bool = False
    ) -> None:
        """Both parameters after the first are results of tail_check.py. Raises TemplateRejected."""
        self._context = context.with_one_tool()  # tools are printed at the beginning, and may be long
        self._non_question_literals = non_question_literals
        self.short_stub_suffices = short_stub_suffices
        self._stubs: dict[tuple[bool, bool], tuple[list[Message], str]] = {}
        self.generation_prompt = self._find_generation_prompt()
        """The text that the template adds after the last message."""

    def _find_generation_prompt(self) -> str:
        if self._context.continued_field:
            raise TemplateRejected("the last message is continued")
        if not self._context.add_generation_prompt:
            return ""
        messages = [self._context.text_message("user", "u")]
        without, with_prompt = (self._context.render(messages, generation_prompt=add) for add in (False, True))
        if not with_prompt.startswith(without):
            raise TemplateRejected("the generation prompt is not at the end")
        return with_prompt[len(without) :]

    def render_tail(self, starts_with_system: bool, ends_with_user: bool, tail: Sequence[Message]) -> str:
        """Return the text after a prefix of this kind, generation prompt included. Raises TemplateRejected."""
        stub, stub_text = self._stub(starts_with_system, ends_with_user)
        text = self._context.render([*stub, *tail])
        if not text.startswith(stub_text):
            raise TemplateRejected("the tail changes the text before it")
        return text[len(stub_text) :]

    def without_generation_prompt(self, text: str) -> str | None:
        """Return None where the text does not end with the generation prompt."""
        prompt = self.generation_prompt
        if not prompt:
            return text
        return text[: -len(prompt)] if text.endswith(prompt) else None

    def may_end_prefix(self, message: Message) -> bool:
        """Return whether the message is a tool result or a question."""
        return message["role"] == "tool" or self.is_question(message)

    def is_question(self, message: Message) -> bool:
        """Return whether the template treats this message as the user's own words."""
        return message["role"] == "user" and not _contains_any(message, self._non_question_literals)

    def is_clean(self, message: Message) -> bool:
        """Return whether the message contains none of the strings that the template searches for."""
        return not _contains_any(message, self._context.template.long_literals)

    def _stub(self, starts_with_system: bool, ends_with_user: bool) -> tuple[list[Message], str]:
        kind = (False, True) if self.short_stub_suffices else (starts_with_system, ends_with_user)
        if kind not in self._stubs:
            messages = [self._context.text_message("system", "s")] if kind[0] else []
            messages.append(self._context.text_message("user", "u"))
            if not kind[1]:
                call: Message = {**self._context.text_message("assistant", ""), "tool_calls": [_TOOL_CALL]}
                messages += [call, {"role": "tool", "content": "r", "tool_call_id": "call_1"}]
            self._stubs[kind] = messages, self._context.render(messages, generation_prompt=False)
        return self._stubs[kind]


def _contains_any(message: Message, strings: Collection[str]) -> bool:
    if not strings:
        return False
    content = message.get("content")
    texts = [content] if isinstance(content, str) else [part.get("text") for part in content or ()]
    return any(string in text for text in texts if isinstance(text, str) for string in strings)


def may_follow(ends_with_user: bool, tail: Sequence[Message]) -> bool:
    """Return whether these messages can be rendered after a prefix of this kind."""
    if not tail:
        return True
    if tail[0]["role"] != "assistant":
        return False
    roles = {message["role"] for message in tail}
    return roles <= _TAIL_ROLES and (ends_with_user or "user" not in roles)


def may_be_prefix(messages: Sequence[Message], renderer: TailRenderer) -> bool:
    """Return whether these messages, from the start of a conversation, may become a cached prefix."""
    if not renderer.may_end_prefix(messages[-1]):
        return False
    if any(message["role"] not in _TAIL_ROLES for message in messages[1:]):
        return False
    if messages[0]["role"] not in ("system", "user"):
        return False
    last_user = next((message for message in reversed(messages) if message["role"] == "user"), None)
    return last_user is not None and renderer.is_question(last_user)
