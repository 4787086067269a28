"""Rendezvous hashing: the kernel equals plain Python, and a node that joins or leaves moves only its share."""

from __future__ import annotations

from array import array
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmroute._kernel import key_hash, rendezvous_home, rendezvous_order

MASK = (1 << 64) - 1
WORDS = st.integers(0, MASK)


def mix(h: int) -> int:
    """Murmur3's 64-bit finalizer."""
    h ^= h >> 33
    h = h * 0xFF51AFD7ED558CCD & MASK
    h ^= h >> 33
    h = h * 0xC4CEB9FE1A85EC53 & MASK
    return h ^ h >> 33


def reference_key_hash(key: bytes) -> int:
    h = 0xCBF29CE484222325
    for byte in key:
        h = (h ^ byte) * 0x100000001B3 & MASK
    return mix(h)


def reference_order(hashed: int, seeds: list[int]) -> list[int]:
    return sorted(range(len(seeds)), key=lambda at: (-mix(hashed ^ seeds[at]), at))


@given(st.binary(max_size=600))
def test_the_key_hash_equals_the_reference(key: bytes) -> None:
    assert key_hash(key) == reference_key_hash(key)


def test_the_key_hash_is_stable_across_versions() -> None:
    """Another value would move every conversation at an upgrade."""
    assert [key_hash(key) for key in (b"", b"a", b"warmroute")] == [
        reference_key_hash(key) for key in (b"", b"a", b"warmroute")
    ]
    assert key_hash(b"") == 0xEFD01F60BA992926
    assert key_hash(bytearray(b"a")) == key_hash(memoryview(b"a")) == key_hash(b"a")  # type: ignore[arg-type]


@given(WORDS, st.lists(WORDS, min_size=1, max_size=40))
def test_home_and_order_equal_the_reference(hashed: int, seeds: list[int]) -> None:
    packed = array("Q", seeds)
    assert rendezvous_order(hashed, packed) == reference_order(hashed, seeds)
    assert rendezvous_home(hashed, packed) == reference_order(hashed, seeds)[0]


@given(WORDS, st.lists(WORDS, min_size=2, max_size=20, unique=True), st.data())
def test_a_node_that_leaves_moves_only_its_own_keys(hashed: int, seeds: list[int], data: st.DataObject) -> None:
    gone = data.draw(st.integers(0, len(seeds) - 1))
    before = [seeds[at] for at in rendezvous_order(hashed, array("Q", seeds))]
    left = seeds[:gone] + seeds[gone + 1 :]
    after = [left[at] for at in rendezvous_order(hashed, array("Q", left))]
    assert after == [seed for seed in before if seed != seeds[gone]]


def test_a_node_that_joins_takes_only_its_share() -> None:
    seeds = [key_hash(b"node%d" % number) for number in range(9)]
    keys = [key_hash(b"key%d" % number) for number in range(20_000)]
    before = [rendezvous_home(key, array("Q", seeds)) for key in keys]
    seeds.append(key_hash(b"node9"))
    after = [rendezvous_home(key, array("Q", seeds)) for key in keys]
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {9}
    assert 0.08 < len(moved) / len(keys) < 0.12


def test_keys_are_spread_evenly() -> None:
    seeds = array("Q", [key_hash(b"http://10.0.0.%d:8000" % number) for number in range(10)])
    homes = Counter(rendezvous_home(key_hash(b"conversation %d" % number), seeds) for number in range(20_000))
    assert set(homes) == set(range(10))
    assert max(homes.values()) < 1.15 * 2000 and min(homes.values()) > 0.85 * 2000


@pytest.mark.parametrize("seeds", [b"", b"1234567", b"123456789"])
def test_seeds_of_a_wrong_length_raise_an_error(seeds: bytes) -> None:
    for call in (rendezvous_home, rendezvous_order):
        with pytest.raises(ValueError):
            call(1, seeds)  # type: ignore[arg-type]


def test_a_hash_out_of_range_raises_an_error() -> None:
    for wrong in (-1, 1 << 64):
        with pytest.raises(OverflowError):
            rendezvous_home(wrong, array("Q", [1]))
    with pytest.raises(TypeError):
        rendezvous_home("1", array("Q", [1]))  # type: ignore[arg-type]
