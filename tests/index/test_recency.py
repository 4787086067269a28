"""The compiled recency list: what it keeps and evicts, invalid input, and its memory bounds."""

from __future__ import annotations

import gc
import random
import tracemalloc
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_recency import drained, packed, stamped, touched

from warmroute._kernel import Recency


@given(st.lists(st.lists(st.integers(0, 5), max_size=12), max_size=40), st.integers(1, 10))
@settings(max_examples=200, deadline=None)
def test_hashes_that_are_no_prompt_stay_within_the_capacity(calls: list[list[int]], capacity: int) -> None:
    """Hashes in any order, or twice: blocks may be counted twice, but never beyond the capacity."""
    recency = Recency(capacity)
    for stamp, hashes in enumerate(calls):
        new, _ = touched(recency, hashes, stamp)
        assert set(new) <= set(hashes)
        assert len(recency) <= capacity
        if stamp % 3 == 2:
            recency.drop(packed(*hashes), packed(*hashes[::2]))
        assert recency.match(packed(*hashes)) <= len(hashes)
    assert set(drained(recency)) <= set(range(6))
    assert recency.drop(packed(*range(6)), packed(*range(6))) == 0


def test_the_last_blocks_of_a_prompt_are_evicted_first() -> None:
    recency = Recency(4)
    assert touched(recency, [1, 2, 3, 4], 1.0) == ([1, 2, 3, 4], [])
    assert touched(recency, [9], 2.0) == ([9], [4])
    assert touched(recency, [1, 2, 5], 3.0) == ([5], [3])
    assert drained(recency) == [9, 5, 2, 1]


def test_a_touched_prefix_is_not_evicted_for_its_own_new_blocks() -> None:
    recency = Recency(3)
    touched(recency, [1], 1.0)
    touched(recency, [2], 2.0)
    touched(recency, [3], 3.0)
    assert touched(recency, [1, 7], 4.0) == ([7], [2])


def test_a_prompt_beyond_the_capacity_keeps_its_first_blocks() -> None:
    recency = Recency(3)
    touched(recency, [5, 6], 1.0)
    assert touched(recency, [1, 2, 3, 7, 8, 4], 2.0) == ([1, 2, 3], [6, 5])
    assert len(recency) == recency.match(packed(1, 2, 3)) == 3


def test_blocks_after_a_gap_are_still_held() -> None:
    recency = Recency(9)
    touched(recency, [1, 2, 3, 4, 5, 6], 1.0)
    assert recency.drop(packed(1, 2, 3, 4), packed(2, 3)) == 2
    assert stamped(recency, [1, 2, 3, 4, 5, 6]) == [(0, 1.0), (3, 1.0), (4, 1.0), (5, 1.0)]
    assert touched(recency, [1, 2, 3, 4, 5], 2.0) == ([2, 3], [])
    assert drained(recency) == [6, 5, 4, 3, 2, 1]


def test_anonymous_blocks_take_room_and_are_evicted_silently() -> None:
    recency = Recency(5)
    touched(recency, [1, 2], 1.0)
    assert recency.add_anonymous(3, 2.0) == b""
    assert len(recency) == 5
    assert recency.add_anonymous(1, 3.0) == packed(2)
    assert touched(recency, [8, 9], 4.0) == ([8, 9], [1])
    assert recency.oldest == 2.0
    assert recency.add_anonymous(10**18, 5.0) == packed(9, 8)
    assert len(recency) == 5
    assert recency.resize(1) == b""
    assert len(recency) == 1


def test_an_empty_list_holds_nothing() -> None:
    recency = Recency(capacity=1)
    assert len(recency) == 0
    assert recency.oldest is None
    assert recency.capacity == 1
    assert recency.touch(b"", 1.0) == (b"", b"")
    assert recency.add_anonymous(0, 1.0) == b""
    assert recency.drop(packed(1), packed(1)) == recency.match(packed(1)) == recency.match(b"") == 0
    assert stamped(recency, [1]) == []
    assert recency.resize(9) == b""
    assert recency.bytes < 256


def test_stamps_keep_their_precision() -> None:
    recency = Recency(2)
    touched(recency, [1], 1_763_189_999.123456)
    assert recency.oldest == 1_763_189_999.123456
    assert stamped(recency, [1]) == [(0, 1_763_189_999.123456)]


