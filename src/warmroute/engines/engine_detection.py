"""Detects which engine a node runs, and finds the parser of its metrics page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from warmroute.engines import sglang, trtllm_metrics, vllm
from warmroute.engines.load_report import LoadReport

_ENGINES = {"vllm": vllm, "sglang": sglang, "trtllm": trtllm_metrics}


def metrics_paths(engine: str) -> tuple[str, ...]:
    """Return where an engine may have its metrics page, the likeliest path first."""
    if engine == "trtllm":
        return trtllm_metrics.PROMETHEUS_PATH, "/metrics"
    return ("/metrics", trtllm_metrics.PROMETHEUS_PATH) if engine == "auto" else ("/metrics",)


def detect_engine(page: bytes) -> str | None:
    """Return the engine that wrote a metrics page."""
    found = (name for name, engine in _ENGINES.items() if any(marker in page for marker in engine.MARKERS))
    return next(found, None)


def engine_of_cards(cards: Sequence[Mapping[str, object]]) -> str | None:
    """Return the engine that wrote a list of models, if the list names TensorRT-LLM: its metrics page may be empty."""
    return "trtllm" if any(card.get("owned_by") == trtllm_metrics.OWNER for card in cards) else None


def parse_load(engine: str, page: bytes) -> LoadReport | None:
    """Return what a metrics page reports; None if the router cannot read the pages of this engine."""
    return _ENGINES[engine].parse_load(page) if engine in _ENGINES else None
