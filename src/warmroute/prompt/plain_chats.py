"""Tokenize chats of plain messages from the tokens of their messages, without rendering the chat template.

The kernel finds the tokens of messages that some request had before, by their bytes (_kernel/message_tokens.c). Only
new messages are decoded and encoded. Chats with other messages (tool calls, reasoning, pictures, …) or of other
templates return None here; chat_tokenizer.py renders them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Final

from warmroute._kernel import TOKEN_BYTES, MessageTokens, Outline
from warmroute.prompt.chat_layout import TokenLayout, token_layout
from warmroute.prompt.chat_template import ChatTemplate
from warmroute.prompt.encoding_time import LOOP_MS
from warmroute.prompt.layout_check import LayoutCheck
from warmroute.prompt.prompt import Prompt, exact_prompt
from warmroute.prompt.render_context import RenderContext
from warmroute.prompt.tokenizer import Tokenizer

if TYPE_CHECKING:
    from warmroute._kernel import MissingMessage


MAX_BODY_BYTES: Final = 1 << 23
"""The tokens of a larger chat would take 10 ms to join, in which the interpreter lock is held."""
MESSAGE_MS: Final = 0.004
"""To encode a message takes so long, however short it is."""


class PlainLayout:
    """The layout of one render context."""

    def __init__(self, check: LayoutCheck, layout: TokenLayout, template: ChatTemplate) -> None:
        self.check = check
        self.layout = layout
        self.template = template

    def is_outdated(self) -> bool:
        """Return whether the template prints another date by now."""
        time_key = self.layout.time_key
        return bool(time_key) and time_key != self.template.time_key()


class PlainChats:
    """Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, budget_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._worst_ms_per_byte: float = tokenizer.worst_ms_per_byte
        self._checks: dict[str, LayoutCheck] = {}
        """By template source."""
        self.messages = MessageTokens(budget_bytes)

    def layout(self, context: RenderContext, cut_tokens: Sequence[str], add_special_tokens: bool) -> PlainLayout | None:
        """Return None where the template or the tokenizer does not allow a layout. Takes milliseconds."""
        if not cut_tokens or self._tokenizer.inexact_reason:
            return None
        template = context.template
        check = self._checks.get(template.source) if context.uses_model_template else LayoutCheck(None)
        if check is None:
            check = self._checks[template.source] = LayoutCheck(template)
        time_key = template.time_key()
        text_layout = check.layout(context)
        if text_layout is None or template.prints_time_of_day() or template.time_key() != time_key:
            return None
        layout = token_layout(text_layout, self._tokenizer, cut_tokens, add_special_tokens, time_key)
        return None if layout is None else PlainLayout(check, layout, template)

    def new_messages(self, plain: PlainLayout, outline: Outline) -> list[MissingMessage] | None:
        """Return the messages whose tokens are not cached; None if the chat cannot be tokenized here."""
        if not plain.check.enabled or outline.body_bytes > MAX_BODY_BYTES:
            return None
        found = self.messages.join(outline, plain.layout.kernel)
        return [] if isinstance(found, bytes) else found

    def tokenize(self, plain: PlainLayout, outline: Outline, body: bytes = b"", max_ms: float = inf) -> Prompt | None:
        """Return None if the chat cannot be tokenized here, or if its new messages may take longer than `max_ms`.

        `body`: of the request; needed with `max_ms`.
        """
        if not plain.check.enabled or outline.body_bytes > MAX_BODY_BYTES:
            return None
        found = self.messages.join(outline, plain.layout.kernel)
        if found is None:
            return None
        if isinstance(found, bytes):
            return exact_prompt(found, len(found) // TOKEN_BYTES)
        if max_ms < inf and self._estimate_ms(outline, body, found) > max_ms:
            return None
        new_bytes = 0
        for message, start, end, _size in found:
            tokens = self._encode(plain, outline, message, start, end)
            is_kept = self.messages.add(outline, message, tokens)
            if tokens is None or not is_kept:
                return None
            new_bytes += len(tokens)
        joined = self.messages.join(outline, plain.layout.kernel)
        if not isinstance(joined, bytes):
            return None  # the cache is too small for this chat
        is_warm = len(found) < outline.message_count
        return exact_prompt(joined, (len(joined) - new_bytes) // TOKEN_BYTES if is_warm else 0)

    def _estimate_ms(self, outline: Outline, body: bytes, messages: Sequence[MissingMessage]) -> float:
        """Return how long it takes to encode these messages."""
        fixed_ms, size_bytes = MESSAGE_MS * len(messages), 0
        for _message, _start, _end, size in messages:
            size_bytes += size
        worst_ms = fixed_ms + self._worst_ms_per_byte * size_bytes
        if fixed_ms > LOOP_MS or worst_ms <= LOOP_MS:
            return worst_ms
        spans = memoryview(outline.message_spans).cast("I")
        return fixed_ms + self._tokenizer.estimate_encode_ms(
            body, [(spans[2 * message], spans[2 * message + 1]) for message, _start, _end, _size in messages]
        )

    def _encode(self, plain: PlainLayout, outline: Outline, message: int, start: int, end: int) -> bytes | None:
        """Return None where this message's tokens depend on other messages, or its text cannot be encoded."""
        text = outline.plain_text(message)
        if text is None or not plain.check.is_safe(text):
            return None
        try:
            return self._unit_tokens(plain.layout, start, end, text)
        except UnicodeEncodeError:
            return None

    def _unit_tokens(self, layout: TokenLayout, start: int, end: int, text: str) -> bytes | None:
        """Return the tokens from the cut before a message's content to the cut after it.

        None where the tokenizer does not find the cut token. Raises UnicodeEncodeError.
        """
        before = layout.starts[start]
        if before.transform is not None:
            text = before.transform(text)
        tokens = self._tokenizer.encode(f"{before.text}{text}{layout.ends[end]}")
        if not before.cut_token:
            return tokens
        return tokens[TOKEN_BYTES:] if tokens.startswith(before.cut_token) else None

    def prefix(self, plain: PlainLayout, outline: Outline, count: int) -> tuple[bytes, str, str] | None:
        """Return the tokens of the first messages up to a cut token, this token, and the text after it.

        None where some of these tokens are not cached.
        """
        if count < 1 or not plain.check.enabled:
            return None
        roles = b"\0" + outline.plain_roles
        cut = plain.layout.last_cuts.get((roles[count - 1], roles[count]))
        tokens = None if cut is None else self.messages.join(outline, plain.layout.kernel, count)
        return (tokens, *cut) if cut is not None and isinstance(tokens, bytes) else None

    def disable(self, check: LayoutCheck) -> None:
        """Render all chats of this template from now on."""
        check.disable()
        self.messages.clear()
