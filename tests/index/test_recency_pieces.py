"""A list of recent blocks can be moved to another process piece by piece."""

from __future__ import annotations

import random
from array import array

import pytest

from warmroute._kernel import Recency


@pytest.mark.parametrize("seed", range(4))
def test_pieces_fill_another_list_alike(seed: int) -> None:
    chance, one, other = random.Random(seed), Recency(500), Recency(500)

    def prompt() -> array[int]:
        first = 1 + 1000 * chance.randrange(20)
        return array("Q", range(first, first + chance.randrange(1, 50)))

    for stamp in range(300):
        one.touch(prompt(), float(stamp))
        if chance.random() < 0.1:
            one.add_anonymous(1, float(stamp))
    one.resize(450)
    one.resize(500)
    pieces = one.pieces()
    for stamp_s, hashes in pieces:
        other.touch(hashes, stamp_s)
    assert other.pieces() == pieces and sum(len(hashes) for _, hashes in pieces) == 8 * len(other)
    assert [stamp_s for stamp_s, _ in pieces] == sorted(stamp_s for stamp_s, _ in pieces)
    for _ in range(100):
        hashes = prompt().tobytes()
        assert one.match(hashes) == other.match(hashes)
    assert Recency(5).pieces() == []
