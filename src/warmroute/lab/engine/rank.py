"""One rank of the engine in real time: clock, histograms, KV events, KV transfers."""

from __future__ import annotations

import asyncio
import math
import os
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec
import zmq
import zmq.asyncio

from warmroute.config import ConfigError
from warmroute.event_log import EventLog
from warmroute.lab.engine.blocks import EventBatch, KvEvent, SharedStore, wire_events
from warmroute.lab.engine.core import EngineCore
from warmroute.lab.engine.timing import Timing
from warmroute.lab.engine.values import EngineConfig, EngineRequest, EngineStats, Finished, FirstToken, Token

# A Prometheus histogram, and the bucket bounds that vLLM 0.32 uses.

TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0,
    50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
STEP_TOKENS = (1.0, *(float(2**power) for power in range(3, 15)))
PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)


def up_to(limit: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, 50… up to `limit`."""
    bounds = (factor * 10**power for power in range(len(str(limit))) for factor in (1, 2, 5))
    return tuple(float(bound) for bound in bounds if bound <= limit)


class Histogram:
    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


# The engine's clock: real time, faster or slower, or stopped.


class EngineClock:
    """Counts engine milliseconds, which pass `speed` times as fast as real ones. Speed 0 stops the clock."""

    def __init__(self, speed: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._speed = speed
        self._real_s = now()
        self._engine_ms = 0.0

    def now_ms(self) -> float:
        return self._at(self._now())

    def _at(self, real_s: float) -> float:
        return self._engine_ms + (real_s - self._real_s) * 1000 * self._speed

    def set_speed(self, speed: float) -> None:
        real_s = self._now()
        self._engine_ms, self._real_s, self._speed = self._at(real_s), real_s, speed

    def seconds_until(self, at_ms: float) -> float | None:
        """Return real seconds from now, or None while the clock is stopped."""
        return (at_ms - self.now_ms()) / (1000 * self._speed) if self._speed else None

    def real_seconds(self, span_ms: float) -> float:
        """Convert a duration to real seconds at the current speed."""
        return span_ms / (1000 * self._speed) if self._speed else 0.0


# Histograms and counters of one rank, in addition to the engine core's own counters.
#
# Times are real seconds: an engine at ten times the speed reports a tenth of the time.


class _Request:
    """One request in flight."""

    __slots__ = ("last_ms", "max_tokens", "reason")

    def __init__(self, arrived_ms: float, max_tokens: int, reason: str) -> None:
        self.last_ms = arrived_ms  # when it arrived, or when its last token came
        self.max_tokens = max_tokens
        self.reason = reason


class RankMetrics:
    """The attributes have vLLM's metric names."""

    def __init__(self, clock: EngineClock, config: EngineConfig) -> None:
        self._clock = clock
        self._requests: dict[str, _Request] = {}
        self._steps = 0
        self._step_tokens = 0
        self.created = time.time()
        self.request_success = {"stop": 0, "length": 0, "abort": 0, "error": 0, "repetition": 0}
        tokens = up_to(config.capacity_tokens)
        self.request_prompt_tokens = Histogram(tokens)
        self.request_generation_tokens = Histogram(tokens)
        self.request_max_num_generation_tokens = Histogram(tokens)
        self.request_params_max_tokens = Histogram(tokens)
        self.request_prefill_kv_computed_tokens = Histogram(tokens)
        self.request_params_n = Histogram(CHOICES)
        self.request_num_preemptions = Histogram(PREEMPTIONS)
        self.iteration_tokens_total = Histogram(STEP_TOKENS)
        self.time_to_first_token_seconds = Histogram(TTFT_S)
        self.inter_token_latency_seconds = Histogram(TOKEN_S)
        self.request_time_per_output_token_seconds = Histogram(TOKEN_S)
        self.e2e_request_latency_seconds = Histogram(REQUEST_S)
        self.request_queue_time_seconds = Histogram(REQUEST_S)
        self.request_inference_time_seconds = Histogram(REQUEST_S)
        self.request_prefill_time_seconds = Histogram(REQUEST_S)
        self.request_decode_time_seconds = Histogram(REQUEST_S)

    def submitted(self, request_id: str, at_ms: float, max_tokens: int, reason: str) -> None:
        """`reason`: the finish reason, unless the request is aborted."""
        self._requests[request_id] = _Request(at_ms, max_tokens, reason)

    def first_token(self, first: FirstToken) -> None:
        request = self._requests.get(first.request_id)
        if request is not None:
            self.time_to_first_token_seconds.observe(self._clock.real_seconds(first.at_ms - request.last_ms))
            request.last_ms = first.at_ms

    def next_token(self, token: Token) -> None:
        request = self._requests.get(token.request_id)
        if request is not None:
            self.inter_token_latency_seconds.observe(self._clock.real_seconds(token.at_ms - request.last_ms))
            request.last_ms = token.at_ms

    def finished(self, done: Finished) -> None:
        request = self._requests.pop(done.request_id, None)
        if request is None:
            return
        seconds = self._clock.real_seconds
        self.request_success["abort" if done.reason == "abort" else request.reason] += 1
        self.request_prompt_tokens.observe(done.prompt_tokens)
        self.request_generation_tokens.observe(done.output_tokens)
        self.request_max_num_generation_tokens.observe(done.output_tokens)
        self.request_params_max_tokens.observe(request.max_tokens)
        self.request_params_n.observe(1)
        self.request_num_preemptions.observe(done.preemptions)
        self.e2e_request_latency_seconds.observe(seconds(done.at_ms - done.arrived_ms))
        if done.admitted_ms is None:
            return
        self.request_queue_time_seconds.observe(seconds(done.admitted_ms - done.arrived_ms))
        self.request_inference_time_seconds.observe(seconds(done.at_ms - done.admitted_ms))
        self.request_prefill_kv_computed_tokens.observe(done.prompt_tokens - done.cached_tokens)
        if done.first_token_ms is None:
            return
        self.request_prefill_time_seconds.observe(seconds(done.first_token_ms - done.admitted_ms))
        decode_s = seconds(done.at_ms - done.first_token_ms)
        self.request_decode_time_seconds.observe(decode_s)
        if done.output_tokens > 1:
            self.request_time_per_output_token_seconds.observe(decode_s / (done.output_tokens - 1))

    def count_steps(self, stats: EngineStats) -> None:
        """Observe the tokens per step since the last call, which was one step ago, or a few if the process was late."""
        steps = stats.steps - self._steps
        if not steps:
            return
        tokens = stats.prompt_tokens_computed + stats.generation_tokens
        each, self._step_tokens, self._steps = (tokens - self._step_tokens) / steps, tokens, stats.steps
        for _ in range(steps):
            self.iteration_tokens_total.observe(each)


# Publishes the KV events of one rank as vLLM 0.32 does: a ZMQ PUB socket, and a ROUTER that replays 10,000 batches.
#
# A published message has three frames: topic, sequence (8 bytes, big-endian, from 0), msgpack `[ts, events, rank]`. For
# a replay, a DEALER sends `["", first sequence]`. It receives `["", topic, sequence, payload]` for each batch that the
# engine still has, then `["", "", ff × 8, ""]`.

log = EventLog("warmroute.fake_engine")

BUFFER_BATCHES: Final = 10_000
"""vLLM's default of `buffer_steps`."""
HIGH_WATER_MARK: Final = 100_000
"""vLLM's default of `hwm`."""
BATCHES_AT_ONCE: Final = 100
"""A replay sends this many batches before other tasks run."""
END_OF_REPLAY: Final = b"\xff" * 8


class EventPublisher:
    """The event and replay sockets of one rank. Publishing never blocks: a slow subscriber loses batches."""

    def __init__(self, topic: str, rank: int, drops_next: Callable[[], bool]) -> None:
        """`drops_next`: whether the next batch is lost. It uses up a sequence number all the same."""
        self.topic = topic
        self._topic = topic.encode()
        self._rank = rank
        self._drops_next = drops_next
        self._encode = msgspec.msgpack.Encoder().encode
        self._sequence = 0
        self._buffer: deque[tuple[bytes, bytes]] = deque(maxlen=BUFFER_BATCHES)
        self._context = zmq.Context()
        self._events = self._context.socket(zmq.PUB)
        self._events.set_hwm(HIGH_WATER_MARK)
        self._events.linger = 0
        self._replays: zmq.asyncio.Socket | None = None
        self._task: asyncio.Task[None] | None = None
        self.port = 0
        self.replay_port = 0

    def listen(self, host: str, port: int, replay_port: int | None) -> None:
        """Bind the sockets. Port 0 takes a free port. Raises ConfigError."""
        self.port = _bind(self._events, host, port)
        if replay_port is None:
            return
        replays = zmq.asyncio.Context.shadow(self._context.underlying).socket(zmq.ROUTER)
        replays.set_hwm(0)  # a ROUTER drops messages beyond its mark, and a replay may exceed it
        replays.linger = 0
        self.replay_port = _bind(replays, host, replay_port)
        self._replays = replays
        self._task = asyncio.get_running_loop().create_task(self._answer_replays(replays))

    def publish(self, events: list[KvEvent]) -> None:
        payload = self._encode(EventBatch(time.time(), list(wire_events(events)), self._rank))
        sequence = self._sequence.to_bytes(8, "big")
        self._sequence += 1
        self._buffer.append((sequence, payload))
        if not self._drops_next():
            self._events.send_multipart((self._topic, sequence, payload), zmq.NOBLOCK)

    def restart(self) -> None:
        """Start again at sequence 0 with an empty replay buffer, as a new process does."""
        self._sequence = 0
        self._buffer.clear()

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._replays is not None:
            self._replays.close(linger=0)
        self._events.close(linger=0)
        self._context.term()

    async def _answer_replays(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            if len(frames) != 3 or frames[1] != b"" or len(frames[2]) != 8:
                log.warning("replay_request_invalid", "The engine ignores it.", frames=len(frames))
                continue
            client, _, first = frames
            batches = [batch for batch in self._buffer if batch[0] >= first]  # big-endian bytes sort like numbers
            for count, (sequence, payload) in enumerate(batches, 1):
                await socket.send_multipart((client, b"", self._topic, sequence, payload))
                if count % BATCHES_AT_ONCE == 0:
                    await asyncio.sleep(0)  # lets other tasks run: a send that need not wait does not
            await socket.send_multipart((client, b"", b"", END_OF_REPLAY, b""))


def _bind(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, host: str, port: int) -> int:
    try:
        socket.bind(f"tcp://{host}:{port or '*'}")
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot publish KV events on {host}:{port}: {error.strerror}; choose another port") from None
    return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])


