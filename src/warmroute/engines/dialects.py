"""Which engine speaks, and how to read it."""

from __future__ import annotations

from collections.abc import Callable

from warmroute.engines import sglang, vllm
from warmroute.engines.report import LoadReport

ReadLoad = Callable[[bytes], LoadReport]
_READERS: dict[str, ReadLoad] = {"vllm": vllm.read_load, "sglang": sglang.read_load}


def recognise(page: bytes) -> str | None:
    """The engine that wrote a metrics page."""
    if vllm.MARK in page:
        return "vllm"
    if sglang.MARK in page:
        return "sglang"
    return None


def load_reader(engine: str) -> ReadLoad | None:
    return _READERS.get(engine)
