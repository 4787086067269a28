"""The compiled index against the reference index, over random sequences of operations."""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Iterable, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from reference_index import ReferenceIndex, hash_blocks

from warmroute._kernel import EVICTED_PARENT, UNKNOWN_PARENT, BlockIndex, Recency
from warmroute.core.node_cache import EngineHash, Tier

BLOCK = 2
tiers = st.sampled_from([Tier.GPU, Tier.GPU, Tier.GPU, *Tier])
few_tokens = st.integers(1, 6).flatmap(lambda n: st.lists(st.integers(0, 1), min_size=n * BLOCK, max_size=n * BLOCK))
engine_hashes: st.SearchStrategy[EngineHash] = st.integers(-8, 12) | st.sampled_from(
    [b"a" * 32, b"b" * 32, 2**64 - 1, 2**63]
)
own_hashes = st.lists(st.integers(0, 9), max_size=8)
which = st.integers(0, 50)


def in_order(rows: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return sorted(rows)


def packed(hashes: Sequence[int]) -> bytes:
    return struct.pack(f"={len(hashes)}Q", *hashes)


def unpacked(hashes: bytes) -> list[int]:
    return list(struct.unpack(f"={len(hashes) // 8}Q", hashes))


class SameAsReference(RuleBasedStateMachine):
    """Few holders, few tokens, few hashes: duplicates, aliases, conflicts and shared blocks happen often."""

    budget_bytes = 1 << 24

    @initialize(extra_holders=st.sampled_from([0, 2, 5]))
    def begin(self, extra_holders: int) -> None:
        self.index, self.reference = BlockIndex(self.budget_bytes), ReferenceIndex()
        self.open: list[int] = []
        self.lru_holders: dict[int, tuple[Recency, Recency]] = {}
        """Holder → its recency list, and that of the reference."""
        for _ in range(2 + extra_holders):
            self.add_holder()

    @rule()
    def add_holder(self) -> None:
        if len(self.open) < 12:
            holder = self.index.add_holder()
            assert holder not in self.open
            self.open.append(holder)
            self.reference.add_holder(holder)

    @precondition(lambda self: len(self.open) > 1)
    @rule(at=which)
    def remove_holder(self, at: int) -> None:
        holder = self.open.pop(at % len(self.open))
        self.index.remove_holder(holder)
        self.reference.remove_holder(holder)

    @rule(at=which)
    def clear(self, at: int) -> None:
        holder = self.open[at % len(self.open)]
        self.index.clear(holder)
        self.reference.clear(holder)

    @rule(
        at=which,
        namespace=st.integers(0, 1),
        parent=st.none() | engine_hashes,
        tokens=few_tokens,
        tier=tiers,
        salted=st.booleans(),
        data=st.data(),
    )
    def store(
        self,
        at: int,
        namespace: int,
        parent: EngineHash | None,
        tokens: list[int],
        tier: Tier,
        salted: bool,
        data: st.DataObject,
    ) -> None:
        holder = self.open[at % len(self.open)]
        n = len(tokens) // BLOCK
        hashes = data.draw(st.lists(engine_hashes, min_size=n, max_size=n))
        extra: list[bytes | None] | None = [b"salt", *[None] * (n - 1)] if salted else None
        arguments = (holder, namespace, parent, hashes, tokens, BLOCK, tier, extra)
        assert self.index.store(*arguments) == self.reference.store(*arguments)

    @rule(at=which, hashes=st.lists(engine_hashes, max_size=5), tier=tiers)
    def store_known(self, at: int, hashes: list[EngineHash], tier: Tier) -> None:
        holder = self.open[at % len(self.open)]
        assert self.index.store_known(holder, hashes, tier) == self.reference.store_known(holder, hashes, tier)

    @rule(at=which, hashes=own_hashes, tier=tiers, named=st.booleans())
    def store_hashes(self, at: int, hashes: list[int], tier: Tier, named: bool) -> None:
        holder = self.open[at % len(self.open)]
        names = [hash + 3 for hash in hashes] if named else None
        assert self.index.store_hashes(holder, hashes, tier, names) == self.reference.store_hashes(
            holder, hashes, tier, names
        )

    @rule(hashes=own_hashes, tier=tiers)
    def store_chain_everywhere(self, hashes: list[int], tier: Tier) -> None:
        for holder in self.open:
            self.index.store_hashes(holder, hashes, tier)
            self.reference.store_hashes(holder, hashes, tier)

    @rule(at=which, hashes=st.lists(engine_hashes, max_size=8), tier=tiers)
    def remove(self, at: int, hashes: list[EngineHash], tier: Tier) -> None:
        holder = self.open[at % len(self.open)]
        assert self.index.remove(holder, hashes, tier) == self.reference.remove(holder, hashes, tier)

    @rule(at=which, hashes=own_hashes, tier=tiers)
    def remove_hashes(self, at: int, hashes: list[int], tier: Tier) -> None:
        holder = self.open[at % len(self.open)]
        assert self.index.remove_hashes(holder, hashes, tier) == self.reference.remove_hashes(holder, hashes, tier)

    @rule(capacity=st.integers(1, 9))
    def add_lru_holder(self, capacity: int) -> None:
        if len(self.lru_holders) < 4:
            recency, reference = Recency(capacity), Recency(capacity)
            holder = self.index.add_holder(recency)
            assert holder not in self.open and holder not in self.lru_holders
            self.reference.add_holder(holder, reference)
            self.lru_holders[holder] = (recency, reference)

    @precondition(lambda self: self.lru_holders)
    @rule(at=which)
    def remove_lru_holder(self, at: int) -> None:
        holder = list(self.lru_holders)[at % len(self.lru_holders)]
        del self.lru_holders[holder]
        self.index.remove_holder(holder)
        self.reference.remove_holder(holder)

    @precondition(lambda self: self.lru_holders)
    @rule(at=which, tokens=few_tokens, namespace=st.integers(0, 1), stamp=st.integers(0, 9))
    def keep(self, at: int, tokens: list[int], namespace: int, stamp: int) -> None:
        holder = list(self.lru_holders)[at % len(self.lru_holders)]
        hashes = hash_blocks(namespace, None, tokens, BLOCK)
        assert unpacked(self.index.touch(holder, packed(hashes), stamp)) == self.reference.touch(holder, hashes, stamp)

    @precondition(lambda self: self.lru_holders)
    @rule(at=which, capacity=st.integers(1, 9), answer=st.integers(0, 2))
    def change_a_recency_list(self, at: int, capacity: int, answer: int) -> None:
        holder = list(self.lru_holders)[at % len(self.lru_holders)]
        recency, reference = self.lru_holders[holder]
        for one, other in zip(
            (recency.add_anonymous(answer, 1.0), recency.resize(capacity)),
            (reference.add_anonymous(answer, 1.0), reference.resize(capacity)),
            strict=True,
        ):
            known = self.reference.remove_hashes(holder, unpacked(other), Tier.GPU)
            assert self.index.remove_hashes(holder, one, Tier.GPU) == known == len(one) // 8

    @precondition(lambda self: self.lru_holders)
    @rule(at=which, tokens=few_tokens, namespace=st.integers(0, 1), first=st.integers(0, 5))
    def undo_routed(self, at: int, tokens: list[int], namespace: int, first: int) -> None:
        holder = list(self.lru_holders)[at % len(self.lru_holders)]
        hashes = hash_blocks(namespace, None, tokens, BLOCK)
        for recency in self.lru_holders[holder]:
            recency.drop(packed(hashes), packed(hashes[first:]))
        known = self.reference.remove_hashes(holder, hashes[first:], Tier.GPU)
        assert self.index.remove_hashes(holder, hashes[first:], Tier.GPU) == known

    @rule(tokens=few_tokens, namespace=st.integers(0, 1))
    def match_a_prompt(self, tokens: list[int], namespace: int) -> None:
        hashes = hash_blocks(namespace, None, tokens, BLOCK)
        assert in_order(self.index.match(hashes)) == in_order(self.reference.match(hashes))

    @rule(hashes=own_hashes)
    def match(self, hashes: list[int]) -> None:
        assert in_order(self.index.match(hashes)) == in_order(self.reference.match(hashes))

    @rule(pairs=st.integers(0, 3))
    def sweep(self, pairs: int) -> None:
        self.index.sweep(pairs)

    @invariant()
    def same_holdings(self) -> None:
        for holder in (*self.open, *self.lru_holders):
            assert Counter(self.index.holdings(holder)) == Counter(self.reference.holdings(holder))
            assert self.index.pair_count(holder) == len(self.reference.holdings(holder))
        stats = self.index.stats()
        assert stats["pairs"] == sum(map(self.index.pair_count, (*self.open, *self.lru_holders)))
        assert stats["bytes"] <= stats["charged_bytes"] <= stats["budget_bytes"]
        assert stats["evicted"] == stats["refused"] == 0
        if not stats["unswept_pairs"]:
            holders = (*self.open, *self.lru_holders)
            blocks = {row[0] for holder in holders for row in self.reference.holdings(holder)}
            assert stats["blocks"] == len(blocks)

    def teardown(self) -> None:
        if not hasattr(self, "index"):
            return
        for holder in (*self.open, *self.lru_holders):
            self.index.remove_holder(holder)
        self.index.sweep(1 << 40)
        stats = self.index.stats()
        assert stats["pairs"] == stats["blocks"] == stats["sets"] == stats["aliases"] == stats["unswept_pairs"] == 0
        assert stats["bytes"] == stats["charged_bytes"]


TestSameAsReference = SameAsReference.TestCase
TestSameAsReference.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


@given(st.integers(0, 2**32), st.integers(2, 40), st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_many_blocks_on_many_holders(seed: int, n_holders: int, turns: int) -> None:
    """Large enough for pages to split and merge, and for sets to be shared and split."""
    source = random.Random(seed)
    index, reference = BlockIndex(1 << 26), ReferenceIndex()
    holders = [index.add_holder() for _ in range(n_holders)]
    for holder in holders:
        reference.add_holder(holder)
    prompts = [[source.getrandbits(64) for _ in range(source.randrange(1, 120))] for _ in range(6)]
    for _ in range(turns):
        for _ in range(40):
            holder, prompt = source.choice(holders), source.choice(prompts)
            part = prompt[: source.randrange(len(prompt) + 1)]
            tier = source.choice([Tier.GPU, Tier.GPU, Tier.CPU, Tier.REMOTE])
            for side in (index, reference):
                side.store_hashes(holder, part, tier, [hash ^ holder for hash in part])
        for _ in range(20):
            holder, prompt = source.choice(holders), source.choice(prompts)
            gone = source.sample(prompt, source.randrange(len(prompt) + 1))
            tier = source.choice([Tier.GPU, Tier.CPU])
            names = [hash ^ holder for hash in gone]
            assert index.remove(holder, names, tier) == reference.remove(holder, names, tier)
        cleared = source.choice(holders)
        index.clear(cleared)
        reference.clear(cleared)
        for prompt in prompts:
            assert sorted(index.match(prompt)) == sorted(reference.match(prompt))
    for holder in holders:
        assert Counter(index.holdings(holder)) == Counter(reference.holdings(holder))


@given(st.integers(0, 2**32), st.integers(65_536, 300_000))
@settings(max_examples=25, deadline=None)
def test_at_the_budget_blocks_are_evicted_and_never_invented(seed: int, budget_bytes: int) -> None:
    """A small index holds a subset of what an unbounded one holds, and its bytes stay within the budget."""
    source = random.Random(seed)
    index, reference = BlockIndex(budget_bytes), ReferenceIndex()
    holders = [index.add_holder() for _ in range(source.randrange(1, 9))]
    for holder in holders:
        reference.add_holder(holder)
    prompts = [[source.getrandbits(64) for _ in range(60)] for _ in range(60)]
    for _ in range(200):
        holder, prompt = source.choice(holders), source.choice(prompts)
        names = [hash ^ holder for hash in prompt]
        tier = source.choice([Tier.GPU, Tier.GPU, Tier.CPU])
        action = source.random()
        if action < 0.7:
            reference.store_hashes(holder, prompt, tier, names)
            index.store_hashes(holder, prompt, tier, names)
        elif action < 0.95:
            for side in (index, reference):
                side.remove(holder, names[:20], tier)
        else:
            for side in (index, reference):
                side.clear(holder)
        stats = index.stats()
        assert stats["bytes"] <= stats["charged_bytes"] <= budget_bytes
        if action < 0.1:
            depths = {row[0]: row[1:] for row in reference.match(prompt)}
            for row in index.match(prompt):
                assert all(ours <= all_ for ours, all_ in zip(row[1:], depths[row[0]], strict=True))
    for holder in holders:
        known = {row[0]: row[1:] for row in reference.holdings(holder)}
        for block, *counts in index.holdings(holder):
            assert all(ours <= all_ for ours, all_ in zip(counts, known[block], strict=True))
    stats = index.stats()
    lost = stats["evicted"] + stats["refused"]
    assert lost or all(Counter(index.holdings(holder)) == Counter(reference.holdings(holder)) for holder in holders)
    for holder in holders:
        index.remove_holder(holder)
    index.sweep(1 << 40)
    assert index.stats()["blocks"] == index.stats()["sets"] == index.stats()["aliases"] == 0
    assert index.stats()["bytes"] == index.stats()["charged_bytes"]


def test_a_parent_evicted_at_the_budget_is_no_gap() -> None:
    index = BlockIndex(65_536)
    holder = index.add_holder()
    assert index.store(holder, 1, 5, [6], [1, 2], 2, Tier.GPU) == UNKNOWN_PARENT
    for n in range(10_000):
        index.store(holder, 1, None, [n], [n, n], 2, Tier.GPU)
    assert index.stats()["evicted"] > 0
    assert index.store(holder, 1, 1 << 60, [1 << 61], [1, 2], 2, Tier.GPU) == EVICTED_PARENT
    index.remove(holder, list(range(10_000)), Tier.GPU)
    assert index.pair_count(holder) == 0
    index.clear(holder)
    assert index.store(holder, 1, 1 << 60, [1 << 61], [1, 2], 2, Tier.GPU) == UNKNOWN_PARENT


def test_a_store_refused_half_way_leaves_nothing_behind() -> None:
    """The holders leave few bytes for blocks: the budgets cover every way to run out of them."""
    crowded = BlockIndex(1 << 24)
    for _ in range(2000):
        crowded.add_holder()
    refused = 0
    for spare_bytes in range(0, 3000, 16):
        index = BlockIndex(crowded.stats()["charged_bytes"] + spare_bytes)
        holders = [index.add_holder() for _ in range(2000)][:6]
        for holder in holders:
            for tier in (Tier.GPU, Tier.CPU):
                index.store_hashes(holder, [1, 2, 3], tier, [holder + 100, holder + 200, holder + 300])
        stats = index.stats()
        assert stats["charged_bytes"] <= stats["budget_bytes"]
        refused += stats["refused"]
        for block in (1, 2, 3):
            matched = {row[0] for row in index.match([block])}
            assert matched == {holder for holder in matched if block in [row[0] for row in index.holdings(holder)]}
        for holder in matched:
            index.remove_holder(holder)
        assert index.stats()["blocks"] == index.stats()["sets"] == 0
    assert refused > 100


@given(st.integers(0, 2**32), st.integers(1, 9), st.booleans())
@settings(max_examples=40, deadline=None)
def test_long_prompts_at_lru_holders(seed: int, n_holders: int, events: bool) -> None:
    """If few holders hold a long prompt, the index asks their recency lists how deep they hold it."""
    source = random.Random(seed)
    index, reference = BlockIndex(1 << 26), ReferenceIndex()
    lists = {}
    for _ in range(n_holders):
        pair = Recency(150), Recency(150)
        holder = index.add_holder(pair[0])
        reference.add_holder(holder, pair[1])
        lists[holder] = pair
    other = index.add_holder()
    reference.add_holder(other)
    trunk = [source.getrandbits(64) for _ in range(80)]
    prompts = [trunk[: source.randrange(81)] + [source.getrandbits(64) for _ in range(40)] for _ in range(5)]
    for stamp in range(30):
        holder, prompt = source.choice(list(lists)), source.choice(prompts)
        part = prompt[: source.randrange(1, len(prompt) + 1)]
        if source.random() < 0.7:
            assert unpacked(index.touch(holder, packed(part), stamp)) == reference.touch(holder, part, stamp)
        else:
            first = source.randrange(len(part))
            for recency in lists[holder]:
                recency.drop(packed(part), packed(part[first:]))
            for side in (index, reference):
                side.remove_hashes(holder, part[first:], Tier.GPU)
        if events and source.random() < 0.3:
            for side in (index, reference):
                side.store_hashes(other, part, Tier.CPU)
        for prompt in prompts:
            assert in_order(index.match(packed(prompt))) == in_order(reference.match(prompt))
