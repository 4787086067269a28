"""A model's chat template: renders a conversation to the text that the engine tokenizes, as transformers does."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from jinja2 import meta, nodes
from jinja2.exceptions import TemplateError

from warmroute.prompt.content_format import ContentFormat, content_format
from warmroute.prompt.template_environment import chat_environment
from warmroute.prompt.template_limits import TemplateTooExpensive

Message = dict[str, Any]
MAX_SOURCE_LENGTH: Final = 1 << 18
MAX_ORDINARY_MESSAGES: Final = 256
MAX_ORDINARY_LENGTH: Final = 1 << 16
"""Characters of a conversation, where any other value counts as four. A longer one from a client may exceed the limits
of rendering: that must not disable the template for others."""
_CONTINUE_MARK: Final = "CONTINUE_FINAL_MESSAGE_TAG "
_TIME_FIELD: Final = re.compile("%[-_0^#]?(.)")
_FINER_THAN_A_DAY: Final = frozenset("HIMSfpXcTRrsZzk+l")
_LONG_LITERAL: Final = 3
_ROLES: Final = frozenset(("system", "user", "assistant", "tool", "developer"))
_SEARCHING_NODES: Final = (nodes.Compare, nodes.Call, nodes.Test, nodes.Filter)


class TemplateRejected(Exception):
    """The template refuses this conversation, or fails. An engine answers such a request with status 400."""


class ChatTemplate:
    """A compiled template. Thread-safe. Raises TemplateRejected if the source is not a valid template."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], now: Callable[[], datetime] = datetime.now
    ) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._now = now
        self._time_formats: tuple[str, ...] = ()
        self._environment = environment = chat_environment(now, self._note_time_format)
        self.disabled_reason = ""
        """Why the template is no longer used: rendering an ordinary conversation took too much time or memory."""
        if len(source) > MAX_SOURCE_LENGTH:
            raise TemplateRejected(f"not a template: longer than {MAX_SOURCE_LENGTH:,} characters")
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except (TemplateError, TemplateTooExpensive) as error:
            raise TemplateRejected(f"not a template: {error}") from error
        except Exception as error:  # such as RecursionError, or SyntaxError: too many nested loops
            raise TemplateRejected(f"not a template: {type(error).__name__}") from error
        self.variables = frozenset(meta.find_undeclared_variables(tree))
        self.supports_developer_role = '"developer"' in source or "'developer'" in source
        self.literals = _literals(tree)
        """Strings that the template may search for in messages."""
        self.long_literals = tuple(text for text in self.literals if len(text) >= _LONG_LITERAL and text not in _ROLES)
        try:
            self.content_format: ContentFormat = content_format(tree)
        except Exception:
            self.content_format = "string"

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Raises TemplateRejected."""
        if self.disabled_reason:
            raise TemplateRejected(self.disabled_reason)
        self._environment.render_time.started_s = None
        all_variables = {**self._special_tokens, **variables} if variables else self._special_tokens
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                **all_variables,
            )
        except (TemplateTooExpensive, MemoryError) as error:
            if _is_ordinary(messages, tools, documents, variables):
                self.disabled_reason = str(error) or "it takes too much memory"
            raise TemplateRejected(f"{error}") from error
        except Exception as error:  # a template can raise anything
            raise TemplateRejected(f"{type(error).__name__}") from error

    def render_continued(self, messages: Sequence[Message], field: str = "content", **options: Any) -> str:
        """Render with the last message unfinished, for `continue_final_message`. Raises TemplateRejected."""
        marked = copy.deepcopy(list(messages))
        last = marked[-1].get(field)
        if last is None or field not in self.source:
            raise TemplateRejected("the last message has nothing to continue")
        if isinstance(last, list):
            part = next((part for part in reversed(last) if isinstance(part, dict) and "text" in part), None)
            if part is None:
                raise TemplateRejected("the last message has no text to continue")
            last, part["text"] = part["text"], part["text"] + _CONTINUE_MARK
        else:
            marked[-1][field] = last + _CONTINUE_MARK
        text = self.render(marked, add_generation_prompt=False, **options)
        if last.strip() not in text or _CONTINUE_MARK.strip() not in text:
            raise TemplateRejected("the template changes the message to continue")
        at = text.rindex(_CONTINUE_MARK.strip())
        return text[:at] if text.startswith(_CONTINUE_MARK, at) else text[:at].rstrip()

    # ---- Time ----

    def _note_time_format(self, format: str) -> None:
        if format not in self._time_formats:
            self._time_formats = (*self._time_formats, format)

    def time_key(self) -> str:
        """Return what the template prints of the current time; a text rendered under another key may differ."""
        if not self._time_formats:
            return ""
        now = self._now()
        return "\0".join(now.strftime(format) for format in self._time_formats)

    def prints_time_of_day(self) -> bool:
        """Return whether the text changes within a day, so that the engine may render another text."""
        return any(field in _FINER_THAN_A_DAY for format in self._time_formats for field in _TIME_FIELD.findall(format))


def _is_ordinary(messages: Sequence[Message], *others: Any) -> bool:
    """Return whether a conversation is so short that a template must be able to render it."""
    left, pending = MAX_ORDINARY_LENGTH, [messages, *others]
    while pending and left >= 0:
        value = pending.pop()
        left -= len(value) if isinstance(value, str) else 4
        if isinstance(value, Mapping):
            pending += [*value, *value.values()]
        elif isinstance(value, list | tuple):
            pending += value
    return left >= 0 and len(messages) <= MAX_ORDINARY_MESSAGES


def _literals(tree: nodes.Template) -> tuple[str, ...]:
    keys = {id(item.arg) for item in tree.find_all(nodes.Getitem)}
    found: dict[str, None] = {}
    for node in tree.find_all(_SEARCHING_NODES):
        for constant in node.find_all(nodes.Const):
            if isinstance(constant.value, str) and constant.value and id(constant) not in keys:
                found[constant.value] = None
    return tuple(found)
