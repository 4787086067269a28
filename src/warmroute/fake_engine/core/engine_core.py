"""A simulated LLM engine: vLLM's scheduler and cache, a timing profile for a GPU, and a clock from outside.

Time passes in steps. A step begins by growing the sequences that decode, then carries on a prompt that did not fit
the last step, then admits waiting requests, all within a token budget; KV blocks are taken, evicted and stored at
that moment. It ends after what the timing profile says, with a token for every sequence whose tokens are all computed,
and the next one begins. When blocks run out the last running sequence (or the one of the lowest priority) loses all of
its blocks and goes back to the front of the queue.

The core does no I/O and has no clock. A driver calls `submit` and `abort` with the time, asks `next_event_at` when to
come back, and calls `advance` to get what has come out by then. A request that is submitted at the very moment at which
a step ends takes part in the next step, if the driver submits before it advances.

Read off vLLM 0.32's source (v1/core): block order, full-prompt admission, preemption, prefix statistics at admission.
Not modelled: speculative decoding, sliding windows, multimodal input, asynchronous scheduling (a step's blocks are
taken one step ahead there). Held to recordings of a real vLLM, step by step: tests/fake_engine/test_like_recorded_vllm.py.
"""

from warmroute.fake_engine.core.block_pool import BlockPool
from warmroute.fake_engine.core.engine_config import EngineConfig
from warmroute.fake_engine.core.decode_batch import DecodeBatch
from warmroute.fake_engine.core.kv_event_types import GPU, BlockStored, KvEvent, KvEventSink
from warmroute.fake_engine.core.lora_slots import LoraSlots
from warmroute.fake_engine.core.engine_request import EngineOutput, EngineRequest, Finished, FirstToken, RequestTooLong, Token
from warmroute.fake_engine.core.sequence import Sequence, State
from warmroute.fake_engine.core.engine_stats import EngineStats
from warmroute.fake_engine.core.step_timing import Timing
from warmroute.fake_engine.core.waiting_queue import ArrivalQueue, PriorityQueue, WaitingQueue


