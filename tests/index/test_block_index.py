"""The compiled block index: stores and removes, memory, time, and invalid input."""

from __future__ import annotations

import random
import resource
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from warmroute._kernel import MIN_BUDGET_BYTES, UNKNOWN_PARENT, BlockIndex, hash_blocks
from warmroute.core.node_cache import Tier


def test_a_block_stored_twice_must_be_removed_twice() -> None:
    index = BlockIndex(1 << 20)
    holder = index.add_holder()
    hashes = hash_blocks(1, None, [1, 2, 3, 4], 2)
    index.store(holder, 1, None, [70, 71], [1, 2, 3, 4], 2, Tier.GPU)
    index.store(holder, 1, 70, [71], [3, 4], 2, Tier.GPU)
    index.remove(holder, [71], Tier.GPU)
    assert index.match(hashes) == [(holder, 2, 2, 2, 2)]
    index.remove(holder, [71], Tier.GPU)
    assert index.match(hashes) == [(holder, 1, 1, 1, 1)]


def test_lower_tiers_extend_a_match() -> None:
    index = BlockIndex(1 << 20)
    holder = index.add_holder()
    tokens = list(range(8))
    hashes = hash_blocks(1, None, tokens, 2)
    index.store(holder, 1, None, [1, 2, 3, 4], tokens, 2, Tier.GPU)
    assert index.store_known(holder, [2, 3, 9], Tier.CPU) == 2
    index.store_known(holder, [4], Tier.REMOTE)
    index.remove(holder, [2, 3, 4], Tier.GPU)
    assert index.match(hashes) == [(holder, 1, 3, 3, 4)]
    index.remove(holder, [2], Tier.CPU)
    assert index.match(hashes) == [(holder, 1, 1, 1, 1)]
    assert index.stats()["unresolved"] == 1


def test_a_block_with_two_engine_hashes_stays_until_both_are_removed() -> None:
    index = BlockIndex(1 << 20)
    holder = index.add_holder()
    index.store_hashes(holder, [5], Tier.GPU, [100])
    index.store_hashes(holder, [5], Tier.GPU, [200])
    index.store_hashes(holder, [5], Tier.GPU)
    removals: list[Callable[[], int]] = [
        lambda: index.remove(holder, [100], 0),
        lambda: index.remove_hashes(holder, [5], 0),
    ]
    for remove in removals:
        assert remove() == 1
        assert len(index.match([5])) == 1
    index.remove(holder, [200], Tier.GPU)
    assert index.match([5]) == []


def test_an_engine_hash_reused_for_other_tokens_means_the_new_block() -> None:
    index = BlockIndex(1 << 20)
    holder = index.add_holder()
    index.store(holder, 1, None, [7], [1, 2], 2, Tier.GPU)
    index.store(holder, 1, None, [7], [3, 4], 2, Tier.GPU)
    assert index.match(hash_blocks(1, None, [1, 2], 2)) == []
    assert index.match(hash_blocks(1, None, [3, 4], 2)) == [(holder, 1, 1, 1, 1)]
    assert index.stats()["conflicts"] == 1


def test_namespaces_share_no_blocks() -> None:
    index = BlockIndex(1 << 20)
    holder = index.add_holder()
    tokens = list(range(64))
    index.store(holder, 1, None, [1, 2, 3, 4], tokens, 16, Tier.GPU)
    assert index.match(hash_blocks(2, None, tokens, 16)) == []
    assert index.match(hash_blocks(1, None, tokens, 16))


def test_a_removed_holder_is_gone_at_once_and_its_number_is_reused_empty() -> None:
    index = BlockIndex(1 << 26)
    holder = index.add_holder()
    hashes = array("Q", range(50_000))
    index.store_hashes(holder, hashes, Tier.GPU)
    index.remove_holder(holder)
    assert index.match(hashes) == [] and index.stats()["unswept_pairs"] > 0
    with pytest.raises(ValueError):
        index.store_hashes(holder, hashes, Tier.GPU)
    assert index.add_holder() == holder
    assert index.match(hashes) == [] and index.pair_count(holder) == 0
    index.store_hashes(holder, hashes[:10], Tier.GPU)
    assert index.match(hashes) == [(holder, 10, 10, 10, 10)]
    assert index.sweep(1 << 40) == 0
    assert index.stats()["blocks"] == 10


