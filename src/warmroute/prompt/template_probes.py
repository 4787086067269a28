"""Conversations to test a chat template with: its own string constants, in every role, at every position."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, Final

from warmroute.prompt.chat_template import ChatTemplate, Message
from warmroute.prompt.render_context import RenderContext
from warmroute.prompt.template_environment import CachedJsonDict

PLAIN_TEXTS: Final = ("x", "two words", "", " around ", "\n\nlines\n\n", "ends.\n", "1")
_STANDARD_VARIABLES: Final = frozenset(
    f"""messages tools documents add_generation_prompt raise_exception strftime_now range namespace dict loop
    {" ".join(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))}""".split()
)
_TOOL: Final = {
    "type": "function",
    "function": {"name": "look_up", "description": None, "parameters": {"type": "object", "properties": {}}},
}
_LONG_CONVERSATION: Final = 24
"""Messages in every twentieth random conversation."""


def probe_contexts(template: ChatTemplate) -> list[RenderContext]:
    """Return the default context first, then others: template variables switched, a tool, no generation prompt."""
    variable_sets: list[dict[str, Any]] = [{}]
    for name in sorted(template.variables - _STANDARD_VARIABLES)[:4]:
        variable_sets += [{name: True}, {name: False}]
    return [
        *(RenderContext(template, variables=variables) for variables in variable_sets),
        RenderContext(template, tools=[CachedJsonDict(_TOOL)]),
        RenderContext(template, add_generation_prompt=False),
    ]


def literal_texts(template: ChatTemplate) -> list[str]:
    """Return texts with the strings that the template searches for: alone, at each end, in the middle, in pairs."""
    texts = []
    for literal in template.literals:
        texts += [literal, f"a{literal}", f"{literal}b", f"a{literal}b"]
    for first, second in product(template.long_literals, repeat=2):
        texts += [f"{first}d{second}", f"{first}\nd\n{second}\n\ne"]
    return texts


def random_conversations(context: RenderContext, texts: Sequence[str], count: int) -> Iterator[list[Message]]:
    """In two of three, the roles are in a valid order: questions are answered, tools are called before they answer."""
    rng = random.Random(4)
    for number in range(1, count + 1):
        length = rng.randint(2, 9) if number % 20 else _LONG_CONVERSATION
        yield _random_conversation(context, rng, texts, length, in_order=number % 3 != 0)


def conversations_with_each_text(
    context: RenderContext, texts: Sequence[str], kinds: str = "suatr"
) -> Iterator[list[Message]]:
    """Put each text at each position of two conversations.

    `kinds`: which positions: of the system, the user, the assistant, a tool, or reasoning.
    """
    for text, (roles, position_kinds) in product(texts, _SKELETONS):
        for position, kind in enumerate(position_kinds):
            if kind in kinds:
                yield _fill_skeleton(context, roles, position, text)


_SKELETONS: Final = (
    (("system", "user", "assistant+", "user", "assistant+", "user"), "suaruaru"),
    (
        ("user", "assistant+!", "tool", "assistant!", "tool", "assistant", "user", "assistant+!", "tool", "assistant+"),
        "uartatauartar",
    ),
)
"""Roles (+ has reasoning, ! calls a tool), and the kinds of the texts in them, in order."""


def _fill_skeleton(context: RenderContext, roles: Sequence[str], position: int, text: str) -> list[Message]:
    messages, at = [], 0
    for role in roles:
        message = _message(context, role.rstrip("+!"), text if at == position else "x")
        at += 1
        if "+" in role:
            message["reasoning"] = message["reasoning_content"] = text if at == position else "x"
            at += 1
        if "!" in role:
            message["tool_calls"] = [_tool_call(0)]
        messages.append(message)
    return messages


def _random_conversation(
    context: RenderContext, rng: random.Random, texts: Sequence[str], length: int, in_order: bool
) -> list[Message]:
    messages: list[Message] = []
    if rng.random() < 0.5:
        messages.append(_message(context, "system", rng.choice(texts)))
    role = "user"
    while len(messages) < length:
        message = _message(context, role, rng.choice(texts))
        if role == "assistant":
            if rng.random() < 0.4:
                message["tool_calls"] = [_tool_call(number) for number in range(rng.randint(1, 2))]
            if rng.random() < 0.4:
                message["reasoning"] = message["reasoning_content"] = rng.choice(texts)
        messages.append(message)
        role = _next_role(role, bool(message.get("tool_calls")), rng, in_order)
    return messages


def _next_role(role: str, has_tool_calls: bool, rng: random.Random, in_order: bool) -> str:
    if not in_order:
        return rng.choice(("user", "assistant", "assistant", "tool"))
    if role == "assistant":
        return "tool" if has_tool_calls else "user"
    return "tool" if role == "tool" and rng.random() < 0.3 else "assistant"


def _message(context: RenderContext, role: str, text: str) -> Message:
    if role == "tool":
        return {"role": role, "content": text, "tool_call_id": "call_0"}
    return context.text_message(role, text)


def _tool_call(number: int) -> dict[str, Any]:
    return {"id": f"call_{number}", "function": {"arguments": {"q": number}, "name": "look_up"}, "type": "function"}
