"""The minimum number of nodes by the time of day and the day of the week (UTC), from `[[scaling.hours]]`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from warmroute.config import Hours
from warmroute.config.scaling_settings import DAYS

MINUTES_PER_DAY: Final = 24 * 60
_THURSDAY: Final = 3
"""The day of the week of 1970-01-01."""


def scheduled_min_nodes(hours: Iterable[Hours], wall_s: float) -> int:
    """Return the highest minimum of the entries that apply now. `wall_s`: seconds since 1970."""
    day, minute = divmod(int(wall_s // 60), MINUTES_PER_DAY)
    today = DAYS[(day + _THURSDAY) % 7]
    yesterday = DAYS[(day + _THURSDAY - 1) % 7]
    minimum = 0
    for one in hours:
        start, end = _minute(one.start), _minute(one.end)
        overnight = end <= start
        started_today = today in one.days and start <= minute and (overnight or minute < end)
        started_yesterday = overnight and yesterday in one.days and minute < end
        if started_today or started_yesterday:
            minimum = max(minimum, one.min_nodes)
    return minimum


def _minute(clock: str) -> int:
    hours, _, minutes = clock.partition(":")
    return int(hours) * 60 + int(minutes)
