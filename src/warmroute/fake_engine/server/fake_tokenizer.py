"""A stand-in for a tokenizer and a chat template: no files, about 0.3 µs a token, the same in every process.

Text is cut into pieces (up to six letters with the space before them, up to three digits, a newline, one or two other
characters) and each piece has an id: characters and the words of the simulated model have their own, all others are
hashed into the rest of a vocabulary of Qwen's size, where two of them may meet. So

- the tokens of a text's beginning are the beginning of the text's tokens, but for the last word;
- special tokens and newlines stand alone, so a chat that grows by a message grows by that message's tokens;
- what the model says is read back as the tokens it was said in, so a next turn finds this turn's blocks;
- ids are turned back into the text that they were last seen for, if they were ever seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from random import Random
from typing import Any, Final, Protocol
from zlib import crc32

import msgspec

from warmroute.fake_engine.server.word_list import WORDS

VOCABULARY: Final = 151_936
_SPECIALS: Final = {"<|endoftext|>": 151_643, "<|im_start|>": 151_644, "<|im_end|>": 151_645}
_FIRST_WORD: Final = 256
_PIECE: Final = re.compile(
    r"<\|(?:im_start|im_end|endoftext)\|>| {2,16}| ?[A-Za-z]{1,6}| ?[0-9]{1,3}|\n| ?[^\sA-Za-z0-9<]{1,2}|.", re.DOTALL
)
_KNOWN_PIECES: Final = 400_000
"""Pieces remembered with their id; then it starts anew."""


Messages = Sequence[dict[str, Any]]
"""Of a chat, as the client sent them."""


def message_text(message: dict[str, Any], calls: bool = True) -> str:
    """A message's content as templates write it: parts a line each, images by their hash, then calls of tools."""
    content = message.get("content")
    text = content if isinstance(content, str) else "\n".join(_part_text(part) for part in content or ())
    for call in (message.get("tool_calls") or ()) if calls else ():
        text += f"\n<tool_call>\n{msgspec.json.encode(call).decode()}\n</tool_call>"
    return text


def _part_text(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    if isinstance(text, str):
        return text
    return f"<image {blake2b(msgspec.json.encode(part), digest_size=8).hexdigest()}>"


class Tokenizer(Protocol):
    """What the server needs of a tokenizer."""

    vocabulary: int
    end_of_turn: int

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """`add_special_tokens` puts the model's beginning of text before it, where it has one."""

    def decode(self, tokens: Iterable[int]) -> str: ...
    def render(self, messages: Messages, tools: Any, generation_prompt: bool) -> str: ...
    def answer(self, random: Random, count: int) -> tuple[list[int], list[str]]:
        """Tokens of an answer, and the text of each: joined, the texts are read as these tokens again."""


class _Ids(dict[str, int]):
    """Piece → id; what is missing is hashed."""

    def __init__(self, pieces: dict[int, str]) -> None:
        super().__init__()
        self._pieces = pieces
        self._fixed: dict[str, int] = {}

    def fix(self, piece: str, token: int) -> None:
        self._fixed[piece] = self[piece] = token
        self._pieces[token] = piece

    def __missing__(self, piece: str) -> int:
        if len(self) > _KNOWN_PIECES:
            self.clear()
            self.update(self._fixed)
        first = _FIRST_WORD + 4 * len(WORDS)
        token = first + crc32(piece.encode("utf-8", "surrogatepass")) % (_SPECIALS["<|endoftext|>"] - first)
        self[piece] = token
        self._pieces[token] = piece
        return token


class FakeTokenizer:
    """Implements Tokenizer."""

    def __init__(self) -> None:
        self.vocabulary = VOCABULARY
        self.end_of_turn = _SPECIALS["<|im_end|>"]
        self._pieces: dict[int, str] = {}
        self._ids = ids = _Ids(self._pieces)
        for token in range(_FIRST_WORD):
            ids.fix(chr(token), token)
        for index, word in enumerate(WORDS):
            for form, text in enumerate((word, " " + word, word.capitalize(), " " + word.capitalize())):
                if text not in ids:
                    ids.fix(text, _FIRST_WORD + 4 * index + form)
        for text, token in _SPECIALS.items():
            ids.fix(text, token)
        self._said = [(ids[" " + word], " " + word) for word in WORDS]

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        ids = self._ids
        return [ids[piece] for piece in _PIECE.findall(text)]

    def decode(self, tokens: Iterable[int]) -> str:
        pieces = self._pieces
        return "".join([pieces.get(token) or f" t{token}" for token in tokens])

    def render(self, messages: Messages, tools: Any, generation_prompt: bool) -> str:
        """ChatML, tools in front."""
        parts: list[str] = []
        if tools:
            parts += ("<|im_start|>tools\n", msgspec.json.encode(tools).decode(), "<|im_end|>\n")
        for message in messages:
            parts += ("<|im_start|>", message["role"], "\n", message_text(message), "<|im_end|>\n")
        if generation_prompt:
            parts.append("<|im_start|>assistant\n")
        return "".join(parts)

    def answer(self, random: Random, count: int) -> tuple[list[int], list[str]]:
        said = random.choices(self._said, k=count)
        if count:
            first = said[0][1].strip().capitalize()
            said[0] = (self._ids[first], first)
        return [token for token, _ in said], [text for _, text in said]
