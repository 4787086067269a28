"""Tokens of plain chats from the tokens of their messages, by a layout that is learned from the template."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import TYPE_CHECKING, Final

from warmroute._kernel import DIGEST_BYTES, MESSAGE_ROLES, TOKEN_BYTES, ChatLayout, MessageTokens, Outline, digest
from warmroute.prompt import tail_rendering
from warmroute.prompt.chat_template import ChatTemplate, TemplateRejected
from warmroute.prompt.encoding_time import LOOP_MS
from warmroute.prompt.prompt import Prompt, exact_prompt
from warmroute.prompt.tail_rendering import MAX_LITERALS, CheckTime
from warmroute.prompt.template_messages import BILLING_HEADER, MEDIA_MARK, RenderContext
from warmroute.prompt.tokenizer import Tokenizer

if TYPE_CHECKING:
    from warmroute._kernel import MissingMessage


# What a chat template puts between the contents of plain messages.
#
# For most templates, the text of a chat is: separator, content, separator, content, …, separator. A separator depends
# only on the roles of the two messages before it and of the message after it, and the content is printed as it is, or
# stripped. `learn_layout` finds the separators by rendering chats of placeholders. `LayoutCheck` compares the result
# with the template. Chats that a layout does not cover are rendered by the template.
#
# A plain message has a role, one text, and nothing else that a template gets (_kernel/body_scan.c).

ROLES: Final = ("", "system", "user", "assistant")
"""Roles by the kernel's number. The first stands for the start and the end of a chat."""
assert len(ROLES) == MESSAGE_ROLES
SYSTEM_ROLE, USER_ROLE, ASSISTANT_ROLE = 1, 2, 3
_NUMBERS: Final = {role[0]: number for number, role in enumerate(ROLES) if role}
USUAL_CHATS: Final = ("u", "su", "uau", "suau", "uauau", "suauau")
"""Chats whose separators are learned, by the first letters of their roles. All of them end with the user."""
ALL_CHATS: Final = (
    *USUAL_CHATS, "uu", "uuuau", "uauu", "uauuau", "suu", "suuuau", "suauu", "usu", "uasu", "suasu", "ssu", "uaau",
    "suaau", "au", "sau",
)  # fmt: skip
"""Chats whose separators are learned if the template accepts them all: besides USUAL_CHATS, some with roles in an
unusual order."""
_PLACEHOLDER: Final = "Xq{}kZ"

Transform = Callable[[str], str]
Triple = tuple[int, int, int]
"""The roles of two messages before a separator, and of the message after it."""


def _unchanged(text: str) -> str:
    return text


TRANSFORMS: Final[tuple[Transform, ...]] = (
    _unchanged,
    str.strip,
    str.lstrip,
    str.rstrip,
    lambda text: text.strip("\n"),
    lambda text: text.lstrip("\n"),
    lambda text: text.rstrip("\n"),
)
"""What templates do with a content before they print it."""
_SPACED: Final = (" a ", "\na\n", "\n\n a\t\n b \n\n", "\ta b", "a\n", "a b\r\n")


@dataclass(slots=True, eq=False)
class TextLayout:
    """The separators of one template, as text."""

    separators: dict[Triple, str]
    transforms: dict[int, int]
    """Number of the transform (TRANSFORMS) of each role."""

    def render(self, roles: Sequence[int], texts: Sequence[str]) -> str | None:
        """Return None where the layout does not cover these roles."""
        pieces: list[str] = []
        for place, text in zip(_triples(roles), [*texts, ""], strict=True):
            separator = self.separators.get(place)
            if separator is None:
                return None
            pieces.append(separator)
            if place[2]:
                pieces.append(TRANSFORMS[self.transforms[place[2]]](text))
        return "".join(pieces)


def _triples(roles: Sequence[int]) -> list[Triple]:
    padded = [0, 0, *roles, 0]
    return list(zip(padded, padded[1:], padded[2:], strict=False))


