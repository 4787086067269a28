"""Renders only the last messages of a chat, for templates of which probes show that this is exact."""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, product
from typing import Any, Final, NamedTuple

from warmroute.prompt.chat_template import CachedJsonDict, ChatTemplate, Message, TemplateRejected
from warmroute.prompt.template_messages import RenderContext

# Conversations to test a chat template with: its own string constants, in every role, at every position.

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
    """Yield random conversations. In two of three, the roles are in a valid order: questions are answered, tools are
    called before they answer."""
    # Fixed seeds: a template must not pass in one process and fail in the next.
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


# Render only the last messages of a conversation, without its beginning.
#
# A cached prefix ends with a user's message or with a tool result. The messages after it are the tail, which starts
# with the assistant's. To render the tail, the renderer puts it after a stub: a few placeholder messages that end like
# the prefix. The tail's text is what the template prints after the stub's text. This is right only for templates whose
# text for a message does not depend on messages far before it. `TailCheck` finds out which templates are like
# that.
#
# There are two kinds of prefixes, because some templates (Qwen3's) print the assistant's messages differently once the
# user has sent another message. After a prefix that ends with a user's message, any tail can be rendered. After one
# that ends with a tool result, only a tail without a user's message can.

_TAIL_ROLES: Final = frozenset(("user", "assistant", "tool"))
"""Roles that may follow the first message of a conversation whose prefixes are cached."""
_TOOL_CALL: Final = {"id": "call_1", "function": {"arguments": {}, "name": "f"}, "type": "function"}


class TailRenderer:
    def __init__(
        self, context: RenderContext, non_question_literals: Collection[str], short_stub_suffices: bool = False
    ) -> None:
        """`non_question_literals` and `short_stub_suffices` are results of the probes. Raises TemplateRejected."""
        # The stub's text is removed again, so its tools need not be all. One stays, because templates print other texts
        # with tools than without.
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


# Find out whether a chat template's text for the last messages can be rendered without the first ones.
#
# The check renders probe conversations as a whole. For each place where a cached prefix could end,
# the whole text must equal the prefix's text plus the tail's text. One difference disables tail
# rendering for the template. A template could still depend on something that no probe contains, so real conversations
# are checked now and then, too (PromptTokenizer.verify_sample).
#
# There are variants of tail rendering, some of which save work later. The check tries all of them with one pass over
# the probes, since rendering whole conversations and their prefixes takes the most time.

_DEFAULT_CONTEXT_PROBES, _OTHER_CONTEXT_PROBES, _REQUEST_PROBES = 300, 60, 4
"""Random conversations for the default context, for each other context, and for a request's own context."""
_MIN_COMPARISONS: Final = 30
"""A check with fewer comparisons has hardly tested anything: the template refused most probes."""
MAX_LITERALS: Final = 150
"""A template that searches for more strings than this is not checked: all pairs of them would have to be."""
MAX_CHECK_S: Final = 20.0
"""CPU time after which a template that is not checked by then counts as unsafe."""
_MAX_CUTS: Final = 64
"""How many messages back from the end the search for a cut goes: each step reads all messages before it."""


class CheckTime:
    """How long a check may take. It belongs to one thread."""

    def __init__(self) -> None:
        self._until_s = time.thread_time() + MAX_CHECK_S

    def is_over(self) -> bool:
        return time.thread_time() > self._until_s


class Variant(NamedTuple):
    """One way to render tails."""

    non_question_literals: tuple[str, ...]
    short_stub: bool