# One data-parallel rank: an engine core in real time, and the requests that wait for its tokens.
#
# The rank asks the core when its next output comes, and sets a timer for then. The event loop's timers count whole
# milliseconds, so an output may be up to 1 ms late but never early. Delays do not add up, because the core runs on the
# engine's clock, whenever it is called.


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


# KV transfer between simulated engines, with the messages of vLLM's NixlConnector.
#
# A prefill request (`do_remote_decode`) leaves its KV cache pinned for LEASE_S. The answer names the engine and the
# request. A decode request (`do_remote_prefill`) fetches it: the decode engine asks the other one for it, and waits as
# long as the tokens that it lacks take over its link, one transfer after the other. A cache that is gone, or an engine
# that does not answer, fails the request as vLLM does (`kv_load_failure_policy` = `fail`).

LEASE_S: Final = 30.0
"""vLLM's default of `kv_lease_duration`."""
FETCH_PATH: Final = "/kv_transfer"
LATENCY_S: Final = 0.002


class TransferFailed(Exception):
    """The KV cache could not be fetched."""


class KvTransfers:
    """The KV transfers between the ranks of one engine and other engines."""

    def __init__(self, host: str, bytes_per_token: int, gigabytes_per_s: float, clock: EngineClock) -> None:
        self._host = host
        self.port = 0
        self._engine_id = os.urandom(8).hex()
        self._seconds_per_token = bytes_per_token / (gigabytes_per_s * 1e9)
        self._clock = clock
        self._pinned: dict[str, asyncio.TimerHandle] = {}
        self._link_free_s = 0.0
        self.transfers = self.failures = 0

    def metrics(self, model: str) -> bytes:
        """Return two of the metrics that vLLM has with NixlConnector."""
        labels = f'{{engine="0",model_name="{model}"}}'
        return (
            f"# TYPE vllm:nixl_xfer_time_seconds summary\nvllm:nixl_xfer_time_seconds_count{labels} {self.transfers}\n"
            "# TYPE vllm:nixl_num_failed_transfers counter\n"
            f"vllm:nixl_num_failed_transfers_total{labels} {self.failures}\n"
        ).encode()

    # The prefill side.

    def pin(self, request_id: str, tokens: int) -> dict[str, Any]:
        """Keep the KV cache of a request. Return the parameters for the decode request."""
        loop = asyncio.get_running_loop()
        self._pinned[request_id] = loop.call_later(LEASE_S, self._pinned.pop, request_id, None)
        return {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1]],
            "remote_engine_id": self._engine_id, "remote_request_id": request_id, "remote_host": self._host,
            "remote_port": self.port, "tp_size": 1, "remote_num_tokens": tokens, "transfer_mode": "pull",
        }  # fmt: skip

    def release(self, request_id: str) -> bool:
        """Another engine fetches the KV cache of a request. Return whether it was there."""
        timer = self._pinned.pop(request_id, None)
        if timer is not None:
            timer.cancel()
        return timer is not None

    # The decode side.

    async def fetch(self, params: dict[str, Any], missing_tokens: int) -> None:
        """Fetch a KV cache. Raises TransferFailed."""
        try:
            await self._ask(params)
        except (OSError, ValueError, EOFError, KeyError, TypeError):
            self.failures += 1
            raise TransferFailed from None
        now_s = asyncio.get_running_loop().time()
        took_s = self._clock.real_seconds(1000.0 * missing_tokens * self._seconds_per_token)
        self._link_free_s = max(self._link_free_s, now_s) + took_s
        await asyncio.sleep(self._link_free_s - now_s + LATENCY_S)
        self.transfers += 1

    async def _ask(self, params: dict[str, Any]) -> None:
        reader, writer = await asyncio.open_connection(params["remote_host"], params["remote_port"])
        try:
            body = msgspec.json.encode({"request_id": params["remote_request_id"]})
            head = f"POST {FETCH_PATH} HTTP/1.1\r\nHost: engine\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            status = await reader.readline()
            if b" 200 " not in status:
                raise ValueError("the KV cache is gone")
        finally:
            writer.transport.abort()
