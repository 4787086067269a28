"""What the router learns: prefill speed, decode speed, and arrival rates."""

from __future__ import annotations

from random import Random

import pytest
from accounting_reference import record_decode_factor, record_first_token, record_step, record_token_ms
from hypothesis import given
from hypothesis import strategies as st

from warmroute.core.demand import ArrivalRate
from warmroute.core.prefill_work import work
from warmroute.core.speeds import DEFAULT_BASE_MS, DEFAULT_MS_PER_TOKEN, DecodeSpeed, NodeSpeed

STEP_MS = 10.0


class SerialNode:
    """Serves prompts one after the other, at a fixed speed."""

    def __init__(self, ms_per_token: float) -> None:
        self.speed = NodeSpeed()
        self.ms_per_token = ms_per_token
        self.now_s = 100.0

    def serve(self, count: int, work_tokens: float = 4000.0, gap_s: float = 0.5) -> float:
        for _ in range(count):
            self.now_s += gap_s
            sent_s = self.now_s
            self.now_s += (1.5 * STEP_MS + work_tokens * self.ms_per_token) / 1000.0
            record_first_token(self.speed, work_tokens, STEP_MS, sent_s, self.now_s)
        return self.speed.ms_per_token


def test_work_is_counted_in_tokens_of_a_short_prompt() -> None:
    assert work(100, 0) == pytest.approx(100, rel=0.01)
    assert work(0, 10_000) == 0
    assert work(1000, 50_000) == pytest.approx(3000, rel=0.02)
    assert work(6000, 0) + work(4000, 6000) == pytest.approx(work(10_000, 0)), "two parts add up"


@given(st.floats(1, 1e6), st.floats(0, 1e6))
def test_a_cached_prefix_never_costs_more_than_a_new_one(new: float, cached: float) -> None:
    assert new <= work(new, cached) <= work(new + cached, 0) * (1 + 1e-9)


@pytest.mark.parametrize("ms_per_token", [0.005, 0.05, 0.5])
def test_the_prefill_speed_is_learned_within_some_responses(ms_per_token: float) -> None:
    node = SerialNode(ms_per_token)
    assert node.speed.ms_per_token == DEFAULT_MS_PER_TOKEN and node.speed.answers == 0
    assert node.serve(15) == pytest.approx(ms_per_token, rel=0.25)
    assert node.serve(30) == pytest.approx(ms_per_token, rel=0.05)
    assert node.speed.answers == 45


def test_a_short_prompt_of_the_same_step_does_not_make_the_long_one_look_free() -> None:
    """Each step prefills the 60 new tokens of a prompt, and another prompt of 6,000. The first tokens of both come
    with the step's end, that of the short prompt first."""
    speed, now_s = NodeSpeed(), 100.0
    for _ in range(20):
        sent_s, now_s = now_s, now_s + 6060 * 0.06 / 1000.0
        record_first_token(speed, 60.0, 0.0, sent_s, now_s)
        record_first_token(speed, 6000.0, 0.0, sent_s, now_s)
    assert speed.ms_per_token == pytest.approx(0.06, rel=0.05)


def test_short_prompts_do_not_make_a_node_look_slow() -> None:
    """60 new tokens take a step of 15 ms, as long as a single one would: that says little about the time of a token."""
    speed, now_s = NodeSpeed(), 100.0
    record_step(speed, 15.0)
    for _ in range(50):
        now_s += 1.0
        record_first_token(speed, 60.0, 0.0, now_s, now_s + 0.016)
    assert speed.ms_per_token == pytest.approx(DEFAULT_MS_PER_TOKEN, rel=0.1)
    for _ in range(20):
        now_s += 1.0
        record_first_token(speed, 6000.0, 0.0, now_s, now_s + 0.6)
    assert speed.ms_per_token == pytest.approx(0.1, rel=0.05), "long ones do"


def test_a_slow_first_token_is_not_charged_to_a_prompt_that_came_later() -> None:
    """The node stood still for 10 s. It then prefills at its usual speed."""
    speed = NodeSpeed()
    record_first_token(speed, 60.0, 0.0, 100.0, 110.0)
    record_first_token(speed, 6000.0, 0.0, 110.5, 110.5 + 0.3)
    assert speed.ms_per_token == pytest.approx(DEFAULT_MS_PER_TOKEN, rel=0.05)


def test_the_steps_of_a_busy_node_are_taken_off_once() -> None:
    """Two prompts wait, and decode steps take 20 ms: 1.5 of them are no prefill. The first prompt has 60 tokens, the
    second 6,000. Both first tokens come after 330 ms."""
    speed, now_s = NodeSpeed(), 100.0
    for _ in range(30):
        sent_s, now_s = now_s, now_s + 0.333
        record_first_token(speed, 60.0, 20.0, sent_s, now_s)
        record_first_token(speed, 6000.0, 20.0, sent_s, now_s)
    assert speed.ms_per_token == pytest.approx(303 / 6060, rel=0.03)


