"""Checks the internal state of a simulated engine. Slow: it looks at every block."""

from __future__ import annotations

from warmroute.lab.engine.blocks import BlockPool
from warmroute.lab.engine.core import EngineCore
from warmroute.lab.engine.values import SequenceState


def check_engine(engine: EngineCore) -> None:
    """Fail unless every request is in one queue and every block in one place."""
    scheduler = engine.scheduler
    running = scheduler.running.values()
    check_blocks(scheduler.pool, [sequence.blocks for sequence in running])
    for sequence in running:
        assert sequence.stored_blocks <= len(sequence.blocks)
        assert sequence.state in (SequenceState.PREFILLING, SequenceState.DECODING)
    assert len(running) + len(scheduler.waiting) == len(engine._sequences), "a request neither runs nor waits"
    assert sum(sequence.state is SequenceState.DECODING for sequence in running) == scheduler.decode.size


def check_blocks(pool: BlockPool, blocks_of_requests: list[list[int]]) -> None:
    """Fail unless every block is either free or held by the requests that the pool counts."""
    holders: dict[int, int] = {}
    for blocks in blocks_of_requests:
        assert len(set(blocks)) == len(blocks), "a request holds a block twice"
        for block in blocks:
            holders[block] = holders.get(block, 0) + 1
    free = [*pool._blank, *pool._idle, *range(pool._never_used, pool.num_blocks)]
    assert len(set(free)) == len(free)
    assert not set(free) & holders.keys(), "a block is both free and in use"
    assert len(free) + len(holders) == pool.num_blocks - 1, "a block is lost"
    assert 0 not in holders, "the null block was allocated"
    assert 0 not in free
    assert {block: count - 1 for block, count in holders.items() if count > 1} == pool._shared
    contents = [*pool._cached.items(), *((h, b) for h, blocks in pool._duplicates.items() for b in blocks)]
    hash_of = {block: block_hash for block_hash, block in contents}
    assert len(hash_of) == len(contents), "a block has two contents"
    assert all(hash_of.get(block) == block_hash for block, block_hash in pool._idle.items())
    assert all(block in holders or block in pool._idle for block in hash_of)
    assert len(pool._cpu) <= pool.cpu_blocks
