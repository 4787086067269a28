"""Where a capture is written: a file, or a directory of rotating files. Both are bounded on disk.

    capture-20261116T050000Z-3f9a.0001.jsonl        start in UTC, a random part, the number of the file

A write that fails loses its lines and nothing else: the next one tries again.
"""

from __future__ import annotations

import gzip
import re
import secrets
import time
from pathlib import Path
from typing import Final

from warmroute.event_log import EventLog
from warmroute.telemetry.append_file import append_all, size_of

log = EventLog("warmroute.capture")

FILE_NAME: Final = re.compile(r"capture-(\d{8}T\d{6}Z)-[0-9a-f]{4}\.(\d{4,})\.jsonl(\.gz)?")
"""The start of the capture and the number of the file. Names sort by time."""


class CaptureFull(OSError):
    """The file has its maximum size."""


class CaptureFile:
    """One file. `.gz` files are compressed, one member for each write."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self._max_bytes = max_bytes

    def write(self, lines: bytes) -> None:
        """Raises OSError; CaptureFull if the file would become too large."""
        data = gzip.compress(lines, 6) if self.path.suffix == ".gz" else lines
        if size_of(self.path) + len(data) > self._max_bytes:
            raise CaptureFull(0, f"it has its maximum of {self._max_bytes:,} bytes")
        append_all(self.path, data)


class CaptureDirectory:
    """Rotating files. Old ones are removed, also those of earlier captures in the same directory."""

    def __init__(self, directory: Path, file_max_bytes: int, max_files: int, started_unix_s: float) -> None:
        self._directory = directory
        self._file_max_bytes = file_max_bytes
        self._max_files = max_files
        started = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(started_unix_s))
        self._prefix = f"capture-{started}-{secrets.token_hex(2)}"
        self._number = 0
        self.path = directory

    def write(self, lines: bytes) -> None:
        """Raises OSError. The next call then tries the same file again."""
        size = size_of(self.path) if self._number else 0
        if not self._number or (size and size + len(lines) > self._file_max_bytes):
            self._next_file()
        elif not size:
            self._directory.mkdir(exist_ok=True)  # the directory may have been removed
        append_all(self.path, lines)

    def _next_file(self) -> None:
        self._directory.mkdir(exist_ok=True)
        files = capture_files(self._directory)
        for old in files[: max(0, len(files) - self._max_files + 1)]:
            old.unlink(missing_ok=True)
        self._number += 1
        self.path = self._directory / f"{self._prefix}.{self._number:04d}.jsonl"


def capture_files(directory: Path) -> list[Path]:
    """Return the files of captures in the directory, the oldest first. Raises OSError."""
    return sorted(file for file in directory.iterdir() if FILE_NAME.fullmatch(file.name))
