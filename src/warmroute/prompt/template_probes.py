"""Conversations to try a template out on: made of its own string constants, in every role, at every place."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, Final

from warmroute.prompt.chat_setting import ChatSetting
from warmroute.prompt.chat_template import ChatTemplate, Message
from warmroute.prompt.template_environment import WrittenOnce

PLAIN_TEXTS: Final = ("x", "two words", "", " around ", "\n\nlines\n\n", "ends.\n", "1")
_STANDARD_VARIABLES: Final = frozenset(
    f"""messages tools documents add_generation_prompt raise_exception strftime_now range namespace dict loop
    {" ".join(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))}""".split()
)
_TOOL: Final = {
    "type": "function",
    "function": {"name": "look_up", "description": None, "parameters": {"type": "object", "properties": {}}},
}
_LONG_LENGTH: Final = 24


def settings(template: ChatTemplate) -> list[ChatSetting]:
    """The usual one first; then with the template's own variables switched, with a tool, without generation prompt."""
    switches: list[dict[str, Any]] = [{}]
    for name in sorted(template.variables - _STANDARD_VARIABLES)[:4]:
        switches += [{name: True}, {name: False}]
    return [
        *(ChatSetting(template, variables=variables) for variables in switches),
        ChatSetting(template, tools=[WrittenOnce(_TOOL)]),
        ChatSetting(template, add_generation_prompt=False),
    ]


def odd_texts(template: ChatTemplate) -> list[str]:
    """What the template looks for: alone, at the start, at the end, in the middle, and two of them around something."""
    texts = []
    for literal in template.literals:
        texts += [literal, f"a{literal}", f"{literal}b", f"a{literal}b"]
    for first, second in product(template.long_literals, repeat=2):
        texts += [f"{first}d{second}", f"{first}\nd\n{second}\n\ne"]
    return texts


def at_random(setting: ChatSetting, texts: Sequence[str], count: int) -> Iterator[list[Message]]:
    """Two in three are in order: questions are answered, tools are called before they answer."""
    chance = random.Random(4)
    for number in range(1, count + 1):
        length = chance.randint(2, 9) if number % 20 else _LONG_LENGTH
        yield _at_random(setting, chance, texts, length, in_order=number % 3 != 0)


def each_in_turn(setting: ChatSetting, texts: Sequence[str], roles: str = "suatr") -> Iterator[list[Message]]:
    """Each text in each place of two conversations: of the system, the user, the assistant, a tool, or reasoning."""
    for text, (template, places) in product(texts, _SKELETONS):
        for place, role in enumerate(places):
            if role in roles:
                yield _filled(setting, template, place, text)


_SKELETONS: Final = (
    (("system", "user", "assistant+", "user", "assistant+", "user"), "suaruaru"),
    (
        ("user", "assistant+!", "tool", "assistant!", "tool", "assistant", "user", "assistant+!", "tool", "assistant+"),
        "uartatauartar",
    ),
)
"""Roles (+ reasons, ! calls a tool), and the kinds of the texts in them, in order."""


def _filled(setting: ChatSetting, roles: Sequence[str], place: int, text: str) -> list[Message]:
    messages, at = [], 0
    for role in roles:
        message = _message(setting, role.rstrip("+!"), text if at == place else "x")
        at += 1
        if "+" in role:
            message["reasoning"] = message["reasoning_content"] = text if at == place else "x"
            at += 1
        if "!" in role:
            message["tool_calls"] = [_call(0)]
        messages.append(message)
    return messages


def _at_random(
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
