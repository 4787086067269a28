"""What each step computes: the waiting queue, the running batch, its adapters and blocks."""

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from warmroute.lab.engine.blocks import GPU, BlockPool, BlockStored, KvEvent, SharedStore
from warmroute.lab.engine.timing import Timing
from warmroute.lab.engine.values import EngineConfig, EngineStats, Sequence, SequenceState

# The queue of waiting requests: first come first served, or by priority with ties broken by arrival.
#
# A request that leaves from the middle is only marked. The queue drops it when it reaches the front.


class WaitingQueue(Protocol):
    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]: ...

    def push(self, sequence: Sequence) -> None: ...

    def push_front(self, sequence: Sequence) -> None: ...

    def peek(self) -> Sequence: ...

    def pop(self) -> Sequence: ...

    def count_removed(self) -> None:
        """Count one request less. The caller then changes the state of that request."""


class ArrivalQueue:
    __slots__ = ("_length", "_queue")

    def __init__(self) -> None:
        self._queue: deque[Sequence] = deque()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for sequence in self._queue if sequence.state is SequenceState.WAITING)

    def push(self, sequence: Sequence) -> None:
        self._queue.append(sequence)
        self._length += 1

    def push_front(self, sequence: Sequence) -> None:
        self._queue.appendleft(sequence)
        self._length += 1

    def peek(self) -> Sequence:
        while self._queue[0].state is not SequenceState.WAITING:
            self._queue.popleft()
        return self._queue[0]

    def pop(self) -> Sequence:
        self.peek()
        self._length -= 1
        return self._queue.popleft()

    def count_removed(self) -> None:
        self._length -= 1


class PriorityQueue:
    __slots__ = ("_heap", "_length")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Sequence]] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        return (entry[2] for entry in sorted(self._heap) if entry[2].state is SequenceState.WAITING)

    def push(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (sequence.request.priority, sequence.arrival, sequence))
        self._length += 1

    def push_front(self, sequence: Sequence) -> None:
        self.push(sequence)

    def peek(self) -> Sequence:
        while self._heap[0][2].state is not SequenceState.WAITING:
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def pop(self) -> Sequence:
        self.peek()
        self._length -= 1
        return heapq.heappop(self._heap)[2]

    def count_removed(self) -> None:
        self._length -= 1


# The decoding sequences of a batch: when the blocks of each change, when each finishes, and how long steps take.
#
# A decoding sequence gains one token in each step, so its length follows from the step number. The batch keeps only two
# schedules: the steps in which a sequence needs or fills a block, and the steps in which it finishes.
#
# A *decode run* is a series of consecutive steps that only decode, all with the same sequences. Its k-th step takes
# floor + g·(context + k·size) ms, so the end of each step has a closed form. The engine computes it from the start of
# the run, whether it takes steps one by one or many at once. So both ways give exactly the same times.


