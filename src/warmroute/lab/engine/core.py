"""A simulated LLM engine: vLLM's scheduler and prefix cache, and the timing of a GPU.

Time passes in steps. At the beginning of a step the scheduler allocates, evicts and stores KV blocks. The step takes
the time that the timing profile gives, and ends with one token for each sequence whose tokens are all computed. Then
the next step begins.

The core does no I/O and has no clock. A driver calls `submit` and `abort` with the time, asks `next_event_at` when to
call again, and calls `advance` to get the outputs up to then. A request that is submitted at the moment at which a step
ends takes part in the next step, if the driver submits before it advances.

The rules follow vLLM 0.32's source (v1/core): block order, full-prompt admission, preemption, prefix statistics at
admission. Not modelled: speculative decoding, sliding windows, multimodal input, asynchronous scheduling (which
allocates a step's blocks one step ahead). tests/fake_engine/test_like_recorded_vllm.py compares the core with
recordings of a real vLLM, step by step.
"""

from warmroute.lab.engine.blocks import KvEvent, KvEventSink, SharedStore
from warmroute.lab.engine.scheduler import Scheduler
from warmroute.lab.engine.timing import Timing
from warmroute.lab.engine.values import (
    EngineConfig,
    EngineOutput,
    EngineRequest,
    EngineStats,
    Finished,
    FirstToken,
    RequestTooLong,
    Sequence,
    SequenceState,
    Token,
)


