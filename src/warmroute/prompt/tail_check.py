"""Find out whether a chat template's text for the last messages can be rendered without the first ones.

The check renders probe conversations (template_probes.py) as a whole. For each place where a cached prefix could end,
the whole text must equal the prefix's text plus the tail's text (tail_rendering.py). One difference disables tail
rendering for the template. A template could still depend on something that no probe contains, so real conversations are
checked now and then, too (PromptTokenizer.verify_sample).

There are variants of tail rendering, some of which save work later. The check tries all of them with one pass over the
probes, since rendering whole conversations and their prefixes takes the most time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Final, NamedTuple

from warmroute.prompt import template_probes
from warmroute.prompt.chat_template import ChatTemplate, Message, TemplateRejected
from warmroute.prompt.render_context import RenderContext
from warmroute.prompt.tail_rendering import TailRenderer, may_be_prefix, may_follow

_DEFAULT_CONTEXT_PROBES, _OTHER_CONTEXT_PROBES, _REQUEST_PROBES = 300, 60, 4
"""Random conversations per check."""
_MIN_COMPARISONS: Final = 30
MAX_LITERALS: Final = 150
"""A template that searches for more strings is not checked, since all pairs of them would have to be."""
MAX_CHECK_S: Final = 20.0
"""CPU time after which a template that is not checked by then counts as unsafe."""
_MAX_CUTS: Final = 64
"""How far back from the end the search for a cut goes: each step reads all messages before it."""


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
        """Tail rendering is right where no message contains a string that the template searches for."""
        self.safe_for_all_messages = False
        self.non_question_literals: tuple[str, ...] = ()
        """Strings that make the template treat a user's message as something else (Qwen3: `<tool_response>`)."""
        self.short_stub_suffices = False
        """The shortest stub can precede every tail."""
        if template is not None and len(template.literals) <= MAX_LITERALS:
            self.non_question_literals = template.long_literals
            self._run(template_probes.probe_contexts(template), template_probes.literal_texts(template))

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
        texts = [*template_probes.PLAIN_TEXTS, *special_texts]
        default = contexts[0]
        probes = chain(
            template_probes.conversations_with_each_text(default, special_texts),
            template_probes.random_conversations(default, texts, _DEFAULT_CONTEXT_PROBES),
        )
        right: Sequence[Variant] = self._compare(check_time, default, probes, variants, _MIN_COMPARISONS) or ()
        for context in contexts[1:]:
            others = template_probes.random_conversations(context, texts, _OTHER_CONTEXT_PROBES)
            still_right = self._compare(check_time, context, others, right)
            right = right if still_right is None else still_right
        return right

    def _find_non_question_literals(
        self, check_time: CheckTime, context: RenderContext, texts: Sequence[str]
    ) -> tuple[str, ...]:
        """Most literals are harmless in a user's message, and some (`text`) are common words: return the others."""
        every, without = self.non_question_literals, [Variant((), False)]
        conversations = template_probes.conversations_with_each_text
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
        special_texts = template_probes.literal_texts(context.template) if self.safe_for_all_messages else []
        probes = template_probes.random_conversations(
            context, [*template_probes.PLAIN_TEXTS, *special_texts], _REQUEST_PROBES
        )
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
        """By end. None where the template rejects the prefix."""
        self._tails: dict[tuple[int, bool], str | None] = {}
        """By start, and whether the stub is short."""

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
