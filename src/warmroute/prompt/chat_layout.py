"""What a chat template puts between the contents of plain messages.

For most templates, the text of a chat is: separator, content, separator, content, …, separator. A separator depends
only on the roles of the two messages before it and of the message after it, and the content is printed as it is, or
stripped. `learn_layout` finds the separators by rendering chats of placeholders. layout_check.py compares the result
with the template. Chats that a layout does not cover are rendered by the template.

A plain message has a role, one text, and nothing else that a template gets (_kernel/body_scan.c).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

from warmroute._kernel import DIGEST_BYTES, MESSAGE_ROLES, ChatLayout, digest
from warmroute.prompt.chat_template import TemplateRejected
from warmroute.prompt.render_context import RenderContext
from warmroute.prompt.tokenizer import Tokenizer

ROLES: Final = ("", "system", "user", "assistant")
"""By the kernel's number. The first stands for the start and the end of a chat."""
assert len(ROLES) == MESSAGE_ROLES
SYSTEM_ROLE, USER_ROLE, ASSISTANT_ROLE = 1, 2, 3
_NUMBERS: Final = {role[0]: number for number, role in enumerate(ROLES) if role}
USUAL_CHATS: Final = ("u", "su", "uau", "suau", "uauau", "suauau")
"""Chats whose separators are learned, by the first letters of their roles. All of them end with the user."""
ALL_CHATS: Final = (
    *USUAL_CHATS, "uu", "uuuau", "uauu", "uauuau", "suu", "suuuau", "suauu", "usu", "uasu", "suasu", "ssu", "uaau",
    "suaau", "au", "sau",
)  # fmt: skip
"""These, too, have roles in an unusual order."""
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
    """By role: the number of the transform."""

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
    """With the cut token."""
    cut_token: bytes
    """Its id, as bytes; empty at the start of a text."""
    transform: Transform | None
    """None where the content stays as it is."""


@dataclass(slots=True, eq=False)
class TokenLayout:
    """A layout whose separators are cut after special tokens, for MessageTokens.join."""

    kernel: ChatLayout
    starts: Mapping[int, Start]
    ends: Mapping[int, str]
    """What belongs to a message after its content, up to and including the next cut token."""
    last_cuts: Mapping[tuple[int, int], tuple[str, str]]
    """By the roles of the last two messages: the cut token after the last content, and the text after that token."""
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
