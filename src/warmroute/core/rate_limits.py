"""Rate limits: requests and tokens per minute for each tenant, over all its keys. No I/O.

Each limit is a token bucket that holds one minute's amount and refills evenly. A request takes 1 from the first bucket,
and its prompt tokens plus its expected output tokens from the second. When it ends, the difference to what it really
used is settled, which may leave a debt. A request that needs more than the bucket can hold passes when it is full: late
rather than never.

Several processes share a limit (core/cluster/shared_limits.py). Each has a bucket of the whole limit, takes from it
what its peers took, and spends no more than its slice of what is left before it has heard from all of them again. So
all of them together exceed a limit by at most one slice. A process that cannot hear from the others has a fraction of
the limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Final

import msgspec

from warmroute.config import KeyConfig
from warmroute.core.rejections import RateLimited

BYTES_PER_TOKEN: Final = 4.0
"""Converts the body's size to prompt tokens, if the prompt was not tokenized."""

MAX_DEBT_MIN: Final = 10.0
"""The longest time for which usage that a response reported can shut a tenant out, in minutes of its limit."""

MAX_FORMER: Final = 1000
"""Tenants without a key whose limits are remembered."""

SLICE_WAIT_S: Final = 0.1
"""When a process that has spent its slice may try again."""


class Bucket:
    __slots__ = ("_level", "_slice", "_slice_left", "_updated_s", "fraction", "limit", "taken")

    def __init__(self, limit: int, now_s: float, level: float | None = None) -> None:
        """`limit` is the amount per minute, and the capacity."""
        self.limit = limit
        self._level = float(limit) if level is None else level
        self._updated_s = now_s
        self.taken = 0.0
        """What this process took from it since its start."""
        self.fraction = 1.0
        """Of the limit: below 1 if this process cannot hear from all that share it."""
        self._slice = self._slice_left = inf
        """What this process may take before it has heard from its peers, and what is left of that."""

    def level(self, now_s: float) -> float:
        """Return what is left; negative in debt."""
        share = self.limit * self.fraction
        refilled = self._level + max(0.0, now_s - self._updated_s) * share / 60.0
        self._level = min(share, refilled)
        self._updated_s = max(self._updated_s, now_s)
        return self._level

    def wait_s(self, amount: float, now_s: float) -> float:
        """Return the time until this amount is left, or until the bucket is full; 0.0 if it is now."""
        share = self.limit * self.fraction
        missing = min(amount, share) - self.level(now_s)
        if missing > 1e-9:
            return missing * 60.0 / share
        # A request that needs more than a slice passes as the first one.
        return SLICE_WAIT_S if self._slice_left < min(amount, self._slice) else 0.0

    def start_slice(self, processes: int, now_s: float) -> None:
        """This process has heard from all others: it may take its part of what is left."""
        self._slice = self._slice_left = max(0.0, self.level(now_s)) / processes if processes > 1 else inf

    def take(self, amount: float) -> None:
        """A negative amount is given back. A debt is at most MAX_DEBT_MIN minutes."""
        self.taken += amount
        self._slice_left -= amount
        self.peer_took(amount)

    def peer_took(self, amount: float) -> None:
        """Another process of the cluster took this amount from the same limit."""
        self._level = max(self._level - amount, -MAX_DEBT_MIN * self.limit)

    def peer_has_left(self, amount: float, now_s: float) -> None:
        """A process that took from the same limit before this one heard from it knows of this much that is left."""
        self._level = min(self.level(now_s), max(amount, -MAX_DEBT_MIN * self.limit))