def test_noise_does_not_make_a_node_look_fast() -> None:
    """800 tokens take 40 ms, give or take 40 %, and a step takes 15 ms."""
    speed, random, now_s = NodeSpeed(), Random(7), 100.0
    record_step(speed, 15.0)
    for _ in range(400):
        now_s += 1.0
        record_first_token(speed, 800.0, 0.0, now_s, now_s + 0.04 * random.uniform(0.6, 1.4))
    assert speed.ms_per_token == pytest.approx(0.05, rel=0.1)


@pytest.mark.parametrize("stall_s", [0.5, 1.0, 2.7, 10.0, 60.0])
def test_a_stall_is_charged_to_one_prompt_and_not_to_all_that_wait(stall_s: float) -> None:
    """Prompts of 6,000 tokens take 300 ms each, one after the other. All wait when the node stands still."""
    speed, now_s = NodeSpeed(), 100.0
    for _ in range(20):
        now_s += 0.3
        record_first_token(speed, 6000.0, 0.0, now_s - 0.3, now_s)
    sent_s, now_s = now_s, now_s + stall_s
    slowest = 0.0
    for _ in range(20):
        now_s += 0.3
        record_first_token(speed, 6000.0, 0.0, sent_s, now_s)
        slowest = max(slowest, speed.ms_per_token)
    assert slowest < 2.3 * DEFAULT_MS_PER_TOKEN
    assert speed.ms_per_token == pytest.approx(DEFAULT_MS_PER_TOKEN, rel=0.35), "and it is forgotten"


def test_a_step_that_takes_long_counts_for_all_prompts_of_it_within_bounds() -> None:
    """Ten prompts of 2,000 tokens in a step that took 10 s instead of 1 s."""
    speed = NodeSpeed()
    for _ in range(10):
        record_first_token(speed, 2000.0, 0.0, 100.0, 110.0)
    assert 1.5 * DEFAULT_MS_PER_TOKEN < speed.ms_per_token < 2.5 * DEFAULT_MS_PER_TOKEN


def test_a_node_with_a_first_token_in_every_step_does_not_appear_infinitely_fast() -> None:
    """60 ms for the 2,000 tokens of each prompt, one with every step of 60 ms."""
    speed = NodeSpeed()
    for step in range(200):
        now_s = 100.0 + step * 0.06
        record_first_token(speed, 2000.0, 60.0, now_s - 1.0, now_s)
    assert 0.01 < speed.ms_per_token < 0.04


def test_learning_starts_from_the_guess() -> None:
    node = SerialNode(0.01)
    node.speed.guess(0.01)
    assert node.speed.ms_per_token == pytest.approx(0.01)
    assert node.serve(3) == pytest.approx(0.01, rel=0.01)


@pytest.mark.parametrize(("before", "after"), [(0.05, 0.25), (0.25, 0.05)])
@pytest.mark.parametrize("gap_s", [0.0, 0.5, 5.0])
def test_a_change_by_five_times_is_noticed_within_a_few_responses(before: float, after: float, gap_s: float) -> None:
    """And learned within half a minute."""
    node = SerialNode(before)
    node.serve(100, gap_s=gap_s)
    node.ms_per_token = after
    learned = node.serve(5, gap_s=gap_s)
    assert max(learned / before, before / learned) > 1.25
    since_s = node.now_s
    while node.now_s < since_s + 30.0:
        node.serve(1, gap_s=gap_s)
    assert node.speed.ms_per_token == pytest.approx(after, rel=0.5)


def test_an_outlier_does_not_ruin_the_prefill_speed() -> None:
    node = SerialNode(0.05)
    node.serve(50)
    node.ms_per_token = 50.0
    assert node.serve(1) < 0.05 * 2.5
    node.ms_per_token = 0.05
    assert node.serve(8) < 0.05 * 1.3


def test_prompts_sent_together_share_their_time() -> None:
    """Eight at once, prefilled one after the other: each waits for those before it."""
    speed, now_s = NodeSpeed(), 100.0
    for _ in range(20):
        sent_s = now_s
        for _ in range(8):
            now_s += (1.5 * STEP_MS + 4000 * 0.02) / 1000.0
            record_first_token(speed, 4000, STEP_MS, sent_s, now_s)
        now_s += 1.0
    assert speed.ms_per_token == pytest.approx(0.02, rel=0.1)


def test_prompts_of_one_step_share_its_time() -> None:
    """Four first tokens at the same time, after the prefill of all four."""
    speed, now_s = NodeSpeed(), 100.0
    for _ in range(40):
        sent_s = now_s
        now_s += (1.5 * STEP_MS + 4 * 2000 * 0.02) / 1000.0
        for _ in range(4):
            record_first_token(speed, 2000, STEP_MS, sent_s, now_s)
        now_s += 1.0
    assert speed.ms_per_token == pytest.approx(0.02, rel=0.25)


