"""How long one engine step takes, in milliseconds: the fits of shared/data/h200_timing.json.

With n new tokens, c cached ones under them, and a decode batch with its summed context:

    prefill     = max(m, a + b·n) + d·n·(c + n/2) + h·c
    decode step = max(e + f·batch, e2 + f2·batch) + g·context
    mixed step  = max(m, a + b·(n + batch)) + Σ d·n·(c + n/2) + h·Σ c + g·context

The fits cover the model's forward pass only; `overhead_ms` is what the engine adds to each step.
"""

from __future__ import annotations

import msgspec


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Coefficients in ms; see the formulas above for what each multiplies."""

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
    """Sampling (0.04 to 0.18 ms measured on an H200 when greedy) and scheduling that is not hidden behind the GPU."""
    reload_us_per_token: float = 0.0
    """KV from host memory back to the GPU."""

    def slowed_by(self, times: float) -> Timing:
        """The same where everything takes so many times as long."""
        return Timing(**{name: times * value for name, value in msgspec.structs.asdict(self).items()})

    def prefill_ms(self, new_tokens: int, cached_tokens: int = 0) -> float:
        """Forward pass of one prompt alone, without the engine's overhead."""
        return self.mixed_ms(new_tokens, self.attention_ms(new_tokens, cached_tokens), 0, 0)

    def attention_ms(self, new_tokens: int, cached_tokens: int) -> float:
        """The part of a prefill that does not share its cost with the rest of the step."""
        return self.d * new_tokens * (cached_tokens + new_tokens / 2) + self.h * cached_tokens

    def decode_ms(self, batch: int, context_tokens: int) -> float:
        """Forward pass of one decode step, without the engine's overhead."""
        return self.decode_floor_ms(batch) + self.g * context_tokens

    def decode_floor_ms(self, batch: int) -> float:
        """A decode step over an empty context."""
        return max(self.e + self.f * batch, self.e2 + self.f2 * batch)

    def mixed_ms(self, new_tokens: int, attention_ms: float, batch: int, context_tokens: int) -> float:
        """Forward pass of a step with prefill chunks (their attention summed) and decodes."""
        return max(self.m, self.a + self.b * (new_tokens + batch)) + attention_ms + self.g * context_tokens
