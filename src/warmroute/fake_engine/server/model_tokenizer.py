"""A model's real tokenizer and chat template, from the model's own files (`--tokenizer PATH`).

It shares no code with the router's tokenization, so that tests compare two implementations.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from warmroute.config import ConfigError
from warmroute.fake_engine.server.fake_tokenizer import Messages, message_text
from warmroute.fake_engine.server.word_list import WORDS

Words = list[tuple[int, str]]
"""Tokens with their texts."""


class ModelTokenizer:
    """Implements fake_tokenizer.Tokenizer."""

    def __init__(self, path: Path) -> None:
        """`path`: tokenizer.json, or its directory. Raises ConfigError."""
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.exists():
            raise ConfigError(f"--tokenizer: there is no {file}")
        self._tokenizer = Tokenizer.from_file(str(file))
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