def test_short_prompts_have_little_weight() -> None:
    node = SerialNode(0.05)
    node.serve(20, work_tokens=8000)
    speed, now_s = node.speed, node.now_s
    for _ in range(5):  # 20 tokens, 30 ms late because of a longer step
        sent_s = now_s = now_s + 0.5
        now_s += 0.045
        record_first_token(speed, 20, STEP_MS, sent_s, now_s)
    assert speed.ms_per_token == pytest.approx(0.05, rel=0.1)


def test_many_short_prompts_do_not_make_a_node_appear_slow() -> None:
    """Of thirty prompts one is long. The others have 100 tokens, and take no longer than the steps of the batch."""
    node = SerialNode(0.05)
    node.serve(20)
    speed, now_s = node.speed, node.now_s
    for number in range(300):
        long = number % 30 == 0
        sent_s = now_s = now_s + 0.1
        now_s += (1.5 * STEP_MS + (3000 * 0.05 if long else 0.0)) / 1000.0
        record_first_token(speed, 3000 if long else 100, STEP_MS, sent_s, now_s)
    assert speed.ms_per_token == pytest.approx(0.05, rel=0.15)


@given(st.lists(st.tuples(st.floats(0, 1e5), st.floats(0, 100), st.floats(0, 100), st.floats(0, 10)), max_size=40))
def test_the_prefill_speed_stays_positive_for_any_times(seen: list[tuple[float, float, float, float]]) -> None:
    speed, now_s = NodeSpeed(), 0.0
    for work_tokens, step_ms, waited_s, gap_s in seen:
        now_s += gap_s
        record_first_token(speed, work_tokens, step_ms, now_s - waited_s, now_s)
        assert 0.0 < speed.ms_per_token < 1e6


# Decode speed.


def test_the_decode_factor_of_a_node_is_learned() -> None:
    speed = NodeSpeed()
    assert speed.factor == 1.0
    for _ in range(100):
        record_decode_factor(speed, 2.0, 1000)
    assert speed.factor == pytest.approx(2.0, rel=0.02)
    record_decode_factor(speed, 1e9, 1000)
    assert speed.factor < 2.5


def test_the_first_responses_of_a_model_say_little_about_their_nodes() -> None:
    """The model's line starts with a default. A node that is measured against it would look slow for ever."""
    speed, decode_speed = NodeSpeed(), DecodeSpeed()
    for _ in range(8):
        record_decode_factor(speed, 60.0 / decode_speed.token_ms(1000), decode_speed.answers)
        record_token_ms(decode_speed, 60.0 / speed.factor, 1000)
    assert decode_speed.token_ms(1000) > 50.0
    assert speed.factor < 1.03


def test_the_decode_speed_of_a_model_is_learned_by_context() -> None:
    decode_speed, random = DecodeSpeed(), Random(1)
    assert decode_speed.token_ms(0) == DEFAULT_BASE_MS
    for _ in range(600):
        context = random.uniform(0, 400_000)
        record_token_ms(decode_speed, 8.0 + 5e-5 * context, context)
    for context in (20_000, 200_000, 380_000):
        assert decode_speed.token_ms(context) == pytest.approx(8.0 + 5e-5 * context, rel=0.1)


def test_more_context_never_makes_decoding_faster() -> None:
    decode_speed = DecodeSpeed()
    for number in range(300):
        record_token_ms(decode_speed, 30.0 - number % 2 * 20.0, number % 2 * 200_000.0)
    assert decode_speed.slope_ms >= 0 and decode_speed.token_ms(400_000) >= decode_speed.token_ms(0) > 0


def test_an_outlier_does_not_ruin_the_decode_speed() -> None:
    decode_speed = DecodeSpeed()
    for _ in range(100):
        record_token_ms(decode_speed, 10.0, 10_000)
    record_token_ms(decode_speed, 1e9, 10_000)
    assert decode_speed.token_ms(10_000) < 12.0


def test_the_first_responses_count_more_than_the_default() -> None:
    decode_speed = DecodeSpeed()
    for _ in range(8):
        record_token_ms(decode_speed, 40.0, 1000)
    assert decode_speed.token_ms(1000) == pytest.approx(40.0, rel=0.15)


# Arrival rate.


def test_without_arrivals_the_rate_is_zero() -> None:
    assert ArrivalRate().per_ms(0.0) == ArrivalRate().per_ms(1e6) == 0.0


@pytest.mark.parametrize("per_s", [0.5, 5.0, 500.0])
def test_the_rate_is_an_average_over_about_ten_seconds(per_s: float) -> None:
    arrivals, now_s = ArrivalRate(), 1000.0
    for _ in range(int(60 * per_s)):
        now_s += 1.0 / per_s
        arrivals.record(now_s)
    assert arrivals.per_ms(now_s) * 1000.0 == pytest.approx(per_s, rel=0.15)
    assert arrivals.per_ms(now_s + 10.0) == pytest.approx(arrivals.per_ms(now_s) / 2.718, rel=0.01)
    assert arrivals.per_ms(now_s + 600.0) * 1000.0 < 1e-6 * per_s
