"""What is learned of a node's speed, of the pace of answers, and of how often requests arrive."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmroute.fleet.arrivals import Arrivals
from warmroute.fleet.decode_speed import USUAL_BASE_MS, DecodeSpeed
from warmroute.fleet.speed import USUAL_MS_PER_TOKEN, Speed, work

STEP_MS = 10.0


class Node:
    """Answers prompts one after the other, at a pace of its own."""

    def __init__(self, ms_per_token: float) -> None:
        self.speed = Speed()
        self.ms_per_token = ms_per_token
        self.now_s = 100.0

    def answers(self, count: int, done: float = 4000.0, gap_s: float = 0.5) -> float:
        for _ in range(count):
            self.now_s += gap_s
            sent_s = self.now_s
            self.now_s += (1.5 * STEP_MS + done * self.ms_per_token) / 1000.0
            self.speed.saw_first_token(done, STEP_MS, sent_s, self.now_s)
        return self.speed.ms_per_token


def test_work_is_in_tokens_of_a_short_prompt() -> None:
    assert work(100, 0) == pytest.approx(100, rel=0.01)
    assert work(0, 10_000) == 0
    assert work(1000, 50_000) == pytest.approx(3000, rel=0.02)
    assert work(6000, 0) + work(4000, 6000) == pytest.approx(work(10_000, 0)), "in two parts it is as much"


@given(st.floats(1, 1e6), st.floats(0, 1e6))
def test_a_cached_token_never_costs_what_a_new_one_does(new: float, cached: float) -> None:
    assert new <= work(new, cached) <= work(new + cached, 0) * (1 + 1e-9)


@pytest.mark.parametrize("ms_per_token", [0.005, 0.05, 0.5])
def test_a_speed_is_learned_within_some_answers(ms_per_token: float) -> None:
    node = Node(ms_per_token)
    assert node.speed.ms_per_token == USUAL_MS_PER_TOKEN and node.speed.answers == 0
    assert node.answers(15) == pytest.approx(ms_per_token, rel=0.25)
    assert node.answers(30) == pytest.approx(ms_per_token, rel=0.05)
    assert node.speed.answers == 45


def test_a_node_whose_every_step_brings_first_tokens_is_not_believed_to_be_infinitely_quick() -> None:
    """60 ms for 2,000 tokens of each prompt, one with every step of 60 ms: what a full batch takes, too."""
    speed = Speed()
    for step in range(200):
        now_s = 100.0 + step * 0.06
        speed.saw_first_token(2000.0, 60.0, now_s - 1.0, now_s)
    assert 0.01 < speed.ms_per_token < 0.04


def test_a_guess_is_where_it_starts() -> None:
    node = Node(0.01)
    node.speed.guess(0.01)
    assert node.speed.ms_per_token == pytest.approx(0.01)
    assert node.answers(3) == pytest.approx(0.01, rel=0.01)


@pytest.mark.parametrize(("before", "after"), [(0.05, 0.25), (0.25, 0.05)])
@pytest.mark.parametrize("gap_s", [0.0, 0.5, 5.0])
def test_a_change_by_five_times_is_noticed_within_a_few_answers(before: float, after: float, gap_s: float) -> None:
    """And believed within half a minute."""
    node = Node(before)
    node.answers(100, gap_s=gap_s)
    node.ms_per_token = after
    learned = node.answers(5, gap_s=gap_s)
    assert max(learned / before, before / learned) > 1.25
    since_s = node.now_s
    while node.now_s < since_s + 30.0:
        node.answers(1, gap_s=gap_s)
    assert node.speed.ms_per_token == pytest.approx(after, rel=0.5)


def test_one_odd_answer_does_not_ruin_it() -> None:
    node = Node(0.05)
    node.answers(50)
    node.ms_per_token = 50.0
    assert node.answers(1) < 0.05 * 2.5
    node.ms_per_token = 0.05
    assert node.answers(8) < 0.05 * 1.3


def test_prompts_that_were_sent_together_share_the_time_that_they_took() -> None:
    """Eight at once, answered one after the other: none of them has waited for nothing but itself."""
    speed, now_s = Speed(), 100.0
    for _ in range(20):
        sent_s = now_s
        for _ in range(8):
            now_s += (1.5 * STEP_MS + 4000 * 0.02) / 1000.0
            speed.saw_first_token(4000, STEP_MS, sent_s, now_s)
        now_s += 1.0
    assert speed.ms_per_token == pytest.approx(0.02, rel=0.1)


def test_prompts_of_one_step_count_together() -> None:
    """Four first tokens at the same moment, after the time of all four."""
    speed, now_s = Speed(), 100.0
    for _ in range(40):
        sent_s = now_s
        now_s += (1.5 * STEP_MS + 4 * 2000 * 0.02) / 1000.0
        for _ in range(4):
            speed.saw_first_token(2000, STEP_MS, sent_s, now_s)
        now_s += 1.0
    assert speed.ms_per_token == pytest.approx(0.02, rel=0.25)


def test_short_prompts_say_little_about_the_speed_of_long_ones() -> None:
    node = Node(0.05)
    node.answers(20, done=8000)
    speed, now_s = node.speed, node.now_s
    for _ in range(5):  # 20 tokens, late by 30 ms: a step that took longer
        sent_s = now_s = now_s + 0.5
        now_s += 0.045
        speed.saw_first_token(20, STEP_MS, sent_s, now_s)
    assert speed.ms_per_token == pytest.approx(0.05, rel=0.1)


def test_a_node_full_of_short_prompts_is_not_believed_to_prefill_long_ones_slowly() -> None:
    """Of thirty prompts one is long; the others have 100 tokens, and take the steps that a batch takes without them."""
    node = Node(0.05)
    node.answers(20)
    speed, now_s = node.speed, node.now_s
    for number in range(300):
        long = number % 30 == 0
        sent_s = now_s = now_s + 0.1
        now_s += (1.5 * STEP_MS + (3000 * 0.05 if long else 0.0)) / 1000.0
        speed.saw_first_token(3000 if long else 100, STEP_MS, sent_s, now_s)
    assert speed.ms_per_token == pytest.approx(0.05, rel=0.15)


@given(st.lists(st.tuples(st.floats(0, 1e5), st.floats(0, 100), st.floats(0, 100), st.floats(0, 10)), max_size=40))
def test_whatever_is_seen_a_speed_stays_a_number_above_zero(seen: list[tuple[float, float, float, float]]) -> None:
    speed, now_s = Speed(), 0.0
    for done, step_ms, waited_s, gap_s in seen:
        now_s += gap_s
        speed.saw_first_token(done, step_ms, now_s - waited_s, now_s)
        assert 0.0 < speed.ms_per_token < 1e6


# How fast answers flow.


def test_a_factor_is_learned_by_answers_that_flow_slower() -> None:
    speed = Speed()
    assert speed.factor == 1.0
    for _ in range(100):
        speed.saw_answer(2.0)
    assert speed.factor == pytest.approx(2.0, rel=0.02)
    speed.saw_answer(1e9)
    assert speed.factor < 2.5


def test_the_pace_of_a_model_is_learned_with_what_context_costs() -> None:
    pace, random = DecodeSpeed(), Random(1)
    assert pace.token_ms(0) == USUAL_BASE_MS
    for _ in range(600):
        context = random.uniform(0, 400_000)
        pace.saw_answer(8.0 + 5e-5 * context, context)
    for context in (20_000, 200_000, 380_000):
        assert pace.token_ms(context) == pytest.approx(8.0 + 5e-5 * context, rel=0.1)


def test_more_context_is_never_believed_to_be_quicker() -> None:
    pace = DecodeSpeed()
    for number in range(300):
        pace.saw_answer(30.0 - number % 2 * 20.0, number % 2 * 200_000.0)
    assert pace.slope_ms >= 0 and pace.token_ms(400_000) >= pace.token_ms(0) > 0


def test_one_odd_answer_does_not_ruin_the_pace() -> None:
    pace = DecodeSpeed()
    for _ in range(100):
        pace.saw_answer(10.0, 10_000)
    pace.saw_answer(1e9, 10_000)
    assert pace.token_ms(10_000) < 12.0


def test_first_answers_count_more_than_the_guess() -> None:
    pace = DecodeSpeed()
    for _ in range(8):
        pace.saw_answer(40.0, 1000)
    assert pace.token_ms(1000) == pytest.approx(40.0, rel=0.15)


# How often requests arrive.


def test_nobody_came_yet() -> None:
    assert Arrivals().rate(0.0) == Arrivals().rate(1e6) == 0.0


@pytest.mark.parametrize("per_s", [0.5, 5.0, 500.0])
def test_the_rate_is_that_of_the_last_ten_seconds_or_so(per_s: float) -> None:
    arrivals, now_s = Arrivals(), 1000.0
    for _ in range(int(60 * per_s)):
        now_s += 1.0 / per_s
        arrivals.saw(now_s)
    assert arrivals.rate(now_s) * 1000.0 == pytest.approx(per_s, rel=0.15)
    assert arrivals.rate(now_s + 10.0) == pytest.approx(arrivals.rate(now_s) / 2.718, rel=0.01)
    assert arrivals.rate(now_s + 600.0) * 1000.0 < 1e-6 * per_s
