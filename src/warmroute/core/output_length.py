"""Estimates how many output tokens a response will have: a moving average by model and tenant.

Short responses end first, and with long ones it takes a while until any has ended. So until ENOUGH responses of a model
have reported their length, the streams that are under way can raise the estimate. On average they are half done. And
prefills of other prompts interrupt them for up to half of the time, so a stream gets a token every second step:

    raised   = mean time since the first tokens / step_ms                             both factors of 2 cancel
    expected = average + max(0, raised − average) · (ENOUGH − reported) / ENOUGH
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from warmroute.core.speeds import DecodeSpeed

DEFAULT_TOKENS: Final = 256.0
WEIGHT: Final = 0.05
ENOUGH: Final = 20
MAX_RAISED_TOKENS: Final = 4096.0
"""Streams under way raise the estimate to at most this: one of them may hang."""
MIN_STEP_MS: Final = 0.1
"""Learned times of a step may be absurd."""
MAX_AVERAGES: Final = 4096
"""Limit of averages by model, and of averages by model and tenant. Beyond it, a model's average counts."""


class _UnderWay:
    """The streams of one model that have had their first token."""

    def __init__(self, decode_speed: DecodeSpeed) -> None:
        self.decode_speed = decode_speed
        self.count = 0
        self.first_tokens_s = 0.0
        """Sum of the times of their first tokens."""
        self.at_s = 0.0
        """When one of them last began or ended."""

    def expected_tokens(self) -> float:
        """Return how long these streams will be on average, by the time since their first tokens."""
        if not self.count:
            return 0.0
        mean_s = self.at_s - self.first_tokens_s / self.count
        return min(MAX_RAISED_TOKENS, 1000.0 * mean_s / max(MIN_STEP_MS, self.decode_speed.mean_ms))


class OutputLengthEstimate:
    def __init__(self) -> None:
        self._by_model: dict[str, float] = {}
        self._by_tenant: dict[tuple[str, str], float] = {}
        self._reported: dict[str, int] = {}
        """Responses of each model that reported their length, until there are ENOUGH."""
        self._under_way: dict[str, _UnderWay] = {}

    def expected(self, model: str, tenant: str, max_tokens: int | None = None) -> float:
        """Return the expected output tokens, at most the `max_tokens` that the request allows."""
        mean = (self._by_tenant.get((model, tenant)) if tenant else None) or self._by_model.get(model) or DEFAULT_TOKENS
        reported = self._reported.get(model, 0)
        if reported < ENOUGH and (under_way := self._under_way.get(model)) is not None:
            mean += max(0.0, under_way.expected_tokens() - mean) * (ENOUGH - reported) / ENOUGH
        return min(mean, max_tokens) if max_tokens else mean

    def export(self) -> tuple[list[tuple[str, float]], list[tuple[str, str, float]]]:
        """Return the averages above 0 by model, and by model and tenant."""
        by_model = [(model, mean) for model, mean in self._by_model.items() if mean > 0.0]
        return by_model, [(*key, mean) for key, mean in self._by_tenant.items() if mean > 0.0]

    def restore(self, by_model: Sequence[tuple[str, float]], by_tenant: Sequence[tuple[str, str, float]]) -> None:
        """Take averages over where there are none."""
        for model, mean in by_model[:MAX_AVERAGES]:
            self._by_model.setdefault(model, mean)
            self._reported.setdefault(model, ENOUGH)
        for model, tenant, mean in by_tenant[:MAX_AVERAGES]:
            self._by_tenant.setdefault((model, tenant), mean)

    def record(self, model: str, tenant: str, tokens: int) -> None:
        means = self._by_model
        mean = means.get(model)
        if mean is not None:
            means[model] = mean + WEIGHT * (tokens - mean)
        elif len(means) < MAX_AVERAGES:
            means[model] = float(tokens)
        if tenant:
            of_tenants = self._by_tenant
            mean = of_tenants.get((model, tenant))
            if mean is not None:
                of_tenants[model, tenant] = mean + WEIGHT * (tokens - mean)
            elif len(of_tenants) < MAX_AVERAGES:
                of_tenants[model, tenant] = float(tokens)
        reported = self._reported.get(model, 0)
        if reported < ENOUGH and model in self._by_model:
            self._reported[model] = reported + 1

    def stream_began(self, model: str, decode_speed: DecodeSpeed, now_s: float) -> bool:
        """Count a stream that had its first token, if it may matter. Return whether its end has to be reported."""
        if self._reported.get(model, 0) >= ENOUGH:
            return False
        under_way = self._under_way.get(model)
        if under_way is None:
            if len(self._under_way) >= MAX_AVERAGES:
                return False
            under_way = self._under_way[model] = _UnderWay(decode_speed)
        under_way.count += 1
        under_way.first_tokens_s += now_s
        under_way.at_s = now_s
        return True

    def stream_ended(self, model: str, began_s: float, now_s: float) -> None:
        """Call it for each stream that `stream_began` counted, with the time of that call."""
        under_way = self._under_way[model]
        under_way.count -= 1
        under_way.first_tokens_s -= began_s
        under_way.at_s = now_s
        if not under_way.count:
            del self._under_way[model]
