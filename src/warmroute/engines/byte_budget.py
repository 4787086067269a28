"""Limits the memory of one node's KV events between their arrival and their application."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

NODE_BYTES: Final = 64 << 20
"""For all ranks of a node. An engine's messages are kilobytes, and the router applies them within milliseconds."""


@dataclass(slots=True, eq=False)
class ByteBudget:
    limit_bytes: int = NODE_BYTES
    used_bytes: int = 0

    @property
    def exceeded(self) -> bool:
        return self.used_bytes > self.limit_bytes