def test_32767_holders_can_be_open_and_one_more_is_rejected() -> None:
    index = BlockIndex(1 << 26)
    holders = [index.add_holder() for _ in range(32_767)]
    assert len(set(holders)) == 32_767
    with pytest.raises(OverflowError):
        index.add_holder()
    for holder in (holders[0], holders[-1]):
        index.store_hashes(holder, [1, 2], Tier.GPU)
    index.store_hashes(holders[9], [1], Tier.CPU)
    assert sorted(index.match([1, 2])) == sorted(
        [(holders[0], 2, 2, 2, 2), (holders[-1], 2, 2, 2, 2), (holders[9], 0, 1, 1, 1)]
    )
    index.clear(holders[0])
    assert sorted(index.match([1, 2])) == sorted([(holders[-1], 2, 2, 2, 2), (holders[9], 0, 1, 1, 1)])
    index.remove_holder(holders[5])
    assert index.add_holder() == holders[5]


def test_a_block_held_by_thousands_of_holders_is_matched_for_all() -> None:
    index = BlockIndex(1 << 26)
    holders = [index.add_holder() for _ in range(3000)]
    for number, holder in enumerate(holders):
        index.store_hashes(holder, list(range(1 + number % 7)), Tier.GPU)
    depths = {row[0]: row[1] for row in index.match(list(range(10)))}
    assert depths == {holder: 1 + number % 7 for number, holder in enumerate(holders)}
    assert index.stats()["bytes"] / index.stats()["pairs"] < 48 + 100


@pytest.mark.parametrize(("per_block", "n_holders"), [(1, 8), (1, 2048), (2, 64), (3, 64), (20, 64)])
def test_a_pair_takes_at_most_48_bytes_at_any_fill(per_block: int, n_holders: int) -> None:
    index = BlockIndex(1 << 28)
    holders = [index.add_holder() for _ in range(n_holders)]
    source = random.Random(per_block)
    while (pairs := index.stats()["pairs"]) < 260_000:
        blocks = array("Q", source.randbytes(8 * 50))
        for holder in source.sample(holders, per_block):
            salt = source.getrandbits(64)
            index.store_hashes(holder, blocks, Tier.GPU, [block ^ salt for block in blocks])
        if pairs > 100_000:
            assert index.stats()["bytes"] / index.stats()["pairs"] <= 48


def test_a_pair_takes_at_most_48_bytes_while_blocks_come_and_go() -> None:
    index = BlockIndex(1 << 28)
    holders = [index.add_holder() for _ in range(16)]
    source = random.Random(4)
    held: list[tuple[int, array[int]]] = []
    for turn in range(12_000):
        holder, blocks = source.choice(holders), array("Q", source.randbytes(8 * 40))
        index.store_hashes(holder, blocks, Tier.GPU, blocks)
        held.append((holder, blocks))
        if len(held) > 3000:
            holder, blocks = held.pop(source.randrange(len(held)))
            index.remove(holder, blocks, Tier.GPU)
        stats = index.stats()
        assert turn < 2600 or stats["bytes"] / stats["pairs"] <= 48


def test_removed_blocks_free_their_memory() -> None:
    index = BlockIndex(1 << 28)
    holder = index.add_holder()
    empty_bytes = index.stats()["bytes"]
    blocks = array("Q", random.Random(1).randbytes(8 * 200_000))
    index.store_hashes(holder, blocks, Tier.GPU)
    full_bytes = index.stats()["bytes"]
    index.remove_hashes(holder, blocks[:190_000], Tier.GPU)
    assert index.stats()["bytes"] < full_bytes / 5
    index.remove_hashes(holder, blocks[190_000:], Tier.GPU)
    assert index.stats()["bytes"] < empty_bytes + 1000


