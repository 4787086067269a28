"""One data-parallel rank: an engine core in real time, and the requests that wait for its tokens.

The rank asks the core when its next output comes, and sets a timer for then. The event loop's timers count whole
milliseconds, so an output may be up to 1 ms late but never early. Delays do not add up, because the core runs on the
engine's clock, whenever it is called.
"""

from __future__ import annotations

import asyncio
import math
from typing import Protocol

from warmroute.fake_engine.core import EngineConfig, EngineCore, EngineRequest, Finished, FirstToken, KvEvent, Timing
from warmroute.fake_engine.core.shared_store import SharedStore
from warmroute.fake_engine.server.engine_clock import EngineClock
from warmroute.fake_engine.server.kv_event_publisher import EventPublisher
from warmroute.fake_engine.server.rank_metrics import RankMetrics


class TokenSink(Protocol):
    """Receives the tokens of one request."""

    def first_token(self, cached_tokens: int) -> None: ...
    def next_token(self) -> None: ...
    def finished(self, outcome: Finished) -> None: ...
    def engine_restarted(self) -> None:
        """The engine has lost the request."""


class Rank:
    def __init__(
        self, number: int, config: EngineConfig, timing: Timing, clock: EngineClock, events: EventPublisher | None,
        store: SharedStore | None = None,
    ) -> None:  # fmt: skip
        # for its whole life
        self.number = number
        self.events = events
        self._config = config
        self._timing = timing
        self._clock = clock
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None
        # from one restart to the next
        self.core = self._new_core()
        self.metrics = RankMetrics(clock, config)
        self._sinks: dict[str, TokenSink] = {}

    def _new_core(self) -> EngineCore:
        return EngineCore(self._config, self._timing, self._publish if self.events is not None else None, self._store)

    def _publish(self, _at_ms: float, events: list[KvEvent]) -> None:
        if self.events is not None:
            self.events.publish(events)

    @property
    def load(self) -> int:
        """The load as vLLM's own balancer counts it: a waiting request counts four times."""
        return 4 * self.core.num_waiting + self.core.num_running

    def submit(self, request: EngineRequest, max_tokens: int, finish_reason: str, sink: TokenSink) -> None:
        """Submit a request. The sink may get tokens before this returns. Raises ValueError as the core does."""
        now_ms = self._clock.now_ms()
        self.core.submit(request, now_ms)
        self.metrics.submitted(request.request_id, now_ms, max_tokens, finish_reason)
        self._sinks[request.request_id] = sink
        self.run_until_now()

    def cached_tokens(self, request: EngineRequest) -> int:
        """Return how many tokens of a prompt the engine has cached."""
        block_size = self._config.block_size
        blocks = (request.prompt_tokens - 1) // block_size
        return len(self.core.scheduler.pool.match(list(request.content.hashes(0, blocks)), blocks)) * block_size

    def abort(self, request_id: str) -> None:
        """Abort a request, for example because its client disconnected. Its sink gets nothing more."""
        if self._sinks.pop(request_id, None) is not None:
            self.core.abort(request_id, self._clock.now_ms())
            self.run_until_now()

    def reset_prefix_cache(self) -> bool:
        return self.core.reset_prefix_cache(self._clock.now_ms())

    def sleep(self) -> None:
        self.core.sleep(self._clock.now_ms())
        self.run_until_now()

    def wake_up(self) -> None:
        self.core.wake_up(self._clock.now_ms())
        self.run_until_now()

    def restart(self) -> None:
        """Restart in place, like a new process with the same sockets."""
        sinks, self._sinks = self._sinks, {}
        self.core = self._new_core()
        self.metrics = RankMetrics(self._clock, self._config)
        if self.events is not None:
            self.events.restart()
        for sink in sinks.values():
            sink.engine_restarted()
        self.run_until_now()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def run_until_now(self) -> None:
        """Advance the core to the current time, pass on its outputs, and set the timer for the next one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        core, sinks, metrics = self.core, self._sinks, self.metrics
        for output in core.advance(self._clock.now_ms()):
            if isinstance(output, Finished):
                metrics.finished(output)
                sink = sinks.pop(output.request_id, None)
                if sink is not None:
                    sink.finished(output)
                continue
            sink = sinks.get(output.request_id)
            if isinstance(output, FirstToken):
                metrics.first_token(output)
                if sink is not None:
                    sink.first_token(output.cached_tokens)
            else:
                metrics.next_token(output)
                if sink is not None:
                    sink.next_token()
        metrics.count_steps(core.stats)
        next_ms = core.next_event_at()
        if next_ms is None or self._timer is not None:
            return
        wait_s = self._clock.seconds_until(next_ms)
        if wait_s is not None:
            self._timer = self._loop.call_later(max(1, math.ceil(wait_s * 1000)) / 1000, self.run_until_now)