class EngineCore:
    """One engine. All times are ms on the driver's clock and never decrease."""

    def __init__(
        self, config: EngineConfig, timing: Timing, kv_events: KvEventSink | None = None,
        store: SharedStore | None = None,
    ) -> None:  # fmt: skip
        # for its whole life
        self.config = config
        self.timing = timing
        self.stats = EngineStats()
        self._sink = kv_events
        self._events: list[KvEvent] = []
        self.scheduler = Scheduler(config, timing, self.stats, self._events if kv_events else None, store)
        self._sequences: dict[str, Sequence] = {}
        self._outputs: list[EngineOutput] = []
        # from one step to the next
        self._start_at_ms: float | None = None  # the engine is idle and starts a step then
        # of the current step
        self._ends_at_ms: float | None = None
        self._started_ms = 0.0
        self._decode_only = False
        self._aborting: list[Sequence] = []

    # ---- for drivers

    def submit(self, request: EngineRequest, now_ms: float) -> None:
        """Queue a request. Its id must not be in use."""
        if request.request_id in self._sequences:
            raise ValueError(f"the engine already has a request {request.request_id!r}")
        if request.prompt_tokens < 1 or request.output_tokens < 1:
            raise ValueError("a request needs at least one prompt token and one output token")
        total = request.prompt_tokens + request.output_tokens
        if total > self.config.capacity_tokens:
            raise RequestTooLong(f"the request has {total} tokens, the engine holds {self.config.capacity_tokens}")
        if request.lora_name is not None and not self.config.max_loras:
            raise ValueError("this engine serves no LoRA adapters")
        self._run_until(now_ms, strictly_before=True)
        self.stats.requests_submitted += 1
        sequence = Sequence(request, self.stats.requests_submitted, now_ms)
        self._sequences[request.request_id] = sequence
        self.scheduler.add(sequence)
        self._start_if_idle(now_ms)

    def abort(self, request_id: str, now_ms: float) -> bool:
        """Abort a request: at once if it waits, at the end of the current step if it runs. False if it is unknown."""
        self._run_until(now_ms, strictly_before=True)
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.aborting:
            return False
        if sequence.state is SequenceState.WAITING:
            self.scheduler.remove_waiting()
            self._finish(sequence, now_ms, "abort")
        else:
            sequence.aborting = True
            self._aborting.append(sequence)
        return True

    def advance(self, now_ms: float) -> list[EngineOutput]:
        """Run up to and including `now_ms`. Return the outputs since the last call, in order of time."""
        self._run_until(now_ms, strictly_before=False)
        outputs, self._outputs = self._outputs, []
        return outputs

    def next_event_at(self) -> float | None:
        """Return the latest time of the next `advance`, which may give no output. None while there is no work."""
        if self._outputs:
            return self._outputs[0].at_ms
        if self._ends_at_ms is None:
            return self._start_at_ms
        limit = self._fast_forward_limit()
        return self.scheduler.decode.end_ms(limit) if limit > self.scheduler.step else self._ends_at_ms

    def change_timing(self, timing: Timing, now_ms: float) -> None:
        """Use another timing for the steps after the current one."""
        self._run_until(now_ms, strictly_before=True)
        self.timing = timing
        self.scheduler.change_timing(timing)
        self._decode_only = False  # do not fast-forward with the old timing

    def reset_prefix_cache(self, now_ms: float) -> bool:
        """Clear the prefix cache. Return False, without effect, while requests run. The next step reports the event."""
        self._run_until(now_ms, strictly_before=True)
        return self.scheduler.pool.reset()

    def sleep(self, now_ms: float) -> None:
        """Sleep as vLLM does at level 1: abort all requests, drop the cache, and queue new requests until `wake_up`."""
        self._run_until(now_ms, strictly_before=True)
        self.scheduler.asleep = True
        for sequence in list(self._sequences.values()):
            self.abort(sequence.request.request_id, now_ms)
        self._start_at_ms = None
        if self._ends_at_ms is None:
            self.scheduler.pool.reset()

    def wake_up(self, now_ms: float) -> None:
        self._run_until(now_ms, strictly_before=True)
        self.scheduler.asleep = False
        if self.scheduler.waiting:
            self._start_if_idle(now_ms)

    # ---- for metrics

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def is_asleep(self) -> bool:
        return self.scheduler.asleep

    @property
    def kv_usage(self) -> float:
        """The fraction of blocks that requests hold. It is 0 on an idle engine, even if its cache is full."""
        return self.scheduler.pool.used_blocks / (self.config.num_blocks - 1)

    @property
    def running_loras(self) -> list[str]:
        return self.scheduler.lora.running

    @property
    def waiting_loras(self) -> list[str]:
        return sorted({s.request.lora_name for s in self.scheduler.waiting if s.request.lora_name is not None})

    # ---- time

    def _start_if_idle(self, now_ms: float) -> None:
        if self._ends_at_ms is None and self._start_at_ms is None and not self.scheduler.asleep:
            self._start_at_ms = now_ms

    def _run_until(self, now_ms: float, strictly_before: bool) -> None:
        """End and begin the steps that end up to `now_ms`, or `strictly_before` it."""
        scheduler = self.scheduler
        while True:
            ends_at_ms = self._ends_at_ms
            if ends_at_ms is None:
                start_at_ms = self._start_at_ms
                if start_at_ms is None or start_at_ms > now_ms or (strictly_before and start_at_ms == now_ms):
                    return
                self._start_at_ms = None
                if scheduler.waiting:
                    scheduler.decode.end_run()
                    self._set_step_end(start_at_ms, scheduler.begin_step(start_at_ms))
            elif ends_at_ms > now_ms or (strictly_before and ends_at_ms == now_ms):
                return
            elif (limit := self._fast_forward_limit()) > scheduler.step:
                self._fast_forward(limit, now_ms, strictly_before)
            else:
                self._end_step(ends_at_ms)
                if scheduler.running or (scheduler.waiting and not scheduler.asleep):
                    self._set_step_end(ends_at_ms, scheduler.begin_step(ends_at_ms))
                else:
                    self._ends_at_ms = None

    def _set_step_end(self, started_ms: float, added_ms: float) -> None:
        """Compute when the step that the scheduler has just scheduled ends."""
        scheduler, timing = self.scheduler, self.timing
        decode = scheduler.decode
        self._started_ms = started_ms
        if scheduler.chunks:
            decode.end_run()
            self._decode_only = False
            new_tokens, attention_ms = 0, 0.0
            for sequence, count in scheduler.chunks:
                new_tokens += count
                attention_ms += timing.attention_ms(count, sequence.computed_tokens)
            step_ms = timing.mixed_ms(new_tokens, attention_ms, decode.size, decode.context_tokens(scheduler.step))
            self._ends_at_ms = started_ms + step_ms + timing.overhead_ms + added_ms
        elif decode.size:
            self._decode_only = scheduler.prefilling is None and not scheduler.truncated
            self._ends_at_ms = decode.step_end_ms(scheduler.step, started_ms)
        elif scheduler.truncated:
            self._decode_only = False
            self._ends_at_ms = started_ms + timing.overhead_ms
        else:
            raise AssertionError("the scheduler scheduled an empty step")

    def _fast_forward_limit(self) -> int:
        """Return the last step that decoding alone reaches: until a sequence finishes or blocks might run out."""
        scheduler = self.scheduler
        if (
            not self._decode_only
            or not self.config.fast_forward
            or self.config.every_token
            or self._aborting
            or (scheduler.waiting and not scheduler.admission_blocked)
        ):
            return 0
        decode = scheduler.decode
        steps_with_blocks = scheduler.pool.free_blocks // decode.size * self.config.block_size
        return min(decode.next_finish_step(), scheduler.step + steps_with_blocks)

    def _fast_forward(self, limit: int, now_ms: float, strictly_before: bool) -> None:
        """End the current step and take all steps up to the one in progress at `now_ms`, at most `limit`."""
        scheduler = self.scheduler
        decode = scheduler.decode
        first, last = scheduler.step, decode.step_in_progress(scheduler.step, limit, now_ms, strictly_before)
        self._send_events(decode.end_ms(first))
        for step in range(first + 1, last + 1):
            if not decode.has_due(step):
                continue
            scheduler.step = step
            for sequence in decode.pop_due(step):
                scheduler.grow(sequence)
            if scheduler.waiting and not scheduler.admission_blocked:
                # A decode filled a block that a waiting request may share. So this step tries to admit it.
                started_ms = decode.end_ms(step - 1)
                self._count_decoded(step - first, started_ms)
                self._set_step_end(started_ms, scheduler.schedule_prefills(started_ms, may_admit=True))
                return
            if step < last and self._events:
                self._send_events(decode.end_ms(step))
        scheduler.step = last
        self._count_decoded(last - first, decode.end_ms(last - 1))
        self._started_ms = decode.end_ms(last - 1)
        self._ends_at_ms = decode.end_ms(last)

    def _count_decoded(self, steps: int, ended_ms: float) -> None:
        stats = self.stats
        stats.steps += steps
        stats.generation_tokens += steps * self.scheduler.decode.size
        stats.busy_ms += ended_ms - self._started_ms

    # ---- the end of a step

    def _end_step(self, at_ms: float) -> None:
        stats, scheduler = self.stats, self.scheduler
        stats.steps += 1
        stats.busy_ms += at_ms - self._started_ms
        for sequence in self._aborting:
            scheduler.remove_running(sequence)
            self._finish(sequence, at_ms, "abort")
        self._aborting.clear()
        stats.generation_tokens += scheduler.decode.size
        if self.config.every_token:
            self._outputs.extend(
                Token(sequence.request.request_id, at_ms)
                for sequence in scheduler.running.values()
                if sequence.state is SequenceState.DECODING
            )
        for sequence in scheduler.decode.pop_finished(scheduler.step):
            scheduler.remove_running(sequence, emitted_in_step=1)
            self._finish(sequence, at_ms, "length")
        for sequence, count in scheduler.chunks:
            if sequence.state is SequenceState.PREFILLING:
                self._end_chunk(sequence, count, at_ms)
        scheduler.end_step()
        self._send_events(at_ms)
        if scheduler.asleep:
            scheduler.pool.reset()

    def _end_chunk(self, sequence: Sequence, count: int, at_ms: float) -> None:
        """Count a prefill chunk. The last chunk of a prompt emits a token."""
        stats, scheduler = self.stats, self.scheduler
        stats.prompt_tokens_computed += count
        sequence.computed_tokens += count
        if sequence.computed_tokens < sequence.tokens:
            return
        if sequence is scheduler.prefilling:
            scheduler.prefilling = None
        stats.generation_tokens += 1
        sequence.tokens += 1
        sequence.emitted += 1
        request = sequence.request
        if sequence.first_token_ms is None:
            stats.prompt_tokens += request.prompt_tokens
            sequence.first_token_ms = at_ms
            self._outputs.append(FirstToken(request.request_id, at_ms, sequence.cached_tokens))
        elif self.config.every_token:
            self._outputs.append(Token(request.request_id, at_ms))
        if sequence.emitted == request.output_tokens:
            scheduler.remove_running(sequence)
            self._finish(sequence, at_ms, "length")
        else:
            scheduler.decode.add(sequence, scheduler.step + 1)

    def _finish(self, sequence: Sequence, at_ms: float, reason: str) -> None:
        sequence.state = SequenceState.FINISHED
        request = sequence.request
        del self._sequences[request.request_id]
        if reason == "abort":
            self.stats.requests_aborted += 1
        else:
            self.stats.requests_finished += 1
        if sequence.admitted_ms is not None:
            self.stats.queue_times += 1
            self.stats.queue_time_ms += sequence.admitted_ms - sequence.arrived_ms
            if sequence.first_token_ms is not None:
                self.stats.prefills += 1
                self.stats.prefill_time_ms += sequence.first_token_ms - sequence.admitted_ms
                self.stats.prefilled_tokens += request.prompt_tokens - max(0, sequence.cached_tokens)
        self._outputs.append(
            Finished(
                request.request_id,
                at_ms,
                reason,
                request.prompt_tokens,
                max(0, sequence.cached_tokens),
                sequence.reloaded_tokens,
                sequence.emitted,
                sequence.preemptions,
                sequence.arrived_ms,
                sequence.admitted_ms,
                sequence.first_token_ms,
            )
        )

    def _send_events(self, at_ms: float) -> None:
        if self._events and self._sink is not None:
            events = self._events[:]
            self._events.clear()
            self._sink(at_ms, events)