class TailCheck:
    """The result of the check for one template."""

    def __init__(self, template: ChatTemplate | None) -> None:
        """Check the template, which takes about a second. None disables tail rendering without a check."""
        self.safe_for_clean_messages = False
        """Whether tail rendering is right if no message contains a string that the template searches for."""
        self.safe_for_all_messages = False
        self.non_question_literals: tuple[str, ...] = ()
        """Strings that make the template treat a user's message as something else (Qwen3: `<tool_response>`)."""
        self.short_stub_suffices = False
        """Whether the shortest stub can precede every tail."""
        if template is not None and len(template.literals) <= MAX_LITERALS:
            self.non_question_literals = template.long_literals
            self._run(probe_contexts(template), literal_texts(template))

    def _run(self, contexts: Sequence[RenderContext], texts: Sequence[str]) -> None:
        every, check_time = self.non_question_literals, CheckTime()
        right = self._right_variants(check_time, contexts, (), [Variant(every, False), Variant(every, True)])
        self.safe_for_clean_messages = Variant(every, False) in right
        if not self.safe_for_clean_messages:
            return
        self.short_stub_suffices = Variant(every, True) in right
        found = self._find_non_question_literals(check_time, contexts[0], texts)
        literal_sets = dict.fromkeys((every, found))
        variants = [Variant(literals, short) for literals in literal_sets for short in (False, True)]
        right = self._right_variants(check_time, contexts, texts, variants)
        self.safe_for_all_messages = Variant(every, False) in right
        if self.safe_for_all_messages:
            if Variant(found, False) in right:
                self.non_question_literals = found
            self.short_stub_suffices = Variant(self.non_question_literals, True) in right

    def _right_variants(
        self,
        check_time: CheckTime,
        contexts: Sequence[RenderContext],
        special_texts: Sequence[str],
        variants: Sequence[Variant],
    ) -> Sequence[Variant]:
        """Return the variants whose tails were all right. A context that cannot render anything changes nothing, except
        for the default one."""
        texts = [*PLAIN_TEXTS, *special_texts]
        default = contexts[0]
        probes = chain(
            conversations_with_each_text(default, special_texts),
            random_conversations(default, texts, _DEFAULT_CONTEXT_PROBES),
        )
        right: Sequence[Variant] = self._compare(check_time, default, probes, variants, _MIN_COMPARISONS) or ()
        for context in contexts[1:]:
            others = random_conversations(context, texts, _OTHER_CONTEXT_PROBES)
            still_right = self._compare(check_time, context, others, right)
            right = right if still_right is None else still_right
        return right

    def _find_non_question_literals(
        self, check_time: CheckTime, context: RenderContext, texts: Sequence[str]
    ) -> tuple[str, ...]:
        """Most literals are harmless in a user's message, and some (`text`) are common words: return the others."""
        every, without = self.non_question_literals, [Variant((), False)]
        conversations = conversations_with_each_text
        harmful = [
            text
            for text in texts
            if self._compare(check_time, context, conversations(context, [text], "u"), without) == []
        ]
        found: list[str] = []
        while harmful:
            literal = max(every, key=lambda literal: sum(literal in text for text in harmful))
            remaining = [text for text in harmful if literal not in text]
            if len(remaining) == len(harmful):
                return every  # no literal explains this text
            found.append(literal)
            harmful = remaining
        return tuple(found)

    def passes_for(self, context: RenderContext) -> bool:
        """Run a short check with a request's own tools and variables."""
        special_texts = literal_texts(context.template) if self.safe_for_all_messages else []
        probes = random_conversations(context, [*PLAIN_TEXTS, *special_texts], _REQUEST_PROBES)
        variant = Variant(self.non_question_literals, self.short_stub_suffices)
        return bool(self._compare(CheckTime(), context, probes, [variant], 1))

    def tail_renderer(self, context: RenderContext) -> TailRenderer:
        """Raises TemplateRejected."""
        return TailRenderer(context, self.non_question_literals, self.short_stub_suffices)

    def disable(self) -> None:
        """Disable tail rendering after a real conversation gave a wrong text."""
        self.safe_for_clean_messages = self.safe_for_all_messages = False

    @staticmethod
    def _compare(
        check_time: CheckTime,
        context: RenderContext,
        conversations: Iterable[list[Message]],
        variants: Sequence[Variant],
        min_comparisons: int = 0,
    ) -> list[Variant] | None:
        """Return the variants whose tails were all right, in at least this many comparisons. None: there is no tail
        renderer."""
        try:
            renderers = {variant: TailRenderer(context, *variant) for variant in variants}
        except TemplateRejected:
            return None
        comparisons = dict.fromkeys(variants, 0)
        for messages in conversations:
            if not renderers or check_time.is_over():
                return []
            try:
                conversation = _Conversation(context, messages)
            except TemplateRejected:
                continue
            for end in range(1, len(messages)):
                for variant, renderer in list(renderers.items()):
                    differs = conversation.differs_at(end, renderer)
                    if differs:
                        del renderers[variant]
                    comparisons[variant] += differs is False
        return [variant for variant in renderers if comparisons[variant] >= min_comparisons]


def differs_at_last_cut(context: RenderContext, renderer: TailRenderer, messages: Sequence[Message]) -> bool:
    """Return whether tail rendering gives a wrong text after the last place where a cached prefix could end."""
    try:
        conversation = _Conversation(context, messages)
    except TemplateRejected:
        return False
    last = len(messages) - 1
    for end in range(last, max(0, last - _MAX_CUTS), -1):
        differs = conversation.differs_at(end, renderer)
        if differs is not None:
            return differs
    return False


class _Conversation:
    """A conversation's text, and that of its prefixes and tails."""

    def __init__(self, context: RenderContext, messages: Sequence[Message]) -> None:
        """Raises TemplateRejected."""
        self._context = context
        self._messages = messages
        self._whole = context.render(messages)
        self._prefixes: dict[int, str | None] = {}
        """Text of each prefix, by its end. None where the template rejects the prefix."""
        self._tails: dict[tuple[int, bool], str | None] = {}
        """Text of each tail, by its start and by whether the stub is short."""

    def differs_at(self, end: int, renderer: TailRenderer) -> bool | None:
        """Return whether prefix and tail differ from the whole. None where no cached prefix can end at this message."""
        prefix, tail = self._messages[:end], self._messages[end:]
        if not may_be_prefix(prefix, renderer) or not may_follow(prefix[-1]["role"] == "user", tail):
            return None
        if end not in self._prefixes:
            self._prefixes[end] = self._render_prefix(prefix)
        prefix_text = self._prefixes[end]
        if prefix_text is None:
            return True
        prefix_text = renderer.without_generation_prompt(prefix_text)
        if prefix_text is None:
            return None
        key = (end, renderer.short_stub_suffices)
        if key not in self._tails:
            self._tails[key] = self._render_tail(renderer, prefix, tail)
        tail_text = self._tails[key]
        return tail_text is None or self._whole != prefix_text + tail_text

    def _render_prefix(self, prefix: Sequence[Message]) -> str | None:
        try:
            return self._context.render(prefix)
        except TemplateRejected:
            return None

    def _render_tail(self, renderer: TailRenderer, prefix: Sequence[Message], tail: Sequence[Message]) -> str | None:
        try:
            return renderer.render_tail(prefix[0]["role"] == "system", prefix[-1]["role"] == "user", tail)
        except TemplateRejected:
            return None
