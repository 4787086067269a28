"""Where a place keeps a block, from the nearest to the GPU to the farthest."""

from __future__ import annotations

from enum import IntEnum


class Tier(IntEnum):
    GPU = 0
    CPU = 1
    DISK = 2
    REMOTE = 3