class DecodeBatch:
    __slots__ = ("_block_size", "_due", "_finish", "_in_run", "_offsets", "_run", "_timing", "size")

    def __init__(self, timing: Timing, block_size: int) -> None:
        self._timing = timing
        self._block_size = block_size
        self.size = 0
        self._offsets = 0  # Σ token_offset of the batch
        self._finish: list[tuple[int, int, Sequence]] = []
        """A heap of (finish_step, admission, sequence). It can contain outdated entries."""
        self._due: dict[int, list[Sequence]] = {}  # step → sequences whose blocks may change in it
        self._in_run = False
        self._run = (0.0, 0, 0.0, 0.0, 0.0)  # start ms, first step, floor ms, g·context, g·size/2

    def context_tokens(self, step: int) -> int:
        """The KV tokens that the decodes of this step read."""
        return self._offsets + self.size * (step - 1)

    def add(self, sequence: Sequence, step: int) -> None:
        """Add a sequence that decodes from this step on. Its `tokens` include the one just emitted."""
        sequence.state = SequenceState.DECODING
        sequence.token_offset = sequence.tokens - step
        sequence.finish_step = step + sequence.request.output_tokens - sequence.emitted - 1
        heapq.heappush(self._finish, (sequence.finish_step, sequence.admission, sequence))
        self.size += 1
        self._offsets += sequence.token_offset
        self._in_run = False
        last_of_block = sequence.tokens % self._block_size
        self.set_due_step(sequence, step if last_of_block <= 1 else step + self._block_size - last_of_block)

    def remove(self, sequence: Sequence, step: int, emitted_in_step: int) -> None:
        """Remove a sequence. `emitted_in_step` is 1 if its token of this step counts, else 0."""
        grown = sequence.token_offset + step + emitted_in_step - sequence.tokens
        sequence.tokens += grown
        sequence.emitted += grown
        self.size -= 1
        self._offsets -= sequence.token_offset
        self._in_run = False

    def set_due_step(self, sequence: Sequence, step: int) -> None:
        """Set the next step in which the sequence needs or fills a block."""
        sequence.due_step = step
        if step <= sequence.finish_step:
            due = self._due.get(step)
            if due is None:
                self._due[step] = [sequence]
            else:
                due.append(sequence)

    def pop_due(self, step: int) -> list[Sequence]:
        """Remove and return the sequences whose blocks change in this step, in batch order."""
        due = self._due.pop(step, None)
        if due is None:
            return []
        if len(due) > 1:
            due.sort(key=_admission)
        return due

    def has_due(self, step: int) -> bool:
        return step in self._due

    def next_finish_step(self) -> int:
        """Return the first step in which a sequence finishes. The batch must not be empty."""
        heap = self._finish
        while True:
            step, admission, sequence = heap[0]
            if _still_finishes(sequence, step, admission):
                return step
            heapq.heappop(heap)

    def pop_finished(self, step: int) -> list[Sequence]:
        """Remove and return the sequences that finish in this step, in batch order."""
        done: list[Sequence] = []
        heap = self._finish
        while heap and heap[0][0] <= step:
            finish_step, admission, sequence = heapq.heappop(heap)
            if _still_finishes(sequence, finish_step, admission):
                done.append(sequence)
        return done

    def end_run(self) -> None:
        """Make the next decode-only step start a new run."""
        self._in_run = False

    def change_timing(self, timing: Timing) -> None:
        """Use another timing from the next step on."""
        self._timing = timing
        self._in_run = False

    def step_end_ms(self, step: int, started_ms: float) -> float:
        """Return the end of a decode-only step that starts now. It continues the current run or starts one."""
        if not self._in_run:
            timing = self._timing
            self._in_run = True
            self._run = (
                started_ms,
                step,
                timing.decode_floor_ms(self.size) + timing.overhead_ms,
                timing.g * self.context_tokens(step),
                timing.g * self.size / 2,
            )
        return self.end_ms(step)

    def end_ms(self, step: int) -> float:
        """Return the end of a step of the current run."""
        start_ms, first, floor_ms, context_ms, half_growth_ms = self._run
        k = step - first + 1
        return start_ms + k * (floor_ms + context_ms + half_growth_ms * (k - 1))

    def step_in_progress(self, step: int, limit: int, now_ms: float, strictly_before: bool) -> int:
        """Return the step in progress at `now_ms` (or just before it), at most `limit`. `step` has ended."""
        ended = self.end_ms(limit - 1)
        if ended < now_ms or (ended == now_ms and not strictly_before):
            return limit
        low, high = step + 1, limit - 1  # bounds of the first step that has not ended
        while low < high:
            middle = (low + high) // 2
            end = self.end_ms(middle)
            if end < now_ms or (end == now_ms and not strictly_before):
                low = middle + 1
            else:
                high = middle
        return low


def _admission(sequence: Sequence) -> int:
    return sequence.admission


def _still_finishes(sequence: Sequence, step: int, admission: int) -> bool:
    """Return whether a heap entry is valid: the sequence has neither left the batch nor skipped a step since."""
    return sequence.state is SequenceState.DECODING and sequence.admission == admission and sequence.finish_step == step


# LoRA adapters on the GPU: at most `slots` in one batch. Loading another one evicts the least recently used.


