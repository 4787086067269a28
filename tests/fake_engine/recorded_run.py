"""What a real vLLM was asked and what it told of its cache, and the same asked of the simulated engine.

Hashes differ between the two, so a block goes by a name made of its tokens, its parent's name and its extra keys, all
as the event that stored it told them. Recorded by tests/real/test_engine_like_vllm.py; files are gzipped JSON.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

import msgspec

from warmroute.engines.kv_events import BlockRemoved, BlockStored, EngineHash, Event, decode_batch
from warmroute.fake_engine.core import (
    EngineConfig,
    EngineCore,
    EngineRequest,
    EventBatch,
    Finished,
    KvEvent,
    TokenContent,
)
from warmroute.fake_engine.core import wire_events as as_vllm_sends_them
from warmroute.fake_engine.profiles import profile

RECORDED = Path(__file__).parents[1] / "real" / "recorded"


class RecordedRequest(msgspec.Struct, omit_defaults=True):
    """One completion."""

    prompt: list[int]
    max_tokens: int
    salt: str | None = None
    priority: int = 0
    answer: list[int] = []
    cached_tokens: int = 0
    """As the engine reported them."""

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.answer]


class RecordedRound(msgspec.Struct, omit_defaults=True):
    """Requests that were all waiting, in this order, when the engine took its next step; it was idle before."""

    requests: list[RecordedRequest]
    late: list[RecordedRequest] = []
    """Further ones, which came in when the first of all had been given this many tokens, one in each step:"""
    late_after: int = 0
    reset_before: bool = False
    """The prefix cache was reset just before."""
    steps: list[list[str]] = []
    """Each batch of KV events, in order: `Blocks.changes`."""

    @property
    def everybody(self) -> list[RecordedRequest]:
        return [*self.requests, *self.late]


class Totals(msgspec.Struct):
    """Of the whole run, from the engine's metrics."""

    preemptions: int
    prefix_cache_queries: int
    prefix_cache_hits: int


class Recording(msgspec.Struct):
    engine: str
    config: EngineConfig
    rounds: list[RecordedRound]
    totals: Totals

    def counts(self) -> dict[str, int]:
        """How much there is in it."""
        changes = [change.split() for one in self.rounds for step in one.steps for change in step]
        requests = [request for one in self.rounds for request in one.everybody]
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


class Blocks:
    """Names for the blocks of one engine, whatever it calls them."""

    def __init__(self) -> None:
        self._names: dict[EngineHash, str] = {}

    def changes(self, payload: bytes) -> list[str]:
        """One batch of events, in words: `stored NAME… after PARENT`, `removed NAME`, `cleared`."""
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
        size, keys = event.block_size, event.extra_keys or []
        assert len(event.token_ids) == size * len(event.block_hashes) and len(keys) == len(event.block_hashes)
        parent = "nothing" if event.parent_block_hash is None else self._names[event.parent_block_hash]
        rest = (event.lora_id, event.medium, event.lora_name, event.group_idx, event.kv_cache_spec_kind)
        names: list[str] = []
        for index, block in enumerate(event.block_hashes):
            told = (
                names[-1] if names else parent,
                event.token_ids[index * size : (index + 1) * size],
                keys[index],
                rest,
            )
            name = blake2b(repr(told).encode(), digest_size=5).hexdigest()
            assert self._names.setdefault(block, name) == name, "one hash for two contents"
            names.append(name)
        return f"stored {' '.join(names)} after {parent}"


