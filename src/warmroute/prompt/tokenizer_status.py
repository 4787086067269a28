"""What the registry knows about the tokenizer of one model, for operators."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from warmroute.prompt.prompt_tokenizer import PromptTokenizer


@dataclass(frozen=True, slots=True)
class TokenizerStatus:
    model: str
    state: Literal["loaded", "loading", "missing"]
    path: str = ""
    source: str = ""
    """`configured`, `node_path`, `hugging_face_cache` or `download`; empty without a tokenizer."""
    hub_id: str = ""
    """The model's name on the hub, if its nodes report one."""
    reason: str = ""
    """Why there is no tokenizer."""
    tokenizer: PromptTokenizer | None = None


def models_table(model: str, hub_id: str, has_table: bool) -> str:
    """Return the lines of TOML that configure a tokenizer. `has_table`: [[models]] already has this name."""
    folder = (hub_id or model).rpartition("/")[2] or "model"
    tokenizer = f"tokenizer = {_quoted(f'/models/{folder}')}  # directory with tokenizer.json, on the router's machine"
    if has_table:
        return f"# in the [[models]] table with name = {_quoted(model)}\n{tokenizer}"
    return f"[[models]]\nname = {_quoted(model)}\n{tokenizer}"


def _quoted(text: str) -> str:
    """A basic string of TOML. JSON's escapes are valid there; DEL is the one character that JSON leaves unescaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
