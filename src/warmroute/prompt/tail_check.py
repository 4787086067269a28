"""Find out whether a chat template's text for the last messages can be rendered without the first ones.

The check renders probe conversations (template_probes.py) as a whole. For each place where a cached prefix could end,
the whole text must equal the prefix's text plus the tail's text (tail_rendering.py). One difference disables tail
rendering for the template. A template could still depend on something that no probe contains, so real conversations are
checked now and then, too (PromptTokenizer.verify_sample).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Final

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
        self._check_until_s = time.thread_time() + MAX_CHECK_S
        if template is not None and len(template.literals) <= MAX_LITERALS:
            self.non_question_literals = template.long_literals
            self._run(template_probes.probe_contexts(template), template_probes.literal_texts(template))

    def _run(self, contexts: Sequence[RenderContext], texts: Sequence[str]) -> None:
        self.safe_for_clean_messages = self._passes(contexts, ())
        self.safe_for_all_messages = self.safe_for_clean_messages and self._passes(contexts, texts)
        if self.safe_for_all_messages:
            every = self.non_question_literals
            self.non_question_literals = self._find_non_question_literals(contexts[0], texts)
            if not self._passes(contexts, texts):
                self.non_question_literals = every
        if self.safe_for_clean_messages:
            self.short_stub_suffices = True
            self.short_stub_suffices = self._passes(contexts, texts if self.safe_for_all_messages else ())

    def _passes(self, contexts: Sequence[RenderContext], special_texts: Sequence[str]) -> bool:
        """A context that cannot render anything counts as passed, except for the default one."""
        texts = [*template_probes.PLAIN_TEXTS, *special_texts]
        default = contexts[0]
        probes = chain(
            template_probes.conversations_with_each_text(default, special_texts),
            template_probes.random_conversations(default, texts, _DEFAULT_CONTEXT_PROBES),
        )
        if not self._compare(default, probes, _MIN_COMPARISONS):
            return False
        return all(
            self._compare(context, template_probes.random_conversations(context, texts, _OTHER_CONTEXT_PROBES), 0)
            is not False
            for context in contexts[1:]
        )

    def _find_non_question_literals(self, context: RenderContext, texts: Sequence[str]) -> tuple[str, ...]:
        """Most literals are harmless in a user's message, and some (`text`) are common words: return the others."""
        every, self.non_question_literals = self.non_question_literals, ()
        harmful = [
            text
            for text in texts
            if self._compare(context, template_probes.conversations_with_each_text(context, [text], "u"), 0) is False
        ]
        self.non_question_literals = every
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
        self._check_until_s = time.thread_time() + MAX_CHECK_S
        special_texts = template_probes.literal_texts(context.template) if self.safe_for_all_messages else []
        probes = template_probes.random_conversations(
            context, [*template_probes.PLAIN_TEXTS, *special_texts], _REQUEST_PROBES
        )
        return bool(self._compare(context, probes, 1))

    def tail_renderer(self, context: RenderContext) -> TailRenderer:
        """Raises TemplateRejected."""
        return TailRenderer(context, self.non_question_literals, self.short_stub_suffices)

    def disable(self) -> None:
        """Disable tail rendering after a real conversation gave a wrong text."""
        self.safe_for_clean_messages = self.safe_for_all_messages = False

    def _compare(
        self, context: RenderContext, conversations: Iterable[list[Message]], min_comparisons: int
    ) -> bool | None:
        """Return whether all tails were right, in at least this many comparisons. None: there is no tail renderer."""
        try:
            renderer = self.tail_renderer(context)
        except TemplateRejected:
            return None
        comparisons = 0
        for messages in conversations:
            if time.thread_time() > self._check_until_s:
                return False
            try:
                whole = context.render(messages)
            except TemplateRejected:
                continue
            for end in range(1, len(messages)):
                differs = _differs_at(context, renderer, messages, end, whole)
                if differs:
                    return False
                comparisons += differs is False
        return comparisons >= min_comparisons


def differs_at_last_cut(context: RenderContext, renderer: TailRenderer, messages: Sequence[Message]) -> bool:
    """Return whether tail rendering gives a wrong text after the last place where a cached prefix could end."""
    try:
        whole = context.render(messages)
    except TemplateRejected:
        return False
    last = len(messages) - 1
    for end in range(last, max(0, last - _MAX_CUTS), -1):
        differs = _differs_at(context, renderer, messages, end, whole)
        if differs is not None:
            return differs
    return False


def _differs_at(
    context: RenderContext, renderer: TailRenderer, messages: Sequence[Message], end: int, whole: str
) -> bool | None:
    """Return None where no cached prefix can end at this message."""
    prefix, tail = messages[:end], messages[end:]
    if not may_be_prefix(prefix, renderer):
        return None
    ends_with_user = prefix[-1]["role"] == "user"
    if not may_follow(ends_with_user, tail):
        return None
    try:
        prefix_text = renderer.without_generation_prompt(context.render(prefix))
        if prefix_text is None:
            return None
        return whole != prefix_text + renderer.render_tail(prefix[0]["role"] == "system", ends_with_user, tail)
    except TemplateRejected:
        return True
