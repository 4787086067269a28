"""The end of a response: bounded, and the last bytes in their order."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmroute._kernel import ResponseTail


@given(st.integers(1, 40), st.lists(st.binary(max_size=60), max_size=30))
def test_the_end_is_what_the_last_pieces_have(limit: int, pieces: list[bytes]) -> None:
    tail = ResponseTail(limit)
    for piece in pieces:
        tail.keep(piece)
    kept = [piece for piece in pieces if piece][-8:]
    assert tail.join() == b"".join(kept)[-limit:]


def test_a_large_piece_is_not_kept_whole() -> None:
    tail, large, small = ResponseTail(1000), b"x" * 100_000, b"y" * 10
    before = sys.getrefcount(large), sys.getrefcount(small)
    tail.keep(large)
    tail.keep(small)
    assert (sys.getrefcount(large), sys.getrefcount(small)) == (before[0], before[1] + 1)
    assert tail.join() == b"x" * 990 + small


def test_only_bytes_are_kept() -> None:
    with pytest.raises(TypeError):
        ResponseTail(10).keep("text")  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        ResponseTail(0)
