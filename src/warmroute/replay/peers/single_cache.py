"""`oracle`: the hit rate of one cache as large as all caches of the fleet together.

Requests are served instantly, in the order of arrival, and blocks of prompts and answers are evicted least recently
used first. This is a practical upper bound, not a proof: several small caches can by chance keep a block that one large
cache evicts, and a request that waits in a queue is matched later.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from math import inf

from warmroute.replay.workloads.arrivals import with_follow_ups
from warmroute.replay.workloads.workload_prompt import WorkloadPrompt


def single_cache_hit_rate(
    prompts: Iterator[WorkloadPrompt],
    capacity_blocks: int,
    block_size: int,
    limit: int | None = None,
    duration_s: float | None = None,
    warm_up: int = 0,
    warm_up_s: float = 0.0,
) -> tuple[float, int]:
    """Return the fraction of prompt tokens that hit, and the number of requests; both without the first `warm_up`, or
    without those of the first `warm_up_s`."""
    cache: OrderedDict[int, None] = OrderedDict()
    queried = hit = count = unmeasured = 0
    is_measuring = False
    end_ms = inf
    for at_ms, prompt in with_follow_ups(prompts):
        if not is_measuring and count >= warm_up and at_ms >= 1000.0 * warm_up_s:
            is_measuring = True
            queried = hit = 0
            unmeasured = count
            end_ms = inf if duration_s is None else at_ms + duration_s * 1000.0
        if is_measuring and ((limit is not None and count == limit + unmeasured) or at_ms >= end_ms):
            break
        count += 1
        content = prompt.blocks.content(block_size)
        chain = content.hashes(0, (prompt.prompt_tokens + prompt.output_tokens) // block_size)
        reusable = (prompt.prompt_tokens - 1) // block_size
        depth = 0
        while depth < reusable and chain[depth] in cache:
            depth += 1
        queried += prompt.prompt_tokens
        hit += depth * block_size
        for block in reversed(chain):  # engines free the tail of a prompt first
            cache[block] = None
            cache.move_to_end(block)
        for _ in range(len(cache) - capacity_blocks):
            cache.popitem(last=False)
    return (hit / queried if queried else 0.0), count - unmeasured if is_measuring else 0
