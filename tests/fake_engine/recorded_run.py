"""Recordings of requests to a real vLLM with its KV events, and the same requests to the simulated engine.

The hashes of the two differ. So a block is named after the tokens, the parent's name and the extra keys of the event
that stored it. tests/real/test_engine_like_vllm.py makes the recordings. They are gzipped JSON files.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
from support.engine_invariants import check_engine

from warmroute.core.node_cache import EngineHash
from warmroute.engines.kv_events import BlockRemoved, BlockStored, Event, decode_batch
from warmroute.lab.engine.blocks import EventBatch, KvEvent, TokenContent, wire_events
from warmroute.lab.engine.core import EngineCore
from warmroute.lab.engine.timing import profile
from warmroute.lab.engine.values import EngineConfig, EngineRequest, Finished

RECORDED = Path(__file__).parents[1] / "real" / "recorded"


class RecordedRequest(msgspec.Struct, omit_defaults=True):
    """One completion request with its response."""

    prompt: list[int]
    max_tokens: int
    salt: str | None = None
    priority: int = 0
    answer: list[int] = []
    cached_tokens: int = 0
    """As the engine reports them."""

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.answer]


class RecordedRound(msgspec.Struct, omit_defaults=True):
    """Requests that all waited, in this order, when an idle engine began its next step."""

    requests: list[RecordedRequest]
    late: list[RecordedRequest] = []
    """Requests that arrived after the first request had got `late_after` tokens, one in each step."""
    late_after: int = 0
    reset_before: bool = False
    """Whether the prefix cache was reset before this round."""
    steps: list[list[str]] = []
    """The batches of KV events in order, as `BlockNames.changes` describes them."""

    @property
    def all_requests(self) -> list[RecordedRequest]:
        return [*self.requests, *self.late]


class Totals(msgspec.Struct):
    """The engine's counters at the end of the run."""

    preemptions: int
    prefix_cache_queries: int
    prefix_cache_hits: int


class Recording(msgspec.Struct):
    engine: str
    config: EngineConfig
    rounds: list[RecordedRound]
    totals: Totals

    def counts(self) -> dict[str, int]:
        """Return the size of the recording."""
        changes = [change.split() for one in self.rounds for step in one.steps for change in step]
        requests = [request for one in self.rounds for request in one.all_requests]
        return {
            "requests": len(requests),
            "prompt_tokens": sum(len(request.prompt) for request in requests),
            "answer_tokens": sum(len(request.answer) for request in requests),
            "cached_tokens": sum(request.cached_tokens for request in requests),
            "steps_with_events": sum(len(one.steps) for one in self.rounds),
            "stored": sum(len(words) - 3 for words in changes if words[0] == "stored"),
            "removed": sum(words[0] == "removed" for words in changes),
            "cleared": sum(words[0] == "cleared" for words in changes),
            "preemptions": self.totals.preemptions,
        }


def save(recording: Recording, path: Path) -> None:
    path.write_bytes(gzip.compress(msgspec.json.encode(recording), 9, mtime=0))


def load(path: Path) -> Recording:
    return msgspec.json.decode(gzip.decompress(path.read_bytes()), type=Recording)


class BlockNames:
    """Names the blocks of one engine independently of its hashes."""

    def __init__(self) -> None:
        self._names: dict[EngineHash, str] = {}

    def changes(self, payload: bytes) -> list[str]:
        """Describe a batch of events: `stored NAME… after PARENT`, `removed NAME`, `cleared`."""
        return [self._change(event) for event in decode_batch(payload).events]

    def _change(self, event: Event) -> str:
        match event:
            case BlockStored():
                return self._stored(event)
            case BlockRemoved():
                return f"removed {' '.join(self._names[block] for block in event.block_hashes)}"
            case _:
                return "cleared"

    def _stored(self, event: BlockStored) -> str:
        size = event.block_size
        keys: list[Any] = msgspec.msgpack.decode(event.extra_keys) or []
        assert len(event.token_ids) == size * len(event.block_hashes) and len(keys) == len(event.block_hashes)
        parent = "nothing" if event.parent_block_hash is None else self._names[event.parent_block_hash]
        rest = (event.lora_id, event.medium, event.lora_name, event.group_idx, event.kv_cache_spec_kind)
        names: list[str] = []
        for index, block in enumerate(event.block_hashes):
            identity = (
                names[-1] if names else parent,
                event.token_ids[index * size : (index + 1) * size],
                keys[index],
                rest,
            )
            name = blake2b(repr(identity).encode(), digest_size=5).hexdigest()
            assert self._names.setdefault(block, name) == name, "two contents have the same hash"
            names.append(name)
        return f"stored {' '.join(names)} after {parent}"


