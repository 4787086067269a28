"""Which process of a machine scales."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import Final

from warmroute.config import ConfigError
from warmroute.event_log import EventLog

# A lock that decides which one of several processes on a machine scales the fleet. One process needs no lock.

MAX_NAME_BYTES: Final = 256
"""The file can be anything: no more is read of it."""


class LeaderLock:
    """A locked file. The process holds the lock until it ends, however it ends, and writes its router's name into the
    file."""

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
        # An operator may remove the file by hand. A second process then locks a new file of the same name: two leaders.
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


# The lease of the worker that scales the fleet: a locked file, and the autoscaler's state beside it for the next one.
#
# The kernel releases the lock when its holder ends, however it ends, so no worker waits for a lease to expire.

log = EventLog("warmroute.scaling")


class FileLease:
    one_machine = True

    def __init__(self, path: Path, router: str = "") -> None:
        """`path`: the file to lock. The state is stored beside it. `router`: the name of this worker's router, if
        workers of other routers may lock the file."""
        self._path = path
        self._router = router
        self._lock = LeaderLock(path, router)
        self._state_file = path.with_name(path.name + ".state")
        self._failed = False
        """Whether the lock or the state could not be written last time."""

    def is_leader(self) -> bool:
        try:
            return self._lock.is_leader()
        except OSError as error:
            self._log_failure(error)
            return False

    @property
    def leader_is_here(self) -> bool:
        """Whether a worker of this router leads, so that this one gets the nodes that the leader adds."""
        return not self._router or self._lock.holder == self._router

    @property
    def state(self) -> bytes:
        """What the previous leader stored; empty if it stored nothing."""
        try:
            return self._state_file.read_bytes()
        except OSError:
            return b""

    async def commit(self, state: bytes) -> bool:
        """Store the state before an action. Return whether this process leads, and may act."""
        if not self.is_leader():
            return False
        new = self._state_file.with_name(self._state_file.name + ".new")
        try:
            new.write_bytes(state)
            os.replace(new, self._state_file)
        except OSError as error:
            self._log_failure(error)
            return False
        self._failed = False
        return True

    def _log_failure(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            log.warning("scaling_state_not_stored", "The autoscaler does not act.", reason=error.strerror)

    def start(self) -> None:
        """Raises ConfigError if the file cannot be locked."""
        try:
            self._lock.is_leader()
        except OSError as error:
            raise ConfigError(f"scaling.lock_file: {self._path}: {error.strerror}") from None

    async def close(self) -> None:
        """Let another worker lead at once."""
        self._lock.release()
