"""Shares the event loop with requests while many nodes are read or changed."""

from __future__ import annotations

import asyncio
import time
from typing import Final

TURN_S: Final = 0.002


class Turn:
    """Call `share` after each piece of work: after TURN_S, other tasks get their turn."""

    __slots__ = ("_since_s",)

    def __init__(self) -> None:
        self._since_s = time.perf_counter()

    async def share(self) -> None:
        if time.perf_counter() - self._since_s > TURN_S:
            await asyncio.sleep(0)
            self._since_s = time.perf_counter()
