"""A lock that decides which one of several processes on a machine scales the fleet. One process needs no lock."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import Final

MAX_NAME_BYTES: Final = 256


class LeaderLock:
    """A locked file. The process holds it until it ends, however it ends, and writes its router's name into it."""

    def __init__(self, path: Path, router: str = "") -> None:
        self._path = path
        self._router = router
        self.holder = ""
        """The router of the process that held the lock at the last call of `is_leader`; empty if it has no name."""
        self._file: int | None = None

    def is_leader(self) -> bool:
        """Return whether this process holds the lock; each call tries to get it. Raises OSError."""
        if self._file is not None:
            if self._is_current(self._file):
                return True
            self.release()  # somebody removed the file; the process that locks the new file leads
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            try:
                self.holder = os.pread(file, MAX_NAME_BYTES, 0).decode(errors="replace")
            finally:
                os.close(file)
            if isinstance(error, BlockingIOError):
                return False
            raise
        self._file, self.holder = file, self._router
        with contextlib.suppress(OSError):  # a full disk: the lock counts
            os.ftruncate(file, 0)
            os.pwrite(file, self._router.encode(), 0)
        return self._is_current(file)

    def _is_current(self, file: int) -> bool:
        """Return whether the open file is still the one at the path."""
        held = os.fstat(file)
        try:
            current = self._path.stat()
        except FileNotFoundError:
            return False
        return (held.st_dev, held.st_ino) == (current.st_dev, current.st_ino)

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
