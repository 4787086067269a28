"""The compiled order of use against an OrderedDict, and what it promises about memory."""

from __future__ import annotations

import gc
import random
import struct
import tracemalloc
from array import array
from collections import OrderedDict
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from warmroute.index import Recency


def packed(*hashes):
    return struct.pack(f"={len(hashes)}Q", *hashes)


def unpacked(hashes):
    return list(struct.unpack(f"={len(hashes) // 8}Q", hashes))


class PlainRecency:
    """The oldest first. A block without a name has a key that no hash is equal to."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.stamps = OrderedDict()
        self.nameless = (f"nameless {n}" for n in count())

    def touch(self, hashes, stamp):
        kept = list(dict.fromkeys(hashes))[: self.capacity]
        new = [hash for hash in kept if hash not in self.stamps]
        for hash in reversed(kept):
            self.stamps[hash] = stamp
            self.stamps.move_to_end(hash)
        return new, self.evict()

    def push(self, n, stamp):
        for _ in range(min(n, self.capacity)):
            self.stamps[next(self.nameless)] = stamp
        return self.evict()

    def drop(self, hashes):
        return sum(self.stamps.pop(hash, None) is not None for hash in hashes)

    def resize(self, capacity):
        self.capacity = capacity
        return self.evict()

    def held(self, hashes):
        return next((at for at, hash in enumerate(hashes) if hash not in self.stamps), len(hashes))

    def evict(self):
        gone = [self.stamps.popitem(last=False)[0] for _ in range(len(self.stamps) - self.capacity)]
        return [key for key in gone if isinstance(key, int)]

    @property
    def oldest(self):
        return next(iter(self.stamps.values()), None)

    def in_order(self):
        return [key for key in self.stamps if isinstance(key, int)]


def touched(recency, hashes, stamp):
    new, evicted = recency.touch(packed(*hashes), stamp)
    return unpacked(new), unpacked(evicted)


def drained(recency):
    """All hashes it holds, the oldest first; it holds none afterwards."""
    return unpacked(recency.push(recency.capacity, 0))


few_hashes = st.lists(st.integers(0, 11) | st.sampled_from([2**64 - 1, 2**63]), max_size=12)
stamps = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-5, 2**40)
capacities = st.integers(1, 10)


class Equal(RuleBasedStateMachine):
    """Few hashes and little room: so that duplicates, evictions and prompts beyond the capacity are the rule."""

    @initialize(capacity=capacities)
    def begin(self, capacity):
        self.recency, self.plain = Recency(capacity), PlainRecency(capacity)

    @rule(hashes=few_hashes, stamp=stamps)
    def touch(self, hashes, stamp):
        assert touched(self.recency, hashes, stamp) == self.plain.touch(hashes, stamp)

    @rule(n=st.integers(0, 4) | st.integers(0, 2**62), stamp=stamps)
    def push(self, n, stamp):
        assert unpacked(self.recency.push(n, stamp)) == self.plain.push(n, stamp)

    @rule(hashes=few_hashes)
    def drop(self, hashes):
        assert self.recency.drop(packed(*hashes)) == self.plain.drop(hashes)

    @rule(capacity=capacities)
    def resize(self, capacity):
        assert unpacked(self.recency.resize(capacity)) == self.plain.resize(capacity)

    @rule()
    def clear(self):
        self.recency.clear()
        self.plain.stamps.clear()

    @rule(hashes=few_hashes)
    def held(self, hashes):
        assert self.recency.held(packed(*hashes)) == self.plain.held(hashes)

    @invariant()
    def holds_the_same(self):
        if not hasattr(self, "recency"):
            return
        assert len(self.recency) == len(self.plain.stamps) <= self.recency.capacity == self.plain.capacity
        assert self.recency.oldest == self.plain.oldest
        for hash in [*range(12), 2**64 - 1, 2**63]:
            assert self.recency.stamp_of(packed(hash)) == self.plain.stamps.get(hash)

    def teardown(self):
        if hasattr(self, "recency"):
            assert drained(self.recency) == self.plain.in_order()


TestEqual = Equal.TestCase
TestEqual.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


@given(st.integers(0, 2**32), st.sampled_from([700, 3000, 12_000]), st.booleans())
@settings(max_examples=20, deadline=None)
def test_many_blocks_in_any_order_of_calls(seed, capacity, in_a_row):
    """Large enough for chains to split and join, for entries to move, and for segments to come and go."""
    source = random.Random(seed)
    known = [n if in_a_row else source.getrandbits(64) for n in range(2 * capacity)]
    recency, plain = Recency(capacity), PlainRecency(capacity)
    for stamp in range(60):
        doing, size = source.random(), source.choice([3, 100, capacity // 3, capacity])
        start = source.randrange(len(known))
        some = known[start : start + size] if source.random() < 0.7 else source.choices(known, k=size)
        if doing < 0.6:
            assert touched(recency, some, stamp) == plain.touch(some, stamp)
        elif doing < 0.75:
            n = source.choice([1, 5, 200])
            assert unpacked(recency.push(n, stamp)) == plain.push(n, stamp)
        elif doing < 0.9:
            assert recency.drop(packed(*some)) == plain.drop(some)
        elif doing < 0.98:
            room = source.randrange(1, 2 * capacity)
            assert unpacked(recency.resize(room)) == plain.resize(room)
        else:
            recency.clear()
            plain.stamps.clear()
        assert len(recency) == len(plain.stamps)
        assert recency.oldest == plain.oldest
        assert recency.held(packed(*some)) == plain.held(some)
        assert recency.bytes <= 80_000 + 32 * len(recency)
    for hash in known[::17]:
        assert recency.stamp_of(packed(hash)) == plain.stamps.get(hash)
    assert drained(recency) == plain.in_order()


def test_the_tail_of_a_prompt_goes_before_its_beginning():
    recency = Recency(4)
    assert touched(recency, [1, 2, 3, 4], 1.0) == ([1, 2, 3, 4], [])
    assert touched(recency, [9], 2.0) == ([9], [4])
    assert touched(recency, [1, 2, 5], 3.0) == ([5], [3])
    assert drained(recency) == [9, 5, 2, 1]


def test_what_a_prompt_shares_with_the_oldest_is_not_evicted_for_it():
    recency = Recency(3)
    touched(recency, [1], 1.0)
    touched(recency, [2], 2.0)
    touched(recency, [3], 3.0)
    assert touched(recency, [7, 1], 4.0) == ([7], [2])


def test_of_a_prompt_beyond_the_capacity_the_beginning_is_kept():
    recency = Recency(3)
    touched(recency, [5, 6], 1.0)
    assert touched(recency, [1, 1, 2, 1, 3, 5, 6, 4], 2.0) == ([1, 2, 3], [6, 5])
    assert len(recency) == recency.held(packed(1, 2, 3)) == 3


def test_blocks_without_names_take_room_and_go_unsaid():
    recency = Recency(5)
    touched(recency, [1, 2], 1.0)
    assert recency.push(3, 2.0) == b""
    assert len(recency) == 5
    assert recency.push(1, 3.0) == packed(2)
    assert touched(recency, [8, 9], 4.0) == ([8, 9], [1])
    assert recency.oldest == 2.0
    assert recency.push(10**18, 5.0) == packed(9, 8)
    assert len(recency) == 5
    assert recency.resize(1) == b""
    assert len(recency) == 1


def test_an_empty_one_says_so():
    recency = Recency(capacity=1)
    assert len(recency) == 0
    assert recency.oldest is None
    assert recency.capacity == 1
    assert recency.touch(b"", 1.0) == (b"", b"")
    assert recency.push(0, 1.0) == b""
    assert recency.drop(packed(1)) == recency.held(packed(1)) == recency.held(b"") == 0
    assert recency.stamp_of(packed(1)) is None
    assert recency.resize(9) == b""
    assert recency.bytes < 256


def test_a_stamp_comes_back_as_it_went_in():
    recency = Recency(2)
    touched(recency, [1], 1_763_189_999.123456)
    assert recency.stamp_of(packed(1)) == recency.oldest == 1_763_189_999.123456


def test_hashes_come_in_any_buffer():
    recency = Recency(9)
    for kind in (bytes, bytearray, memoryview):
        assert recency.touch(kind(packed(1, 2)), 1)[1] == b""
    assert recency.held(array("Q", [1, 2, 3])) == 2
    assert recency.drop(memoryview(packed(1, 2, 3))[8:]) == 1


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda r: Recency(), TypeError),
        (lambda r: Recency(0), ValueError),
        (lambda r: Recency(-1), ValueError),
        (lambda r: Recency(2**31), ValueError),
        (lambda r: Recency(2**70), ValueError),
        (lambda r: Recency(1.5), TypeError),
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
        (lambda r: r.push(-1, 1.0), ValueError),
        (lambda r: r.push(2**64, 1.0), ValueError),
        (lambda r: r.push(1.0, 1.0), TypeError),
        (lambda r: r.push(1, float("nan")), ValueError),
        (lambda r: r.push(1), TypeError),
        (lambda r: r.drop(b"1"), ValueError),
        (lambda r: r.drop(None), TypeError),
        (lambda r: r.held(b"123456789"), ValueError),
        (lambda r: r.held(1), TypeError),
        (lambda r: r.stamp_of(b""), ValueError),
        (lambda r: r.stamp_of(packed(1, 2)), ValueError),
        (lambda r: r.stamp_of(1), TypeError),
        (lambda r: r.resize(0), ValueError),
        (lambda r: r.resize("3"), TypeError),
    ],
)
def test_wrong_input_changes_nothing(call, error):
    recency = Recency(3)
    touched(recency, [1, 2, 3], 5.0)
    with pytest.raises(error):
        call(recency)
    assert recency.capacity == len(recency) == 3
    assert recency.oldest == 5.0
    assert drained(recency) == [3, 2, 1]


def test_a_block_costs_at_most_32_bytes():
    recency = Recency(1_000_000)
    assert recency.bytes < 256
    source = random.Random(1)
    for n in range(2000):
        recency.touch(source.randbytes(500 * 8), n)
        if n in (200, 900):
            assert recency.bytes <= 32 * len(recency)
    assert len(recency) == 1_000_000
    assert recency.bytes <= 32 * 1_000_000
    recency.resize(10_000)
    assert recency.bytes <= 32 * 10_000 + 60_000
    recency.clear()
    assert recency.bytes < 256


def test_without_memory_it_stays_as_it_was():
    """Each allocation of a call fails once. A result that had to be cut is lost where that fails, and nothing else."""
    testcapi = pytest.importorskip("_testcapi")
    prompts = [packed(*range(900, 2400)), packed(*range(900, 1200), *range(1000, 1900)), packed(*range(5000))]
    calls = [
        *(lambda recency, prompt=prompt: recency.touch(prompt, 2.0) for prompt in prompts),
        lambda recency: recency.push(700, 2.0),
        lambda recency: recency.resize(90),
        lambda recency: recency.drop(prompts[0]),
    ]

    def filled():
        recency = Recency(1500)
        touched(recency, range(1000), 1.0)
        recency.push(300, 1.0)
        return recency

    for call in calls:
        before, after = filled(), filled()
        call(after)
        allowed = {(len(r), r.capacity, r.oldest, *drained(r)) for r in (before, after)}
        refused = 0
        for start in range(1, 200):
            recency = filled()
            gc.disable()
            testcapi.set_nomemory(start, start + 1)
            try:
                call(recency)
            except MemoryError:
                refused += 1
            finally:
                testcapi.remove_mem_hooks()
                gc.enable()
            assert (len(recency), recency.capacity, recency.oldest, *drained(recency)) in allowed
        assert refused or call is calls[-1]


def test_nothing_leaks_and_bytes_are_what_is_allocated():
    source = random.Random(2)

    def a_life():
        recency = Recency(5000)
        for n in range(20):
            recency.touch(source.randbytes(8 * 900), n)
            recency.push(10, n)
            with pytest.raises(ValueError):
                recency.touch(b"1", n)
        recency.drop(source.randbytes(800))
        recency.resize(3000)
        return recency

    tracemalloc.start()
    try:
        a_life()
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(20):
            a_life()
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 3_000
        recency = a_life()
        gc.collect()
        traced = tracemalloc.get_traced_memory()[0] - before
        assert abs(traced - recency.bytes) < 5_000 < recency.bytes
    finally:
        tracemalloc.stop()
