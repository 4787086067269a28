"""Finds out whether a template's text for the end of a conversation can be rendered without its beginning (window.py).

Conversations are made up from what the template itself looks for: its own string constants, in every role, at the
start, in the middle and at the end of a message, with tools and reasoning, alternating properly and not. For each,
and for each place where a stem could end, the text of the whole must be the text up to there and the text from the
window. One difference is enough to deny the template its window. What remains is that a template could look at
something that no made-up conversation has; so real ones are checked, too, now and then (PromptReader.audit).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

from warmroute.prompt.chat_setting import ChatSetting
from warmroute.prompt.chat_template import ChatTemplate, Message, Refused
from warmroute.prompt.template_environment import WrittenOnce
from warmroute.prompt.window import Window, fits_behind, may_have_stems

_LONG, _SHORT, _VERY_SHORT = 300, 60, 4
"""Conversations in a check."""
_LEAST_CHECKS: Final = 30
_KNOWN_VARIABLES: Final = frozenset(
    [
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "bos_token",
        "eos_token",
        "unk_token",
        "sep_token",
        "pad_token",
        "cls_token",
        "mask_token",
        "raise_exception",
        "strftime_now",
        "range",
        "namespace",
        "dict",
        "loop",
    ]
)
_TOOL: Final = {
    "type": "function",
    "function": {"name": "look_up", "description": None, "parameters": {"type": "object", "properties": {}}},
}


class Locality:
    """What was found out about one template."""

    def __init__(self, template: ChatTemplate | None) -> None:
        """None: a template that is not worth the trouble, and gets no window."""
        self.telling: tuple[str, ...] = ()
        """Strings by which the template may take a user's message for something else than a question."""
        self.with_clean_messages = False
        """The window is right where no message holds a string that the template looks for."""
        self.with_any_message = False
        if template is not None:
            self._try_out(template)

    def _try_out(self, template: ChatTemplate) -> None:
        usual, *others = _settings(template)
        plain, all_texts = _texts(template, ()), _texts(template, template.literals)
        self.telling = template.long_literals
        self.with_clean_messages = bool(_holds(usual, plain, self.telling)) and not self._denied_by(others, plain)
        self.with_any_message = (
            self.with_clean_messages
            and bool(_holds(usual, all_texts, self.telling))
            and not self._denied_by(others, all_texts)
        )
        if self.with_any_message:
            self._find_the_telling_ones(usual, others, all_texts)

    def _find_the_telling_ones(
        self, usual: ChatSetting, others: Sequence[ChatSetting], all_texts: Sequence[str]
    ) -> None:
        """Most literals are harmless in a user's message, and some (`text`) are common words."""
        for literal in usual.template.long_literals:
            fewer = tuple(string for string in self.telling if string != literal)
            if _holds(usual, _texts_around(usual.template, literal), fewer, _SHORT):
                self.telling = fewer
        if not _holds(usual, all_texts, self.telling) or self._denied_by(others, all_texts):
            self.telling = usual.template.long_literals

    def _denied_by(self, settings: Sequence[ChatSetting], texts: Sequence[str]) -> bool:
        """A setting under which nothing can be rendered says nothing."""
        return any(_holds(setting, texts, self.telling, _SHORT, least=0) is False for setting in settings)

    def holds_for(self, setting: ChatSetting) -> bool:
        """A short check under a request's own setting: its tools, its variables."""
        template = setting.template
        texts = _texts(template, template.literals if self.with_any_message else ())
        return bool(_holds(setting, texts, self.telling, _VERY_SHORT, least=1))

    def deny(self) -> None:
        """A real conversation has shown the contrary."""
        self.with_clean_messages = self.with_any_message = False


def differs_at_last_cut(setting: ChatSetting, window: Window, messages: Sequence[Message]) -> bool:
    """Whether the window gives another text behind the last place in this conversation where a stem could end."""
    try:
        whole = setting.render(messages)
    except Refused:
        return False
    for end in range(len(messages) - 1, 0, -1):
        differs_here = _differs_at(setting, window, messages, end, whole)
        if differs_here is not None:
            return differs_here
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


