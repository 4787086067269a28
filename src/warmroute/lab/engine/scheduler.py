"""The scheduler of one engine: the waiting queue, the running batch, and the blocks of its sequences.

A step first gives the decoding sequences the blocks they need, then continues the prompt that did not fit into the last
step, then admits waiting requests, all within a token budget. When blocks run out, the scheduler preempts the last
running sequence (or the one of the lowest priority): it loses all blocks and returns to the front of the queue.
"""

from warmroute.fake_engine.core.block_pool import BlockPool
from warmroute.fake_engine.core.decode_batch import DecodeBatch
from warmroute.fake_engine.core.engine_config import EngineConfig
from warmroute.fake_engine.core.engine_stats import EngineStats
from warmroute.fake_engine.core.kv_event_types import GPU, BlockStored, KvEvent
from warmroute.fake_engine.core.lora_slots import LoraSlots
from warmroute.fake_engine.core.sequence import Sequence, State
from warmroute.fake_engine.core.shared_store import SharedStore
from warmroute.fake_engine.core.step_timing import Timing
from warmroute.fake_engine.core.waiting_queue import ArrivalQueue, PriorityQueue, WaitingQueue


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
        if sequence.state is State.DECODING:
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
                if sequence.state is State.PREFILLING:
                    self.decode.add(sequence, self.step + 1)
            self._skipped.clear()

    def grow(self, sequence: Sequence) -> bool:
        """Allocate the block that this step's token of a decode begins, and store the block that it fills.

        Return False if the sequence was preempted for lack of blocks.
        """
        step, block_size = self.step, self._config.block_size
        if sequence.due_step != step or sequence.state is not State.DECODING:
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
            if other > admission and sequence.state is State.DECODING:
                self.decode.remove(sequence, self.step, emitted_in_step=0)
                sequence.state = State.PREFILLING
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
        sequence.state = State.PREFILLING
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
        victim.state = State.WAITING
        victim.computed_tokens = 0
        victim.preemptions += 1
        self._stats.preemptions += 1
        self.waiting.push_front(victim)
        return victim
