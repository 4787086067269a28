"""Histograms and counters of one rank, in addition to the engine core's own counters.

Times are real seconds: an engine at ten times the speed reports a tenth of the time.
"""

from __future__ import annotations

import time

from warmroute.fake_engine.core import EngineConfig, EngineStats, Finished, FirstToken, Token
from warmroute.fake_engine.server import histogram as buckets
from warmroute.fake_engine.server.engine_clock import EngineClock
from warmroute.fake_engine.server.histogram import Histogram


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
        tokens = buckets.up_to(config.capacity_tokens)
        self.request_prompt_tokens = Histogram(tokens)
        self.request_generation_tokens = Histogram(tokens)
        self.request_max_num_generation_tokens = Histogram(tokens)
        self.request_params_max_tokens = Histogram(tokens)
        self.request_prefill_kv_computed_tokens = Histogram(tokens)
        self.request_params_n = Histogram(buckets.CHOICES)
        self.request_num_preemptions = Histogram(buckets.PREEMPTIONS)
        self.iteration_tokens_total = Histogram(buckets.STEP_TOKENS)
        self.time_to_first_token_seconds = Histogram(buckets.TTFT_S)
        self.inter_token_latency_seconds = Histogram(buckets.TOKEN_S)
        self.request_time_per_output_token_seconds = Histogram(buckets.TOKEN_S)
        self.e2e_request_latency_seconds = Histogram(buckets.REQUEST_S)
        self.request_queue_time_seconds = Histogram(buckets.REQUEST_S)
        self.request_inference_time_seconds = Histogram(buckets.REQUEST_S)
        self.request_prefill_time_seconds = Histogram(buckets.REQUEST_S)
        self.request_decode_time_seconds = Histogram(buckets.REQUEST_S)

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
