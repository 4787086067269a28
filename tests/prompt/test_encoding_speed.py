"""How much new text the event loop encodes at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from warmroute.prompt.encoding_speed import FIRST_MS_PER_BYTE, MAX_BYTES, MIN_MEASURED_BYTES, EncodingSpeed

QUICK, SLOW = 2e-6, 14e-5
"""Known words, and random letters, in milliseconds for each byte."""


def encode(speed: EncodingSpeed, ms_per_byte: float, times: int = 1, size: int = 20_000) -> None:
    for _ in range(times):
        speed.record(size, size * ms_per_byte)


def test_quick_texts_let_longer_ones_stay_on_the_loop() -> None:
    speed = EncodingSpeed()
    assert speed.max_bytes(1.0) == 1 << 14
    encode(speed, QUICK, times=100)
    assert speed.max_bytes(1.0) == MAX_BYTES > 33_000


def test_one_slow_text_sends_the_next_long_ones_to_a_thread() -> None:
    speed = EncodingSpeed()
    encode(speed, QUICK, times=100)
    encode(speed, SLOW)
    assert speed.max_bytes(1.0) <= 7_200
    encode(speed, QUICK, times=16)
    assert speed.max_bytes(1.0) < 1 << 14
    encode(speed, QUICK, times=200)
    assert speed.max_bytes(1.0) == MAX_BYTES


def test_short_texts_say_nothing_about_long_ones() -> None:
    speed = EncodingSpeed()
    encode(speed, 10.0 * SLOW, size=MIN_MEASURED_BYTES - 1)
    encode(speed, 0.0, size=10)
    assert speed.ms_per_byte == FIRST_MS_PER_BYTE


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(0.0, 1e4))))
def test_no_text_makes_the_limit_negative_or_unbounded(texts: list[tuple[int, float]]) -> None:
    speed = EncodingSpeed()
    for size, took_ms in texts:
        speed.record(size, took_ms)
    assert 0 <= speed.max_bytes(1.0) <= MAX_BYTES
