"""The ids of a capture: SipHash-2-4, checked against the vectors of its authors."""

from __future__ import annotations

import pytest

from warmroute._kernel import capture_ids

KEY = bytes(range(16))


def siphash(key: bytes, message: bytes) -> int:
    """SipHash-2-4 as its paper describes it."""
    mask = (1 << 64) - 1
    k0, k1 = (int.from_bytes(key[at : at + 8], "little") for at in (0, 8))
    v0, v1 = k0 ^ 0x736F6D6570736575, k1 ^ 0x646F72616E646F6D
    v2, v3 = k0 ^ 0x6C7967656E657261, k1 ^ 0x7465646279746573

    def rotate(x: int, bits: int) -> int:
        return (x << bits | x >> (64 - bits)) & mask

    def rounds(count: int) -> None:
        nonlocal v0, v1, v2, v3
        for _ in range(count):
            v0, v2 = (v0 + v1) & mask, (v2 + v3) & mask
            v1, v3, v0 = rotate(v1, 13) ^ v0, rotate(v3, 16) ^ v2, rotate(v0, 32)
            v2, v0 = (v2 + v1) & mask, (v0 + v3) & mask
            v1, v3, v2 = rotate(v1, 17) ^ v2, rotate(v3, 21) ^ v0, rotate(v2, 32)

    padded = message + bytes(7 - len(message) % 8) + bytes([len(message) % 256])
    for at in range(0, len(padded), 8):
        word = int.from_bytes(padded[at : at + 8], "little")
        v3 ^= word
        rounds(2)
        v0 ^= word
    v2 ^= 0xFF
    rounds(4)
    return v0 ^ v1 ^ v2 ^ v3


def test_the_reference_is_siphash() -> None:
    assert siphash(KEY, b"") == 0x726FDB47DD0E0E31
    assert siphash(KEY, bytes(range(15))) == 0xA129CA6149BE45E5


def test_an_id_is_the_low_48_bits_of_siphash() -> None:
    chain = bytes(range(256)) * 4
    expected = [siphash(KEY, chain[at : at + 8]) & (1 << 48) - 1 for at in range(0, len(chain), 8)]
    assert capture_ids(chain, KEY) == expected
    assert capture_ids(b"", KEY) == []


def test_another_key_gives_other_ids() -> None:
    chain = bytes(range(200))
    assert not set(capture_ids(chain, KEY)) & set(capture_ids(chain, bytes(16)))


@pytest.mark.parametrize("arguments", [(b"", b"short"), (b"",), ("text", KEY), (b"", "text")])
def test_wrong_arguments_are_errors(arguments: tuple[object, ...]) -> None:
    with pytest.raises((TypeError, ValueError)):
        capture_ids(*arguments)  # type: ignore[arg-type]
