"""Prefixes that many prompts share: those that a new node is prewarmed with, and those that an operator sees."""

from __future__ import annotations

from math import exp
from typing import Final

import msgspec

from warmroute.core.messages import Lookup
from warmroute.core.prediction import Prediction

# Hot prefixes: prompt prefixes that many requests share, each with an example prompt, so that scaling can prefill them
# on another node before requests miss them there.
#
# For each prompt the router counts its blocks at a few depths (1, 2, 3, 4, 6, 8, 12, … blocks) in a table of bounded
# size that drops the least used entries (Metwally's Space-Saving). Counts decay: a use one minute ago counts 1/e.

DECAY_S: Final = 60.0
MAX_COUNTS: Final = 4096
MAX_EXAMPLES: Final = 256
"""Prefixes that keep an example prompt."""
DEPTHS: Final = tuple(sorted({max(1, round(2.0 ** (step / 2))) for step in range(32)} | {3, 6, 12}))
COVERED_SHARE: Final = 0.8
"""Longer prefixes with this share of a shorter prefix's uses replace it in the result."""
HOT_USES: Final = 3.0
"""Decayed uses from which a prefix is hot. A single conversation stays below, an application is above."""


_NO_EXAMPLE: Final = Lookup(b"", 0, 0)


class HotPrefix(msgspec.Struct, frozen=True):
    chain: bytes
    """Its block hashes."""
    uses: float
    """Decayed uses."""
    example: Lookup
    """The prefix of a prompt that has it."""
    tokens: int


class _Count(msgspec.Struct, eq=False):
    at_s: float
    depth: int
    size: int
    uses: float = 1.0
    chain: bytes = b""
    """Set, like the example, only while the prefix is hot."""
    example: Lookup | None = None

    def now(self, now_s: float) -> float:
        return self.uses * exp(min(0.0, self.at_s - now_s) / DECAY_S)


class HotPrefixes:
    def __init__(self, keep_examples: bool = True) -> None:
        """`keep_examples`: whether hot prefixes keep their tokens. Without them nothing of a prompt stays in memory but
        hashes, and the examples are empty."""
        self.keeps_examples = keep_examples
        self._counts: dict[bytes, _Count] = {}
        self._examples = 0
        """Counts that have an example."""

    def __len__(self) -> int:
        return len(self._counts)

    def record_peer(self, chain: bytes, block_size: int, now_s: float) -> None:
        """Count a prompt that another process sent. Its prefixes get an example from a prompt of this process."""
        self.record(chain, block_size, None, now_s)

    def record(self, chain: bytes, block_size: int, prompt: Lookup | None, now_s: float) -> None:
        """Count a prompt with these block hashes. The router keeps a part of the prompt only for hot prefixes."""
        counts = self._counts
        blocks = len(chain) // 8
        for depth in DEPTHS:
            if depth > blocks:
                break
            key = chain[depth * 8 - 8 : depth * 8]
            found = counts.get(key)
            if found is None:
                if len(counts) >= MAX_COUNTS:
                    self._make_room(now_s)
                    counts = self._counts
                counts[key] = _Count(now_s, depth, block_size)
                continue
            found.uses = found.now(now_s) + 1.0
            found.at_s = now_s
            if prompt is None or found.example is not None or found.uses < HOT_USES:
                continue
            if self._examples < MAX_EXAMPLES:
                found.example = prompt.prefix(depth * block_size) if self.keeps_examples else _NO_EXAMPLE
                found.chain = chain[: depth * 8]
                self._examples += 1

    def _make_room(self, now_s: float) -> None:
        """Drop the less used half, and the examples of prefixes that are no longer hot."""
        ranked = sorted(self._counts.items(), key=lambda item: item[1].now(now_s), reverse=True)
        self._counts = dict(ranked[: MAX_COUNTS // 2])
        self._drop_cold_examples(now_s)

    def _drop_cold_examples(self, now_s: float) -> None:
        self._examples = 0
        for count in self._counts.values():
            if count.example is not None:
                if count.now(now_s) < HOT_USES / 2:
                    count.example, count.chain = None, b""
                else:
                    self._examples += 1

    def hottest(self, most: int, now_s: float) -> list[HotPrefix]:
        """Return the prefixes whose loss would cost the most prefill work, without those that a longer one covers."""
        self._drop_cold_examples(now_s)
        ranked = [
            (uses, count, count.example)
            for count in self._counts.values()
            if count.example is not None and (uses := count.now(now_s)) >= HOT_USES
        ]
        ranked.sort(key=lambda item: item[1].depth, reverse=True)
        covered: dict[bytes, float] = {}
        """Last block of each shorter prefix of the chosen ones → the uses that they cover."""
        chosen: list[HotPrefix] = []
        for uses, count, example in ranked:
            chain = count.chain
            if uses * COVERED_SHARE <= covered.get(chain[-8:], 0.0):
                continue
            chosen.append(HotPrefix(chain, uses, example, count.depth * count.size))
            for depth in DEPTHS:
                if depth > count.depth:
                    break
                key = chain[depth * 8 - 8 : depth * 8]
                covered[key] = covered.get(key, 0.0) + uses
        chosen.sort(key=lambda prefix: prefix.uses * prefix.tokens, reverse=True)
        return chosen[:most]


# Popular prefixes: which beginnings many prompts share, what share of the prompts has each, and which route sends it.
#
# The router samples a prompt every SAMPLE_S at most, so that counting costs the same at any rate. It keeps hashes only.

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
