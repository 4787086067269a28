"""The look that the live page and replay's HTML report share: colours and type, in theme.css."""

from __future__ import annotations

from pathlib import Path


def theme_css() -> str:
    return Path(__file__).with_name("theme.css").read_text(encoding="utf-8")
