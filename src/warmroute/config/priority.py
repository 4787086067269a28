"""Priorities of requests: names in the configuration, headers and metrics; numbers in the admission queue."""

from __future__ import annotations

from typing import Final, Literal, get_args

PriorityName = Literal["high", "normal", "low"]
HIGH, NORMAL, LOW = range(3)
"""A lower number is served first."""
PRIORITY_NAMES: Final[tuple[PriorityName, ...]] = get_args(PriorityName)
"""By number."""
PRIORITY_NUMBERS: Final[dict[str, int]] = {name: number for number, name in enumerate(PRIORITY_NAMES)}
