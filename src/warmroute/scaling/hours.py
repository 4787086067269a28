"""What the configuration knows of the day: how many nodes there are to be at least, by the clock (UTC)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from warmroute.config import Hours
from warmroute.config.scaling import DAYS

DAY_MIN: Final = 24 * 60
_THURSDAY: Final = 3
"""The day that 1970 began on."""


def least_nodes(hours: Iterable[Hours], wall_s: float) -> int:
    """`wall_s`: seconds since 1970."""
    minutes = int(wall_s // 60)
    day, minute = divmod(minutes, DAY_MIN)
    today = DAYS[(day + _THURSDAY) % 7]
    yesterday = DAYS[(day + _THURSDAY - 1) % 7]
    least = 0
    for one in hours:
        start, end = _minute(one.start), _minute(one.end)
        over_night = end <= start
        now = (today in one.days and start <= minute and (over_night or minute < end)) or (
            over_night and yesterday in one.days and minute < end
        )
        if now:
            least = max(least, one.min_nodes)
    return least


def _minute(clock: str) -> int:
    hours, _, minutes = clock.partition(":")
    return int(hours) * 60 + int(minutes)
