"""Sends the package's logs to standard error, one line each, as text with the date or as JSON."""

from __future__ import annotations

import logging
import sys
import time

import msgspec

from warmroute.config import Log


class _JsonLines(logging.Formatter):
    def __init__(self, worker: int | None) -> None:
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        if self._worker is not None:
            line["worker"] = self._worker
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


def set_up(config: Log, worker: int | None = None) -> None:
    """Sends the package's logs to standard error in the configured form.

    `worker`: the number of this process among several workers. Each line names it, since all write to the same place.
    """
    handler = logging.StreamHandler(sys.stderr)
    name = "" if worker is None else f"[worker {worker}] "
    text = _TextLines(f"%(asctime)s %(levelname)-7s {name}%(message)s")
    handler.setFormatter(_JsonLines(worker) if config.format == "json" else text)
    logger = logging.getLogger("warmroute")
    logger.handlers[:] = [handler]
    logger.setLevel(config.level.upper())
    logger.propagate = False