class Replay:
    """A simulated engine that is asked what a real one was, and gives the real answers."""

    def __init__(self, config: EngineConfig) -> None:
        self.core = EngineCore(config, profile("h200-1.5b").timing, self._sink)
        self._blocks = Blocks()
        self._steps: list[list[str]] = []
        self._cached: dict[str, int] = {}

    def _sink(self, at_ms: float, events: Iterable[KvEvent]) -> None:
        batch = EventBatch(at_ms, list(as_vllm_sends_them(events)), 0)
        self._steps.append(self._blocks.changes(msgspec.msgpack.encode(batch)))

    def serve(self, one: RecordedRound, at_ms: float, late_at_ms: float | None) -> tuple[RecordedRound, float]:
        """What came of a round, and when the late ones came in: at the end of a step, which is found if not given."""
        core = self.core
        if one.reset_before:
            assert core.reset_prefix_cache(at_ms)
        for asked in one.requests:
            self._submit(asked, at_ms)
        if one.late:
            steps = core.stats.steps + one.late_after
            core.advance(at_ms)
            if late_at_ms is None:
                while core.stats.steps < steps - 1:
                    self._advance(core.next_event_at())
                late_at_ms = core.next_event_at()
                assert late_at_ms is not None
            for asked in one.late:
                self._submit(asked, late_at_ms)
        while (next_ms := core.next_event_at()) is not None:
            self._advance(next_ms)
        core.check()
        steps_of_round, self._steps = self._steps, []
        cached, self._cached = self._cached, {}
        served = [
            msgspec.structs.replace(asked, cached_tokens=cached[str(index)])
            for index, asked in enumerate(one.everybody)
        ]
        count = len(one.requests)
        result = RecordedRound(served[:count], served[count:], one.late_after, one.reset_before, steps_of_round)
        return result, late_at_ms or at_ms

    def _submit(self, asked: RecordedRequest, at_ms: float) -> None:
        content = TokenContent(asked.tokens, self.core.config.block_size, cache_salt=asked.salt)
        name = str(len(self._cached))
        self._cached[name] = -1
        request = EngineRequest(
            name, len(asked.prompt), asked.max_tokens, content, asked.priority, cache_salt=asked.salt
        )
        self.core.submit(request, at_ms)

    def _advance(self, to_ms: float | None) -> None:
        assert to_ms is not None
        for output in self.core.advance(to_ms):
            if isinstance(output, Finished):
                self._cached[output.request_id] = output.cached_tokens


def simulated(recording: Recording, **settings: bool) -> Recording:
    """The same rounds served by the simulated engine, with the real answers."""
    # Steps can be counted where they are taken one by one; when they end is the same in any case.
    finder = Replay(msgspec.structs.replace(recording.config, fast_forward=False))
    replay = Replay(msgspec.structs.replace(recording.config, **settings))
    rounds: list[RecordedRound] = []
    for number, one in enumerate(recording.rounds):
        at_ms = 1e6 * number
        _, late_at_ms = finder.serve(one, at_ms, None)
        rounds.append(replay.serve(one, at_ms, late_at_ms)[0])
    stats = replay.core.stats
    totals = Totals(stats.preemptions, stats.prefix_cache_queries, stats.prefix_cache_hits)
    return Recording("simulated", replay.core.config, rounds, totals)


def differences(real: Recording, ours: Recording) -> list[str]:
    """Where two runs of the same rounds part, round by round and in words; empty if they are the same."""
    found: list[str] = []
    for number, (theirs, mine) in enumerate(zip(real.rounds, ours.rounds, strict=True)):
        for index, (one, other) in enumerate(zip(theirs.everybody, mine.everybody, strict=True)):
            if one.cached_tokens != other.cached_tokens:
                found.append(
                    f"round {number}, request {index}: {one.cached_tokens} tokens hit, ours {other.cached_tokens}"
                )
        if theirs.steps != mine.steps:
            pairs = zip(theirs.steps, mine.steps, strict=False)
            at = next(
                (i for i, pair in enumerate(pairs) if pair[0] != pair[1]), min(len(theirs.steps), len(mine.steps))
            )
            found.append(
                f"round {number}, batch {at} of {len(theirs.steps)} (ours {len(mine.steps)}): "
                f"{theirs.steps[at : at + 1]}, ours {mine.steps[at : at + 1]}"
            )
    if real.totals != ours.totals:
        found.append(f"{real.totals}, ours {ours.totals}")
    return found
