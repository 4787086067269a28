"""Logs to standard error, and files that grow within bounds."""

from __future__ import annotations

import logging
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from warmroute.config import Log

# Sends the package's logs to standard error, one line each, as text with the date or as JSON.


class _JsonLines(logging.Formatter):
    def __init__(self, process: str | None) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        if self._process is not None:
            line["process"] = self._process
        event = getattr(record, "event", None)
        if event is not None:
            line["event"] = event
            line["message"] = getattr(record, "sentence", "")
            for name, value in getattr(record, "fields", {}).items():
                plain = value is None or isinstance(value, (str, int, float, bool))
                line.setdefault(name, value if plain else str(value))
        else:
            line["message"] = record.getMessage()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class _TextLines(logging.Formatter):
    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"


def set_up(config: Log, process: str | None = None) -> None:
    """Sends the package's logs to standard error in the configured form.

    `process`: the name of this one of several. Each line names it, since all write to the same place.
    """
    handler = logging.StreamHandler(sys.stderr)
    name = "" if process is None else f"[{process}] "
    text = _TextLines(f"%(asctime)s %(levelname)-7s {name}%(message)s")
    handler.setFormatter(_JsonLines(process) if config.format == "json" else text)
    logger = logging.getLogger("warmroute")
    logger.handlers[:] = [handler]
    logger.setLevel(config.level.upper())
    logger.propagate = False


# Appends to files that may disappear, fill up or become read-only at any time.


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