def _holds(
    setting: ChatSetting, texts: Sequence[str], telling: Sequence[str], count: int = _LONG, least: int = _LEAST_CHECKS
) -> bool | None:
    """None where there is no window to check."""
    try:
        window = Window(setting, telling)
    except Refused:
        return None
    checks = 0
    for messages in _conversations(setting, texts, count):
        try:
            whole = setting.render(messages)
        except Refused:
            continue
        for end in range(1, len(messages)):
            differs_here = _differs_at(setting, window, messages, end, whole)
            if differs_here:
                return False
            checks += differs_here is False
    return checks >= least


def _settings(template: ChatTemplate) -> Iterator[ChatSetting]:
    switches: list[dict[str, Any]] = [{}]
    for name in sorted(template.variables - _KNOWN_VARIABLES)[:4]:
        switches += [{name: True}, {name: False}]
    for variables in switches:
        yield ChatSetting(template, variables=variables)
    yield ChatSetting(template, tools=[WrittenOnce(_TOOL)])
    yield ChatSetting(template, add_generation_prompt=False)


def _conversations(setting: ChatSetting, texts: Sequence[str], count: int) -> Iterator[list[Message]]:
    chance = random.Random(4)
    for number in range(1, count + 1):
        length = chance.randint(2, 9) if number % 20 else 24
        yield _conversation(setting, chance, texts, length, number % 3 != 0)


_PLAIN: Final = ("x", "two words", "", " around ", "\n\nlines\n\n", "ends.\n", "1")


def _texts(template: ChatTemplate, literals: Sequence[str]) -> list[str]:
    texts = list(_PLAIN)
    for literal in literals:
        texts += [literal, f"a{literal}", f"{literal}b", f"a{literal}b", f"{literal}\nc\n{literal}"]
    for opening, closing in pairwise(literals):
        texts += _pair(opening, closing) + _pair(closing, opening)
    return texts


def _texts_around(template: ChatTemplate, literal: str) -> list[str]:
    """Mostly with this literal, beside each of the others."""
    texts = _texts(template, (literal,))
    for other in template.literals:
        texts += _pair(literal, other) + _pair(other, literal)
    return texts


def _pair(first: str, second: str) -> list[str]:
    return [f"{first}d{second}", f"{first}\nd\n{second}\n\ne"]


def _conversation(
    setting: ChatSetting, chance: random.Random, texts: Sequence[str], length: int, in_order: bool
) -> list[Message]:
    messages: list[Message] = []
    if chance.random() < 0.5:
        messages.append(_message(setting, "system", chance.choice(texts)))
    role = "user"
    while len(messages) < length:
        message = _message(setting, role, chance.choice(texts))
        if role == "assistant":
            if chance.random() < 0.4:
                message["tool_calls"] = [_call(number) for number in range(chance.randint(1, 2))]
            if chance.random() < 0.4:
                message["reasoning"] = message["reasoning_content"] = chance.choice(texts)
        messages.append(message)
        role = _next_role(role, bool(message.get("tool_calls")), chance, in_order)
    return messages


def _next_role(role: str, called: bool, chance: random.Random, in_order: bool) -> str:
    if not in_order:
        return chance.choice(("user", "assistant", "assistant", "tool"))
    if role == "assistant":
        return "tool" if called else "user"
    return "tool" if role == "tool" and chance.random() < 0.3 else "assistant"


def _message(setting: ChatSetting, role: str, text: str) -> Message:
    if role == "tool":
        return {"role": role, "content": text, "tool_call_id": "call_0"}
    content: Any = [{"type": "text", "text": text}] if setting.format == "openai" else text
    return {"role": role, "content": content}


def _call(number: int) -> dict[str, Any]:
    return {"id": f"call_{number}", "function": {"arguments": {"q": number}, "name": "look_up"}, "type": "function"}
