"""Only one process scales. A single one needs no lock; several on one machine share a file that one of them holds."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class FileLock:
    """Held until the process ends, however it ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    def leads(self) -> bool:
        """Tries again each time, so that another takes over when the leader is gone. Raises OSError."""
        if self._file is not None:
            if self._is_there(self._file):
                return True
            self.release()  # somebody removed the file: whoever holds its successor leads
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            if isinstance(error, BlockingIOError):
                return False
            raise
        self._file = file
        return self._is_there(file)

    def _is_there(self, file: int) -> bool:
        """Whether the path still leads to it."""
        held = os.fstat(file)
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return False
        return (held.st_dev, held.st_ino) == (there.st_dev, there.st_ino)

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
