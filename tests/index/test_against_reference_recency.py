"""The compiled recency list against an OrderedDict."""

from __future__ import annotations

import random
from math import isnan

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from reference_recency import ReferenceRecency, Tree, drained, packed, stamped, touched, unpacked

from warmroute._kernel import Recency

few_blocks = st.lists(st.integers(0, 1), max_size=12)
stamps = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-5, 2**40)
capacities = st.integers(1, 10)


class SameAsReference(RuleBasedStateMachine):
    """Few blocks and little room: evictions, diverging prompts and prompts beyond the capacity happen often."""

    @initialize(capacity=capacities, high=st.booleans())
    def begin(self, capacity: int, high: bool) -> None:
        self.recency, self.reference = Recency(capacity), ReferenceRecency(capacity)
        self.tree = Tree(lambda number: 2**64 - 1 - number if high else number)
        self.known: list[list[int]] = [[]]

    def prompt(self, blocks: list[int]) -> list[int]:
        self.known.append(self.tree.prompt(blocks))
        return self.known[-1]

    @rule(blocks=few_blocks, stamp=stamps)
    def touch(self, blocks: list[int], stamp: float) -> None:
        hashes = self.prompt(blocks)
        assert touched(self.recency, hashes, stamp) == self.reference.touch(hashes, stamp)

    @rule(which=st.integers(0, 1000), size=st.integers(0, 12), stamp=stamps)
    def touch_again(self, which: int, size: int, stamp: float) -> None:
        hashes = self.known[which % len(self.known)][:size]
        assert touched(self.recency, hashes, stamp) == self.reference.touch(hashes, stamp)

    @rule(n=st.integers(0, 4) | st.integers(0, 2**62), stamp=stamps)
    def add_anonymous(self, n: int, stamp: float) -> None:
        assert unpacked(self.recency.add_anonymous(n, stamp)) == self.reference.add_anonymous(n, stamp)

    @rule(which=st.integers(0, 1000), dropped=st.lists(st.booleans(), min_size=12, max_size=12))
    def drop(self, which: int, dropped: list[bool]) -> None:
        hashes = self.known[which % len(self.known)]
        some = [hash for hash, goes in zip(hashes, dropped, strict=False) if goes]
        assert self.recency.drop(packed(*hashes), packed(*some)) == self.reference.drop(hashes, some)

    @rule(capacity=capacities)
    def resize(self, capacity: int) -> None:
        assert unpacked(self.recency.resize(capacity)) == self.reference.resize(capacity)

    @rule()
    def clear(self) -> None:
        self.recency.clear()
        self.reference.stamps.clear()

    @rule(blocks=few_blocks)
    def held(self, blocks: list[int]) -> None:
        hashes = self.prompt(blocks)
        assert self.recency.match(packed(*hashes)) == self.reference.match(hashes)

    @rule(which=st.integers(0, 1000), depth=st.integers(0, 13), latest=stamps)
    def uses(self, which: int, depth: int, latest: float) -> None:
        hashes = self.known[which % len(self.known)]
        found = self.reference.stamps_of(hashes)
        wanted = [(at, stamp) for at, stamp in found if at < depth and stamp <= latest]
        assert stamped(self.recency, hashes, depth, latest) == wanted

    @invariant()
    def same_contents(self) -> None:
        if not hasattr(self, "recency"):
            return
        assert len(self.recency) == len(self.reference.stamps) <= self.recency.capacity == self.reference.capacity
        assert self.recency.oldest == self.reference.oldest
        free, oldest = self.recency.room
        assert free == self.reference.capacity - len(self.reference.stamps)
        assert oldest == self.reference.oldest or (self.reference.oldest is None and isnan(oldest))
        for hashes in self.known[-8:]:
            assert stamped(self.recency, hashes) == self.reference.stamps_of(hashes)

    def teardown(self) -> None:
        if hasattr(self, "recency"):
            assert drained(self.recency) == self.reference.in_order()


TestSameAsReference = SameAsReference.TestCase
TestSameAsReference.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


@given(st.integers(0, 2**32), st.sampled_from([700, 3000, 12_000]), st.sampled_from([1, 3, 40]))
@settings(max_examples=20, deadline=None)
def test_many_blocks_in_any_order_of_calls(seed: int, capacity: int, piece: int) -> None:
    """Large enough for chains to split and join, for entries to move, and for segments to be added and freed:
    conversations of a few pieces each, which diverge at the end of a piece or within it."""
    source = random.Random(seed)
    tree = Tree(lambda _: source.getrandbits(64))
    recency, reference = Recency(capacity), ReferenceRecency(capacity)
    known: list[list[int]] = [[]]
    for stamp in range(60):
        for _ in range(max(1, capacity // piece // 20)):
            blocks = source.choice(known)
            blocks = blocks[: source.randrange(len(blocks) + 1)] if source.random() < 0.5 else blocks
            blocks = [*blocks, *source.choices(range(1 << 30), k=source.randrange(2 * piece))][-4 * piece :]
            known.append(blocks)
            some = tree.prompt(blocks)
            assert touched(recency, some, stamp) == reference.touch(some, stamp)
        known = known[-200:]
        some = tree.prompt(source.choice(known))
        action = source.random()
        if action < 0.2:
            n = source.choice([1, 5, 200])
            assert unpacked(recency.add_anonymous(n, stamp)) == reference.add_anonymous(n, stamp)
        elif action < 0.5:
            gone = some[source.randrange(len(some) + 1) :]
            assert recency.drop(packed(*some), packed(*gone)) == reference.drop(some, gone)
        elif action < 0.6:
            gone = [hash for hash in some if source.random() < 0.5]
            assert recency.drop(packed(*some), packed(*gone)) == reference.drop(some, gone)
        elif action < 0.75:
            room = source.randrange(1, 2 * capacity)
            assert unpacked(recency.resize(room)) == reference.resize(room)
        elif action < 0.77:
            recency.clear()
            reference.stamps.clear()
        assert len(recency) == len(reference.stamps)
        assert recency.oldest == reference.oldest
        assert recency.match(packed(*some)) == reference.match(some)
        assert recency.bytes <= 80_000 + 48 * len(recency)
    for blocks in known[::17]:
        assert stamped(recency, tree.prompt(blocks)) == reference.stamps_of(tree.prompt(blocks))
    assert drained(recency) == reference.in_order()
