"""The duration of an engine step in milliseconds. The formulas were fitted to measurements on an H200.

With n new tokens, c cached tokens before them, and a decode batch with the sum of its contexts:

    prefill     = max(m, a + b·n) + d·n·(c + n/2) + h·c
    decode step = max(e + f·batch, e2 + f2·batch) + g·context
    mixed step  = max(m, a + b·(n + batch)) + Σ d·n·(c + n/2) + h·Σ c + g·context

The fits cover the model's forward pass only. `overhead_ms` is what the engine adds to each step.
"""

from __future__ import annotations

import msgspec


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Coefficients in ms. The formulas above show what each one multiplies."""

    m: float
    a: float
    b: float
    d: float
    h: float
    e: float
    f: float
    e2: float
    f2: float
    g: float
    overhead_ms: float = 0.2
    """Sampling (0.04 to 0.18 ms measured on an H200 when greedy), and scheduling that does not overlap with the GPU."""
    reload_us_per_token: float = 0.0
    """Time to copy KV from host memory back to the GPU."""

    def slowed_by(self, factor: float) -> Timing:
        """Return a timing in which everything takes `factor` times as long."""
        return Timing(**{name: factor * value for name, value in msgspec.structs.asdict(self).items()})

    def attention_ms(self, new_tokens: int, cached_tokens: int) -> float:
        """The part of a prefill whose cost adds to the rest of the step."""
        return self.d * new_tokens * (cached_tokens + new_tokens / 2) + self.h * cached_tokens

    def decode_floor_ms(self, batch: int) -> float:
        """The forward pass of a decode step over an empty context."""
        return max(self.e + self.f * batch, self.e2 + self.f2 * batch)

    def mixed_ms(self, new_tokens: int, attention_ms: float, batch: int, context_tokens: int) -> float:
        """The forward pass of a step with prefill chunks and decodes. `attention_ms`: the sum over the chunks."""
        return max(self.m, self.a + self.b * (new_tokens + batch)) + attention_ms + self.g * context_tokens
