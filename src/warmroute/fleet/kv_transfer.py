"""How long KV tokens take from a prefill node to a decode node, learned for each pair of islands.

    transfer = LATENCY_MS + ms_per_token · tokens          [ms]

The prior is a network of about 6 GB/s within an island, and a tenth of it between islands, for a model with 128 KB of
KV cache per token. The router sees the time between the decode request and the first token of its stream, less the
steps of the decode node's batch. `ms_per_token` is the ratio of two decaying sums, as for a node's prefill speed.

Loads from a shared KV store have the same formula, learned for each store and island. A network or a store that seems
slower than prefilling is not used, so nothing more is learned of it: what was learned fades with time, and the prior
returns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
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
HALF_LIFE_S: Final = 600.0
"""After this time without a measurement, half of what was learned is left beside the prior."""
MAX_LOAD_TOKENS: Final = 4_000.0
"""One load counts as at most this many tokens, a fifth of the prior: its first token may be late for other reasons."""
MAX_ISLAND_PAIRS: Final = 256
NEEDS_PARTNER: Final = frozenset(("sglang",))
"""Engines whose decode nodes cannot prefill: their requests always go to a pair of nodes."""


def transfer_ms(ms_per_token: float, tokens: float) -> float:
    return LATENCY_MS + ms_per_token * tokens if tokens > 0.0 else LATENCY_MS


@dataclass(slots=True, eq=False)
class TransferSpeed:
    """Of transfers between two islands, or of loads from a shared KV store to the nodes of an island."""

    prior_ms_per_token: float = PRIOR_MS_PER_TOKEN
    max_tokens: float = inf
    """One measurement counts as at most this many tokens."""
    measured: int = 0
    _tokens: float = PRIOR_TOKENS
    _ms: float = field(init=False)
    _at_s: float = 0.0

    def __post_init__(self) -> None:
        self._ms = self._tokens * self.prior_ms_per_token

    def ms_per_token(self, now_s: float) -> float:
        tokens, ms = self._sums(now_s)
        return ms / tokens

    def learn(self, tokens: float, took_ms: float, now_s: float) -> None:
        """A transfer of this many tokens took this long."""
        if tokens < MIN_TOKENS:
            return
        sum_tokens, sum_ms = self._sums(now_s)
        expected_ms = LATENCY_MS + tokens * sum_ms / sum_tokens
        token_ms = min(max(took_ms - LATENCY_MS, 0.01 * expected_ms), MAX_FACTOR * expected_ms)
        weight = min(1.0, self.max_tokens / tokens)
        self._tokens = sum_tokens * KEPT + tokens * weight
        self._ms = sum_ms * KEPT + token_ms * weight
        self._at_s = now_s
        self.measured += 1

    def _sums(self, now_s: float) -> tuple[float, float]:
        left = 0.5 ** (max(0.0, now_s - self._at_s) / HALF_LIFE_S)
        prior_tokens = PRIOR_TOKENS * (1.0 - left)
        return self._tokens * left + prior_tokens, self._ms * left + prior_tokens * self.prior_ms_per_token


@dataclass(slots=True, eq=False)
class TransferSpeeds:
    """Of one model, between all islands and from all stores."""

    _speeds: dict[tuple[str, str], TransferSpeed] = field(default_factory=dict)
    _load_speeds: dict[tuple[str, str], TransferSpeed] = field(default_factory=dict)

    def from_store(self, store: str, island: str) -> TransferSpeed:
        """Return how fast nodes of an island load KV tokens from a shared KV store."""
        key = (store, island)
        speed = self._load_speeds.get(key)
        if speed is None:
            speed = TransferSpeed(max_tokens=MAX_LOAD_TOKENS)
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
