"""Rendering only the end of a conversation.

The rule. A stem is the beginning of a conversation up to a message of a user, or to the answer of a tool; what
follows is the assistant's. The text of what follows a stem is taken from a window: a short made-up beginning (`head`)
that ends like the stem does, and the messages behind it. So it is right only for templates whose text for a message
does not depend on what was said long before. Which templates are like that, locality.py finds out; for the others
there is no window.

Two kinds of stems, since some templates (Qwen3's) render the assistant's messages in another way once the user has
spoken again: one that ends with the user's message is settled, whatever follows. One that ends with the answer of a
tool is open, and good only until the user speaks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

from warmroute.prompt.chat_setting import ChatSetting
from warmroute.prompt.chat_template import Message, Refused

FOLLOWERS: Final = frozenset(("user", "assistant", "tool"))
"""Roles that may stand behind the first message of a conversation that has stems."""
_CALL: Final = {"id": "call_1", "function": {"arguments": {}, "name": "f"}, "type": "function"}


class Window:
    """The ends of conversations under one setting."""

    def __init__(self, setting: ChatSetting, telling: Collection[str], short_heads: bool = False) -> None:
        """As locality.py has found out. `telling`: strings by which the template may take a user's message for
        something else. `short_heads`: a user's message is enough of a beginning, whatever the stem.
        """
        self._setting = setting.with_one_tool()  # tools stand at the beginning, and may be long
        self._telling = telling
        self._short_heads = short_heads
        self._heads: dict[tuple[bool, bool], tuple[list[Message], str]] = {}
        self.generation_prompt = self._generation_prompt()
        """What the setting puts behind a conversation. Raises Refused."""

    def _generation_prompt(self) -> str:
        if self._setting.continues:
            raise Refused("no window: the last message is continued")
        if not self._setting.add_generation_prompt:
            return ""
        messages = [self._message("user", "u")]
        bare, full = (self._setting.render(messages, generation_prompt=wanted) for wanted in (False, True))
        if not full.startswith(bare):
            raise Refused("no window: the generation prompt is not put behind the text")
        return full[len(bare) :]

    def text_behind(self, starts_with_system: bool, settled: bool, tail: Sequence[Message]) -> str:
        """The text of what follows a stem, with the generation prompt. Raises Refused."""
        messages, text = self._head(starts_with_system, settled)
        whole = self._setting.render([*messages, *tail])
        if not whole.startswith(text):
            raise Refused("no window: the end changes the beginning")
        return whole[len(text) :]

    def without_generation_prompt(self, text: str) -> str | None:
        """None where it is not there."""
        prompt = self.generation_prompt
        if not prompt:
            return text
        return text[: -len(prompt)] if text.endswith(prompt) else None

    def may_end_a_stem(self, message: Message) -> bool:
        """The answer of a tool, or a question."""
        return message["role"] == "tool" or self.is_question(message)

    def is_question(self, message: Message) -> bool:
        """A user's message that is taken for nothing else."""
        return message["role"] == "user" and not _holds_one_of(message, self._telling)

    def is_clean(self, message: Message) -> bool:
        """Whether it holds none of the strings that the template looks for."""
        return not _holds_one_of(message, self._setting.template.long_literals)

    def _head(self, starts_with_system: bool, settled: bool) -> tuple[list[Message], str]:
        kind = (False, True) if self._short_heads else (starts_with_system, settled)
        if kind not in self._heads:
            messages = [self._message("system", "s")] if kind[0] else []
            messages.append(self._message("user", "u"))
            if not kind[1]:
                call: Message = {**self._message("assistant", ""), "tool_calls": [_CALL]}
                messages += [call, {"role": "tool", "content": "r", "tool_call_id": "call_1"}]
            self._heads[kind] = messages, self._setting.render(messages, generation_prompt=False)
        return self._heads[kind]

    def _message(self, role: str, text: str) -> Message:
        content: Any = [{"type": "text", "text": text}] if self._setting.format == "openai" else text
        return {"role": role, "content": content}


def _holds_one_of(message: Message, strings: Collection[str]) -> bool:
    if not strings:
        return False
    content = message.get("content")
    texts = [content] if isinstance(content, str) else [part.get("text") for part in content or ()]
    return any(string in text for text in texts if isinstance(text, str) for string in strings)


def fits_behind(settled: bool, tail: Sequence[Message]) -> bool:
    """Whether a stem of this kind may stand before these messages."""
    if not tail:
        return True
    if tail[0]["role"] != "assistant":
        return False
    roles = {message["role"] for message in tail}
    return roles <= FOLLOWERS and (settled or "user" not in roles)


def may_have_stems(messages: Sequence[Message], window: Window) -> bool:
    """Whether a stem may end behind these messages, which are all there are."""
    if not window.may_end_a_stem(messages[-1]):
        return False
    if any(message["role"] not in FOLLOWERS for message in messages[1:]):
        return False
    if messages[0]["role"] not in ("system", "user"):
        return False
    last_user = next((message for message in reversed(messages) if message["role"] == "user"), None)
    return last_user is not None and window.is_question(last_user)
