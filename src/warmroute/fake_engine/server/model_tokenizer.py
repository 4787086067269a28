"""A real model's tokenizer and chat template, from the files that the model ships (`--tokenizer PATH`).

Needs the packages `tokenizers` and `jinja2`, which Warmroute does not depend on otherwise.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from warmroute.config import ConfigError
from warmroute.fake_engine.server.fake_tokenizer import Messages, message_text
from warmroute.fake_engine.server.word_list import WORDS


class ModelTokenizer:
    """Implements tokens.Tokenizer."""

    def __init__(self, path: Path) -> None:
        """Takes tokenizer.json, or the folder that it lies in. Raises ConfigError."""
        try:
            tokenizers = importlib.import_module("tokenizers")
            self._sandbox = importlib.import_module("jinja2.sandbox")
        except ImportError as error:
            raise ConfigError(f"--tokenizer needs `pip install tokenizers jinja2` ({error})") from None
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.exists():
            raise ConfigError(f"--tokenizer: there is no {file}")
        self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(file))
        settings = _read(file.with_name("tokenizer_config.json"))
        self._names = {name: _text(settings.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        self._template = self._compile(file.with_name("chat_template.jinja"), settings)
        self.vocabulary = int(self._tokenizer.get_vocab_size(with_added_tokens=True))
        self.end_of_turn = int(self._tokenizer.token_to_id(self._names["eos_token"]) or 0)
        self._openers, self._said = self._find_words()

    def _compile(self, file: Path, settings: dict[str, Any]) -> Any:
        text = file.read_text() if file.exists() else settings.get("chat_template")
        if not isinstance(text, str):
            raise ConfigError(f"--tokenizer: no chat template in {file.parent}")
        environment = self._sandbox.ImmutableSandboxedEnvironment(
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

    def _find_words(self) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
        """Words that are one token at the beginning of an answer, and within it; proven by reading some back."""
        opening = self.encode(self.render([{"role": "user", "content": "x"}], None, True))

        def after(text: str) -> list[int]:
            prompt = self.render([{"role": "user", "content": "x"}], None, True)
            return self.encode(prompt + text)[len(opening) :]

        openers = [(tokens[0], word.capitalize()) for word in WORDS if len(tokens := after(word.capitalize())) == 1]
        if not openers:
            raise ConfigError("--tokenizer: no answers can be made that this tokenizer reads back")
        said = [(tokens[1], " " + word) for word in WORDS if len(tokens := after(f"{openers[0][1]} {word}")) == 2]
        tokens, texts = self._choose(Random(0), openers, said, 200)
        if after("".join(texts)) != tokens:
            raise ConfigError("--tokenizer: no answers can be made that this tokenizer reads back")
        return openers, said

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, tokens: Iterable[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def render(self, messages: Messages, tools: Any, generation_prompt: bool) -> str:
        plain = [{**message, "content": message_text(message, calls=False)} for message in messages]
        text: str = self._template.render(
            messages=plain, tools=tools or None, add_generation_prompt=generation_prompt, **self._names
        )
        return text

    def answer(self, random: Random, count: int) -> tuple[list[int], list[str]]:
        return self._choose(random, self._openers, self._said, count)

    @staticmethod
    def _choose(
        random: Random, openers: list[tuple[int, str]], said: list[tuple[int, str]], count: int
    ) -> tuple[list[int], list[str]]:
        chosen = [random.choice(openers), *random.choices(said, k=count - 1)] if count else []
        return [token for token, _ in chosen], [text for _, text in chosen]


def _read(file: Path) -> dict[str, Any]:
    return msgspec.json.decode(file.read_bytes(), type=dict[str, Any]) if file.exists() else {}


def _text(token: Any) -> str:
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else ""
