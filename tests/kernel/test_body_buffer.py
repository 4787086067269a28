"""BodyBuffer returns exactly the bytes that were added, whatever their pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmroute._kernel import BodyBuffer


@given(st.lists(st.tuples(st.binary(max_size=200), st.integers(-5, 500_000)), max_size=20))
def test_pieces_are_joined(pieces: list[tuple[bytes, int]]) -> None:
    buffer, whole = BodyBuffer(), b""
    for data, missing in pieces:
        buffer.append(data, missing)
        whole += data
        assert len(buffer) == len(whole)
    assert buffer.take() == whole
    assert len(buffer) == 0 and buffer.take() == b""


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("size", [1, 65_535, 65_536, 65_537, 3_000_001])
def test_large_bodies_are_joined(size: int, announced: bool) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    buffer = BodyBuffer()
    for start in range(0, size, 50_000):
        piece = data[start : min(start + 50_000, size)]
        buffer.append(piece, size - start - len(piece) if announced else 0)
    taken = buffer.take()
    assert taken == data[:size]
    buffer.append(b"next", 0)
    assert buffer.take() == b"next" and taken == data[:size], "a body that was taken never changes"


def test_wrong_arguments_are_errors() -> None:
    with pytest.raises(TypeError):
        BodyBuffer().append("text", 0)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        BodyBuffer().append(b"data")  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        BodyBuffer(1)  # type: ignore[call-arg]
    with pytest.raises(MemoryError):
        BodyBuffer().append(b"data", 2**62)
