"""A model's chat template: from a conversation to the text that the engine tokenizes, as transformers renders it."""

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

Message = dict[str, Any]
_CONTINUES: Final = "CONTINUE_FINAL_MESSAGE_TAG "
_TIME_FIELD: Final = re.compile("%[-_0^#]?(.)")
_FINER_THAN_A_DAY: Final = frozenset("HIMSfpXcTRrsZzk+l")
_LONG: Final = 3
_ROLES: Final = frozenset(("system", "user", "assistant", "tool", "developer"))
_ASKED_ABOUT: Final = (nodes.Compare, nodes.Call, nodes.Test, nodes.Filter)


class Refused(Exception):
    """The template does not take this conversation, or cannot be run. An engine answers with 400."""


class ChatTemplate:
    """One template, compiled. Safe to use from several threads. Raises Refused if it is none."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], now: Callable[[], datetime] = datetime.now
    ) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._now = now
        self._times_asked: tuple[str, ...] = ()
        environment = chat_environment(now, self._note_time)
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except (TemplateError, RecursionError) as error:
            raise Refused(f"no template: {error}") from error
        self.variables = frozenset(meta.find_undeclared_variables(tree))
        self.knows_developer = '"developer"' in source or "'developer'" in source
        self.literals = _literals(tree)
        """Strings that the template may look for in what it is given."""
        self.long_literals = tuple(text for text in self.literals if len(text) >= _LONG and text not in _ROLES)
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
        """Raises Refused."""
        given = {**self._special_tokens, **variables} if variables else self._special_tokens
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                **given,
            )
        except Exception as error:  # a template can run into anything
            raise Refused(f"{type(error).__name__}") from error

    def render_open(self, messages: Sequence[Message], field: str = "content", **given: Any) -> str:
        """The last message is left open, for the model to go on with: `continue_final_message`. Raises Refused."""
        marked = copy.deepcopy(list(messages))
        last = marked[-1].get(field)
        if last is None or field not in self.source:
            raise Refused("the last message has nothing to continue")
        if isinstance(last, list):
            part = next((part for part in reversed(last) if isinstance(part, dict) and "text" in part), None)
            if part is None:
                raise Refused("the last message has no text to continue")
            last, part["text"] = part["text"], part["text"] + _CONTINUES
        else:
            marked[-1][field] = last + _CONTINUES
        text = self.render(marked, add_generation_prompt=False, **given)
        if last.strip() not in text or _CONTINUES.strip() not in text:
            raise Refused("the template changes the message that is to be continued")
        at = text.rindex(_CONTINUES.strip())
        return text[:at] if text.startswith(_CONTINUES, at) else text[:at].rstrip()

    # ---- Time ----

    def _note_time(self, format: str) -> None:
        if format not in self._times_asked:
            self._times_asked = (*self._times_asked, format)

    def time_key(self) -> str:
        """What the template has been seen to print of the time. Text rendered under another key may be another."""
        if not self._times_asked:
            return ""
        now = self._now()
        return "\0".join(now.strftime(format) for format in self._times_asked)

    def prints_the_hour(self) -> bool:
        """Whether the text changes more often than by the day, so that no other machine renders the same."""
        return any(field in _FINER_THAN_A_DAY for asked in self._times_asked for field in _TIME_FIELD.findall(asked))


def _literals(tree: nodes.Template) -> tuple[str, ...]:
    keys = {id(item.arg) for item in tree.find_all(nodes.Getitem)}
    found: dict[str, None] = {}
    for asked in tree.find_all(_ASKED_ABOUT):
        for constant in asked.find_all(nodes.Const):
            if isinstance(constant.value, str) and constant.value and id(constant) not in keys:
                found[constant.value] = None
    return tuple(found)
