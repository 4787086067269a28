"""Popular prefixes: which beginnings many prompts share, what share of the prompts has each, and which route sends it.

The router samples a prompt every SAMPLE_S at most, so that counting costs the same at any rate. It keeps hashes only.
"""

from __future__ import annotations

from math import exp
from typing import Final

import msgspec

from warmroute.index.hot_prefixes import DECAY_S, HotPrefixes
from warmroute.index.lookup import Lookup
from warmroute.index.prediction import Prediction

SAMPLE_S: Final = 0.05
REFRESH_S: Final = 10.0
"""Time for which `popular` returns the same prefixes: ranking them takes a millisecond."""
MAX_PREFIXES: Final = 8


class PopularPrefix(msgspec.Struct, eq=False):
    chain: bytes
    """Its block hashes."""
    tokens: int
    share: float
    """Fraction of the sampled prompts of the last minute that start with it."""
    sender: tuple[str, str, str] | None = None
    """Model, route and tenant of the last sampled prompt with it; None until one was sampled."""


class PopularPrefixes:
    def __init__(self) -> None:
        self._hot = HotPrefixes(keep_examples=False)
        self.next_sample_s = -1e9
        """Until then `sample` counts nothing."""
        self._sampled = 0.0
        """Sampled prompts, decayed like the uses of a prefix."""
        self._sampled_s = 0.0
        self._popular: list[PopularPrefix] = []
        self._refresh_s = -1e9

    def sample(
        self, route: tuple[str, str], tenant: str, prediction: Prediction | None, prompt: Lookup | None, now_s: float
    ) -> None:
        """Count a prompt, unless one was counted a moment ago. `route`: model and route."""
        if now_s < self.next_sample_s or prediction is None or prompt is None:
            return
        self.next_sample_s = now_s + SAMPLE_S
        self._sampled = self._sampled_at(now_s) + 1.0
        self._sampled_s = now_s
        chain = prediction.chain
        self._hot.record(chain, prediction.cache.block_size, prompt, now_s)
        for prefix in self._popular:
            if chain.startswith(prefix.chain):
                prefix.sender = (*route, tenant)

    def _sampled_at(self, now_s: float) -> float:
        return self._sampled * exp(min(0.0, self._sampled_s - now_s) / DECAY_S)

    def popular(self, now_s: float) -> list[PopularPrefix]:
        """Return the prefixes whose loss would cost the most prefill work, as of the last REFRESH_S."""
        if now_s >= self._refresh_s:
            self._refresh_s = now_s + REFRESH_S
            senders = {prefix.chain: prefix.sender for prefix in self._popular}
            total = max(1.0, self._sampled_at(now_s))
            self._popular = [
                PopularPrefix(hot.chain, hot.tokens, min(1.0, hot.uses / total), senders.get(hot.chain))
                for hot in self._hot.hottest(MAX_PREFIXES, now_s)
            ]
        return self._popular