def learn_layout(context: RenderContext, chats: Sequence[str]) -> TextLayout | None:
    """Return a layout of what these chats contain.

    None where the template prints more than separators and contents, or depends on more than three roles.
    """
    if context.continued_field:
        return None
    separators: dict[Triple, str] = {}
    for letters in chats:
        roles = [_NUMBERS[letter] for letter in letters]
        placeholders = [_PLACEHOLDER.format(number) for number in range(len(roles))]
        rendered = render(context, roles, placeholders)
        if rendered is None:
            continue
        pieces = _split(rendered, placeholders)
        if pieces is None:
            return None
        for place, piece in zip(_triples(roles), pieces, strict=True):
            # The template looks further than the two roles before: it numbers messages, or prints the last ones
            # differently.
            if separators.setdefault(place, piece) != piece:
                return None
    transforms = _find_transforms(context, separators)
    if transforms is None or (0, 0, _NUMBERS["u"]) not in separators:
        return None
    return TextLayout(separators, transforms)


def render(context: RenderContext, roles: Sequence[int], texts: Sequence[str]) -> str | None:
    """Return the template's text, None where the template rejects the chat."""
    messages = [context.text_message(ROLES[role], text) for role, text in zip(roles, texts, strict=True)]
    try:
        return context.render(messages)
    except TemplateRejected:
        return None


def _split(text: str, placeholders: Sequence[str]) -> list[str] | None:
    """Return the texts around the placeholders; None where they are not there once each, in this order."""
    pieces: list[str] = []
    for placeholder in placeholders:
        # Some templates print a system message twice, or drop an assistant's.
        if text.count(placeholder) != 1:
            return None
        piece, _placeholder, text = text.partition(placeholder)
        pieces.append(piece)
    if any(placeholder in piece for piece in pieces for placeholder in placeholders):
        return None
    return [*pieces, text]


def _find_transforms(context: RenderContext, separators: dict[Triple, str]) -> dict[int, int] | None:
    """Return None where a role's content is printed in none of the known ways."""
    found = dict.fromkeys(range(1, MESSAGE_ROLES), 0)
    chats = [[SYSTEM_ROLE, USER_ROLE], [USER_ROLE, ASSISTANT_ROLE, USER_ROLE]]
    chats = [chat for chat in chats if all(place in separators for place in _triples(chat))]
    for role in found:
        probes = [(chat, [text if at == role else "x" for at in chat]) for chat in chats for text in _SPACED]
        probes = [(chat, texts) for chat, texts in probes if role in chat]
        expected = [render(context, chat, texts) for chat, texts in probes]
        for number in range(len(TRANSFORMS)):
            layout = TextLayout(separators, {**found, role: number})
            if [layout.render(chat, texts) for chat, texts in probes] == expected:
                found[role] = number
                break
        else:
            return None
    return found


# ---- As tokens ----

_NOT_COVERED: Final = struct.pack("=qq", -1, -1)


@dataclass(frozen=True, slots=True)
class Start:
    """What belongs to a message before its content: a cut token, and the separator's text after it."""

    text: str
    """The cut token and the separator's text after it."""
    cut_token: bytes
    """Id of the cut token, as bytes; empty at the start of a text."""
    transform: Transform | None
    """What the template does with the content before it prints it; None for nothing."""


@dataclass(slots=True, eq=False)
class TokenLayout:
    """A layout whose separators are cut after special tokens, for MessageTokens.join."""

    kernel: ChatLayout
    starts: Mapping[int, Start]
    ends: Mapping[int, str]
    """What belongs to a message after its content, up to and including the next cut token."""
    last_cuts: Mapping[tuple[int, int], tuple[str, str]]
    """The cut token after the last content, and the text after that token, by the roles of the last two messages."""
    time_key: str
    """What the template printed of the time when the layout was learned."""


