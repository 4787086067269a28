"""The probability that a block is used again, by the time since its last use."""

from __future__ import annotations

from random import Random

import pytest
from cache_fixtures import prompt, tokens

from warmroute.core.messages import Lookup
from warmroute.core.reuse import Reuse


def chain(*blocks: int) -> bytes:
    request: Lookup = prompt(*blocks)
    assert len(tokens(*blocks)) == request.token_count
    return request.blocks("m", "", 16)


def long(number: int) -> bytes:
    """Return a prompt long enough that some of its blocks are sampled."""
    return chain(*range(number * 256, number * 256 + 256))


def after_rounds(rounds: int, every_s: float, prompts: int = 10, fresh: int = 0) -> tuple[Reuse, float]:
    """Repeat the same prompts in every round, and add `fresh` prompts that come once."""
    reuse, now_s, number = Reuse(), 0.0, 10_000
    for _ in range(rounds):
        now_s += every_s
        for at in range(prompts):
            reuse.record(long(at), now_s)
        for _ in range(fresh):
            number += 1
            reuse.record(long(number), now_s)
    return reuse, now_s


def test_the_probability_starts_at_zero() -> None:
    reuse = Reuse()
    assert [reuse.chance(age_s) for age_s in (0.0, 1.0, 1e6)] == [0.0] * 3


def test_prompts_that_repeat_are_likely_to_repeat() -> None:
    reuse, _ = after_rounds(40, 10.0)
    assert reuse.chance(1.0) > 0.9 and reuse.chance(8.0) > 0.9


def test_blocks_older_than_any_reuse_are_unlikely_to_be_reused() -> None:
    reuse, _ = after_rounds(40, 10.0)
    assert reuse.chance(100.0) < 0.05 and reuse.chance(1e6) < 0.05


def test_prompts_that_come_once_lower_the_probability() -> None:
    reuse, _ = after_rounds(60, 10.0, prompts=10, fresh=10)
    assert 0.4 < reuse.chance(1.0) < 0.6


def test_without_repeats_the_probability_is_near_zero() -> None:
    reuse, _ = after_rounds(60, 1.0, prompts=0, fresh=10)
    assert reuse.chance(0.1) < 0.01


def test_the_probability_never_grows_with_age() -> None:
    reuse, random = Reuse(), Random(4)
    now_s = 0.0
    for _ in range(2000):
        now_s += random.expovariate(2.0)
        at = int(random.paretovariate(0.7)) % 500
        reuse.record(long(at), now_s)
    chances = [reuse.chance(0.1 * 1.3**step) for step in range(40)]
    assert chances == sorted(chances, reverse=True) and 0.2 < chances[0] <= 1.0


def test_old_reuse_fades() -> None:
    """At first prompts repeat; later none does."""
    reuse, now_s = after_rounds(200, 5.0)
    before = reuse.chance(1.0)
    for number in range(6000):
        now_s += 0.1
        reuse.record(long(10_000 + number), now_s)
    assert before > 0.9 and reuse.chance(1.0) < 0.3


@pytest.mark.parametrize("blocks", [0, 1, 7, 8, 9, 1000])
def test_prompts_of_any_length_are_accepted(blocks: int) -> None:
    reuse = Reuse()
    for now_s in range(64):
        reuse.record(chain(*range(blocks)) if blocks else b"", float(now_s))
    assert reuse.chance(0.5) > 0.5 if blocks == 1000 else 0.0 <= reuse.chance(0.5) <= 1.0


def test_a_growing_conversation_counts_as_reuse() -> None:
    """The sampled blocks of a prefix are the same for every length of the prompt."""
    reuse = Reuse()
    for turn in range(1, 200):
        reuse.record(chain(*range(40 + 10 * turn)), 10.0 * turn)
    assert reuse.chance(5.0) > 0.9


def test_memory_is_bounded() -> None:
    reuse = Reuse()
    for number in range(2000):
        reuse.record(chain(*range(number * 64, number * 64 + 64)), float(number))
    assert len(reuse._recency) <= 1 << 16
