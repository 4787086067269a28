"""The sample at another load: more or fewer conversations, each as long as it was.

Conversations that arrive faster would not do: if each were over sooner, the caches would hold as many at a time as
before, and a fleet whose caches are too small for the load would look large enough. So more load is copies of
conversations, a few minutes earlier or later, with content of their own. What several conversations share, such as a
system prompt, the copies share, too. Less load leaves conversations out.

Turns that would come before or after the recorded time come at its other end instead, so that every part of it gets as
much more. What nobody has cached comes where it did: when a conversation begins, and at the beginning of the recorded
time, which is not measured. So turns that go to the beginning are those of another conversation, and turns that go to
the end repeat what their own conversation has cached. In a sample that begins with a cut (time_cut.py), all of this
happens after the cut: what fills the caches before it keeps its time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import msgspec

from warmroute.fake_engine.core.block_content import BlockContent, mix64
from warmroute.replay.planning.recorded_request import RecordedRequest
from warmroute.replay.planning.recorded_traffic import Sample
from warmroute.replay.workloads.workload_prompt import Blocks, WorkloadPrompt

MAX_SHIFT: Final = 1 / 6
"""Of the recorded time: how much earlier or later a copy begins at most."""
_HASHES: Final = 1 << 64


class OtherLoads:
    def __init__(self, sample: Sample, block_size: int) -> None:
        self._sample = sample
        self._block_size = block_size
        by_conversation: dict[int, list[RecordedRequest]] = {}
        for one in sample.requests:
            by_conversation.setdefault(one.conversation, []).append(one)
        self._conversations = list(by_conversation.values())
        self._shared: set[int] | None = None

    def prompts(self, load: float, variant: int = 0) -> tuple[list[WorkloadPrompt], int]:
        """Return `load` times as many requests in the order of their arrival, and how many come before the measured
        part. In another variant, other conversations are copied or left out, and copies come at other times."""
        sample = self._sample
        first_ms, wanted = sample.requests[0].at_ms, round(load * len(sample.requests))
        requests = self._fewer(wanted, variant) if load < 1.0 else self._more(wanted, variant)
        requests.sort(key=lambda one: one.at_ms)
        warm_up = sum(one.at_ms < sample.from_ms for one in requests)
        return [_sent_at(one.prompt, one.at_ms - first_ms) for one in requests], warm_up

    def _fewer(self, wanted: int, variant: int) -> list[RecordedRequest]:
        kept: list[RecordedRequest] = []
        for turns in self._shuffled(variant):
            kept += turns[: wanted - len(kept)]
        return kept

    def _more(self, wanted: int, variant: int) -> list[RecordedRequest]:
        requests, shuffled = list(self._sample.requests), self._shuffled(variant)
        number = 0
        while len(requests) < wanted:
            number += 1
            for turns in shuffled:
                requests += self._copy(turns[: wanted - len(requests)], number, variant)
        return requests

    def _shuffled(self, variant: int) -> list[list[RecordedRequest]]:
        """Return the conversations in an order that has nothing to do with their times."""
        return sorted(self._conversations, key=lambda turns: mix64(turns[0].conversation, 2 + (variant << 32)))

    def _copy(self, turns: Sequence[RecordedRequest], number: int, variant: int) -> list[RecordedRequest]:
        """Return the turns at other times within the recorded time, with content of their own."""
        if not turns:
            return []
        if self._shared is None:
            self._shared = _shared_blocks(self._sample.requests, self._block_size)
        first_ms, until_ms = self._sample.complete_from_ms, self._sample.until_ms
        chance = mix64(turns[0].conversation, 2 + number + (variant << 32)) % _HASHES / _HASHES
        span_ms = until_ms - first_ms
        shift_ms = (2.0 * chance - 1.0) * MAX_SHIFT * span_ms
        if first_ms <= turns[-1].at_ms < first_ms - shift_ms:  # all of them would go to the end
            shift_ms = -shift_ms
        copies = []
        for one in turns:
            if one.at_ms < first_ms:
                rounds, at_ms = 0.0, one.at_ms - first_ms
            else:
                rounds, at_ms = divmod(one.at_ms + shift_ms - first_ms, span_ms) if span_ms > 0 else (0.0, 0.0)
            copy = 2 * number + (rounds > 0)
            prompt = msgspec.structs.replace(
                one.prompt,
                blocks=_CopiedBlocks(one.prompt.blocks, self._shared, copy),
                session=b"%b, copy %d" % (one.prompt.session, copy) if one.prompt.session else b"",
            )
            copies.append(RecordedRequest(prompt, first_ms + at_ms, one.conversation))
        return copies


def _sent_at(prompt: WorkloadPrompt, at_ms: float) -> WorkloadPrompt:
    """Return a request that is sent at this time, whatever has been answered."""
    return msgspec.structs.replace(prompt, at_ms=at_ms, number=-1, follows=-1, think_ms=0.0, next_turn=None)


def _shared_blocks(requests: Sequence[RecordedRequest], block_size: int) -> set[int]:
    """Return the hashes of blocks that several conversations have."""
    by_conversation: dict[int, set[int]] = {}
    for one in requests:
        blocks = one.prompt.blocks.content(block_size).hashes(0, one.prompt.prompt_tokens // block_size)
        by_conversation.setdefault(one.conversation, set()).update(blocks)
    seen = Counter(block for blocks in by_conversation.values() for block in blocks)
    return {block for block, conversations in seen.items() if conversations > 1}


class _CopiedBlocks:
    def __init__(self, blocks: Blocks, shared: set[int], number: int) -> None:
        self._blocks, self._shared, self._key = blocks, shared, mix64(number, 7) >> 2

    def content(self, block_size: int) -> BlockContent:
        return _CopiedContent(self._blocks.content(block_size), self._shared, self._key)


class _CopiedContent:
    __slots__ = ("_content", "_key", "_shared")

    def __init__(self, content: BlockContent, shared: set[int], key: int) -> None:
        self._content, self._shared, self._key = content, shared, key

    def hashes(self, start: int, stop: int) -> list[int]:
        shared, key = self._shared, self._key
        return [one if one in shared else one ^ key for one in self._content.hashes(start, stop)]

    def token_ids(self, start: int, stop: int) -> list[int]:
        return self._content.token_ids(start, stop)
