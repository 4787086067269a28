"""Appends to files that may disappear, fill up or become read-only at any time."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def size_of(path: Path) -> int:
    """Return the file's size; 0 if there is none. Raises OSError."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def append_all(path: Path, data: bytes) -> None:
    """Append all of the data or nothing. The file is opened for each call: it may have been moved. Raises OSError."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640)
    try:
        before = os.fstat(file).st_size
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(file, rest) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(file, before)
            raise
    finally:
        os.close(file)
