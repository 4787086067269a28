"""The duration of a step that only prefills or only decodes, without the engine's overhead."""

from __future__ import annotations

from warmroute.lab.engine.timing import Timing


def prefill_ms(timing: Timing, new_tokens: int, cached_tokens: int = 0) -> float:
    return timing.mixed_ms(new_tokens, timing.attention_ms(new_tokens, cached_tokens), 0, 0)


def decode_ms(timing: Timing, batch: int, context_tokens: int) -> float:
    return timing.decode_floor_ms(batch) + timing.g * context_tokens
