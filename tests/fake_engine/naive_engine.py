"""A naive implementation of the simulated engine, to compare the fast one with: vLLM's scheduler loop, token by token.

It has one queue of free block objects, counts tokens in each step, and looks at every waiting request in every step. It
shares only the value types (requests, outputs, events, timing) with the engine core.
"""

from __future__ import annotations

from step_durations import decode_ms

from warmroute.lab.engine.blocks import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, KvEventSink
from warmroute.lab.engine.timing import Timing
from warmroute.lab.engine.values import EngineConfig, EngineOutput, EngineRequest, Finished, FirstToken


class Block:
    def __init__(self) -> None:
        self.references = 0
        self.content: int | None = None


class Request:
    def __init__(self, request: EngineRequest, arrival: int, arrived_ms: float) -> None:
        self.request = request
        self.arrival = arrival
        self.arrived_ms = arrived_ms
        self.tokens = request.prompt_tokens
        self.computed = 0
        self.blocks: list[Block] = []
        self.stored = 0
        self.cached_tokens = 0
        self.preemptions = 0
        self.admitted_ms: float | None = None
        self.first_token_ms: float | None = None
        self.aborting = False
        self.decoding = False

    @property
    def emitted(self) -> int:
        return self.tokens - self.request.prompt_tokens

    def hash_of(self, index: int) -> int:
        return self.request.content.hashes(index, index + 1)[0]