class SimulatedRun:
    """A simulated engine that gets the recorded requests and generates the recorded outputs."""

    def __init__(self, config: EngineConfig) -> None:
        self.core = EngineCore(config, profile("h200-1.5b").timing, self._sink)
        self._blocks = BlockNames()
        self._steps: list[list[str]] = []
        self._cached: dict[str, int] = {}

    def _sink(self, at_ms: float, events: Iterable[KvEvent]) -> None:
        batch = EventBatch(at_ms, list(wire_events(events)), 0)
        self._steps.append(self._blocks.changes(msgspec.msgpack.encode(batch)))

    def serve(self, one: RecordedRound, at_ms: float, late_at_ms: float | None) -> tuple[RecordedRound, float]:
        """Return the round as the simulated engine served it, and when its late requests arrived.

        Late requests arrive at the end of a step. If `late_at_ms` is None, this finds it by counting steps.
        """
        core = self.core
        if one.reset_before:
            assert core.reset_prefix_cache(at_ms)
        for request in one.requests:
            self._submit(request, at_ms)
        if one.late:
            steps = core.stats.steps + one.late_after
            core.advance(at_ms)
            if late_at_ms is None:
                while core.stats.steps < steps - 1:
                    self._advance(core.next_event_at())
                late_at_ms = core.next_event_at()
                assert late_at_ms is not None
            for request in one.late:
                self._submit(request, late_at_ms)
        while (next_ms := core.next_event_at()) is not None:
            self._advance(next_ms)
        check_engine(core)
        steps_of_round, self._steps = self._steps, []
        cached, self._cached = self._cached, {}
        served = [
            msgspec.structs.replace(request, cached_tokens=cached[str(index)])
            for index, request in enumerate(one.all_requests)
        ]
        count = len(one.requests)
        result = RecordedRound(served[:count], served[count:], one.late_after, one.reset_before, steps_of_round)
        return result, late_at_ms or at_ms

    def _submit(self, request: RecordedRequest, at_ms: float) -> None:
        content = TokenContent(request.tokens, self.core.config.block_size, cache_salt=request.salt)
        name = str(len(self._cached))
        self._cached[name] = -1
        submitted = EngineRequest(
            name, len(request.prompt), request.max_tokens, content, request.priority, cache_salt=request.salt
        )
        self.core.submit(submitted, at_ms)

    def _advance(self, to_ms: float | None) -> None:
        assert to_ms is not None
        for output in self.core.advance(to_ms):
            if isinstance(output, Finished):
                self._cached[output.request_id] = output.cached_tokens


def simulate(recording: Recording, **settings: bool) -> Recording:
    """Serve the recorded rounds with the simulated engine."""
    # Without fast-forwarding the engine takes steps one by one, so that they can be counted. The times are the same.
    step_counter = SimulatedRun(msgspec.structs.replace(recording.config, fast_forward=False))
    simulated = SimulatedRun(msgspec.structs.replace(recording.config, **settings))
    rounds: list[RecordedRound] = []
    for number, one in enumerate(recording.rounds):
        at_ms = 1e6 * number
        _, late_at_ms = step_counter.serve(one, at_ms, None)
        rounds.append(simulated.serve(one, at_ms, late_at_ms)[0])
    stats = simulated.core.stats
    totals = Totals(stats.preemptions, stats.prefix_cache_queries, stats.prefix_cache_hits)
    return Recording("simulated", simulated.core.config, rounds, totals)


def differences(real: Recording, simulated: Recording) -> list[str]:
    """Describe where two runs of the same rounds differ. Empty if they are equal."""
    found: list[str] = []
    for number, (theirs, mine) in enumerate(zip(real.rounds, simulated.rounds, strict=True)):
        for index, (one, other) in enumerate(zip(theirs.all_requests, mine.all_requests, strict=True)):
            if one.cached_tokens != other.cached_tokens:
                found.append(
                    f"round {number}, request {index}: {one.cached_tokens} tokens hit, simulated {other.cached_tokens}"
                )
        if theirs.steps != mine.steps:
            pairs = zip(theirs.steps, mine.steps, strict=False)
            at = next(
                (i for i, pair in enumerate(pairs) if pair[0] != pair[1]), min(len(theirs.steps), len(mine.steps))
            )
            found.append(
                f"round {number}, batch {at} of {len(theirs.steps)} (simulated {len(mine.steps)}): "
                f"{theirs.steps[at : at + 1]}, simulated {mine.steps[at : at + 1]}"
            )
    if real.totals != simulated.totals:
        found.append(f"{real.totals}, simulated {simulated.totals}")
    return found
