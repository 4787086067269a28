"""A bounded sample of recent prompts, by model and route.

Of the requests of a route that arrive within SAMPLE_S, the router keeps a reference to the body of one, drawn at
random with equal chances, and nothing of the others. The sample stands for all of them (its weight), so that shares and
costs do not depend on the rhythm in which clients send. It is complete when the response has ended: then the doctor
knows how much of the prompt was cached.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Final

from warmroute.fleet.prefill_work import work
from warmroute.prompt_doctor.masked_prompt import MaskedPrompt
from warmroute.routing.attempts import Attempts

SAMPLE_S: Final = 1.0
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


class _Draw:
    """The requests of a route of which one is sampled."""

    __slots__ = ("ends_s", "requests", "sample")

    def __init__(self, ends_s: float) -> None:
        self.ends_s = ends_s
        self.requests = 0
        self.sample: PromptSample | None = None


class PromptSample:
    __slots__ = (
        "arrived_s", "body", "cached_tokens", "draw", "ms_per_token", "number", "path", "prompt", "prompt_tokens",
        "samples", "step_ms", "tenant", "tokens",
    )  # fmt: skip

    def __init__(
        self, samples: PromptSamples, draw: _Draw, path: bytes, body: bytes, tenant: str, arrived_s: float
    ) -> None:
        self.samples: PromptSamples | None = samples
        """None once it is complete or dropped."""
        self.draw = draw
        self.number = 0
        """Of the route's samples, in the order in which the doctor got them."""
        self.path = path
        self.body = body
        """Empty once the doctor has read it."""
        self.tenant = tenant
        self.arrived_s = arrived_s
        self.prompt: MaskedPrompt | None = None
        self.tokens = b""
        """As the router read them, four bytes each."""
        self.prompt_tokens = 0
        self.cached_tokens: int | None = None
        """None if neither the node nor the router knows it. Then the prompt is not compared."""
        self.ms_per_token = 0.0
        self.step_ms = 0.0

    def completed(
        self, attempts: Attempts, key: RouteKey, prompt_tokens: int, cached_tokens: int | None, ms_per_token: float,
        step_ms: float,
    ) -> None:  # fmt: skip
        samples, self.samples = self.samples, None
        if samples is None:
            return
        if attempts.lookup is not None and not attempts.lookup.text:
            self.tokens = attempts.lookup.tokens
        self.prompt_tokens, self.cached_tokens = prompt_tokens, cached_tokens
        self.ms_per_token, self.step_ms = ms_per_token, step_ms
        samples.add(key, self)

    def cost_ms(self, cached: float) -> float:
        """Return the prefill time of the prompt with this many cached tokens (telemetry/traffic.py)."""
        return max(self.step_ms, self.ms_per_token * work(self.prompt_tokens - cached, cached))

    @property
    def weight(self) -> int:
        """The number of requests that it stands for, itself included."""
        return self.draw.requests

    @property
    def size_bytes(self) -> int:
        read = self.prompt.size_bytes if self.prompt is not None else 0
        return len(self.body) + len(self.tokens) + read


class RouteSamples:
    """What the doctor has of one route. Its thread changes it."""

    def __init__(self) -> None:
        self.recent: deque[PromptSample] = deque(maxlen=MAX_RECENT)
        self.older: deque[PromptSample] = deque(maxlen=MAX_OLDER)
        self.last_number = 0

    def add(self, sample: PromptSample) -> None:
        """Add a sample that was read. Every OLDER_S, one moves to the older ones."""
        self.last_number += 1
        sample.number = self.last_number
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
        self._draws: dict[RouteKey, _Draw] = {}
        self._pending: dict[PromptSample, int] = {}
        """Samples whose response is not complete, and the size of their bodies; the oldest first."""
        self._pending_bytes = 0
        self._new: dict[PromptSample, RouteKey] = {}
        self._random = random or Random().random

    def offer(self, attempts: Attempts, path: bytes, body: bytes) -> None:
        """Take a sample of a request that has just arrived, if the draw of its route falls on it."""
        request = attempts.request
        key, now_s = (request.model, request.route), request.arrived_s
        draw = self._draws.get(key)
        if draw is None or now_s >= draw.ends_s:
            if draw is None and not self._has_room(now_s):
                return
            draw = self._draws[key] = _Draw(now_s + SAMPLE_S)
        draw.requests = requests = draw.requests + 1
        if requests > 1 and self._random() * requests >= 1.0:
            return
        if draw.sample is not None:
            self._drop(draw.sample)
        sample = draw.sample = attempts.sample = PromptSample(self, draw, path, body, request.tenant, now_s)
        pending = self._pending
        pending[sample] = len(body)
        self._pending_bytes += len(body)
        while len(pending) > MAX_PENDING or self._pending_bytes > MAX_PENDING_BYTES:
            self._drop(next(iter(pending)))

    def _has_room(self, now_s: float) -> bool:
        """Return whether another route can be sampled. Routes without requests make room."""
        if len(self._draws) >= MAX_ROUTES:
            self._draws = {key: draw for key, draw in self._draws.items() if draw.ends_s > now_s}
        return len(self._draws) < MAX_ROUTES

    def _drop(self, sample: PromptSample) -> None:
        self._forget(sample)
        self._new.pop(sample, None)
        sample.samples, sample.body = None, b""

    def _forget(self, sample: PromptSample) -> None:
        self._pending_bytes -= self._pending.pop(sample, 0)

    def add(self, key: RouteKey, sample: PromptSample) -> None:
        """Add a sample whose response is complete."""
        self._forget(sample)
        if len(self._new) < MAX_PENDING:
            self._new[sample] = key

    def forget_all(self) -> None:
        for sample in (*self._pending, *self._new):
            sample.samples, sample.body = None, b""
        self._draws, self._pending, self._pending_bytes, self._new = {}, {}, 0, {}

    def take(self, now_s: float) -> list[tuple[RouteKey, PromptSample]]:
        """Return the samples that are complete since the last call, except those that another may still replace."""
        taken = [(key, sample) for sample, key in self._new.items() if sample.draw.ends_s <= now_s]
        for _key, sample in taken:
            del self._new[sample]
            sample.draw.sample = None
        return taken
