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

from warmroute.engines.kv_events import BlockRemoved, BlockStored, EngineHash, Event, read_batch
from warmroute.sim.engine import EngineConfig, EngineCore, EngineRequest, EventBatch, Finished, KvEvent, TokenContent
from warmroute.sim.engine import wire_events as as_vllm_sends_them
from warmroute.sim.profiles import profile

RECORDED = Path(__file__).parents[1] / "real" / "recorded"


class Asked(msgspec.Struct, omit_defaults=True):
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


class Round(msgspec.Struct, omit_defaults=True):
    """Requests that were all waiting, in this order, when the engine took its next step; it was idle before."""

    requests: list[Asked]
    reset_before: bool = False
    """The prefix cache was reset just before."""
    steps: list[list[str]] = []
    """Each batch of KV events, in order: `Blocks.changes`."""


class Totals(msgspec.Struct):
    """Of the whole run, from the engine's metrics."""

    preemptions: int
    prefix_cache_queries: int
    prefix_cache_hits: int


class Recording(msgspec.Struct):
    engine: str
    config: EngineConfig
    rounds: list[Round]
    totals: Totals

    def counts(self) -> dict[str, int]:
        """How much there is in it."""
        changes = [change.split() for one in self.rounds for step in one.steps for change in step]
        requests = [request for one in self.rounds for request in one.requests]
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
        return [self._change(event) for event in read_batch(payload).events]

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


def simulated(recording: Recording, config: EngineConfig | None = None) -> Recording:
    """The same rounds served by the simulated engine, with the real answers."""
    blocks = Blocks()
    steps: list[list[str]] = []

    def sink(at_ms: float, events: Iterable[KvEvent]) -> None:
        batch = EventBatch(at_ms, list(as_vllm_sends_them(events)), 0)
        steps.append(blocks.changes(msgspec.msgpack.encode(batch)))

    core = EngineCore(config or recording.config, profile("h200-1.5b").timing, sink)
    size = core.config.block_size
    now_ms = 0.0
    rounds: list[Round] = []
    for one in recording.rounds:
        now_ms += 1000
        if one.reset_before:
            assert core.reset_prefix_cache(now_ms)
        for index, asked in enumerate(one.requests):
            content = TokenContent(asked.tokens, size, cache_salt=asked.salt)
            request = EngineRequest(
                str(index), len(asked.prompt), asked.max_tokens, content, asked.priority, cache_salt=asked.salt
            )
            core.submit(request, now_ms)
        cached = [0] * len(one.requests)
        while (at_ms := core.next_event_at()) is not None:
            now_ms = at_ms
            for output in core.advance(now_ms):
                if isinstance(output, Finished):
                    cached[int(output.request_id)] = output.cached_tokens
        core.check()
        served = [
            msgspec.structs.replace(asked, cached_tokens=tokens)
            for asked, tokens in zip(one.requests, cached, strict=True)
        ]
        rounds.append(Round(served, one.reset_before, steps[:]))
        steps.clear()
    stats = core.stats
    totals = Totals(stats.preemptions, stats.prefix_cache_queries, stats.prefix_cache_hits)
    return Recording("simulated", core.config, rounds, totals)


def differences(real: Recording, ours: Recording) -> list[str]:
    """Where two runs of the same rounds part, round by round and in words; empty if they are the same."""
    found: list[str] = []
    for number, (theirs, mine) in enumerate(zip(real.rounds, ours.rounds, strict=True)):
        for index, (one, other) in enumerate(zip(theirs.requests, mine.requests, strict=True)):
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
