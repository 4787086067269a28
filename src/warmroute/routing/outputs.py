"""How long answers are: learned by model and tenant, and bounded by what the request allows."""

from __future__ import annotations

from typing import Final

USUAL_TOKENS: Final = 256.0
WEIGHT: Final = 0.05
MOST_KINDS: Final = 4096
"""Models × tenants that are learned apart, and models; beyond them a model's average stands for its tenants."""


class OutputLengths:
    def __init__(self) -> None:
        self._means: dict[str, float] = {}
        self._of_tenants: dict[tuple[str, str], float] = {}

    def expected(self, model: str, tenant: str, most: int | None = None) -> float:
        mean = (self._of_tenants.get((model, tenant)) if tenant else None) or self._means.get(model) or USUAL_TOKENS
        return min(mean, most) if most else mean

    def saw(self, model: str, tenant: str, tokens: int) -> None:
        mean = self._means.get(model)
        if mean is not None:
            self._means[model] = mean + WEIGHT * (tokens - mean)
        elif len(self._means) < MOST_KINDS:
            self._means[model] = float(tokens)
        if tenant:
            self._saw_tenant((model, tenant), tokens)

    def _saw_tenant(self, kind: tuple[str, str], tokens: int) -> None:
        means = self._of_tenants
        mean = means.get(kind)
        if mean is not None:
            means[kind] = mean + WEIGHT * (tokens - mean)
        elif len(means) < MOST_KINDS:
            means[kind] = float(tokens)
