"""Find out whether a chat template's text for plain messages is what a layout says (chat_layout.py).

The check compares the layout with the template on chats of plain texts, and of texts with the strings that the template
searches for. Strings that change how a message is printed (Qwen3: `</think>`) are unsafe: a message that contains one
is not tokenized by the layout. A template could still depend on something that no probe contains, so real chats are
checked now and then, too (PromptTokenizer.verify_sample).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Final

from warmroute.prompt import template_probes
from warmroute.prompt.chat_layout import (
    ALL_CHATS,
    ASSISTANT_ROLE,
    SYSTEM_ROLE,
    USER_ROLE,
    USUAL_CHATS,
    TextLayout,
    learn_layout,
    render,
)
from warmroute.prompt.chat_template import ChatTemplate
from warmroute.prompt.render_context import RenderContext
from warmroute.prompt.tail_check import MAX_LITERALS, CheckTime
from warmroute.prompt.template_messages import BILLING_HEADER, MEDIA_MARK

_TEMPLATE_PROBES, _REQUEST_PROBES = 200, 4
"""Random chats for each check."""
_LONG_CHAT: Final = 24
"""Messages in every twentieth random chat."""
_SKELETONS: Final = (
    (SYSTEM_ROLE, USER_ROLE, ASSISTANT_ROLE, USER_ROLE, ASSISTANT_ROLE, USER_ROLE),
    (USER_ROLE, ASSISTANT_ROLE, USER_ROLE),
)
"""Chats in which each text is put at each place."""
_MORE_TEXTS: Final = ('<b>&"c\'" é🙂 {{ x }} \\n', "many words " * 2000)
_ALWAYS_UNSAFE: Final = (MEDIA_MARK, BILLING_HEADER)


class LayoutCheck:
    """The result of the check for one template."""

    def __init__(self, template: ChatTemplate | None) -> None:
        """Check the template, which takes some tenths of a second. None disables layouts without a check."""
        self.enabled = False
        self.unsafe: tuple[str, ...] = _ALWAYS_UNSAFE
        """Strings that change how a message that contains them is printed."""
        self._chats: Sequence[str] = ALL_CHATS
        if template is not None and len(template.literals) <= MAX_LITERALS:
            check_time = CheckTime()
            context, texts = RenderContext(template), template_probes.literal_texts(template)
            for self._chats in (ALL_CHATS, USUAL_CHATS):
                self.unsafe = _ALWAYS_UNSAFE
                self.enabled = self._passes(check_time, context, texts, template.literals)
                if self.enabled:
                    break

    def _passes(
        self, check_time: CheckTime, context: RenderContext, literal_texts: Sequence[str], literals: Sequence[str]
    ) -> bool:
        layout = learn_layout(context, self._chats)
        if layout is None or not self._agrees(check_time, context, layout, (), _TEMPLATE_PROBES):
            return False
        harmful = [text for text in literal_texts if self._is_harmful(check_time, context, layout, text)]
        while harmful:
            literal = max(literals, key=lambda literal: sum(literal in text for text in harmful))
            remaining = [text for text in harmful if literal not in text]
            if len(remaining) == len(harmful):
                return False  # no literal explains this text
            self.unsafe += (literal,)
            harmful = remaining
        return self._agrees(check_time, context, layout, literal_texts, _TEMPLATE_PROBES)

    def is_safe(self, text: str) -> bool:
        """Return whether a message with this text is printed as the layout says."""
        for unsafe in self.unsafe:
            if unsafe in text:
                return False
        return bool(text) and not text.isspace()

    def layout(self, context: RenderContext) -> TextLayout | None:
        """Learn a layout with a request's own tools and variables. Takes milliseconds."""
        layout = learn_layout(context, self._chats) if self.enabled else None
        if layout is None:
            return None
        texts = template_probes.literal_texts(context.template)
        return layout if self._agrees(CheckTime(), context, layout, texts, _REQUEST_PROBES) else None

    def disable(self) -> None:
        """Disable layouts after a real chat got wrong tokens."""
        self.enabled = False

    def _is_harmful(self, check_time: CheckTime, context: RenderContext, layout: TextLayout, text: str) -> bool:
        if not self.is_safe(text):
            return False
        chats = (
            (roles, [text if at == place else "x" for at in range(len(roles))])
            for roles in _SKELETONS
            for place in range(len(roles))
        )
        return not _equal(check_time, context, layout, chats)

    def _agrees(
        self, check_time: CheckTime, context: RenderContext, layout: TextLayout, texts: Sequence[str], count: int
    ) -> bool:
        texts = [text for text in (*template_probes.PLAIN_TEXTS, *_MORE_TEXTS, *texts) if self.is_safe(text)]
        return _equal(check_time, context, layout, _random_chats(texts, count))


def _equal(
    check_time: CheckTime,
    context: RenderContext,
    layout: TextLayout,
    chats: Iterable[tuple[Sequence[int], Sequence[str]]],
) -> bool:
    """Return whether layout and template agree on all chats that both accept, and there was time to compare them."""
    for roles, texts in chats:
        if check_time.is_over():
            return False
        by_layout = layout.render(roles, texts)
        if by_layout is not None:
            by_template = render(context, roles, texts)
            if by_template is not None and by_template != by_layout:
                return False
    return True


def _random_chats(texts: Sequence[str], count: int) -> Iterable[tuple[list[int], list[str]]]:
    """In two of three, user and assistant take turns."""
    rng = random.Random(5)
    for number in range(1, count + 1):
        length = rng.randint(1, 7) if number % 20 else _LONG_CHAT
        roles = [SYSTEM_ROLE] if rng.random() < 0.5 else []
        for at in range(length):
            in_turn = ASSISTANT_ROLE if at % 2 else USER_ROLE
            roles.append(in_turn if number % 3 else rng.choice((SYSTEM_ROLE, USER_ROLE, USER_ROLE, ASSISTANT_ROLE)))
        if roles[-1] != USER_ROLE:
            roles.append(USER_ROLE)
        yield roles, [rng.choice(texts) for _role in roles]
