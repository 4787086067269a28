"""How likely blocks are used again, by how long they were not: learned from the prompts that come."""

from __future__ import annotations

from random import Random

import pytest
from believed import prompt, tokens

from warmroute.index.lookup import Lookup
from warmroute.index.reuse import Reuse


def chain(*blocks: int) -> bytes:
    asked: Lookup = prompt(*blocks)
    assert len(tokens(*blocks)) == asked.token_count
    return asked.blocks("m", "", 16)


def long(number: int) -> bytes:
    """A prompt of its own, long enough that some of its blocks are looked at."""
    return chain(*range(number * 256, number * 256 + 256))


def seen(rounds: int, every_s: float, prompts: int = 10, fresh: int = 0) -> tuple[Reuse, float]:
    """The same prompts come again and again, and beside them some that come once."""
    reuse, now_s, number = Reuse(), 0.0, 10_000
    for _ in range(rounds):
        now_s += every_s
        for at in range(prompts):
            reuse.saw(long(at), now_s)
        for _ in range(fresh):
            number += 1
            reuse.saw(long(number), now_s)
    return reuse, now_s


def test_nothing_is_known_at_first() -> None:
    reuse = Reuse()
    assert [reuse.chance(age_s) for age_s in (0.0, 1.0, 1e6)] == [0.0] * 3


def test_what_comes_again_and_again_is_likely_to_come_again() -> None:
    reuse, _ = seen(40, 10.0)
    assert reuse.chance(1.0) > 0.9 and reuse.chance(8.0) > 0.9


def test_what_was_not_used_for_longer_than_anything_that_came_again_will_not() -> None:
    reuse, _ = seen(40, 10.0)
    assert reuse.chance(100.0) < 0.05 and reuse.chance(1e6) < 0.05


def test_what_comes_once_lowers_the_chance() -> None:
    reuse, _ = seen(60, 10.0, prompts=10, fresh=10)
    assert 0.4 < reuse.chance(1.0) < 0.6


def test_prompts_that_never_come_again_have_no_chance() -> None:
    reuse, _ = seen(60, 1.0, prompts=0, fresh=10)
    assert reuse.chance(0.1) < 0.01


def test_the_chance_never_grows_with_age() -> None:
    reuse, random = Reuse(), Random(4)
    now_s = 0.0
    for _ in range(2000):
        now_s += random.expovariate(2.0)
        at = int(random.paretovariate(0.7)) % 500
        reuse.saw(long(at), now_s)
    chances = [reuse.chance(0.1 * 1.3**step) for step in range(40)]
    assert chances == sorted(chances, reverse=True) and 0.2 < chances[0] <= 1.0


def test_what_was_learned_fades() -> None:
    """Once, prompts came again; later, none does."""
    reuse, now_s = seen(200, 5.0)
    before = reuse.chance(1.0)
    for number in range(6000):
        now_s += 0.1
        reuse.saw(long(10_000 + number), now_s)
    assert before > 0.9 and reuse.chance(1.0) < 0.3


@pytest.mark.parametrize("blocks", [0, 1, 7, 8, 9, 1000])
def test_prompts_of_any_length_are_taken(blocks: int) -> None:
    reuse = Reuse()
    for now_s in range(64):
        reuse.saw(chain(*range(blocks)) if blocks else b"", float(now_s))
    assert reuse.chance(0.5) > 0.5 if blocks == 1000 else 0.0 <= reuse.chance(0.5) <= 1.0


def test_a_growing_conversation_is_reuse() -> None:
    """Whatever the length, it is the same blocks that are looked at."""
    reuse = Reuse()
    for turn in range(1, 200):
        reuse.saw(chain(*range(40 + 10 * turn)), 10.0 * turn)
    assert reuse.chance(5.0) > 0.9


def test_memory_is_bounded() -> None:
    reuse = Reuse()
    for number in range(2000):
        reuse.saw(chain(*range(number * 64, number * 64 + 64)), float(number))
    assert len(reuse._recency) <= 1 << 16
