"""Detects which engine wrote a metrics page, and finds its parser."""

from __future__ import annotations

from collections.abc import Callable

from warmroute.engines import sglang, vllm
from warmroute.engines.load_report import LoadReport

ParseLoad = Callable[[bytes], LoadReport]
_PARSERS: dict[str, ParseLoad] = {"vllm": vllm.parse_load, "sglang": sglang.parse_load}


def detect_engine(page: bytes) -> str | None:
    if vllm.MARKER in page:
        return "vllm"
    if sglang.MARKER in page:
        return "sglang"
    return None


def load_parser(engine: str) -> ParseLoad | None:
    return _PARSERS.get(engine)
