"""Where a place keeps a block, from the nearest to the GPU to the farthest, and what a block there is worth."""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class Tier(IntEnum):
    GPU = 0
    CPU = 1
    DISK = 2
    REMOTE = 3


WORTH: Final = (1.0, 0.9, 0.6, 0.5)
"""Share of its prefill that a block in each tier saves: what is farther has to be loaded first. From host memory that
takes a tenth of computing it (measured: 8 to 21 times cheaper); disk and remote are guesses on the careful side."""
