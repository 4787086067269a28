"""Structured log events: a stable name to grep for, fields, and a sentence.

    log = EventLog("warmroute.engines")
    log.warning("node_down", "The router sends it no requests.", node=node.name, reason="connection refused")

As text: `node_down node=gpu-a reason="connection refused": The router sends it no requests.`
As JSON (`log.format = "json"`): the event's name is `event`, each field has its own key, the sentence is `message`.
"""

from __future__ import annotations

import json
import logging
import re
from traceback import extract_tb

_BARE = re.compile(r"[\w./:@%+,\[\]-]+\Z")
"""A value that needs no quotes. Everything else is quoted as JSON, so that no value can start a line of its own."""


class EventLog:
    """A logger whose records carry an event name and fields."""

    __slots__ = ("_logger",)

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, sentence: str = "", /, **fields: object) -> None:
        self._emit(logging.DEBUG, event, sentence, fields)

    def info(self, event: str, sentence: str = "", /, **fields: object) -> None:
        self._emit(logging.INFO, event, sentence, fields)

    def warning(self, event: str, sentence: str = "", /, **fields: object) -> None:
        self._emit(logging.WARNING, event, sentence, fields)

    def error(self, event: str, sentence: str = "", /, **fields: object) -> None:
        self._emit(logging.ERROR, event, sentence, fields)

    def exception(self, event: str, sentence: str = "", /, **fields: object) -> None:
        """An error with the traceback of the exception being handled."""
        self._emit(logging.ERROR, event, sentence, fields, traceback=True)

    def _emit(self, level: int, event: str, sentence: str, fields: dict[str, object], traceback: bool = False) -> None:
        if self._logger.isEnabledFor(level):
            extra = {"event": event, "fields": fields, "sentence": sentence}
            self._logger.log(level, "%s", text_of(event, sentence, fields), extra=extra, exc_info=traceback)


def text_of(event: str, sentence: str, fields: dict[str, object]) -> str:
    """One line: the event's name, its fields as key=value, and the sentence."""
    parts = [event, *(f"{name}={_value(value)}" for name, value in fields.items())]
    return f"{' '.join(parts)}: {sentence}" if sentence else " ".join(parts)


def _value(value: object) -> str:
    text = f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
    return text if _BARE.match(text) else json.dumps(text, ensure_ascii=False)


def where_it_failed(error: BaseException) -> str:
    """The error's type and source line, without its message, which may contain a user's text."""
    frames = extract_tb(error.__traceback__)
    return f"{type(error).__name__} at {frames[-1].filename}:{frames[-1].lineno}" if frames else type(error).__name__
