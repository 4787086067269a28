"""oracle: the hit rate of one cache as large as the whole fleet's. Requests are served in no time, in the order of
their arrival; blocks of prompts and answers go least recently used first. A ceiling for practice, not a proof: several
small caches can by luck keep what one large one would have dropped, and a request that waits is matched later.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator

from warmroute.replay.workloads.prompt import Prompt


def hit_rate(
    prompts: Iterator[Prompt],
    capacity_blocks: int,
    block_size: int,
    limit: int | None = None,
    duration_s: float | None = None,
    warm_up: int = 0,
) -> tuple[float, int]:
    """Share of prompt tokens that hit, and the number of requests, the first `warm_up` of them not counted."""
    cache: OrderedDict[int, None] = OrderedDict()
    asked = hit = count = 0
    end_ms = float("inf")
    for at_ms, prompt in _in_order(prompts):
        if count == warm_up:
            asked = hit = 0
            end_ms = float("inf") if duration_s is None else at_ms + duration_s * 1000.0
        if (limit is not None and count == limit + warm_up) or at_ms >= end_ms:
            break
        count += 1
        content = prompt.blocks.content(block_size)
        chain = content.hashes(0, (prompt.prompt_tokens + prompt.output_tokens) // block_size)
        reusable = (prompt.prompt_tokens - 1) // block_size
        depth = 0
        while depth < reusable and chain[depth] in cache:
            depth += 1
        asked += prompt.prompt_tokens
        hit += depth * block_size
        for block in reversed(chain):  # tail first, as engines free them
            cache[block] = None
            cache.move_to_end(block)
        for _ in range(len(cache) - capacity_blocks):
            cache.popitem(last=False)
    return (hit / asked if asked else 0.0), count - warm_up


def _in_order(prompts: Iterator[Prompt]) -> Iterator[tuple[float, Prompt]]:
    """Arrivals and follow-ups, by time."""
    waiting: list[tuple[float, int, Prompt]] = []
    entered = 0
    upcoming = next(prompts, None)
    while upcoming is not None or waiting:
        if waiting and (upcoming is None or waiting[0][0] < upcoming.at_ms):
            at_ms, _, prompt = heapq.heappop(waiting)
        else:
            assert upcoming is not None
            at_ms, prompt = upcoming.at_ms, upcoming
            upcoming = next(prompts, None)
        yield at_ms, prompt
        follow_up = prompt.then() if prompt.then is not None else None
        if follow_up is not None:
            entered += 1
            heapq.heappush(waiting, (at_ms + follow_up.think_ms, entered, follow_up.prompt))
