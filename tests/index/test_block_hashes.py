"""Block hashes: which blocks are equal, and how well the hash mixes its input."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest
import reference_index
from hypothesis import given
from hypothesis import strategies as st

from warmroute._kernel import engine_hash, hash_blocks
from warmroute.core.messages import namespace_seed

tokens_lists = st.lists(st.integers(0, 2**32 - 1), max_size=80)
extras = st.one_of(st.none(), st.binary(max_size=70))


def unpacked(hashes: bytes) -> list[int]:
    return array("Q", hashes).tolist()


@given(st.integers(0, 2**64 - 1), st.none() | st.integers(0, 2**64 - 1), tokens_lists, st.integers(1, 40), st.data())
def test_chain_matches_the_reference(
    namespace: int, parent: int | None, tokens: list[int], block_size: int, data: st.DataObject
) -> None:
    n = len(tokens) // block_size
    extra = data.draw(st.none() | st.lists(extras, min_size=n, max_size=n))
    assert unpacked(hash_blocks(namespace, parent, tokens, block_size, extra)) == reference_index.hash_blocks(
        namespace, parent, tokens, block_size, extra
    )


@given(st.binary(min_size=1, max_size=64) | st.integers(-(2**63), 2**64 - 1))
def test_engine_hash_matches_the_reference(hash: int | bytes) -> None:
    assert engine_hash(hash) == reference_index.engine_hash(hash)


def test_all_token_containers_give_the_same_hashes() -> None:
    source = random.Random(1)
    tokens = [source.randrange(200_000) for _ in range(70)]
    expected = hash_blocks(1, None, tokens, 16)
    assert len(expected) == 4 * 8
    as_bytes = array("I", tokens).tobytes()
    for given_ in (
        tuple(tokens),
        array("I", tokens),
        array("i", tokens),
        array("q", tokens),
        array("Q", tokens),
        memoryview(array("I", tokens)),
        as_bytes,
        bytearray(as_bytes),
        memoryview(b"x" + as_bytes)[1:],
    ):
        assert hash_blocks(1, None, given_, 16) == expected


def test_a_chain_continues_from_its_last_hash() -> None:
    tokens = list(range(100, 228))
    whole = hash_blocks(9, None, tokens, 16)
    first = hash_blocks(9, None, tokens[:48], 16)
    assert first + hash_blocks(9, unpacked(first)[-1], tokens[48:], 16) == whole


def test_a_block_depends_on_everything_before_it() -> None:
    source = random.Random(2)
    tokens = [source.randrange(50_000) for _ in range(64)]
    base_chain = unpacked(hash_blocks(1, None, tokens, 16))
    assert not set(base_chain) & set(unpacked(hash_blocks(2, None, tokens, 16)))
    assert not set(base_chain) & set(unpacked(hash_blocks(1, None, tokens[16:], 16)))
    changed = unpacked(hash_blocks(1, None, [*tokens[:20], tokens[20] ^ 1, *tokens[21:]], 16))
    assert changed[0] == base_chain[0] and not set(changed[1:]) & set(base_chain)
    salted = unpacked(hash_blocks(1, None, tokens, 16, [None, b"image", None, None]))
    assert salted[0] == base_chain[0] and not set(salted[1:]) & set(base_chain)
    assert hash_blocks(1, None, tokens, 16, [b"", None, b"", None]) == hash_blocks(1, None, tokens, 16)


@pytest.mark.parametrize("block_size", [1, 3, 16, 33])
def test_every_input_bit_flips_half_of_the_output_bits(block_size: int) -> None:
    source = random.Random(block_size)
    rounds = 300
    for position in range(0, 32 * block_size + 128, 7):
        flips = [0] * 64
        for _ in range(rounds):
            tokens = [source.getrandbits(32) for _ in range(block_size)]
            seeds = [source.getrandbits(64), source.getrandbits(64)]
            before = int.from_bytes(hash_blocks(seeds[0], seeds[1], tokens, block_size), "little")
            if position < 32 * block_size:
                tokens[position // 32] ^= 1 << position % 32
            else:
                seeds[(position - 32 * block_size) // 64] ^= 1 << position % 64
            moved = before ^ int.from_bytes(hash_blocks(seeds[0], seeds[1], tokens, block_size), "little")
            for bit in range(64):
                flips[bit] += moved >> bit & 1
        assert 0.47 < sum(flips) / (64 * rounds) < 0.53
        assert min(flips) / rounds > 0.3 and max(flips) / rounds < 0.7


@pytest.mark.parametrize("shift", [0, 16, 24])
def test_similar_blocks_collide_no_more_than_random_ones(shift: int) -> None:
    """Of 500,000 blocks that differ in a few bits of one token, about 29 should collide in 32 bits."""
    n = 500_000 if not shift else 1 << 8 if shift == 24 else 1 << 16
    blocks = array("I", [token for i in range(n) for token in (7, i << shift, 0, 0)])
    heads = [int.from_bytes(hash_blocks(3, None, blocks[4 * i : 4 * i + 4], 4), "little") for i in range(n)]
    assert len(set(heads)) == n
    if not shift:
        for cut in ([h >> 32 for h in heads], [h & 0xFFFFFFFF for h in heads]):
            assert 5 < n - len(set(cut)) < 80


def test_zero_blocks_of_different_lengths_differ() -> None:
    hashes = {hash_blocks(1, None, [0] * n, n) for n in range(1, 200)}
    assert len(hashes) == 199


def test_every_field_makes_another_namespace() -> None:
    seeds = {namespace_seed("m", "l", 16, "t")}
    for fields in (("m2", "l", 16, "t"), ("m", "", 16, "t"), ("m", "l", 32, "t"), ("m", "l", 16), ("ml", "", 16, "t")):
        seeds.add(namespace_seed(*fields))
    assert len(seeds) == 6


@pytest.mark.parametrize(
    "arguments",
    [
        (1, None, [1, -1], 1),
        (1, None, [1 << 32], 1),
        (1, None, [1 << 70], 1),
        (1, None, array("q", [-1]), 1),
        (1, None, array("i", [-1]), 1),
        (1, None, array("Q", [1 << 32]), 1),
        (1, None, array("H", [1, 2]), 1),
        (1, None, b"12345", 1),
        (1, None, array("d", [1.0]), 1),
        (1, None, array("f", [1.0]), 1),
        (1, None, [1], 0),
        (1, None, [1], -1),
        (1, None, [1], 1 << 40),
        (1 << 64, None, [1], 1),
        (1, 1 << 64, [1], 1),
        (-(1 << 63) - 1, None, [1], 1),
        (1, None, [1, 2], 1, [b"x"]),
    ],
)
def test_values_out_of_range_are_rejected(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError):
        hash_blocks(*arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        (1, None, [1.0], 1),
        (1, None, ["1"], 1),
        (1, None, None, 1),
        (1, None, 5, 1),
        (1, None, [1], "1"),
        ("1", None, [1], 1),
        (1, "1", [1], 1),
        (1, None, [1], 1, "x"),
        (1, None, [1], 1, ["x"]),
        (1, None, [1]),
        (1, None, [1], 1, None, None),
    ],
)
def test_values_of_the_wrong_type_are_rejected(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError):
        hash_blocks(*arguments)