class TenantLimits(msgspec.Struct, eq=False):
    requests: Bucket | None = None
    tokens: Bucket | None = None

    def begin(self, now_s: float, body_bytes: int, has_output: bool) -> RequestCharge:
        """Take a request from the limit. Raises RateLimited if no request, or not a single token, is left.

        `has_output`: the response has output tokens.
        """
        self._check_begin(now_s)
        if self.requests is not None:
            self.requests.take(1.0)
        return RequestCharge(self, body_bytes / BYTES_PER_TOKEN, has_output)

    def taken_before(self, body_bytes: int, has_output: bool) -> RequestCharge:
        """Return the charge of a request that has taken what it needs from these limits, in another process."""
        return RequestCharge(self, body_bytes / BYTES_PER_TOKEN, has_output)

    def check(self, prompt: float | None, output: float, now_s: float, body_bytes: int, has_output: bool) -> None:
        """Check like `begin` and `RequestCharge.take_tokens`, but take nothing. Raises RateLimited."""
        self._check_begin(now_s)
        if self.tokens is not None:
            self._check_tokens(*_needed(prompt, output, body_bytes / BYTES_PER_TOKEN, has_output), now_s)

    def _check_begin(self, now_s: float) -> None:
        requests, tokens = self.requests, self.tokens
        if requests is not None and (wait_s := requests.wait_s(1.0, now_s)):
            raise RateLimited("requests", 1.0, requests.limit, wait_s, self.headers(now_s), requests.fraction)
        if tokens is not None and (wait_s := tokens.wait_s(1.0, now_s)):
            raise RateLimited("tokens", 1.0, tokens.limit, wait_s, self.headers(now_s), tokens.fraction)

    def _check_tokens(self, prompt: float, output: float, now_s: float) -> None:
        tokens = self.tokens
        if tokens is not None and (wait_s := tokens.wait_s(prompt + output, now_s)):
            raise RateLimited("tokens", prompt + output, tokens.limit, wait_s, self.headers(now_s), tokens.fraction)

    def headers(self, now_s: float) -> tuple[tuple[str, str], ...]:
        """Return what is left as OpenAI's x-ratelimit headers."""
        found: list[tuple[str, str]] = []
        for name, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                found += [
                    (f"x-ratelimit-limit-{name}", str(bucket.limit)),
                    (f"x-ratelimit-remaining-{name}", str(max(0, int(bucket.level(now_s))))),
                    (f"x-ratelimit-reset-{name}", f"{bucket.wait_s(bucket.limit, now_s):.3f}s"),
                ]
        return tuple(found)


class RequestCharge(msgspec.Struct, eq=False):
    """What one request has taken from its tenant's limits, until its usage is known."""

    _limits: TenantLimits
    _assumed_prompt: float
    _has_output: bool
    _prompt: float = 0.0
    _output: float = 0.0
    _settled: bool = False

    def take_tokens(self, prompt: float | None, output: float, now_s: float) -> None:
        """Take the prompt's tokens (None: not tokenized) and the expected output. Raises RateLimited; then `cancel`."""
        tokens = self._limits.tokens
        if tokens is None:
            return
        prompt, output = _needed(prompt, output, self._assumed_prompt, self._has_output)
        self._limits._check_tokens(prompt, output, now_s)
        self._prompt, self._output = prompt, output
        tokens.take(prompt + output)

    def headers(self, now_s: float) -> tuple[tuple[str, str], ...]:
        """Return what is left of the tenant's limits as x-ratelimit headers."""
        return self._limits.headers(now_s)

    def settle(self, prompt: int | None, output: int | None) -> None:
        """Replace the expected usage with what the response reports. Only the first call counts."""
        if not self._settled:
            self._settled = True
            if prompt is not None and output is None:  # for example an embedding
                output = 0
            if self._limits.tokens is not None:
                used = (self._prompt if prompt is None else prompt) + (self._output if output is None else output)
                self._limits.tokens.take(used - self._prompt - self._output)

    def cancel(self) -> None:
        """No node served the request: it takes nothing."""
        if not self._settled:
            self.settle(0, 0)
            if self._limits.requests is not None:
                self._limits.requests.take(-1.0)


