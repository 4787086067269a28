"""The prefill speed by whole answers: a regression that says nothing unless it is clear."""

from __future__ import annotations

from math import isfinite
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmroute.core.speeds import WholeAnswers


def answers_of(ms_per_token: float, noise: float, *, output: float = 1.0, together: bool = False) -> WholeAnswers:
    """100 answers of up to 6,000 tokens of work and 2 s of decoding, with this much relative noise."""
    found, random = WholeAnswers(), Random(5)
    for _ in range(100):
        work = random.uniform(100.0, 6000.0)
        decode_ms = work / 3.0 if together else random.uniform(100.0, 2000.0) * output
        found.add(
            work, decode_ms, (ms_per_token * work + 1.3 * decode_ms + 40.0) * random.uniform(1 - noise, 1 + noise)
        )
    return found


@pytest.mark.parametrize("ms_per_token", [0.01, 0.1, 1.0])
def test_the_speed_is_found_beside_the_decoding(ms_per_token: float) -> None:
    assert answers_of(ms_per_token, 0.0).ms_per_token == pytest.approx(ms_per_token, rel=0.01)
    assert answers_of(ms_per_token, 0.0, output=0.0).ms_per_token == pytest.approx(ms_per_token, rel=0.01)


def test_noise_and_outputs_that_grow_with_the_prompt_show_nothing() -> None:
    assert answers_of(0.001, 0.4).ms_per_token is None
    assert answers_of(0.1, 0.1, together=True).ms_per_token is None
    assert WholeAnswers().ms_per_token is None


numbers = st.floats(0.0, 1e9)


@given(st.lists(st.tuples(numbers, numbers, numbers), max_size=80))
def test_no_answers_give_an_impossible_speed(answers: list[tuple[float, float, float]]) -> None:
    found = WholeAnswers()
    for answer in answers:
        found.add(*answer)
        speed = found.ms_per_token
        assert speed is None or (isfinite(speed) and speed > 0.0)
