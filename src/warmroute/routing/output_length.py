"""Estimates how many output tokens a response will have: a moving average by model and tenant."""

from __future__ import annotations

from typing import Any, Final

DEFAULT_TOKENS: Final = 256.0
WEIGHT: Final = 0.05
MAX_AVERAGES: Final = 4096
"""Limit of averages by model, and of averages by model and tenant. Beyond it, a model's average counts."""


class OutputLengthEstimate:
    def __init__(self) -> None:
        self._by_model: dict[str, float] = {}
        self._by_tenant: dict[tuple[str, str], float] = {}

    def expected(self, model: str, tenant: str, max_tokens: int | None = None) -> float:
        """Return the expected output tokens, at most the `max_tokens` that the request allows."""
        mean = (self._by_tenant.get((model, tenant)) if tenant else None) or self._by_model.get(model) or DEFAULT_TOKENS
        return min(mean, max_tokens) if max_tokens else mean

    def record(self, model: str, tenant: str, tokens: int) -> None:
        _update(self._by_model, model, tokens)
        if tenant:
            _update(self._by_tenant, (model, tenant), tokens)


def _update(means: dict[Any, float], key: object, tokens: int) -> None:
    mean = means.get(key)
    if mean is not None:
        means[key] = mean + WEIGHT * (tokens - mean)
    elif len(means) < MAX_AVERAGES:
        means[key] = float(tokens)