class EngineCore:
    """One engine. All times are ms on the driver's clock and never go back."""

    def __init__(self, config: EngineConfig, timing: Timing, kv_events: KvEventSink | None = None) -> None:
        # for its whole life
        self.config = config
        self.timing = timing
        self.stats = EngineStats()
        self._sink = kv_events
        self._events: list[KvEvent] = []
        self._pool = BlockPool(config.num_blocks, config.cpu_blocks, self._events if kv_events else None)
        self._decode = DecodeBatch(timing, config.block_size)
        self._lora = LoraSlots(config.max_loras, config.lora_load_ms)
        self._waiting: WaitingQueue = PriorityQueue() if config.by_priority else ArrivalQueue()
        self._sequences: dict[str, Sequence] = {}
        self._running: dict[int, Sequence] = {}  # admission → sequence, in batch order
        self._outputs: list[EngineOutput] = []
        self._admissions = 0
        self._asleep = False
        # from one step to the next
        self._step = 0
        self._start_at_ms: float | None = None  # idle, with work that came in then
        self._prefilling: Sequence | None = None  # the one prompt that did not fit its step; last of the batch
        self._stuck = False  # nothing that waits can be admitted before blocks, slots or contents change
        self._stuck_on: set[int] = set()  # contents that would change it
        # of the step in progress
        self._ends_at_ms: float | None = None
        self._started_ms = 0.0
        self._decode_only = False
        self._chunks: list[tuple[Sequence, int]] = []
        self._cut_short = False  # one lost its own blocks on its turn: those behind it sit this step out
        self._left_out: list[Sequence] = []  # the decodes among them
        self._aborting: list[Sequence] = []

    # ---- what a driver calls

    def submit(self, request: EngineRequest, now_ms: float) -> None:
        """Queues a request. Its id must not be in use."""
        if request.request_id in self._sequences:
            raise ValueError(f"request {request.request_id!r} is here already")
        if request.prompt_tokens < 1 or request.output_tokens < 1:
            raise ValueError("a request has at least one prompt token and one output token")
        total = request.prompt_tokens + request.output_tokens
        if total > self.config.capacity_tokens:
            raise RequestTooLong(f"{total} tokens, and this engine holds {self.config.capacity_tokens}")
        if request.lora_name is not None and not self.config.max_loras:
            raise ValueError("this engine serves no LoRA adapters")
        self._run(now_ms, before=True)
        self.stats.requests_submitted += 1
        sequence = Sequence(request, self.stats.requests_submitted, now_ms)
        self._sequences[request.request_id] = sequence
        self._waiting.push(sequence)
        self._stuck = False
        self._wake(now_ms)

    def abort(self, request_id: str, now_ms: float) -> bool:
        """Drops a request: at once if it waits, at the end of the present step if it runs. False if it is not here."""
        self._run(now_ms, before=True)
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.aborting:
            return False
        if sequence.state is State.WAITING:
            self._waiting.forget_one()
            self._stuck = False
            self._end(sequence, now_ms, "abort")
        else:
            sequence.aborting = True
            self._aborting.append(sequence)
        return True

    def advance(self, now_ms: float) -> list[EngineOutput]:
        """Lives up to and including `now_ms`; what came out since the last call, in order of time."""
        self._run(now_ms, before=False)
        outputs, self._outputs = self._outputs, []
        return outputs

    def next_event_at(self) -> float | None:
        """When to advance next, at the latest; None while there is nothing to do. Nothing may come of it."""
        if self._outputs:
            return self._outputs[0].at_ms
        if self._ends_at_ms is None:
            return self._start_at_ms
        limit = self._fast_forward_limit()
        return self._decode.end_ms(limit) if limit > self._step else self._ends_at_ms

    def change_timing(self, timing: Timing, now_ms: float) -> None:
        """The step in progress ends as planned, those after it take what this says."""
        self._run(now_ms, before=True)
        self.timing = timing
        self._decode.change_timing(timing)
        self._decode_only = False  # nothing is foreseen by the old one

    def reset_prefix_cache(self, now_ms: float) -> bool:
        """Forgets all cached blocks; False, and nothing done, while requests run. Told with the next step's events."""
        self._run(now_ms, before=True)
        return self._pool.reset()

    def sleep(self, now_ms: float) -> None:
        """Level 1 in vLLM's default mode: all requests are aborted, the cache is dropped, new ones queue and hang."""
        self._run(now_ms, before=True)
        self._asleep = True
        for sequence in list(self._sequences.values()):
            self.abort(sequence.request.request_id, now_ms)
        self._start_at_ms = None
        if self._ends_at_ms is None:
            self._pool.reset()

    def wake_up(self, now_ms: float) -> None:
        self._run(now_ms, before=True)
        self._asleep = False
        if self._waiting:
            self._wake(now_ms)

    # ---- what metrics read

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_asleep(self) -> bool:
        return self._asleep

    @property
    def kv_usage(self) -> float:
        """Share of the blocks that are in use: 0 on an idle engine, however full its cache."""
        return self._pool.used_blocks / (self.config.num_blocks - 1)

    @property
    def running_loras(self) -> list[str]:
        return self._lora.running

    @property
    def waiting_loras(self) -> list[str]:
        return sorted({s.request.lora_name for s in self._waiting if s.request.lora_name is not None})

    def cached_tokens(self, content_hashes: list[int]) -> int:
        """Leading tokens that lie in the GPU's cache now. For oracles and tests; changes nothing."""
        return len(self._pool.match(content_hashes, len(content_hashes))) * self.config.block_size

    def check(self) -> None:
        """Raises if the books do not add up. For tests: slow."""
        self._pool.check([sequence.blocks for sequence in self._running.values()])
        for sequence in self._running.values():
            if sequence.stored_blocks > len(sequence.blocks) or sequence.state not in (
                State.PREFILLING,
                State.DECODING,
            ):
                raise AssertionError("a running sequence is out of order")
        if len(self._running) + len(self._waiting) != len(self._sequences):
            raise AssertionError("a request is neither running nor waiting")
        if sum(s.state is State.DECODING for s in self._running.values()) != self._decode.batch:
            raise AssertionError("the decode batch has lost count")

    # ---- time

    def _wake(self, now_ms: float) -> None:
        if self._ends_at_ms is None and self._start_at_ms is None and not self._asleep:
            self._start_at_ms = now_ms

    def _run(self, now_ms: float, before: bool) -> None:
        """Ends and begins steps up to `now_ms`; with `before`, only those that end before it."""
        while True:
            ends_at_ms = self._ends_at_ms
            if ends_at_ms is None:
                start_at_ms = self._start_at_ms
                if start_at_ms is None or start_at_ms > now_ms or (before and start_at_ms == now_ms):
                    return
                self._start_at_ms = None
                if self._waiting:
                    self._decode.interrupt()
                    self._begin_step(start_at_ms)
            elif ends_at_ms > now_ms or (before and ends_at_ms == now_ms):
                return
            elif (limit := self._fast_forward_limit()) > self._step:
                self._fast_forward(limit, now_ms, before)
            else:
                self._finish_step(ends_at_ms)
                if self._running or (self._waiting and not self._asleep):
                    self._begin_step(ends_at_ms)
                else:
                    self._ends_at_ms = None

    def _fast_forward_limit(self) -> int:
        """The last step that can be reached by decoding alone: until one is done, or blocks might run out."""
        if (
            not self._decode_only
            or not self.config.fast_forward
            or self.config.every_token
            or self._aborting
            or (self._waiting and not self._stuck)
        ):
            return 0
        decode = self._decode
        enough = self._pool.free_blocks // decode.batch * self.config.block_size
        return min(decode.next_finish_step(), self._step + enough)

    def _fast_forward(self, limit: int, now_ms: float, before: bool) -> None:
        """The present step has ended; takes all steps up to the one in progress at `now_ms`, or to `limit`."""
        decode = self._decode
        first, last = self._step, decode.last_started(self._step, limit, now_ms, before)
        self._flush_events(decode.end_ms(first))
        for step in range(first + 1, last + 1):
            if not decode.has_due(step):
                continue
            self._step = step
            for sequence in decode.due(step):
                self._grow(sequence)
            if self._waiting and not self._stuck:
                # A block was filled that one of those waiting may have been missing: this step looks at them again.
                self._count_decoded(step - first, decode.end_ms(step - 1))
                self._schedule(decode.end_ms(step - 1), may_admit=True)
                return
            if step < last and self._events:
                self._flush_events(decode.end_ms(step))
        self._step = last
        self._count_decoded(last - first, decode.end_ms(last - 1))
        self._started_ms = decode.end_ms(last - 1)
        self._ends_at_ms = decode.end_ms(last)

    def _count_decoded(self, steps: int, ended_ms: float) -> None:
        stats = self.stats
        stats.steps += steps
        stats.generation_tokens += steps * self._decode.batch
        stats.busy_ms += ended_ms - self._started_ms

    def _flush_events(self, at_ms: float) -> None:
        if self._events and self._sink is not None:
            events = self._events[:]
            self._events.clear()
            self._sink(at_ms, events)

    # ---- the beginning of a step

    def _begin_step(self, started_ms: float) -> None:
        self._step += 1
        preemptions = self.stats.preemptions
        for sequence in self._decode.due(self._step):
            behind = sequence.admission
            if not self._grow(sequence):
                self._leave_out(behind)
                break
        self._schedule(started_ms, may_admit=self.stats.preemptions == preemptions)

    def _leave_out(self, behind: int) -> None:
        """Nobody behind this place in the batch takes part in this step. Happens by priority only."""
        self._cut_short = True
        for admission, sequence in self._running.items():
            if admission > behind and sequence.state is State.DECODING:
                self._decode.leave(sequence, self._step, emitted_in_step=0)
                sequence.state = State.PREFILLING
                self._left_out.append(sequence)

    def _grow(self, sequence: Sequence) -> bool:
        """Takes the block that this step's token of a decode starts, and stores the one that it fills.

        False if there was no block to take but its own: it waits again, without any.
        """
        step, block_size = self._step, self.config.block_size
        if sequence.due_step != step or sequence.state is not State.DECODING:
            return True
        tokens = sequence.token_offset + step
        if (tokens - 1) % block_size == 0:
            while not self._pool.free_blocks:
                if self._preempt() is sequence:
                    return False
            sequence.blocks += self._pool.allocate(1)
        in_last_block = tokens % block_size
        if in_last_block == 0:
            self._store(sequence, tokens // block_size)
            self._decode.expect(sequence, step + 1)
        else:
            self._decode.expect(sequence, step + block_size - in_last_block)
        return True

    def _schedule(self, started_ms: float, may_admit: bool) -> None:
        """Prefills what the budget allows beside the decodes, and works out when the step ends."""
        decode, timing = self._decode, self.timing
        chunks = self._chunks
        chunks.clear()
        budget = self.config.max_num_batched_tokens - decode.batch
        extra_ms = 0.0
        if self._prefilling is not None and budget > 0 and not self._cut_short:
            preemptions = self.stats.preemptions
            budget -= self._continue_prefill(self._prefilling, budget)
            may_admit = may_admit and self.stats.preemptions == preemptions
        if may_admit and self._waiting and not self._asleep and not (self._stuck and self.config.fast_forward):
            extra_ms = self._admit(budget, started_ms)
        self._started_ms = started_ms
        if chunks:
            decode.interrupt()
            self._decode_only = False
            new_tokens, attention_ms = 0, 0.0
            for sequence, count in chunks:
                new_tokens += count
                attention_ms += timing.attention_ms(count, sequence.computed_tokens)
            step_ms = timing.mixed_ms(new_tokens, attention_ms, decode.batch, decode.context_tokens(self._step))
            self._ends_at_ms = started_ms + step_ms + timing.overhead_ms + extra_ms
        elif decode.batch:
            self._decode_only = self._prefilling is None and not self._cut_short
            self._ends_at_ms = decode.step_end_ms(self._step, started_ms)
        elif self._cut_short:
            self._decode_only = False
            self._ends_at_ms = started_ms + timing.overhead_ms
        else:
            raise AssertionError("a step with nothing to do")

    def _continue_prefill(self, sequence: Sequence, budget: int) -> int:
        count = min(sequence.tokens - sequence.computed_tokens, budget)
        reached = sequence.computed_tokens + count
        wanted = -(-reached // self.config.block_size) - len(sequence.blocks)
        while wanted > self._pool.free_blocks:
            if self._preempt() is sequence:
                return 0
        sequence.blocks += self._pool.allocate(wanted)
        self._store(sequence, reached // self.config.block_size)
        self._chunks.append((sequence, count))
        return count

    def _admit(self, budget: int, now_ms: float) -> float:
        """Lets in what waits, in order, while it fits; the time (ms) that adapters and the CPU tier add to the step."""
        config, pool, waiting = self.config, self._pool, self._waiting
        block_size = config.block_size
        passed_over: list[Sequence] = []
        extra_ms = 0.0
        self._stuck = False
        self._stuck_on = set()
        while budget > 0 and waiting:
            if len(self._running) >= config.max_num_seqs:
                self._stuck = True
                break
            sequence = waiting.peek()
            if not self._lora.admits(sequence.request.lora_name):
                passed_over.append(waiting.pop())
                continue
            tokens = sequence.tokens
            hits: list[int] = []
            reloaded = 0
            # At least one token has to be computed, so a prompt that is cached to its end gives up its last block.
            reusable = (tokens - 1) // block_size
            if config.prefix_caching and config.reuse_cached_blocks:
                sequence.know_hashes(tokens // block_size)
                hits = pool.match(sequence.hashes, reusable)
            if -(-tokens // block_size) - len(hits) + pool.idle_among(hits) > pool.free_blocks:
                self._stuck = True
                self._stuck_on = set(sequence.hashes)
                break
            waiting.pop()
            pool.hold(hits)
            if config.cpu_blocks and config.prefix_caching:
                reloaded = pool.match_cpu(sequence.hashes, len(hits), reusable) * block_size
            extra_ms += self._enter(sequence, hits, reloaded, now_ms)
            count = min(tokens - sequence.computed_tokens, budget)
            reached = sequence.computed_tokens + count
            sequence.blocks += pool.allocate(-(-reached // block_size) - len(hits))
            self._store(sequence, reached // block_size)
            self._chunks.append((sequence, count))
            if reached < tokens:
                self._prefilling = sequence
            budget -= count
        if passed_over:
            self._stuck = self._stuck or not waiting
            for sequence in reversed(passed_over):
                waiting.push_front(sequence)
        return extra_ms

    def _enter(self, sequence: Sequence, hits: list[int], reloaded: int, now_ms: float) -> float:
        """Puts a sequence at the end of the batch with its hits; the time (ms) until its KV and adapter are there."""
        stats = self.stats
        self._admissions += 1
        sequence.admission = self._admissions
        sequence.state = State.PREFILLING
        sequence.blocks = hits
        sequence.stored_blocks = len(hits)
        hit_tokens = len(hits) * self.config.block_size
        sequence.computed_tokens = hit_tokens + reloaded
        self._running[sequence.admission] = sequence
        if sequence.admitted_ms is None:
            sequence.admitted_ms = now_ms
            sequence.cached_tokens = sequence.computed_tokens
            sequence.reloaded_tokens = reloaded
            stats.prefix_cache_queries += sequence.tokens
            stats.prefix_cache_hits += hit_tokens
        stats.reloaded_tokens += reloaded
        load_ms = self._lora.enter(sequence.request.lora_name)
        if load_ms:
            stats.lora_loads += 1
        return load_ms + reloaded * self.timing.reload_us_per_token / 1000

    def _store(self, sequence: Sequence, full_blocks: int) -> None:
        """Makes a sequence's blocks reusable up to `full_blocks`."""
        start = sequence.stored_blocks
        if full_blocks <= start or not self.config.prefix_caching:
            return
        sequence.know_hashes(full_blocks)
        sequence.stored_blocks = full_blocks
        hashes = sequence.hashes[start:full_blocks]
        self._pool.store(sequence.blocks[start:full_blocks], hashes)
        if self._stuck_on and not self._stuck_on.isdisjoint(hashes):
            self._stuck = False
        if self._sink is None:
            return
        request = sequence.request
        lora = [request.lora_name] if request.lora_name is not None else None
        extra_keys = [lora] * (full_blocks - start)
        if start == 0 and request.cache_salt is not None:
            extra_keys[0] = [*(lora or ()), request.cache_salt]
        self._events.append(
            BlockStored(
                hashes,
                sequence.hashes[start - 1] if start else None,
                request.content.token_ids(start, full_blocks),
                self.config.block_size,
                None if lora is None else 1,
                GPU,
                request.lora_name,
                extra_keys,
                0,
                "full_attention",
                session_id=request.session_id,
            )
        )

    def _preempt(self) -> Sequence:
        """Takes all blocks from the last of the batch, or from the lowest priority, and lets it wait again."""
        if self.config.by_priority:
            victim = max(self._running.values(), key=lambda s: (s.request.priority, s.arrival))
        else:
            victim = self._running[next(reversed(self._running))]
        if victim.state is State.DECODING:
            self._decode.leave(victim, self._step, emitted_in_step=0)
        self._leave_batch(victim)
        victim.state = State.WAITING
        victim.computed_tokens = 0
        victim.preemptions += 1
        self.stats.preemptions += 1
        self._waiting.push_front(victim)
        return victim

    # ---- the end of a step

    def _finish_step(self, at_ms: float) -> None:
        stats, decode, step = self.stats, self._decode, self._step
        stats.steps += 1
        stats.busy_ms += at_ms - self._started_ms
        for sequence in self._aborting:
            if sequence.state is State.DECODING:
                decode.leave(sequence, step, emitted_in_step=0)
            self._leave_batch(sequence)
            self._end(sequence, at_ms, "abort")
        self._aborting.clear()
        stats.generation_tokens += decode.batch
        if self.config.every_token:
            self._outputs.extend(
                Token(sequence.request.request_id, at_ms)
                for sequence in self._running.values()
                if sequence.state is State.DECODING
            )
        for sequence in decode.finished(step):
            decode.leave(sequence, step, emitted_in_step=1)
            self._leave_batch(sequence)
            self._end(sequence, at_ms, "length")
        for sequence, count in self._chunks:
            if sequence.state is State.PREFILLING:
                self._computed(sequence, count, at_ms)
        self._chunks.clear()
        if self._cut_short:
            self._cut_short = False
            for sequence in self._left_out:
                if sequence.state is State.PREFILLING:
                    decode.join(sequence, step + 1)
            self._left_out.clear()
        self._flush_events(at_ms)
        if self._asleep:
            self._pool.reset()

    def _computed(self, sequence: Sequence, count: int, at_ms: float) -> None:
        stats = self.stats
        stats.prompt_tokens_computed += count
        sequence.computed_tokens += count
        if sequence.computed_tokens < sequence.tokens:
            return
        if sequence is self._prefilling:
            self._prefilling = None
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
            self._leave_batch(sequence)
            self._end(sequence, at_ms, "length")
        else:
            self._decode.join(sequence, self._step + 1)

    def _leave_batch(self, sequence: Sequence) -> None:
        """Gives up its blocks, its adapter and its place."""
        del self._running[sequence.admission]
        self._pool.free(sequence.blocks, sequence.hashes[: sequence.stored_blocks])
        sequence.blocks = []
        sequence.stored_blocks = 0
        self._lora.leave(sequence.request.lora_name)
        self._stuck = False
        if sequence is self._prefilling:
            self._prefilling = None

    def _end(self, sequence: Sequence, at_ms: float, reason: str) -> None:
        sequence.state = State.GONE
        request = sequence.request
        del self._sequences[request.request_id]
        if reason == "abort":
            self.stats.requests_aborted += 1
        else:
            self.stats.requests_finished += 1
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