def token_layout(
    text_layout: TextLayout, tokenizer: Tokenizer, cut_tokens: Sequence[str], add_special_tokens: bool, time_key: str
) -> TokenLayout | None:
    """Return None where no chat can be cut."""
    starts: dict[int, Start] = {}
    ends: dict[int, str] = {}
    first, last = [b""] * MESSAGE_ROLES, [b""] * MESSAGE_ROLES**2
    last_cuts: dict[tuple[int, int], tuple[str, str]] = {}
    separators = b""
    for two_before, before, after in product(range(MESSAGE_ROLES), repeat=3):
        separator = text_layout.separators.get((two_before, before, after))
        cut_at, cut_token = _first_cut(separator or "", cut_tokens)
        if separator is None or (before and after and not cut_token):
            separators += _NOT_COVERED
            continue
        if not after and not cut_token:
            cut_at = len(separator)  # nothing follows, so there is nothing to cut off
        end, rest = separator[:cut_at], separator[cut_at:]
        cut_id = tokenizer.token_id(cut_token) if cut_token else b""
        end_number = start_number = 0
        if before:
            end_number = _number("end", end)
            ends[end_number] = end
        else:
            first[after] = (tokenizer.special_prefix if add_special_tokens else b"") + tokenizer.encode(end)
        if after:
            transform = text_layout.transforms[after]
            start_number = _number("start", cut_token, rest, str(transform))
            starts[start_number] = Start(cut_token + rest, cut_id, TRANSFORMS[transform] if transform else None)
        else:
            tokens = tokenizer.encode(cut_token + rest)
            if not tokens.startswith(cut_id):
                return None
            if cut_token:
                last_cuts[two_before, before] = cut_token, rest
            special = tokenizer.special_suffix if add_special_tokens else b""
            last[two_before * MESSAGE_ROLES + before] = tokens[len(cut_id) :] + special
        separators += struct.pack("=qq", end_number, start_number)
    if not starts or not ends:
        return None
    return TokenLayout(ChatLayout(separators, tuple(first), tuple(last)), starts, ends, last_cuts, time_key)


def _first_cut(separator: str, cut_tokens: Sequence[str]) -> tuple[int, str]:
    """Return the end of the first cut token and the token itself; 0 and "" where there is none."""
    found = [(separator.find(token), token) for token in cut_tokens if token in separator]
    if not found:
        return 0, ""
    at, token = min(found)
    return at + len(token), token


def _number(*texts: str) -> int:
    """Return 63 bits that are equal for equal texts, in this process."""
    material = "\0".join((*(str(len(text)) for text in texts), *texts)).encode("utf-8", "surrogatepass")
    return int.from_bytes(digest(material, 0, len(material))[: DIGEST_BYTES // 2], "little") >> 1


# Find out whether a chat template's text for plain messages is what a layout says.
#
# The check compares the layout with the template on chats of plain texts, and of texts with the strings that the
# template searches for. Strings that change how a message is printed (Qwen3: `</think>`) are unsafe: a message that
# contains one is not tokenized by the layout. A template could still depend on something that no probe contains, so
# real chats are checked now and then, too (PromptTokenizer.verify_sample).

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
            context, texts = RenderContext(template), tail_rendering.literal_texts(template)
            # Many templates refuse unusual orders, or merge messages. Usual chats still have a layout then.
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
        texts = tail_rendering.literal_texts(context.template)
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
        texts = [text for text in (*tail_rendering.PLAIN_TEXTS, *_MORE_TEXTS, *texts) if self.is_safe(text)]
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
    """Yield random chats. In two of three, user and assistant take turns."""
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


# Tokenize chats of plain messages from the tokens of their messages, without rendering the chat template.
#
# The kernel finds the tokens of messages that some request had before, by their bytes (_kernel/message_tokens.c). Only
# new messages are decoded and encoded. Chats with other messages (tool calls, reasoning, pictures, …) or of other
# templates return None here; chat_tokenizer.py renders them.

MAX_BODY_BYTES: Final = 1 << 23
"""The tokens of a larger chat would take 10 ms to join, in which the interpreter lock is held."""
MESSAGE_MS: Final = 0.004
"""Time to encode a message, however short it is."""


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
        """The check of each template, by the template's source."""
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
            count = len(found) // TOKEN_BYTES
            return Prompt(found, count, warm_tokens=count)
        if max_ms < inf and self._estimate_ms(outline, body, found) > max_ms:
            return None
        new_bytes = 0
        for message, start, end, _size in found:
            tokens = self._encode(plain, outline, message, start, end)
            # Also a message that cannot be tokenized alone is kept, as such: the next request need not try it again.
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
