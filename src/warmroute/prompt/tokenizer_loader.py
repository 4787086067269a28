"""Load tokenizers and chat templates from local files. Loading takes seconds, so it runs in a thread.

The loader opens only tokenizer files and chat templates, runs templates only in a sandbox, and executes nothing else.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from weakref import WeakValueDictionary

import msgspec

from warmroute.prompt.chat_template import ChatTemplate, TemplateRejected
from warmroute.prompt.content_format import ContentFormat
from warmroute.prompt.prompt_tokenizer import PromptTokenizer
from warmroute.prompt.render_context import EngineOptions
from warmroute.prompt.tokenizer import Tokenizer, load_tokenizer

_MAX_FILE_BYTES: Final = 512 << 20
"""A larger file is not a tokenizer.json."""
_MAX_REASON_LENGTH: Final = 300


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """What a PromptTokenizer is made from."""

    path: str
    chat_template: str
    """A file; empty for the model's own template."""
    content_format: ContentFormat | None
    template_kwargs: bytes
    """As JSON, because 1 and True are equal in Python."""
    trust_request_chat_template: bool
    exclude_tools_when_tool_choice_none: bool
    max_model_len: int
    cache_bytes: int


class TokenizerLoader:
    """Loads the same files only once. Not thread-safe: one thread uses it."""

    def __init__(self) -> None:
        self._tokenizers: WeakValueDictionary[tuple[Any, ...], Tokenizer] = WeakValueDictionary()
        self._prompt_tokenizers: WeakValueDictionary[tuple[Any, ...], PromptTokenizer] = WeakValueDictionary()

    def load(self, spec: TokenizerSpec) -> PromptTokenizer:
        """Return the same object for equal files and options. Raises OSError, ValueError."""
        tokenizer = self.load_tokenizer(spec.path)
        template = read_template(spec.chat_template) if spec.chat_template else ""
        # a PromptTokenizer references its tokenizer, so no other tokenizer has this id while it is found here
        key = (id(tokenizer), replace(spec, path="", chat_template=template))
        prompt_tokenizer = self._prompt_tokenizers.get(key)
        if prompt_tokenizer is None:
            options = EngineOptions(
                template,
                spec.content_format,
                msgspec.json.decode(spec.template_kwargs),
                spec.trust_request_chat_template,
                spec.exclude_tools_when_tool_choice_none,
                spec.max_model_len or None,
            )
            prompt_tokenizer = PromptTokenizer(tokenizer, options, spec.cache_bytes)
            self._prompt_tokenizers[key] = prompt_tokenizer
        return prompt_tokenizer

    def load_tokenizer(self, path: str) -> Tokenizer:
        """Return the same object for equal files, in this or another directory. Raises OSError, ValueError."""
        path = os.path.abspath(os.path.expanduser(path))
        file = check_tokenizer_path(path)
        location = (file, *_file_stamps(os.path.dirname(file)))
        tokenizer = self._tokenizers.get(location)
        if tokenizer is None:
            loaded = load_tokenizer(path)
            content = (
                loaded.fingerprint,
                *(tuple(sorted(table.items())) for table in (loaded.templates, loaded.special_tokens)),
                loaded.inexact_reason,
                loaded.chat_inexact_reason,
            )
            tokenizer = self._tokenizers[location] = self._tokenizers.setdefault(content, loaded)
        return tokenizer


def check_tokenizer_path(path: str) -> str:
    """Return the tokenizer.json at a path, which is that file or its directory. Raises OSError, ValueError."""
    path = os.path.abspath(os.path.expanduser(path))
    file = os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path
    if not file.endswith(".json"):
        os.stat(file)
        raise ValueError(f"{file}: not a tokenizer.json")
    _check_regular_file(file)
    return file


def read_template(path: str) -> str:
    """Read a chat template from a file. Raises OSError, ValueError."""
    path = os.path.expanduser(path)
    _check_regular_file(path)
    text = Path(path).read_text(encoding="utf-8")
    if not text.strip():
        raise ValueError(f"{path}: empty file")
    try:
        ChatTemplate(text, {})
    except TemplateRejected as problem:
        raise ValueError(f"{path}: not a chat template: {problem}") from None
    return text


def load_error_reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return f"{error or type(error).__name__}"[:_MAX_REASON_LENGTH]


def _check_regular_file(path: str) -> None:
    """Refuse pipes and devices, which may never end. Raises OSError, ValueError."""
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path}: not a regular file")
    if found.st_size > _MAX_FILE_BYTES:
        raise ValueError(f"{path}: too large, {found.st_size} bytes")


def _file_stamps(folder: str) -> list[tuple[str, int, int]]:
    """Return name, modification time and size of the files that belong to a tokenizer."""
    with os.scandir(folder) as found:
        files = [entry for entry in found if entry.name.endswith((".json", ".jinja")) and entry.is_file()]
        return sorted((entry.name, entry.stat().st_mtime_ns, entry.stat().st_size) for entry in files)
