"""Ids for requests whose client sends none.

An engine takes the router's id for its own: with it, a client could read or cancel the stored response of another one.
So an id cannot be guessed: it has 128 random bits. The system is asked for many of them at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

_ID_DIGITS: Final = 32
_IDS_AT_ONCE: Final = 256


def random_ids() -> Iterator[bytes]:
    while True:
        digits = os.urandom(_ID_DIGITS // 2 * _IDS_AT_ONCE).hex().encode()
        for start in range(0, len(digits), _ID_DIGITS):
            yield b"wr-" + digits[start : start + _ID_DIGITS]
