"""LRU holders of the block index: a holder has the blocks that its recency list has."""

from __future__ import annotations

import random
import subprocess
import sys
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from warmroute._kernel import MIN_BUDGET_BYTES, BlockIndex, Recency
from warmroute.core.node_cache import Tier


def test_eviction_at_the_budget_also_removes_blocks_from_the_recency_list() -> None:
    index = BlockIndex(MIN_BUDGET_BYTES * 2)
    recency = Recency(100_000)
    holder = index.add_holder(recency)
    source = random.Random(1)
    prompts = [source.randbytes(8 * 100) for _ in range(300)]
    for stamp, prompt in enumerate(prompts):
        assert index.touch(holder, prompt, float(stamp)) == prompt
        stats = index.stats()
        assert stats["bytes"] <= stats["budget_bytes"]
        assert index.match(prompt) == [(holder, 100, 100, 100, 100)], "never the prompt that is being stored"
        assert stats["pairs"] == index.pair_count(holder) == len(recency)
    assert index.stats()["evicted"] > 0 and index.stats()["refused"] == 0
    held = [recency.match(prompt) for prompt in prompts]
    assert held == sorted(held) and held[0] == 0 and held[-1] == 100
    assert [sum(row[1] for row in index.match(prompt)) for prompt in prompts] == held


def test_the_larger_holder_is_evicted_from_with_or_without_a_recency_list() -> None:
    index = BlockIndex(MIN_BUDGET_BYTES * 4)
    recency = Recency(100_000)
    small, large = index.add_holder(recency), index.add_holder()
    source = random.Random(2)
    kept = source.randbytes(8 * 500)
    index.touch(small, kept, 0.0)
    for _ in range(200):
        index.store_hashes(large, source.randbytes(8 * 100), Tier.GPU)
    assert index.stats()["evicted"] > 0
    assert len(recency) == 500 and index.match(kept)[0][1] == 500


def test_a_removed_lru_holder_is_swept_in_steps() -> None:
    index = BlockIndex(1 << 24)
    recency = Recency(100_000)
    holder = index.add_holder(recency)
    prompt = random.Random(3).randbytes(8 * 20_000)
    index.touch(holder, prompt, 0.0)
    recency.add_anonymous(10, 1.0)
    index.remove_holder(holder)
    assert index.match(prompt) == []
    left = index.stats()["unswept_pairs"]
    assert 0 < left < 20_000 and index.stats()["pairs"] == 0
    assert index.sweep(1000) == left - 1000
    assert index.sweep(100_000) == index.stats()["blocks"] == 0


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda index, holder: index.add_holder(1), TypeError),
        (lambda index, holder: index.add_holder(Recency(1), 2), TypeError),
        (lambda index, holder: index.clear(holder), ValueError),
        (lambda index, holder: index.store_hashes(holder, [1], Tier.GPU), ValueError),
        (lambda index, holder: index.store(holder, 1, None, [7], [1, 2], 2, Tier.GPU), ValueError),
        (lambda index, holder: index.store_known(holder, [7], Tier.GPU), ValueError),
        (lambda index, holder: index.touch(index.add_holder(), b"", 1.0), ValueError),
        (lambda index, holder: index.touch(99, b"", 1.0), ValueError),
        (lambda index, holder: index.touch(holder, b"1", 1.0), ValueError),
        (lambda index, holder: index.touch(holder, [1], 1.0), TypeError),
        (lambda index, holder: index.touch(holder, b"12345678", "1"), TypeError),
        (lambda index, holder: index.touch(holder, b"12345678"), TypeError),
    ],
)
def test_calls_that_a_lru_holder_does_not_support_are_rejected(
    call: Callable[[Any, int], object], error: type[Exception]
) -> None:
    index = BlockIndex(1 << 20)
    recency = Recency(4)
    holder = index.add_holder(recency)
    index.touch(holder, b"abcdefgh", 1.0)
    with pytest.raises(error):
        call(index, holder)
    with pytest.raises(ValueError):
        index.add_holder(recency)  # it is not empty
    assert index.match(b"abcdefgh") == [(holder, 1, 1, 1, 1)] and len(recency) == 1


@pytest.mark.parametrize(("budget_bytes", "blocks"), [(MIN_BUDGET_BYTES, 20_000), (1 << 20, 200_000)])
def test_blocks_refused_at_the_budget_are_not_in_the_recency_list(budget_bytes: int, blocks: int) -> None:
    index = BlockIndex(budget_bytes)
    recency = Recency(1_000_000)
    holder, other = index.add_holder(recency), index.add_holder()
    prompt = random.Random(4).randbytes(8 * blocks)
    assert index.touch(holder, prompt, 1.0) == prompt
    held = recency.match(prompt)
    assert blocks / 40 < held == len(recency) == index.pair_count(holder) == len(index.holdings(holder)) < blocks
    assert index.match(prompt) == [(holder, held, held, held, held)] and index.stats()["refused"] > 0
    for first in range(0, 800, 8):
        assert index.store_hashes(other, list(range(first, first + 8)), Tier.GPU) == 8
    held = recency.match(prompt)
    again = index.touch(holder, prompt, 2.0)
    assert prompt.endswith(again) and len(again) >= len(prompt) - 8 * held, "blocks that were not held are new again"
    assert recency.match(prompt) == len(recency) == len(index.holdings(holder)) > blocks / 40


