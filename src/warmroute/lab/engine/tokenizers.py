"""A simulated tokenizer and chat template: no files, about 0.3 µs per token, the same in every process.

The tokenizer splits text into pieces: up to six letters with the space before them, up to three digits, a newline, or
one or two other characters. Each piece has an id. Single characters and the words of the simulated model have ids of
their own. All other pieces are hashed into the rest of a vocabulary of Qwen's size, so two of them can share an id.

- The tokens of a prefix are a prefix of the text's tokens, except for the last word.
- Special tokens and newlines are separate pieces, so a new message appends tokens and changes none.
- The simulated model's output is encoded to the tokens it was generated from, so the next turn finds its blocks.
- An id is decoded to the piece that it was last seen for.
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
_MAX_CACHED_PIECES: Final = 400_000


Messages = Sequence[dict[str, Any]]
"""The messages of a chat, as the client sent them."""


def message_text(message: dict[str, Any], with_tool_calls: bool = True) -> str:
    """Return a message's content as templates write it: one line per part, images as hashes, then tool calls."""
    content = message.get("content")
    text = content if isinstance(content, str) else "\n".join(_part_text(part) for part in content or ())
    for call in (message.get("tool_calls") or ()) if with_tool_calls else ():
        text += f"\n<tool_call>\n{msgspec.json.encode(call).decode()}\n</tool_call>"
    return text


def _part_text(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    if isinstance(text, str):
        return text
    return f"<image {blake2b(msgspec.json.encode(part), digest_size=8).hexdigest()}>"


class Tokenizer(Protocol):
    """A tokenizer with its chat template and the outputs of its simulated model."""

    vocabulary: int
    end_of_turn: int

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Encode a text. `add_special_tokens` puts the model's beginning-of-text token before it, if it has one."""

    def decode(self, tokens: Iterable[int]) -> str: ...
    def render(self, messages: Messages, tools: Any, generation_prompt: bool) -> str: ...
    def generate(self, random: Random, count: int) -> tuple[list[int], list[str]]:
        """Return random output tokens and the text of each. The joined texts are encoded to the same tokens."""


class _PieceIds(dict[str, int]):
    """Maps pieces to ids, and hashes pieces that have no id of their own."""

    def __init__(self, pieces: dict[int, str]) -> None:
        super().__init__()
        self._pieces = pieces
        self._own: dict[str, int] = {}

    def add_own(self, piece: str, token: int) -> None:
        self._own[piece] = self[piece] = token
        self._pieces[token] = piece

    def __missing__(self, piece: str) -> int:
        if len(self) > _MAX_CACHED_PIECES:
            self.clear()
            self.update(self._own)
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
        self._ids = ids = _PieceIds(self._pieces)
        for token in range(_FIRST_WORD):
            ids.add_own(chr(token), token)
        for index, word in enumerate(WORDS):
            for form, text in enumerate((word, " " + word, word.capitalize(), " " + word.capitalize())):
                if text not in ids:
                    ids.add_own(text, _FIRST_WORD + 4 * index + form)
        for text, token in _SPECIALS.items():
            ids.add_own(text, token)
        self._output_words = [(ids[" " + word], " " + word) for word in WORDS]

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        ids = self._ids
        return [ids[piece] for piece in _PIECE.findall(text)]

    def decode(self, tokens: Iterable[int]) -> str:
        pieces = self._pieces
        return "".join([pieces.get(token) or f" t{token}" for token in tokens])

    def render(self, messages: Messages, tools: Any, generation_prompt: bool) -> str:
        """Render ChatML, with the tools first."""
        parts: list[str] = []
        if tools:
            parts += ("<|im_start|>tools\n", msgspec.json.encode(tools).decode(), "<|im_end|>\n")
        for message in messages:
            parts += ("<|im_start|>", message["role"], "\n", message_text(message), "<|im_end|>\n")
        if generation_prompt:
            parts.append("<|im_start|>assistant\n")
        return "".join(parts)

    def generate(self, random: Random, count: int) -> tuple[list[int], list[str]]:
        words = random.choices(self._output_words, k=count)
        if count:
            first = words[0][1].strip().capitalize()
            words[0] = (self._ids[first], first)
        return [token for token, _ in words], [text for _, text in words]