class LoraSlots:
    __slots__ = ("_resident", "_running", "load_ms", "slots")

    def __init__(self, slots: int, load_ms: float) -> None:
        self.slots = slots
        self.load_ms = load_ms
        self._resident: dict[str, None] = {}  # least recently used first
        self._running: dict[str, int] = {}  # adapter → requests in the batch

    @property
    def running(self) -> list[str]:
        return list(self._running)

    def admits(self, name: str | None) -> bool:
        return name is None or name in self._running or len(self._running) < self.slots

    def add_request(self, name: str | None) -> float:
        """Count a request that joins the batch. Return the time (ms) to load its adapter."""
        if name is None:
            return 0.0
        self._running[name] = self._running.get(name, 0) + 1
        if name in self._resident:
            del self._resident[name]
            self._resident[name] = None
            return 0.0
        if len(self._resident) >= self.slots:
            del self._resident[next(other for other in self._resident if other not in self._running)]
        self._resident[name] = None
        return self.load_ms

    def remove_request(self, name: str | None) -> None:
        if name is None:
            return
        count = self._running[name] - 1
        if count:
            self._running[name] = count
        else:
            del self._running[name]


# The scheduler of one engine: the waiting queue, the running batch, and the blocks of its sequences.
#
# A step first gives the decoding sequences the blocks they need, then continues the prompt that did not fit into the
# last step, then admits waiting requests, all within a token budget. When blocks run out, the scheduler preempts the
# last running sequence (or the one of the lowest priority): it loses all blocks and returns to the front of the queue.