FLOOD_SCRIPT = """
import random, resource, sys
from array import array
from collections.abc import Callable
from typing import Any
from warmroute._kernel import BlockIndex
def rss(): return int(open("/proc/self/statm").read().split()[1]) * 4096
budget = int(sys.argv[1])
source = random.Random(1)
index = BlockIndex(budget)
holders = [index.add_holder() for _ in range(8)]
before, highest = rss(), 0
for turn in range(int(sys.argv[2])):
    blocks = array("Q", source.randbytes(8 * 256))
    index.store_hashes(source.choice(holders), blocks, turn % 17 == 0, blocks)
    if turn % 1000 == 999:
        index.remove_holder(holders[turn // 1000 % 8]); holders[turn // 1000 % 8] = index.add_holder()
    highest = max(highest, rss())
    stats = index.stats()
    assert stats["bytes"] <= stats["charged_bytes"] <= budget
print(highest - before, stats["evicted"] + 0, stats["refused"], stats["pairs"])
"""


def test_memory_is_flat_under_a_flood_of_unique_blocks() -> None:
    budget = 4 << 20
    ran = subprocess.run(
        [sys.executable, "-c", FLOOD_SCRIPT, str(budget), "8000"], capture_output=True, text=True, check=True
    )
    grown, evicted, refused, pairs = map(int, ran.stdout.split())
    assert grown < 1.25 * budget + (1 << 20)
    assert evicted > 100_000 and refused < evicted / 50
    assert pairs > 0.5 * budget / 48


def test_a_flood_on_one_holder_evicts_nothing_from_smaller_holders() -> None:
    index = BlockIndex(1 << 20)
    quiet, loud = index.add_holder(), index.add_holder()
    prompt = hash_blocks(1, None, array("I", range(1000)), 1)
    index.store_hashes(quiet, prompt, Tier.GPU)
    source = random.Random(2)
    for _ in range(1000):
        index.store_hashes(loud, source.randbytes(8 * 256), Tier.GPU)
    assert index.stats()["evicted"] > 100_000
    assert index.match(prompt) == [(quiet, 1000, 1000, 1000, 1000)]


def test_what_prompts_match_outlives_what_they_do_not() -> None:
    index = BlockIndex(1 << 20)
    holder = index.add_holder()
    system_prompt = hash_blocks(1, None, array("I", range(200)), 1)
    index.store_hashes(holder, system_prompt, Tier.GPU)
    source = random.Random(3)
    for _ in range(2000):
        index.match(system_prompt)
        index.store_hashes(holder, source.randbytes(8 * 64), Tier.GPU)
    assert index.stats()["evicted"] > 50_000
    held = {row[0] for row in index.holdings(holder)}
    assert sum(hash in held for hash in array("Q", system_prompt)) > 190


def test_nothing_leaks() -> None:
    def round_trip() -> None:
        index = BlockIndex(1 << 22)
        holders = [index.add_holder() for _ in range(5)]
        source = random.Random(1)
        for turn in range(60):
            blocks = source.randbytes(8 * 300)
            for holder in holders[: 1 + turn % 5]:
                index.store_hashes(holder, blocks, turn % 4)
            index.match(blocks)
            index.match(list(array("Q", blocks)))
            bad: Any
            for bad in ([1.5], [b""], b"123", [1 << 65]):
                with pytest.raises((TypeError, ValueError)):
                    index.store_hashes(holders[0], bad, 0)
            with pytest.raises(ValueError):
                index.store(holders[0], 1, None, list(range(300)), list(range(300)), 16, 0)
            index.remove_hashes(holders[0], blocks, turn % 4)
            if turn % 7 == 0:
                index.clear(holders[turn % 5])
            index.stats(), index.holdings(holders[1]), index.block_hash(holders[0], 5)

    for _ in range(5):
        round_trip()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(40):
        round_trip()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2048


def test_no_call_takes_long_while_the_index_grows_and_is_cleared() -> None:
    """A batch of 1,000 events takes a few ms whatever the tables do. Two batches may be slower on a busy machine."""
    index = BlockIndex(1 << 28)
    holder = index.add_holder()
    source = random.Random(6)
    took = []
    for turn in range(60):
        events = [[source.getrandbits(64) for _ in range(4)] for _ in range(1000)]
        tokens = array("I", source.randbytes(4 * 64))
        start = time.process_time()
        for hashes in events:
            index.store(holder, 1, None, hashes, tokens, 16, Tier.GPU)
        if turn % 20 == 19:
            index.clear(holder)
        took.append(time.process_time() - start)
    took.sort()
    assert took[30] < 0.005 and took[-3] < 0.02


