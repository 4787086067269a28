"""Detects which engine wrote a metrics page, and finds its parser."""

from __future__ import annotations

from collections.abc import Callable

from warmroute.engines import sglang, vllm
from warmroute.engines.load_report import LoadReport

_ENGINES = {"vllm": vllm, "sglang": sglang}


def detect_engine(page: bytes) -> str | None:
    return next((name for name, engine in _ENGINES.items() if engine.MARKER in page), None)


def load_parser(engine: str) -> Callable[[bytes], LoadReport] | None:
    return _ENGINES[engine].parse_load if engine in _ENGINES else None
