"""Rate limits: how many requests and tokens a tenant may use each minute, with all its keys together. No I/O.

A token bucket for each: it holds what a minute allows, and fills up evenly. A request takes one from the first, and its
tokens from the second: those of its prompt, and as many as its answer is expected to have. When it has ended, what it
really used is settled, which may leave the bucket in debt. One that needs more than the bucket can hold goes when it is
full: it is late rather than never.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from warmroute.config import KeyConfig
from warmroute.routing.refusals import RateLimited

BYTES_PER_TOKEN: Final = 4.0
"""Of a body whose prompt was not read."""


class Bucket:
    __slots__ = ("_at_s", "_level", "limit")

    def __init__(self, limit: int, now_s: float, level: float | None = None) -> None:
        """`limit` is for a minute, and the most that it holds."""
        self.limit = limit
        self._level = float(limit) if level is None else level
        self._at_s = now_s

    def level(self, now_s: float) -> float:
        """What is left; below 0 where more was used than there was."""
        filled = self._level + max(0.0, now_s - self._at_s) * self.limit / 60.0
        self._level = min(float(self.limit), filled)
        self._at_s = max(self._at_s, now_s)
        return self._level

    def wait_s(self, amount: float, now_s: float) -> float:
        """How long until so much is left, or all that it holds; 0.0 where it is."""
        lacking = min(amount, float(self.limit)) - self.level(now_s)
        return lacking * 60.0 / self.limit if lacking > 1e-9 else 0.0

    def take(self, amount: float) -> None:
        """Gives back what is below 0. How much it then holds is seen at the next look."""
        self._level -= amount

    def resized(self, limit: int, now_s: float) -> Bucket:
        """Another limit: as full as it was."""
        return Bucket(limit, now_s, self.level(now_s) * limit / self.limit)


class TenantLimits:
    __slots__ = ("requests", "tokens")

    def __init__(self, requests: Bucket | None, tokens: Bucket | None) -> None:
        self.requests = requests
        self.tokens = tokens

    def begin(self, now_s: float, body_bytes: int, answers: bool) -> Charge:
        """A request begins; `answers`: it is one that has an answer in tokens. Raises RateLimited where there may be
        none, or where no tokens are left at all."""
        self._check_begin(now_s)
        if self.requests is not None:
            self.requests.take(1.0)
        return Charge(self, body_bytes / BYTES_PER_TOKEN, answers)

    def _check_begin(self, now_s: float) -> None:
        requests, tokens = self.requests, self.tokens
        if requests is not None and (wait_s := requests.wait_s(1.0, now_s)):
            raise RateLimited("requests", 1.0, requests.limit, wait_s, self.told(now_s))
        if tokens is not None and (wait_s := tokens.wait_s(1.0, now_s)):
            raise RateLimited("tokens", 1.0, tokens.limit, wait_s, self.told(now_s))

    def check(self, prompt: float | None, output: float, now_s: float, body_bytes: int, answers: bool) -> None:
        """As `begin` and then `take_tokens` would decide, of one that takes nothing. Raises RateLimited."""
        self._check_begin(now_s)
        if self.tokens is not None:
            self._check_tokens(*_needs(prompt, output, body_bytes / BYTES_PER_TOKEN, answers), now_s)

    def _check_tokens(self, prompt: float, output: float, now_s: float) -> None:
        tokens = self.tokens
        if tokens is not None and (wait_s := tokens.wait_s(prompt + output, now_s)):
            raise RateLimited("tokens", prompt + output, tokens.limit, wait_s, self.told(now_s))

    def told(self, now_s: float) -> tuple[tuple[str, str], ...]:
        """What is left, as OpenAI's headers tell it."""
        found: list[tuple[str, str]] = []
        for name, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                found += [
                    (f"x-ratelimit-limit-{name}", str(bucket.limit)),
                    (f"x-ratelimit-remaining-{name}", str(max(0, int(bucket.level(now_s))))),
                    (f"x-ratelimit-reset-{name}", f"{bucket.wait_s(bucket.limit, now_s):.3f}s"),
                ]
        return tuple(found)


class Charge:
    """What one request has taken, until it is known what it used."""

    __slots__ = ("_answers", "_guess", "_limits", "_output", "_prompt", "_settled")

    def __init__(self, limits: TenantLimits, guess: float, answers: bool) -> None:
        self._limits = limits
        self._guess = guess
        self._answers = answers
        self._prompt = self._output = 0.0
        self._settled = False

    def take_tokens(self, prompt: float | None, output: float, now_s: float) -> None:
        """Of its prompt (None: it was not read), and of the answer as expected. Raises RateLimited; then `cancel`."""
        tokens = self._limits.tokens
        if tokens is None:
            return
        prompt, output = _needs(prompt, output, self._guess, self._answers)
        self._limits._check_tokens(prompt, output, now_s)
        self._prompt, self._output = prompt, output
        tokens.take(prompt + output)

    @property
    def wants_usage(self) -> bool:
        return self._limits.tokens is not None

    def settle(self, prompt: int | None, output: int | None) -> None:
        """The answer says what it used, as far as it does. Once."""
        if not self._settled:
            self._settled = True
            if prompt is not None and output is None:  # such as that of an embedding
                output = 0
            if self._limits.tokens is not None:
                used = (self._prompt if prompt is None else prompt) + (self._output if output is None else output)
                self._limits.tokens.take(used - self._prompt - self._output)

    def refused_by_node(self) -> None:
        """The node wanted nothing of it: it was a request, but used no tokens."""
        self.settle(0, 0)

    def cancel(self) -> None:
        """It never got to a node, or to none that served it: it takes nothing."""
        if not self._settled:
            self.settle(0, 0)
            if self._limits.requests is not None:
                self._limits.requests.take(-1.0)


class RateLimits:
    """Of all tenants that have any."""

    def __init__(self, keys: Sequence[KeyConfig], now_s: float) -> None:
        self._tenants: dict[str, TenantLimits] = {}
        self.reconfigure(keys, now_s)

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def of(self, tenant: str) -> TenantLimits | None:
        return self._tenants.get(tenant)

    def reconfigure(self, keys: Sequence[KeyConfig], now_s: float) -> None:
        """What was used counts on."""
        requests: dict[str, int] = {}
        tokens: dict[str, int] = {}
        for key in keys:
            requests[key.tenant] = key.requests_per_min or requests.get(key.tenant, 0)
            tokens[key.tenant] = key.tokens_per_min or tokens.get(key.tenant, 0)
        before, self._tenants = self._tenants, {}
        for tenant in requests:
            if requests[tenant] or tokens[tenant]:
                limits = before.get(tenant) or TenantLimits(None, None)
                limits.requests = _bucket(limits.requests, requests[tenant], now_s)
                limits.tokens = _bucket(limits.tokens, tokens[tenant], now_s)
                self._tenants[tenant] = limits


def _needs(prompt: float | None, output: float, guess: float, answers: bool) -> tuple[float, float]:
    """Tokens of its prompt (None: it was not read) and of its answer, where it has one."""
    return guess if prompt is None else prompt, output if answers else 0.0


def _bucket(before: Bucket | None, limit: int, now_s: float) -> Bucket | None:
    if not limit:
        return None
    if before is None:
        return Bucket(limit, now_s)
    return before if before.limit == limit else before.resized(limit, now_s)