class RateLimits:
    def __init__(self, keys: Sequence[KeyConfig], now_s: float) -> None:
        self._tenants: dict[str, TenantLimits] = {}
        self._former: dict[str, TenantLimits] = {}
        """Of tenants without a key by now: requests whose head came with one still count."""
        self._fraction, self._processes = 1.0, 1
        self.reconfigure(keys, now_s)

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def of(self, tenant: str) -> TenantLimits | None:
        return self._tenants.get(tenant) or self._former.get(tenant)

    def taken(self, now_s: float) -> dict[str, tuple[float, float, float, float]]:
        """Return what each tenant's requests took in this process since its start, requests and tokens, and what is
        left of both."""
        return {
            tenant: (
                limits.requests.taken if limits.requests is not None else 0.0,
                limits.tokens.taken if limits.tokens is not None else 0.0,
                limits.requests.level(now_s) if limits.requests is not None else 0.0,
                limits.tokens.level(now_s) if limits.tokens is not None else 0.0,
            )
            for tenant, limits in self._tenants.items()
        }

    def levels(self, now_s: float) -> dict[str, tuple[float, float]]:
        """Return what is left of each tenant's requests and tokens."""
        return {tenant: (requests, tokens) for tenant, (_, _, requests, tokens) in self.taken(now_s).items()}

    def restore(self, levels: Mapping[str, tuple[float, float]], ago_s: float, now_s: float) -> None:
        """Go on with what was left `ago_s` ago."""
        for tenant, left in levels.items():
            limits = self._tenants.get(tenant)
            for bucket, level in zip((limits.requests, limits.tokens), left, strict=True) if limits is not None else ():
                if bucket is not None:
                    bucket.peer_has_left(level + ago_s * bucket.limit / 60.0, now_s)

    def peer_took(self, tenant: str, requests: float, tokens: float) -> None:
        """Another process of the cluster took this much from a tenant's limits."""
        limits = self._tenants.get(tenant)
        if limits is not None and limits.requests is not None:
            limits.requests.peer_took(requests)
        if limits is not None and limits.tokens is not None:
            limits.tokens.peer_took(tokens)

    def peer_has_left(self, tenant: str, requests: float, tokens: float, now_s: float) -> None:
        """A process whose requests took from a tenant's limits before this one heard from it has this much left."""
        limits = self._tenants.get(tenant)
        if limits is not None and limits.requests is not None:
            limits.requests.peer_has_left(requests, now_s)
        if limits is not None and limits.tokens is not None:
            limits.tokens.peer_has_left(tokens, now_s)

    def start_slices(self, processes: int, now_s: float) -> None:
        """This process has heard from all others: it may take its part of what is left."""
        self._processes = processes
        for bucket in self._buckets():
            bucket.start_slice(processes, now_s)

    def set_fraction(self, fraction: float, now_s: float) -> None:
        """Use this fraction of each limit: the other processes, which cannot be heard, use the rest."""
        self._fraction = fraction
        for bucket in self._buckets():
            bucket.level(now_s)
            bucket.fraction = fraction

    def _buckets(self) -> Iterator[Bucket]:
        for limits in self._tenants.values():
            yield from (bucket for bucket in (limits.requests, limits.tokens) if bucket is not None)

    def reconfigure(self, keys: Sequence[KeyConfig], now_s: float) -> None:
        """Apply new limits. What tenants have used still counts."""
        requests: dict[str, int] = {}
        tokens: dict[str, int] = {}
        for key in keys:
            requests[key.tenant] = key.requests_per_min or requests.get(key.tenant, 0)
            tokens[key.tenant] = key.tokens_per_min or tokens.get(key.tenant, 0)
        before, self._tenants = {**self._former, **self._tenants}, {}
        for tenant in requests:
            if requests[tenant] or tokens[tenant]:
                limits = before.get(tenant) or TenantLimits()
                limits.requests = _resize(limits.requests, requests[tenant], now_s)
                limits.tokens = _resize(limits.tokens, tokens[tenant], now_s)
                self._tenants[tenant] = limits
        former = [(tenant, limits) for tenant, limits in before.items() if tenant not in requests]
        self._former = dict(former[-MAX_FORMER:])
        self.set_fraction(self._fraction, now_s)
        self.start_slices(self._processes, now_s)


def _needed(prompt: float | None, output: float, assumed_prompt: float, has_output: bool) -> tuple[float, float]:
    """Return the prompt tokens and output tokens to take."""
    return assumed_prompt if prompt is None else prompt, output if has_output else 0.0


def _resize(before: Bucket | None, limit: int, now_s: float) -> Bucket | None:
    if not limit:
        return None
    if before is None or before.limit == limit:
        return before or Bucket(limit, now_s)
    bucket = Bucket(limit, now_s, before.level(now_s) * limit / before.limit)  # as full as before
    bucket.taken = before.taken
    return bucket
