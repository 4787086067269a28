"""Where the templates of these tests are, and the real tokenizers and chats."""

from __future__ import annotations

from pathlib import Path

SHARED = Path("/work/shared/data")


def template_text(name: str) -> str:
    return (Path(__file__).parent / "templates" / f"{name}.jinja").read_text()