class NaiveEngine:
    def __init__(self, config: EngineConfig, timing: Timing, sink: KvEventSink) -> None:
        self.config = config
        self.timing = timing
        self.sink = sink
        self.free = [Block() for _ in range(config.num_blocks - 1)]
        self.cached: dict[int, list[Block]] = {}
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.scheduled: dict[int, int] = {}
        self.resident_loras: list[str] = []
        self.events: list[KvEvent] = []
        self.outputs: list[EngineOutput] = []
        self.submitted = 0
        self.aborting: list[Request] = []
        self.start_at: float | None = None
        self.ends_at: float | None = None

    def submit(self, request: EngineRequest, now_ms: float) -> None:
        self.run(now_ms, before=True)
        self.submitted += 1
        self.waiting.append(Request(request, self.submitted, now_ms))
        if self.ends_at is None and self.start_at is None:
            self.start_at = now_ms

    def abort(self, request_id: str, now_ms: float) -> bool:
        self.run(now_ms, before=True)
        for one in self.waiting:
            if one.request.request_id == request_id and not one.aborting:
                self.waiting.remove(one)
                self.end(one, now_ms, "abort")
                return True
        for one in self.running:
            if one.request.request_id == request_id and not one.aborting:
                one.aborting = True
                self.aborting.append(one)
                return True
        return False

    def reset_prefix_cache(self, now_ms: float) -> bool:
        self.run(now_ms, before=True)
        if self.running:
            return False
        for block in self.free:
            block.content = None
        self.cached.clear()
        self.events.append(AllBlocksCleared())
        return True

    def advance(self, now_ms: float) -> list[EngineOutput]:
        self.run(now_ms, before=False)
        outputs, self.outputs = self.outputs, []
        return outputs

    def run(self, now_ms: float, before: bool) -> None:
        while True:
            due = self.ends_at if self.ends_at is not None else self.start_at
            if due is None or due > now_ms or (before and due == now_ms):
                return
            if self.ends_at is not None:
                self.update(self.ends_at)
            self.start_at = None
            self.ends_at = None
            if self.running or self.waiting:
                self.ends_at = due + self.schedule(due)

    def allocate(self, count: int) -> list[Block]:
        blocks = [self.free.pop(0) for _ in range(count)]
        for block in blocks:
            if block.content is not None:
                self.cached[block.content].remove(block)
                self.events.append(BlockRemoved([block.content], "GPU", 0))
                block.content = None
            assert block.references == 0
            block.references = 1
        return blocks

    def release(self, one: Request) -> None:
        blank: list[Block] = []
        cached: list[Block] = []
        for block in reversed(one.blocks):
            block.references -= 1
            assert block.references >= 0
            if block.references == 0:
                (blank if block.content is None else cached).append(block)
        self.free = blank + self.free + cached
        one.blocks = []
        one.stored = 0

    def store(self, one: Request, full_blocks: int) -> None:
        if full_blocks <= one.stored:
            return
        hashes = [one.hash_of(index) for index in range(one.stored, full_blocks)]
        for block, content in zip(one.blocks[one.stored : full_blocks], hashes, strict=True):
            block.content = content
            self.cached.setdefault(content, []).append(block)
        parent = one.hash_of(one.stored - 1) if one.stored else None
        name = one.request.lora_name
        keys: list[list[str] | None] = [[name] if name else None for _ in hashes]
        if one.stored == 0 and one.request.cache_salt:
            keys[0] = [*(keys[0] or []), one.request.cache_salt]
        token_ids = one.request.content.token_ids(one.stored, full_blocks)
        size = self.config.block_size
        self.events.append(
            BlockStored(hashes, parent, token_ids, size, 1 if name else None, "GPU", name, keys, 0, "full_attention")
        )
        one.stored = full_blocks

    def schedule(self, now_ms: float) -> float:
        config, size = self.config, self.config.block_size
        budget = config.max_num_batched_tokens
        self.scheduled = {}
        preempted = False
        for one in list(self.running):
            if one not in self.running:
                continue
            count = min(one.tokens - one.computed, budget)
            if count == 0:
                continue
            needed = -(-(one.computed + count) // size) - len(one.blocks)
            while needed > len(self.free):
                preempted = True
                victim = self.running[-1]
                if config.by_priority:
                    victim = max(self.running, key=lambda r: (r.request.priority, r.arrival))
                self.running.remove(victim)
                budget += self.scheduled.pop(victim.arrival, 0)
                self.release(victim)
                victim.computed = 0
                victim.decoding = False
                victim.preemptions += 1
                self.waiting.insert(0, victim)
                if victim is one:
                    break
            if one not in self.running:
                break  # as vLLM does: the sequences behind it skip this step
            one.blocks += self.allocate(needed)
            self.store(one, (one.computed + count) // size)
            self.scheduled[one.arrival] = count
            budget -= count
        load_ms = 0.0 if preempted else self.admit(budget, now_ms)
        return self.step_ms() + load_ms

    def admit(self, budget: int, now_ms: float) -> float:
        config, size = self.config, self.config.block_size
        load_ms = 0.0
        queue = list(self.waiting)
        if config.by_priority:
            queue.sort(key=lambda r: (r.request.priority, r.arrival))
        for one in queue:
            if budget == 0 or len(self.running) == config.max_num_seqs:
                break
            name = one.request.lora_name
            in_batch = {r.request.lora_name for r in self.running} - {None}
            if name is not None and name not in in_batch and len(in_batch) == config.max_loras:
                continue
            hits: list[Block] = []
            for index in range((one.tokens - 1) // size):
                holders = self.cached.get(one.hash_of(index))
                if not holders:
                    break
                hits.append(holders[0])
            idle = sum(block.references == 0 for block in hits)
            if -(-one.tokens // size) - len(hits) + idle > len(self.free):
                break
            for block in hits:
                if block.references == 0:
                    self.free.remove(block)
                block.references += 1
            self.waiting.remove(one)
            self.running.append(one)
            one.computed = len(hits) * size
            one.blocks = hits
            one.stored = len(hits)
            if one.admitted_ms is None:
                one.admitted_ms = now_ms
                one.cached_tokens = one.computed
            if name is not None:
                if name not in self.resident_loras:
                    load_ms += config.lora_load_ms
                    if len(self.resident_loras) == config.max_loras:
                        self.resident_loras.remove(next(n for n in self.resident_loras if n not in in_batch))
                else:
                    self.resident_loras.remove(name)
                self.resident_loras.append(name)
            count = min(one.tokens - one.computed, budget)
            one.blocks += self.allocate(-(-(one.computed + count) // size) - len(hits))
            self.store(one, (one.computed + count) // size)
            self.scheduled[one.arrival] = count
            budget -= count
        return load_ms

    def step_ms(self) -> float:
        timing = self.timing
        decodes = [r for r in self.running if r.decoding and r.arrival in self.scheduled]
        prefills = [r for r in self.running if r not in decodes and r.arrival in self.scheduled]
        context = sum(r.computed for r in decodes)
        if not decodes and not prefills:
            return timing.overhead_ms
        if not prefills:
            return decode_ms(timing, len(decodes), context) + timing.overhead_ms
        attention = sum(timing.attention_ms(self.scheduled[r.arrival], r.computed) for r in prefills)
        new = sum(self.scheduled[r.arrival] for r in prefills)
        return timing.mixed_ms(new, attention, len(decodes), context) + timing.overhead_ms

    def update(self, at_ms: float) -> None:
        for one in self.aborting:
            self.running.remove(one)
            self.release(one)
            self.end(one, at_ms, "abort")
        self.aborting.clear()
        for one in list(self.running):
            if one.arrival not in self.scheduled:
                continue
            one.computed += self.scheduled[one.arrival]
            one.decoding = False
            if one.computed < one.tokens:
                continue
            one.decoding = True
            one.tokens += 1
            if one.first_token_ms is None:
                one.first_token_ms = at_ms
                self.outputs.append(FirstToken(one.request.request_id, at_ms, one.cached_tokens))
            if one.emitted == one.request.output_tokens:
                self.running.remove(one)
                self.release(one)
                self.end(one, at_ms, "length")
        if self.events:
            events, self.events = self.events, []
            self.sink(at_ms, events)

    def end(self, one: Request, at_ms: float, reason: str) -> None:
        r = one.request
        self.outputs.append(
            Finished(
                r.request_id,
                at_ms,
                reason,
                r.prompt_tokens,
                one.cached_tokens,
                0,
                one.emitted,
                one.preemptions,
                one.arrived_ms,
                one.admitted_ms,
                one.first_token_ms,
            )
        )
