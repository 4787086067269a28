"""Waits for a condition."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 10.0
"""How long a test waits for what must happen, on a slow machine."""


async def until(condition: Callable[..., Any], what: str = "", patience_s: float = PATIENCE_S) -> Any:
    """Poll until the condition is true, and return its value."""
    deadline_s = time.monotonic() + patience_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline_s, f"did not happen within {patience_s:g} s: {what or condition}"
        await asyncio.sleep(0.005)
