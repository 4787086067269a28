"""How often prefixes are used: the mean time between the requests for each of them.

A prefix is known by its last block. One short interval says little: of requests that come at random, every third pair
is less than half the mean interval apart. So the router averages over several uses, and a prefix that it sees for the
first time counts as one that is used every FIRST_INTERVAL_S. The table has a bounded size: prefixes that were not used
for long leave it, many at once, so that a request costs no search.
"""

from __future__ import annotations

from typing import Final

FIRST_INTERVAL_S: Final = 10.0
WEIGHT: Final = 0.3
"""Of the latest interval in the average."""
MAX_PREFIXES: Final = 4096


class PrefixUses:
    def __init__(self) -> None:
        self._latest: dict[bytes, tuple[float, float]] = {}
        """Last block → when the prefix was last used, and the mean interval."""
        self._earlier: dict[bytes, tuple[float, float]] = {}
        """The same, of prefixes that were used before those in `_latest`. Dropped when `_latest` is full."""

    def __len__(self) -> int:
        return len(self._latest.keys() | self._earlier.keys())

    def record(self, block: bytes, now_s: float) -> None:
        """A request for the prefix that ends with this block goes to a node."""
        known = self._latest.get(block) or self._earlier.get(block)
        self._latest[block] = (now_s, _average(known, now_s) if known is not None else FIRST_INTERVAL_S)
        if len(self._latest) >= MAX_PREFIXES // 2:
            self._earlier, self._latest = self._latest, {}

    def interval_s(self, block: bytes, now_s: float) -> float | None:
        """Return the mean time between two uses, if the prefix is used now; None if it was never used."""
        known = self._latest.get(block) or self._earlier.get(block)
        return _average(known, now_s) if known is not None else None


def _average(known: tuple[float, float], now_s: float) -> float:
    last_s, interval_s = known
    return interval_s + WEIGHT * (max(0.0, now_s - last_s) - interval_s)
