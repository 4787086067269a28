"""A bounded sample of recent prompts, by model and route.

On the request path the router keeps a reference to the body of one request per SAMPLE_S and route, and nothing of the
others. The sample is complete when the response has ended: then the doctor knows how much of the prompt was cached.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Final

from warmroute.prompt_doctor.masked_prompt import MaskedPrompt
from warmroute.routing.attempts import Attempts

SAMPLE_S: Final = 1.0
"""Mean of the least time between two samples of a route. It varies between 0 and twice this: else a client that sends
at fixed intervals would be sampled again and again, and others seldom."""
MAX_ROUTES: Final = 64
"""Further routes are not sampled."""
MAX_PENDING: Final = 256
"""Sampled requests without a complete response. The oldest are dropped first."""
MAX_PENDING_BYTES: Final = 16 << 20
MAX_RECENT: Final = 64
"""Samples of a route that are compared."""
MAX_OLDER: Final = 30
"""Samples that are kept longer, to see how prompts have changed."""
OLDER_S: Final = 60.0
"""Time between two of these."""

RouteKey = tuple[str, str]
"""Model and route, as telemetry/traffic.py counts them."""


class PromptSample:
    __slots__ = (
        "arrived_s", "body", "cached_tokens", "ms_per_token", "path", "prompt", "prompt_tokens", "samples", "tenant",
        "tokens",
    )  # fmt: skip

    def __init__(self, samples: PromptSamples, path: bytes, body: bytes, tenant: str, arrived_s: float) -> None:
        self.samples: PromptSamples | None = samples
        """None once it is complete or dropped."""
        self.path = path
        self.body = body
        """Empty once the doctor has read it."""
        self.tenant = tenant
        self.arrived_s = arrived_s
        self.prompt: MaskedPrompt | None = None
        self.tokens = b""
        """As the router read them, four bytes each."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.ms_per_token = 0.0

    def completed(
        self, attempts: Attempts, key: RouteKey, prompt_tokens: int, cached_tokens: int, ms_per_token: float
    ) -> None:
        samples, self.samples = self.samples, None
        if samples is None:
            return
        if attempts.lookup is not None:
            self.tokens = attempts.lookup.tokens
        self.prompt_tokens, self.cached_tokens, self.ms_per_token = prompt_tokens, cached_tokens, ms_per_token
        samples.add(key, self)

    @property
    def size_bytes(self) -> int:
        read = self.prompt.size_bytes if self.prompt is not None else 0
        return len(self.body) + len(self.tokens) + read


class RouteSamples:
    """What the doctor has of one route. Its thread changes it."""

    def __init__(self) -> None:
        self.recent: deque[PromptSample] = deque(maxlen=MAX_RECENT)
        self.older: deque[PromptSample] = deque(maxlen=MAX_OLDER)

    def add(self, sample: PromptSample) -> None:
        """Add a sample that was read. Every OLDER_S, one moves to the older ones."""
        if len(self.recent) == MAX_RECENT:
            first = self.recent[0]
            if not self.older or first.arrived_s - self.older[-1].arrived_s >= OLDER_S:
                self.older.append(first)
        self.recent.append(sample)

    @property
    def size_bytes(self) -> int:
        return sum([sample.size_bytes for sample in (*self.recent, *self.older)])


class PromptSamples:
    """Used on the event loop."""

    def __init__(self, random: Callable[[], float] | None = None) -> None:
        self._due_s: dict[RouteKey, float] = {}
        self._pending: dict[PromptSample, int] = {}
        """Samples whose response is not complete, and the size of their bodies; the oldest first."""
        self._pending_bytes = 0
        self._new: list[tuple[RouteKey, PromptSample]] = []
        self._random = random or Random().random

    def offer(self, attempts: Attempts, path: bytes, body: bytes) -> None:
        """Take a sample of a request that has just arrived, if its route is due."""
        request = attempts.request
        key, now_s = (request.model, request.route), request.arrived_s
        if now_s < self._due_s.get(key, 0.0):
            return
        if len(self._due_s) > MAX_ROUTES and key not in self._due_s:
            self._due_s = {one: due_s for one, due_s in self._due_s.items() if due_s > now_s}
            if len(self._due_s) > MAX_ROUTES:
                return
        self._due_s[key] = now_s + SAMPLE_S * 2.0 * self._random()
        sample = PromptSample(self, path, body, request.tenant, now_s)
        attempts.sample = sample
        pending = self._pending
        pending[sample] = len(body)
        self._pending_bytes += len(body)
        while len(pending) > MAX_PENDING or self._pending_bytes > MAX_PENDING_BYTES:
            oldest = next(iter(pending))
            self._forget(oldest)
            oldest.samples, oldest.body = None, b""

    def _forget(self, sample: PromptSample) -> None:
        self._pending_bytes -= self._pending.pop(sample, 0)

    def add(self, key: RouteKey, sample: PromptSample) -> None:
        """Add a sample whose response is complete."""
        self._forget(sample)
        if len(self._new) < MAX_PENDING:
            self._new.append((key, sample))

    def forget_all(self) -> None:
        for sample in list(self._pending):
            sample.samples, sample.body = None, b""
        self._pending, self._pending_bytes, self._new = {}, 0, []

    def take(self) -> list[tuple[RouteKey, PromptSample]]:
        """Return the samples that are complete since the last call."""
        new, self._new = self._new, []
        return new
