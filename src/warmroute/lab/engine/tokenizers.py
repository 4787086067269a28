"""The tokenizers of the simulated engine: a simulated one, and a model's real one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any, Final, Protocol
from zlib import crc32

import msgspec
from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as LibraryTokenizer

from warmroute.config import ConfigError

# The words that the simulated model generates. Each has at most six letters and is one token.

_TEXT = """
    the of and to in is it that was for on are as with at this have from or one had by word but not what all
    were we when your can said there use an each which she do how their if will up other about out many then
    them these so some her would make like him into time has look two more write go see number no way could
    people my than first water been call who oil its now find long down day did get come made may part over new
    sound take only little work know place year live me back give most very after thing our just name good man
    think say great where help much before line right too mean old any same tell boy follow came want show also
    around form three small set put end does well large must big even such turn here why ask went men read need
    land home us move try kind hand again change off play spell air away animal house point page letter mother
    answer found study still learn should world high every near add food own below last left few while along
    might close seem next hard open begin life always those both paper got group often run until side feet car
    mile night walk white sea began grow took river four carry state once book hear stop second later miss idea
    enough eat face watch far really almost let above girl cut young talk soon list song being leave family
    cache block token prefix route node engine warm cold
"""

WORDS = tuple(_TEXT.split())


# A simulated tokenizer and chat template: no files, about 0.3 µs per token, the same in every process.
#
# The tokenizer splits text into pieces: up to six letters with the space before them, up to three digits, a newline, or
# one or two other characters. Each piece has an id. Single characters and the words of the simulated model have ids of
# their own. All other pieces are hashed into the rest of a vocabulary of Qwen's size, so two of them can share an id.
#
# - The tokens of a prefix are a prefix of the text's tokens, except for the last word.
# - Special tokens and newlines are separate pieces, so a new message appends tokens and changes none.
# - The simulated model's output is encoded to the tokens it was generated from, so the next turn finds its blocks.
# - An id is decoded to the piece that it was last seen for.

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


# A model's real tokenizer and chat template, from the model's own files (`--tokenizer PATH`).
#
# It shares no code with the router's tokenization, so that tests compare two implementations.

Words = list[tuple[int, str]]
"""Tokens with their texts."""


class ModelTokenizer:
    """Implements fake_tokenizer.Tokenizer."""

    def __init__(self, path: Path) -> None:
        """`path`: tokenizer.json, or its directory. Raises ConfigError."""
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.exists():
            raise ConfigError(f"--tokenizer: there is no {file}")
        self._tokenizer = LibraryTokenizer.from_file(str(file))
        settings = _read_json(file.with_name("tokenizer_config.json"))
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        self._special_tokens = {name: _token_text(settings.get(name)) for name in names}
        self._template = _load_template(file.with_name("chat_template.jinja"), settings)
        self.vocabulary = int(self._tokenizer.get_vocab_size(with_added_tokens=True))
        self.end_of_turn = int(self._tokenizer.token_to_id(self._special_tokens["eos_token"]) or 0)
        self._first_words, self._next_words = self._find_output_words()

    def _find_output_words(self) -> tuple[Words, Words]:
        """Find words that are one token at the beginning of an output, and within it. Raises ConfigError."""
        prompt = self.render([{"role": "user", "content": "x"}], None, True)
        prompt_tokens = len(self.encode(prompt))

        def encode_output(text: str) -> list[int]:
            return self.encode(prompt + text)[prompt_tokens:]

        first = [(t[0], word.capitalize()) for word in WORDS if len(t := encode_output(word.capitalize())) == 1]
        if first:
            within = [(t[1], " " + word) for word in WORDS if len(t := encode_output(f"{first[0][1]} {word}")) == 2]
            tokens, texts = _choose(Random(0), first, within, 200)
            if encode_output("".join(texts)) == tokens:
                return first, within
        raise ConfigError("--tokenizer: this tokenizer does not encode generated words to the same tokens")

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, tokens: Iterable[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def render(self, messages: Messages, tools: Any, generation_prompt: bool) -> str:
        plain = [{**message, "content": message_text(message, with_tool_calls=False)} for message in messages]
        return self._template.render(
            messages=plain, tools=tools or None, add_generation_prompt=generation_prompt, **self._special_tokens
        )

    def generate(self, random: Random, count: int) -> tuple[list[int], list[str]]:
        return _choose(random, self._first_words, self._next_words, count)


def _choose(random: Random, first: Words, within: Words, count: int) -> tuple[list[int], list[str]]:
    chosen = [random.choice(first), *random.choices(within, k=count - 1)] if count else []
    return [token for token, _ in chosen], [text for _, text in chosen]


def _load_template(file: Path, settings: dict[str, Any]) -> Template:
    text = file.read_text() if file.exists() else settings.get("chat_template")
    if not isinstance(text, str):
        raise ConfigError(f"--tokenizer: no chat template in {file.parent}")
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def raise_exception(message: str) -> None:
        raise ValueError(message)

    def tojson(value: Any, indent: int | None = None, **_: Any) -> str:
        encoded = msgspec.json.encode(value)
        return msgspec.json.format(encoded, indent=indent if indent is not None else 0).decode()

    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = tojson
    return environment.from_string(text)


def _read_json(file: Path) -> dict[str, Any]:
    return msgspec.json.decode(file.read_bytes(), type=dict[str, Any]) if file.exists() else {}


def _token_text(token: Any) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""