def test_hashes_may_be_in_any_buffer() -> None:
    recency = Recency(9)
    for kind in (bytes, bytearray, memoryview):
        assert recency.touch(kind(packed(1, 2)), 1)[1] == b""
    assert recency.match(array("Q", [1, 2, 3])) == 2
    assert recency.drop(array("Q", [1, 2]), memoryview(packed(1, 2))[8:]) == 1


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda r: Recency(), TypeError),  # type: ignore[call-arg]
        (lambda r: Recency(0), ValueError),
        (lambda r: Recency(-1), ValueError),
        (lambda r: Recency(2**31), ValueError),
        (lambda r: Recency(2**70), ValueError),
        (lambda r: Recency(1.5), TypeError),  # type: ignore[arg-type]
        (lambda r: r.touch(b"1234567", 1.0), ValueError),
        (lambda r: r.touch(array("H", [1, 2, 3, 4]), 1.0), ValueError),
        (lambda r: r.touch("12345678", 1.0), TypeError),
        (lambda r: r.touch([1], 1.0), TypeError),
        (lambda r: r.touch(memoryview(packed(7, 8, 9, 10)).cast("Q")[::2], 1.0), ValueError),
        (lambda r: r.touch(packed(7)), TypeError),
        (lambda r: r.touch(packed(7), "1"), TypeError),
        (lambda r: r.touch(packed(7), None), TypeError),
        (lambda r: r.touch(packed(7), float("nan")), ValueError),
        (lambda r: r.touch(packed(7), float("inf")), ValueError),
        (lambda r: r.touch(packed(7), 10**400), ValueError),
        (lambda r: r.add_anonymous(-1, 1.0), ValueError),
        (lambda r: r.add_anonymous(2**64, 1.0), ValueError),
        (lambda r: r.add_anonymous(1.0, 1.0), TypeError),
        (lambda r: r.add_anonymous(1, float("nan")), ValueError),
        (lambda r: r.add_anonymous(1), TypeError),
        (lambda r: r.drop(b"1", b""), ValueError),
        (lambda r: r.drop(packed(1), b"1"), ValueError),
        (lambda r: r.drop(packed(1)), TypeError),
        (lambda r: r.drop(packed(1), None), TypeError),
        (lambda r: r.match(b"123456789"), ValueError),
        (lambda r: r.match(1), TypeError),
        (lambda r: r.last_uses(b"1", 1, 1.0), ValueError),
        (lambda r: r.last_uses(packed(1), 1), TypeError),
        (lambda r: r.last_uses(packed(1), "1", 1.0), TypeError),
        (lambda r: r.last_uses(packed(1), 1, None), TypeError),
        (lambda r: r.last_uses(1, 1, 1.0), TypeError),
        (lambda r: r.resize(0), ValueError),
        (lambda r: r.resize("3"), TypeError),
    ],
)
def test_invalid_input_changes_nothing(call: Callable[[Any], object], error: type[Exception]) -> None:
    recency = Recency(3)
    touched(recency, [1, 2, 3], 5.0)
    with pytest.raises(error):
        call(recency)
    assert recency.capacity == len(recency) == 3
    assert recency.oldest == 5.0
    assert drained(recency) == [3, 2, 1]


@pytest.mark.parametrize(("blocks", "most"), [(500, 9), (16, 14), (2, 38), (1, 48)])
def test_memory_per_block_by_blocks_per_prompt(blocks: int, most: int) -> None:
    recency = Recency(100_000)
    assert recency.bytes < 256
    source = random.Random(1)
    for n in range(200_000 // blocks):
        recency.touch(source.randbytes(blocks * 8), n)
    assert len(recency) == 100_000
    assert recency.bytes <= most * 100_000 + 30_000
    recency.resize(10_000)
    assert recency.bytes <= most * 10_000 + 60_000
    recency.clear()
    assert recency.bytes < 256


def test_a_failed_allocation_changes_nothing(failing: Callable[[int, Callable[..., object]], object]) -> None:
    """Each allocation of a call fails once. The call then does either everything or nothing."""
    prompts = [packed(*range(900), *range(2000, 2600)), packed(*range(5000)), packed(*range(7000, 7100))]
    calls: list[Callable[[Recency], object]] = [
        *(lambda recency, prompt=prompt: recency.touch(prompt, 2.0) for prompt in prompts),
        lambda recency: recency.add_anonymous(700, 2.0),
        lambda recency: recency.resize(90),
    ]

    def filled() -> Recency:
        recency = Recency(1500)
        for first in range(0, 400, 4):
            touched(recency, [*range(10_000 + first, 10_004 + first)], 0.5)
        touched(recency, [*range(1000)], 1.0)
        recency.add_anonymous(300, 1.0)
        return recency

    for call in calls:
        before, after = filled(), filled()
        result = call(after)
        states = [(len(r), r.capacity, r.oldest, *drained(r)) for r in (before, after)]
        refused = 0
        for number in range(200):
            recency = filled()
            done = failing(number, lambda recency=recency, call=call: call(recency))
            refused += done is None
            assert done in (None, result)
            assert (len(recency), recency.capacity, recency.oldest, *drained(recency)) == states[done is not None]
        assert refused


def test_no_leaks_and_bytes_match_the_allocated_memory() -> None:
    source = random.Random(2)

    def use_once() -> Recency:
        recency = Recency(5000)
        for n in range(20):
            recency.touch(source.randbytes(8 * 900), n)
            recency.add_anonymous(10, n)
            with pytest.raises(ValueError):
                recency.touch(b"1", n)
        some = source.randbytes(800)
        recency.touch(some, 20)
        recency.drop(some, some[80:240])
        recency.resize(3000)
        return recency

    tracemalloc.start()
    try:
        use_once()
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(20):
            use_once()
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 3_000
        recency = use_once()
        gc.collect()
        traced = tracemalloc.get_traced_memory()[0] - before
        assert abs(traced - recency.bytes) < 5_000 < recency.bytes
    finally:
        tracemalloc.stop()
