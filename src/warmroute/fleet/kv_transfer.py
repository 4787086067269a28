"""How long KV tokens take from a prefill node to a decode node, learned for each pair of islands.

    transfer = LATENCY_MS + ms_per_token · tokens          [ms]

The prior is a network of about 6 GB/s within an island, and a tenth of it between islands, for a model with 128 KB of
KV cache per token. The router sees the time between the decode request and the first token of its stream, less the
steps of the decode node's batch. `ms_per_token` is the ratio of two decaying sums, as for a node's prefill speed.

Loads from a shared KV store have the same formula, learned for each store and island. A store that seems slower than
prefilling is not used, so nothing more is learned of it: what was learned fades with time, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

LATENCY_MS: Final = 10.0
"""Time of a transfer without any tokens: two requests instead of one, and the connection between the engines."""
PRIOR_MS_PER_TOKEN: Final = 0.02
FAR_FACTOR: Final = 10.0
"""Between two islands, a token takes this many times as long until it was measured."""
PRIOR_TOKENS: Final = 20_000.0
"""The prior weighs as much as this many transferred tokens."""
KEPT: Final = 0.98
"""What a transfer leaves of the weight of earlier ones."""
MIN_TOKENS: Final = 256
"""A shorter transfer says nothing about the network."""
MAX_FACTOR: Final = 10.0
"""One transfer counts as at most this many times as slow as the others: it may have waited for memory."""
LOAD_HALF_LIFE_S: Final = 600.0
"""After this time without a load, half of what was learned of a store is left beside the prior."""
MAX_LOAD_TOKENS: Final = 4_000.0
"""One load counts as at most this many tokens, a fifth of the prior: its first token may be late for other reasons."""
MAX_ISLAND_PAIRS: Final = 256
NEEDS_PARTNER: Final = frozenset(("sglang",))
"""Engines whose decode nodes cannot prefill: their requests always go to a pair of nodes."""


@dataclass(slots=True, eq=False)
class TransferSpeed:
    """Of one pair of islands."""

    ms_per_token: float
    transfers: int = 0
    """Measured ones."""
    _tokens: float = PRIOR_TOKENS
    _ms: float = field(init=False)

    def __post_init__(self) -> None:
        self._ms = self._tokens * self.ms_per_token

    def ms(self, tokens: float) -> float:
        return LATENCY_MS + self.ms_per_token * tokens if tokens > 0.0 else LATENCY_MS

    def learn(self, tokens: float, took_ms: float) -> None:
        """A transfer of this many tokens took this long."""
        if tokens < MIN_TOKENS:
            return
        least_ms, most_ms = 0.01 * self.ms(tokens), MAX_FACTOR * self.ms(tokens)
        self._tokens = self._tokens * KEPT + tokens
        self._ms = self._ms * KEPT + min(max(took_ms - LATENCY_MS, least_ms), most_ms)
        self.ms_per_token = self._ms / self._tokens
        self.transfers += 1


@dataclass(slots=True, eq=False)
class LoadSpeed:
    """Of the nodes of an island that load KV tokens from a shared KV store."""

    loads: int = 0
    """Measured ones."""
    _tokens: float = PRIOR_TOKENS
    _ms: float = PRIOR_TOKENS * PRIOR_MS_PER_TOKEN
    _at_s: float = 0.0

    def ms_per_token(self, now_s: float) -> float:
        tokens, ms = self._sums(now_s)
        return ms / tokens

    def learn(self, tokens: float, took_ms: float, now_s: float) -> None:
        """A load of this many tokens took this long."""
        if tokens < MIN_TOKENS:
            return
        sum_tokens, sum_ms = self._sums(now_s)
        expected_ms = LATENCY_MS + tokens * sum_ms / sum_tokens
        load_ms = min(max(took_ms - LATENCY_MS, 0.01 * expected_ms), MAX_FACTOR * expected_ms)
        weight = min(1.0, MAX_LOAD_TOKENS / tokens)
        self._tokens = sum_tokens * KEPT + tokens * weight
        self._ms = sum_ms * KEPT + load_ms * weight
        self._at_s = now_s
        self.loads += 1

    def _sums(self, now_s: float) -> tuple[float, float]:
        left = 0.5 ** (max(0.0, now_s - self._at_s) / LOAD_HALF_LIFE_S)
        prior_tokens = PRIOR_TOKENS * (1.0 - left)
        return self._tokens * left + prior_tokens, self._ms * left + prior_tokens * PRIOR_MS_PER_TOKEN


@dataclass(slots=True, eq=False)
class TransferSpeeds:
    """Of one model, between all islands and from all stores."""

    _speeds: dict[tuple[str, str], TransferSpeed] = field(default_factory=dict)
    _load_speeds: dict[tuple[str, str], LoadSpeed] = field(default_factory=dict)

    def from_store(self, store: str, island: str) -> LoadSpeed:
        """Return how fast nodes of an island load KV tokens from a shared KV store."""
        key = (store, island)
        speed = self._load_speeds.get(key)
        if speed is None:
            speed = LoadSpeed()
            if len(self._load_speeds) < MAX_ISLAND_PAIRS:
                self._load_speeds[key] = speed
        return speed

    def between(self, prefill_island: str, decode_island: str) -> TransferSpeed:
        key = (prefill_island, decode_island)
        speed = self._speeds.get(key)
        if speed is None:
            far = 1.0 if prefill_island == decode_island else FAR_FACTOR
            speed = TransferSpeed(PRIOR_MS_PER_TOKEN * far)
            if len(self._speeds) < MAX_ISLAND_PAIRS:
                self._speeds[key] = speed
        return speed
