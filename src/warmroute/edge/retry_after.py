"""Reads the Retry-After header of a node."""

from __future__ import annotations

import time
from email.utils import parsedate_to_datetime
from typing import Final

MAX_RETRY_AFTER_S: Final = 3600
"""Longer times of nodes are cut to this."""


def seconds_of(retry_after: bytes) -> int | None:
    """Return the time in a Retry-After header, which is a number of seconds or a date; None if it is neither."""
    if not retry_after or len(retry_after) > 40:
        return None
    if retry_after.isdigit():
        return min(int(retry_after), MAX_RETRY_AFTER_S)
    try:
        left_s = parsedate_to_datetime(retry_after.decode("ascii")).timestamp() - time.time()
    except (ValueError, OverflowError):
        return None
    return max(1, min(int(left_s), MAX_RETRY_AFTER_S))