@pytest.mark.parametrize(("n_holders", "shared"), [(1, 0), (8, 600), (40, 600)])
def test_a_prompt_that_needs_more_than_is_left_is_stored_whole(n_holders: int, shared: int) -> None:
    """Long prompts at the budget, some of them held by many holders."""
    index = BlockIndex(1 << 20)
    lists = [Recency(200_000) for _ in range(n_holders)]
    holders = [index.add_holder(recency) for recency in lists]
    source = random.Random(5)
    roots = [source.randbytes(8 * shared) for _ in range(4)]
    for stamp in range(150):
        at = source.randrange(n_holders)
        prompt = source.choice(roots) + source.randbytes(8 * source.randrange(8000))
        index.touch(holders[at], prompt, float(stamp))
        assert lists[at].match(prompt) == len(prompt) // 8
    stats = index.stats()
    assert stats["refused"] == 0 < stats["evicted"] and stats["charged_bytes"] <= stats["budget_bytes"]
    for holder, recency in zip(holders, lists, strict=True):
        assert index.pair_count(holder) == len(recency) == len(index.holdings(holder))


@pytest.mark.parametrize(
    "change",
    [
        lambda recency: recency.resize(100),
        lambda recency: recency.add_anonymous(19_000, 2.0),
        lambda recency: recency.clear(),
        lambda recency: recency.touch(random.Random(7).randbytes(8 * 20_000), 2.0),
    ],
)
def test_the_recency_list_of_a_removed_holder_may_be_changed(change: Callable[[Recency], object]) -> None:
    """It is empty then. The index sweeps its former blocks, and the next holder with this number holds none of them."""
    index = BlockIndex(1 << 24)
    recency = Recency(20_000)
    holder = index.add_holder(recency)
    prompt = random.Random(6).randbytes(8 * 20_000)
    index.touch(holder, prompt, 1.0)
    index.remove_holder(holder)
    assert len(recency) == 0 and recency.capacity == 20_000 and index.stats()["unswept_pairs"] > 0
    change(recency)
    assert index.sweep(1 << 40) == index.stats()["blocks"] == 0
    again = index.add_holder(Recency(20_000))
    index.touch(again, prompt[: 8 * 10], 2.0)
    assert index.match(prompt) == [(again, 10, 10, 10, 10)] and len(index.holdings(again)) == 10


def test_a_recency_list_belongs_to_one_holder() -> None:
    index, recency = BlockIndex(1 << 20), Recency(4)
    holder = index.add_holder(recency)
    for other in (index, BlockIndex(1 << 20)):
        with pytest.raises(ValueError):
            other.add_holder(recency)
    index.remove_holder(holder)
    assert index.add_holder(recency) == holder
    del index
    assert BlockIndex(1 << 20).add_holder(recency) == 0


def test_after_a_failed_allocation_a_holder_holds_what_its_recency_list_holds(
    failing: Callable[[int, Callable[..., object]], object],
) -> None:
    old, new = array("Q", range(100, 120)).tobytes(), array("Q", range(200, 238)).tobytes()
    for number in range(60):
        index, recency = BlockIndex(1 << 20), Recency(40)
        holder = index.add_holder(recency)
        recency.add_anonymous(20, 0.0)
        index.touch(holder, old, 1.0)
        failing(number, lambda index=index, holder=holder: index.touch(holder, new, 2.0))
        for prompt in (old, new):
            assert sum(row[1] for row in index.match(prompt)) == recency.match(prompt)
        assert len(index.holdings(holder)) == index.pair_count(holder)
        failing(number, lambda index=index, holder=holder: index.remove_holder(holder))
        assert index.sweep(1 << 40) == index.stats()["blocks"] == 0


COLLECTION_SCRIPT = """
import gc
from warmroute._kernel import BlockIndex, Recency
index = BlockIndex(1 << 22)
stored, routed = index.add_holder(), index.add_holder(Recency(9))
index.store_hashes(stored, list(range(3000)), 0)
index.touch(routed, bytes(8), 1.0)
class Last:
    def __init__(self): self.itself = self
    def __del__(self):
        for holder in (stored, routed): index.remove_holder(holder)
        index.sweep(1 << 40)
        for _ in range(200): index.add_holder()
gc.disable()
used = [[] for _ in range(500)]  # uses up the free lists
Last()
gc.set_threshold(1, 1, 1)
read = index.holdings
holder = HOLDER
gc.enable()
rows = read(holder)
gc.disable()
print(len(rows))
"""


@pytest.mark.parametrize(("holder", "rows"), [("stored", 3000), ("routed", 1)])
def test_a_garbage_collection_that_changes_holders_during_holdings_is_safe(holder: str, rows: int) -> None:
    code = COLLECTION_SCRIPT.replace("HOLDER", holder)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(ran.stdout) == rows
