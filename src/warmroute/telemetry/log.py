"""Logs for what an operator must act on: on standard error, one line each, as text or JSON."""

from __future__ import annotations

import logging
import sys
import time
from traceback import extract_tb

import msgspec

from warmroute.config import Log


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def without_words(error: Exception) -> str:
    """What went wrong and where. An error's own words may be a user's."""
    last = extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {last.filename}:{last.lineno}"


def set_up(config: Log) -> None:
    """Sends the package's logs to standard error in the configured form."""
    handler = logging.StreamHandler(sys.stderr)
    if config.format == "json":
        handler.setFormatter(_JsonLines())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("warmroute")
    logger.handlers[:] = [handler]
    logger.setLevel(config.level.upper())
    logger.propagate = False
