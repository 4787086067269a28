"""Finds out whether a template's text for the end of a conversation can be rendered without its beginning (window.py).

Made-up conversations (made_up.py) are rendered in whole, and for each place where a stem could end, the text must be
the text up to there and the text from the window. One difference is enough to deny the template its window. What
remains is that a template could look at something that no made-up conversation has; so real ones are checked, too,
now and then (PromptTokenizer.audit).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Final

from warmroute.prompt.chat_setting import ChatSetting
from warmroute.prompt.chat_template import ChatTemplate, Message, Refused
from warmroute.prompt.tail_rendering import Window, fits_behind, may_have_stems
from warmroute.prompt.template_probes import PLAIN_TEXTS, at_random, each_in_turn, odd_texts, settings

_MANY, _SOME, _FEW = 300, 60, 4
"""Conversations at random in a check."""
_LEAST_CHECKS: Final = 30


class Locality:
    """What was found out about one template."""

    def __init__(self, template: ChatTemplate | None) -> None:
        """None: a template that is not worth the trouble, and gets no window. Else it takes a second."""
        self.with_clean_messages = False
        """The window is right where no message holds a string that the template looks for."""
        self.with_any_message = False
        self.telling: tuple[str, ...] = ()
        """Strings by which the template may take a user's message for something else than a question."""
        self.short_heads = False
        """The shortest beginning of a window is enough."""
        if template is not None:
            self.telling = template.long_literals
            self._try_out(settings(template), odd_texts(template))

    def _try_out(self, tried: Sequence[ChatSetting], odd: Sequence[str]) -> None:
        self.with_clean_messages = self._is_right(tried, ())
        self.with_any_message = self.with_clean_messages and self._is_right(tried, odd)
        if self.with_any_message:
            every, self.telling = self.telling, self._telling(tried[0], odd)
            if not self._is_right(tried, odd):
                self.telling = every
        if self.with_clean_messages:
            self.short_heads = True
            self.short_heads = self._is_right(tried, odd if self.with_any_message else ())

    def _is_right(self, tried: Sequence[ChatSetting], odd: Sequence[str]) -> bool:
        """A setting under which nothing can be rendered says nothing, except for the usual one."""
        texts = [*PLAIN_TEXTS, *odd]
        usual = tried[0]
        if not self._holds(usual, chain(each_in_turn(usual, odd), at_random(usual, texts, _MANY)), _LEAST_CHECKS):
            return False
        return all(self._holds(setting, at_random(setting, texts, _SOME), 0) is not False for setting in tried[1:])

    def _telling(self, setting: ChatSetting, odd: Sequence[str]) -> tuple[str, ...]:
        """Most literals are harmless in a user's message, and some (`text`) are common words: finds the others."""
        every, self.telling = self.telling, ()
        harmful = [text for text in odd if self._holds(setting, each_in_turn(setting, [text], "u"), 0) is False]
        self.telling = every
        found: list[str] = []
        while harmful:
            literal = max(every, key=lambda literal: sum(literal in text for text in harmful))
            left = [text for text in harmful if literal not in text]
            if len(left) == len(harmful):
                return every  # a text without any of them
            found.append(literal)
            harmful = left
        return tuple(found)

    def holds_for(self, setting: ChatSetting) -> bool:
        """A short check under a request's own setting: its tools, its variables."""
        odd = odd_texts(setting.template) if self.with_any_message else []
        return bool(self._holds(setting, at_random(setting, [*PLAIN_TEXTS, *odd], _FEW), 1))

    def window(self, setting: ChatSetting) -> Window:
        """Raises Refused."""
        return Window(setting, self.telling, self.short_heads)

    def deny(self) -> None:
        """A real conversation has shown the contrary."""
        self.with_clean_messages = self.with_any_message = False

    def _holds(self, setting: ChatSetting, conversations: Iterable[list[Message]], least: int) -> bool | None:
        """Whether the window was right, at least so many times. None where there is no window."""
        try:
            window = self.window(setting)
        except Refused:
            return None
        checks = 0
        for messages in conversations:
            try:
                whole = setting.render(messages)
            except Refused:
                continue
            for end in range(1, len(messages)):
                differs = _differs_at(setting, window, messages, end, whole)
                if differs:
                    return False
                checks += differs is False
        return checks >= least


def differs_at_last_cut(setting: ChatSetting, window: Window, messages: Sequence[Message]) -> bool:
    """Whether the window gives another text behind the last place in this conversation where a stem could end."""
    try:
        whole = setting.render(messages)
    except Refused:
        return False
    for end in range(len(messages) - 1, 0, -1):
        differs = _differs_at(setting, window, messages, end, whole)
        if differs is not None:
            return differs
    return False


def _differs_at(setting: ChatSetting, window: Window, messages: Sequence[Message], end: int, whole: str) -> bool | None:
    """None where no stem can end there."""
    first, tail = messages[:end], messages[end:]
    if not may_have_stems(first, window):
        return None
    settled = first[-1]["role"] == "user"
    if not fits_behind(settled, tail):
        return None
    try:
        beginning = window.without_generation_prompt(setting.render(first))
        if beginning is None:
            return None
        return whole != beginning + window.text_behind(first[0]["role"] == "system", settled, tail)
    except Refused:
        return True