class Scheduler:
    """Decides what each step computes. It has no clock: the engine core decides when a step begins and ends."""

    def __init__(
        self, config: EngineConfig, timing: Timing, stats: EngineStats, kv_events: list[KvEvent] | None,
        store: SharedStore | None = None,
    ) -> None:  # fmt: skip
        """`kv_events`: the list that the scheduler appends KV events to. None: no events. `store`: a KV store that the
        engine shares with others."""
        # for its whole life
        self._config = config
        self._timing = timing
        self._stats = stats
        self._kv_events = kv_events
        self._shared_store = store
        self.pool = BlockPool(config.num_blocks, config.cpu_blocks, kv_events)
        self.decode = DecodeBatch(timing, config.block_size)
        self.lora = LoraSlots(config.max_loras, config.lora_load_ms)
        self.waiting: WaitingQueue = PriorityQueue() if config.by_priority else ArrivalQueue()
        self.running: dict[int, Sequence] = {}  # admission → sequence, in batch order
        self.asleep = False
        self._admissions = 0
        # from one step to the next
        self.step = 0
        self.prefilling: Sequence | None = None  # the one prompt that did not fit its step; last of the batch
        self.admission_blocked = False  # nothing can be admitted before blocks, slots or contents change
        self._blocked_hashes: set[int] = set()  # storing one of them may unblock admission
        # of the current step
        self.chunks: list[tuple[Sequence, int]] = []
        """The prompts that prefill in this step, and how many tokens of each."""
        self.truncated = False
        """Whether a sequence preempted itself, so that those behind it skip this step. Only with priorities."""
        self._skipped: list[Sequence] = []  # the decodes among those

    def change_timing(self, timing: Timing) -> None:
        self._timing = timing
        self.decode.change_timing(timing)

    def add(self, sequence: Sequence) -> None:
        """Queue a new request."""
        self.waiting.push(sequence)
        self.admission_blocked = False

    def remove_waiting(self) -> None:
        """Remove a waiting request. The caller then changes its state."""
        self.waiting.count_removed()
        self.admission_blocked = False

    def remove_running(self, sequence: Sequence, emitted_in_step: int = 0) -> None:
        """Remove a sequence from the batch and free its blocks and its adapter."""
        if sequence.state is SequenceState.DECODING:
            self.decode.remove(sequence, self.step, emitted_in_step)
        del self.running[sequence.admission]
        self.pool.free(sequence.blocks, sequence.hashes[: sequence.stored_blocks])
        sequence.blocks = []
        sequence.stored_blocks = 0
        self.lora.remove_request(sequence.request.lora_name)
        self.admission_blocked = False
        if sequence is self.prefilling:
            self.prefilling = None

    def begin_step(self, now_ms: float) -> float:
        """Schedule the next step. Return the time (ms) that loading adapters and KV adds to it."""
        self.step += 1
        preemptions = self._stats.preemptions
        for sequence in self.decode.pop_due(self.step):
            admission = sequence.admission
            if not self.grow(sequence):
                self._skip_behind(admission)
                break
        return self.schedule_prefills(now_ms, may_admit=self._stats.preemptions == preemptions)

    def end_step(self) -> None:
        """Let skipped sequences decode again from the next step on."""
        self.chunks.clear()
        if self.truncated:
            self.truncated = False
            for sequence in self._skipped:
                if sequence.state is SequenceState.PREFILLING:
                    self.decode.add(sequence, self.step + 1)
            self._skipped.clear()

    def grow(self, sequence: Sequence) -> bool:
        """Allocate the block that this step's token of a decode begins, and store the block that it fills.

        Return False if the sequence was preempted for lack of blocks.
        """
        step, block_size = self.step, self._config.block_size
        if sequence.due_step != step or sequence.state is not SequenceState.DECODING:
            return True
        tokens = sequence.token_offset + step
        if (tokens - 1) % block_size == 0:
            while not self.pool.free_blocks:
                if self._preempt() is sequence:
                    return False
            sequence.blocks += self.pool.allocate(1)
        in_last_block = tokens % block_size
        if in_last_block == 0:
            self._store(sequence, tokens // block_size)
            self.decode.set_due_step(sequence, step + 1)
        else:
            self.decode.set_due_step(sequence, step + block_size - in_last_block)
        return True

    def schedule_prefills(self, now_ms: float, may_admit: bool) -> float:
        """Fill the budget that the decodes leave with prefills. Return the added time as `begin_step` does."""
        self.chunks.clear()
        budget = self._config.max_num_batched_tokens - self.decode.size
        if self.prefilling is not None and budget > 0 and not self.truncated:
            preemptions = self._stats.preemptions
            budget -= self._continue_prefill(self.prefilling, budget)
            may_admit = may_admit and self._stats.preemptions == preemptions
        blocked = self.admission_blocked and self._config.fast_forward
        if may_admit and self.waiting and not self.asleep and not blocked:
            return self._admit(budget, now_ms)
        return 0.0

    def _skip_behind(self, admission: int) -> None:
        """Make the sequences behind this place in the batch skip the step, as vLLM does."""
        self.truncated = True
        for other, sequence in self.running.items():
            if other > admission and sequence.state is SequenceState.DECODING:
                self.decode.remove(sequence, self.step, emitted_in_step=0)
                sequence.state = SequenceState.PREFILLING
                self._skipped.append(sequence)

    def _continue_prefill(self, sequence: Sequence, budget: int) -> int:
        """Schedule the next chunk of a prompt. Return its tokens."""
        count = min(sequence.tokens - sequence.computed_tokens, budget)
        reached = sequence.computed_tokens + count
        needed = -(-reached // self._config.block_size) - len(sequence.blocks)
        while needed > self.pool.free_blocks:
            if self._preempt() is sequence:
                return 0
        sequence.blocks += self.pool.allocate(needed)
        self._store(sequence, reached // self._config.block_size)
        self.chunks.append((sequence, count))
        return count

    def _admit(self, budget: int, now_ms: float) -> float:
        """Admit waiting requests in order while they fit."""
        config, pool, waiting = self._config, self.pool, self.waiting
        block_size = config.block_size
        without_slot: list[Sequence] = []  # they wait for a LoRA slot, and requests behind them may pass
        added_ms = 0.0
        self.admission_blocked = False
        self._blocked_hashes = set()
        while budget > 0 and waiting:
            if len(self.running) >= config.max_num_seqs:
                self.admission_blocked = True
                break
            sequence = waiting.peek()
            if not self.lora.admits(sequence.request.lora_name):
                without_slot.append(waiting.pop())
                continue
            tokens = sequence.tokens
            hits: list[int] = []
            reloaded = 0
            # The engine computes at least one token, so it cannot reuse the last block of a fully cached prompt.
            reusable = (tokens - 1) // block_size
            if config.prefix_caching and config.reuse_cached_blocks:
                sequence.compute_hashes(tokens // block_size)
                hits = pool.match(sequence.hashes, reusable)
            if -(-tokens // block_size) - len(hits) + pool.count_idle(hits) > pool.free_blocks:
                self.admission_blocked = True
                self._blocked_hashes = set(sequence.hashes)
                break
            waiting.pop()
            pool.acquire(hits)
            if config.cpu_blocks and config.prefix_caching:
                reloaded = pool.match_cpu(sequence.hashes, len(hits), reusable) * block_size
            loaded = 0
            if self._shared_store is not None and config.prefix_caching:
                known = len(hits) + reloaded // block_size
                loaded = self._shared_store.match(sequence.hashes, known, reusable) * block_size
                if loaded:
                    added_ms += self._shared_store.load_ms(loaded, now_ms)
            added_ms += self._add_running(sequence, hits, reloaded, now_ms, loaded)
            count = min(tokens - sequence.computed_tokens, budget)
            reached = sequence.computed_tokens + count
            sequence.blocks += pool.allocate(-(-reached // block_size) - len(hits))
            self._store(sequence, reached // block_size)
            self.chunks.append((sequence, count))
            if reached < tokens:
                self.prefilling = sequence
            budget -= count
        if without_slot:
            self.admission_blocked = self.admission_blocked or not waiting
            for sequence in reversed(without_slot):
                waiting.push_front(sequence)
        return added_ms

    def _add_running(self, sequence: Sequence, hits: list[int], reloaded: int, now_ms: float, loaded: int = 0) -> float:
        """Append a sequence to the batch. Return the time (ms) to load its KV from the CPU tier, and its adapter.
        `loaded`: tokens from a shared store."""
        stats = self._stats
        self._admissions += 1
        sequence.admission = self._admissions
        sequence.state = SequenceState.PREFILLING
        sequence.blocks = hits
        sequence.stored_blocks = len(hits)
        hit_tokens = len(hits) * self._config.block_size
        sequence.computed_tokens = hit_tokens + reloaded + loaded
        remote_tokens = sequence.request.remote_tokens if not sequence.preemptions else 0
        self.running[sequence.admission] = sequence
        if sequence.admitted_ms is None:
            sequence.admitted_ms = now_ms
            sequence.cached_tokens = sequence.computed_tokens
            sequence.reloaded_tokens = reloaded + loaded
            stats.prefix_cache_queries += sequence.tokens
            stats.prefix_cache_hits += hit_tokens
        stats.reloaded_tokens += reloaded + loaded
        if remote_tokens > sequence.computed_tokens:  # the engine computes at least one token
            sequence.computed_tokens = min(remote_tokens, sequence.tokens - 1)
        load_ms = self.lora.add_request(sequence.request.lora_name)
        if load_ms:
            stats.lora_loads += 1
        return load_ms + reloaded * self._timing.reload_us_per_token / 1000

    def _store(self, sequence: Sequence, full_blocks: int) -> None:
        """Make the first `full_blocks` blocks of a sequence reusable, and report the new ones."""
        start = sequence.stored_blocks
        if full_blocks <= start or not self._config.prefix_caching:
            return
        sequence.compute_hashes(full_blocks)
        sequence.stored_blocks = full_blocks
        hashes = sequence.hashes[start:full_blocks]
        self.pool.store(sequence.blocks[start:full_blocks], hashes)
        if self._shared_store is not None:
            self._shared_store.put(hashes)
        if self._blocked_hashes and not self._blocked_hashes.isdisjoint(hashes):
            self.admission_blocked = False
        if self._kv_events is None:
            return
        request = sequence.request
        lora = [request.lora_name] if request.lora_name is not None else None
        extra_keys = [lora] * (full_blocks - start)
        if start == 0 and request.cache_salt is not None:
            extra_keys[0] = [*(lora or ()), request.cache_salt]
        self._kv_events.append(
            BlockStored(
                hashes,
                sequence.hashes[start - 1] if start else None,
                request.content.token_ids(start, full_blocks),
                self._config.block_size,
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
        """Take all blocks from the last of the batch, or from the lowest priority, and queue it again."""
        if self._config.by_priority:
            victim = max(self.running.values(), key=lambda s: (s.request.priority, s.arrival))
        else:
            victim = self.running[next(reversed(self.running))]
        self.remove_running(victim)
        victim.state = SequenceState.WAITING
        victim.computed_tokens = 0
        victim.preemptions += 1
        self._stats.preemptions += 1
        self.waiting.push_front(victim)
        return victim
