"""Where the test templates are, and the real tokenizers and chats."""

from __future__ import annotations

from array import array
from pathlib import Path

SHARED = Path("/work/shared/data")


def token_ids(tokens: bytes) -> list[int]:
    return array("I", tokens).tolist()


def template_text(name: str) -> str:
    return (Path(__file__).parent / "templates" / f"{name}.jinja").read_text()
