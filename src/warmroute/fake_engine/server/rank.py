"""One data-parallel rank: an engine core, driven by the clock, with those who listen to its requests.

The core is asked when it next has something to say, and a timer is set for then; between two timers nothing runs. The
event loop's timers count whole milliseconds, so an output may come up to 1 ms late, but never early, and lateness does
not add up: the core lives by the engine's clock, not by when it is called.
"""

from __future__ import annotations

import asyncio
import math
from typing import Protocol

from warmroute.fake_engine.core import EngineConfig, EngineCore, EngineRequest, Finished, FirstToken, Timing
from warmroute.fake_engine.core.kv_event_types import KvEvent
from warmroute.fake_engine.server.engine_clock import EngineClock
from warmroute.fake_engine.server.kv_event_publisher import EventPublisher
from warmroute.fake_engine.server.rank_metrics import RankMetrics


class TokenSink(Protocol):
    """Whoever waits for one request's answer."""

    def began(self, cached_tokens: int) -> None:
        """The first token is there."""

    def token(self) -> None:
        """One more token is there."""

    def finished(self, outcome: Finished) -> None: ...
    def cut(self) -> None:
        """The engine is gone, and the answer with it."""


class Rank:
    def __init__(
        self, number: int, config: EngineConfig, timing: Timing, clock: EngineClock, events: EventPublisher | None
    ) -> None:
        # for its whole life
        self.number = number
        self.events = events
        self._config = config
        self._timing = timing
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None
        # from one restart to the next
        self.core = self._new_core()
        self.metrics = RankMetrics(clock, config)
        self._hearers: dict[str, TokenSink] = {}

    def _new_core(self) -> EngineCore:
        return EngineCore(self._config, self._timing, self._publish if self.events is not None else None)

    def _publish(self, _at_ms: float, events: list[KvEvent]) -> None:
        if self.events is not None:
            self.events.publish(events)

    # What the server calls.

    @property
    def load(self) -> int:
        """What vLLM's own balancer goes by: those waiting count four times."""
        return 4 * self.core.num_waiting + self.core.num_running

    def submit(self, request: EngineRequest, max_tokens: int, ends_by: str, hearer: TokenSink) -> None:
        """The hearer may be told of tokens before this returns. Raises ValueError as the core does."""
        now_ms = self._clock.now_ms()
        self.core.submit(request, now_ms)
        self.metrics.submitted(request.request_id, now_ms, max_tokens, ends_by)
        self._hearers[request.request_id] = hearer
        self.live()

    def abort(self, request_id: str) -> None:
        """The client has left; nobody hears of the request any more."""
        if self._hearers.pop(request_id, None) is not None:
            self.core.abort(request_id, self._clock.now_ms())
            self.live()

    def reset_prefix_cache(self) -> bool:
        return self.core.reset_prefix_cache(self._clock.now_ms())

    def sleep(self) -> None:
        self.core.sleep(self._clock.now_ms())
        self.live()

    def wake_up(self) -> None:
        self.core.wake_up(self._clock.now_ms())
        self.live()

    def restart(self) -> None:
        """In place, as a new process with the same sockets."""
        hearers, self._hearers = self._hearers, {}
        self.core = self._new_core()
        self.metrics = RankMetrics(self._clock, self._config)
        if self.events is not None:
            self.events.restart()
        for hearer in hearers.values():
            hearer.cut()
        self.live()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    # Time.

    def live(self) -> None:
        """Lives up to now, tells what came out, and sets the timer for what comes next."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        core, hearers, metrics = self.core, self._hearers, self.metrics
        for output in core.advance(self._clock.now_ms()):
            if isinstance(output, Finished):
                metrics.finished(output)
                hearer = hearers.pop(output.request_id, None)
                if hearer is not None:
                    hearer.finished(output)
                continue
            hearer = hearers.get(output.request_id)
            if isinstance(output, FirstToken):
                metrics.began(output)
                if hearer is not None:
                    hearer.began(output.cached_tokens)
            else:
                metrics.token(output)
                if hearer is not None:
                    hearer.token()
        metrics.stepped(core.stats)
        next_ms = core.next_event_at()
        if next_ms is None or self._timer is not None:
            return
        wait_s = self._clock.seconds_until(next_ms)
        if wait_s is not None:
            self._timer = self._loop.call_later(max(1, math.ceil(wait_s * 1000)) / 1000, self.live)
