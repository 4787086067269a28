"""The storage tiers of a KV block, nearest to the GPU first, and how much of its prefill a block in each tier saves."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from warmroute._kernel import TIER_CPU, TIER_DISK, TIER_GPU, TIER_REMOTE


class Tier(IntEnum):
    GPU = TIER_GPU
    CPU = TIER_CPU
    DISK = TIER_DISK
    REMOTE = TIER_REMOTE


SAVED_SHARE: Final = (1.0, 0.9, 0.6, 0.5)
"""Share of its prefill that a block in each tier saves, since the engine has to load it first. Loading from host memory
takes a tenth of the prefill (measured: 8 to 21 times cheaper). Disk and remote are cautious guesses."""