@pytest.mark.parametrize(
    "call",
    [
        lambda index, holder: index.store(holder, 1, None, [1], [1, 2, 3], 2, 0),
        lambda index, holder: index.store(holder, 1, None, [1, 2], [1, 2], 2, 0),
        lambda index, holder: index.store(holder, 1, None, [1], [1, -2], 2, 0),
        lambda index, holder: index.store(holder, 1, None, [1 << 64], [1, 2], 2, 0),
        lambda index, holder: index.store(holder, 1, None, [b"x" * 65], [1, 2], 2, 0),
        lambda index, holder: index.store(holder, 1, b"", [1], [1, 2], 2, 0),
        lambda index, holder: index.store(holder, 1, None, [1], [1, 2], 2, 4),
        lambda index, holder: index.store(holder, 1, None, [1], [1, 2], 2, -1),
        lambda index, holder: index.store(holder, 1, None, [1], [1, 2], 0, 0),
        lambda index, holder: index.store(holder, 1, None, [1], [1, 2], 2, 0, []),
        lambda index, holder: index.store(holder + 1, 1, None, [1], [1, 2], 2, 0),
        lambda index, holder: index.store(-1, 1, None, [1], [1, 2], 2, 0),
        lambda index, holder: index.store(1 << 80, 1, None, [1], [1, 2], 2, 0),
        lambda index, holder: index.store_hashes(holder, [1, 2], 0, [1]),
        lambda index, holder: index.store_hashes(holder, b"1234567", 0),
        lambda index, holder: index.store_hashes(holder, array("d", [1.0]), 0),
        lambda index, holder: index.match(b"1234567"),
        lambda index, holder: index.match(array("I", [1, 2])),
        lambda index, holder: index.remove_holder(holder + 7),
        lambda index, holder: index.sweep(-1),
        lambda index, holder: BlockIndex(MIN_BUDGET_BYTES - 1),
    ],
)
def test_values_out_of_range_are_rejected_and_change_nothing(call: Callable[[Any, int], object]) -> None:
    index = BlockIndex(1 << 20)
    holder = index.add_holder()
    before = index.stats()
    with pytest.raises(ValueError):
        call(index, holder)
    assert index.stats() == before


@pytest.mark.parametrize(
    "call",
    [
        lambda index, holder: index.store(holder, 1, None, [None], [1, 2], 2, 0),
        lambda index, holder: index.store(holder, 1, 1.5, [1], [1, 2], 2, 0),
        lambda index, holder: index.store(holder, 1, None, 5, [1, 2], 2, 0),
        lambda index, holder: index.store(holder, 1, None, [1], {1, 2}, 2, 0),
        lambda index, holder: index.store(holder, 1, None, [1], [1, 2], 2, 0, [5]),
        lambda index, holder: index.store(holder, 1, None, [1], [1, 2], 2),
        lambda index, holder: index.store(None, 1, None, [1], [1, 2], 2, 0),
        lambda index, holder: index.store_hashes(holder, "12345678", 0),
        lambda index, holder: index.remove(holder, None, 0),
        lambda index, holder: index.match(7),
        lambda index, holder: index.match(["1"]),
        lambda index, holder: BlockIndex("1"),  # type: ignore[arg-type]
        lambda index, holder: BlockIndex(),  # type: ignore[call-arg]
    ],
)
def test_values_of_the_wrong_type_are_rejected_and_change_nothing(call: Callable[[Any, int], object]) -> None:
    index = BlockIndex(1 << 20)
    holder = index.add_holder()
    before = index.stats()
    with pytest.raises(TypeError):
        call(index, holder)
    assert index.stats() == before


def test_an_empty_batch_changes_nothing() -> None:
    index = BlockIndex(1 << 20)
    holder = index.add_holder()
    assert index.store(holder, 1, None, [], [], 16, 0) == 0
    assert index.store(holder, 1, 5, [], [], 16, 0) == UNKNOWN_PARENT
    assert index.store_hashes(holder, b"", 0) == index.remove(holder, [], 0) == 0
    assert index.match([]) == index.match(b"") == []


def test_counts_saturate_and_the_stats_show_it() -> None:
    index = BlockIndex(1 << 20)
    holder = index.add_holder()
    for _ in range(20):
        index.store_hashes(holder, [1], Tier.CPU)
    assert index.holdings(holder) == [(1, 0, 15, 0, 0)]
    assert index.stats()["saturated"] == 5
