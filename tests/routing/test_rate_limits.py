"""Rate limits: what a tenant may use each minute, taken before, settled after, and given back where nothing was had."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmroute.config import ConfigError, KeyConfig, from_table
from warmroute.routing.rate_limits import Bucket, Charge, RateLimits, TenantLimits
from warmroute.routing.refusals import RateLimited


def key(tenant: str, requests: int = 0, tokens: int = 0, number: int = 0) -> KeyConfig:
    return KeyConfig(sha256=f"{number:064x}", tenant=tenant, requests_per_min=requests, tokens_per_min=tokens)


def limits(requests: int = 0, tokens: int = 0) -> TenantLimits:
    found = RateLimits([key("t", requests, tokens)], 0.0).of("t")
    assert found is not None
    return found


def begin(of: TenantLimits, now_s: float, prompt: float | None = 100, output: float = 50, body: int = 0) -> Charge:
    charge = of.begin(now_s, body, answers=True)
    try:
        charge.take_tokens(prompt, output, now_s)
    except RateLimited:
        charge.cancel()
        raise
    return charge


def test_a_minute_allows_so_many_requests_and_they_come_back_evenly() -> None:
    of = limits(requests=60)
    for _ in range(60):
        begin(of, 0.0)
    with pytest.raises(RateLimited) as refused:
        begin(of, 0.0)
    assert refused.value.retry_after_s == 1 and refused.value.what == "requests"
    assert refused.value.reason == "requests_per_min"
    begin(of, 1.0)
    with pytest.raises(RateLimited):
        begin(of, 1.5)
    begin(of, 2.0)


def test_when_to_come_back_is_when_it_will_be_let_through() -> None:
    of = limits(tokens=6000)
    begin(of, 0.0, 4000, 1000)
    with pytest.raises(RateLimited) as refused:
        begin(of, 0.0, 2000, 500)
    after_s = refused.value.retry_after_s
    assert after_s == 15 and refused.value.needed == 2500, "1,500 are lacking, and 100 come each second"
    with pytest.raises(RateLimited):
        begin(of, after_s - 1.0, 2000, 500)
    begin(of, after_s, 2000, 500)


def test_what_was_really_used_is_settled_once() -> None:
    of = limits(tokens=1000)
    assert of.tokens is not None
    charge = begin(of, 0.0, 100, 400)
    assert of.tokens.level(0.0) == 500
    charge.settle(100, 50)
    assert of.tokens.level(0.0) == 850
    charge.settle(100, 900)
    charge.cancel()
    assert of.tokens.level(0.0) == 850


def test_an_answer_longer_than_expected_leaves_a_debt() -> None:
    of = limits(tokens=600)
    begin(of, 0.0, 100, 100).settle(100, 1700)
    assert of.tokens is not None and of.tokens.level(0.0) == -1200
    with pytest.raises(RateLimited) as refused:
        of.begin(0.0, 0, answers=True)
    assert refused.value.retry_after_s == 121
    begin(of, 140.0, 100, 90)


def test_what_the_answer_does_not_say_counts_as_expected() -> None:
    of = limits(tokens=1000)
    assert of.tokens is not None
    begin(of, 0.0, 100, 200).settle(None, None)
    assert of.tokens.level(0.0) == 700
    begin(of, 0.0, 100, 200).settle(90, None)
    assert of.tokens.level(0.0) == 610, "an embedding has no answer in tokens"


def test_what_was_not_read_is_guessed_by_its_bytes_and_what_answers_nothing_has_no_answer() -> None:
    of = limits(tokens=1000)
    assert of.tokens is not None
    begin(of, 0.0, None, 100, body=400)
    assert of.tokens.level(0.0) == 800
    charge = of.begin(0.0, 400, answers=False)
    charge.take_tokens(None, 100, 0.0)
    assert of.tokens.level(0.0) == 700


def test_what_never_got_to_a_node_takes_nothing() -> None:
    of = limits(requests=10, tokens=1000)
    assert of.tokens is not None and of.requests is not None
    begin(of, 0.0).cancel()
    assert (of.requests.level(0.0), of.tokens.level(0.0)) == (10, 1000)
    begin(of, 0.0).refused_by_node()
    assert (of.requests.level(0.0), of.tokens.level(0.0)) == (9, 1000)
    with pytest.raises(RateLimited):
        begin(of, 0.0, 5000, 0) and begin(of, 0.0, 5000, 0)
    assert of.requests.level(0.0) == 8


def test_one_that_needs_more_than_a_minute_allows_goes_when_the_bucket_is_full() -> None:
    of = limits(tokens=1000)
    assert of.tokens is not None
    begin(of, 0.0, 5000, 1000)
    assert of.tokens.level(0.0) == -5000
    with pytest.raises(RateLimited) as refused:
        begin(of, 0.0, 5000, 1000)
    assert refused.value.retry_after_s == 301, "it comes no sooner than there are tokens at all"
    with pytest.raises(RateLimited) as refused:
        begin(of, 301.0, 5000, 1000)
    begin(of, 301.0 + refused.value.retry_after_s, 5000, 1000)


def test_what_is_left_is_told_as_openai_does() -> None:
    of = limits(requests=60, tokens=6000)
    begin(of, 0.0, 1000, 500)
    assert dict(of.told(0.0)) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1.000s",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "4500",
        "x-ratelimit-reset-tokens": "15.000s",
    }
    assert [name for name, _ in limits(requests=1).told(0.0)] == [
        "x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests",
    ]  # fmt: skip


def test_keys_of_one_tenant_share_and_others_do_not() -> None:
    found = RateLimits([key("a", 2, number=1), key("a", 0, 500, number=2), key("b", 2), key("free")], 0.0)
    assert found and found.of("free") is None and found.of("") is None
    of = found.of("a")
    assert of is not None and of.requests is not None and of.tokens is not None
    assert (of.requests.limit, of.tokens.limit) == (2, 500)
    begin(of, 0.0)
    begin(of, 0.0)
    with pytest.raises(RateLimited):
        begin(of, 0.0)
    other = found.of("b")
    assert other is not None
    begin(other, 0.0)
    assert not RateLimits([key("free")], 0.0)


def test_keys_that_contradict_each_other_are_refused() -> None:
    keys = [
        {"sha256": f"{number:064x}", "tenant": "a", "tokens_per_min": limit} for number, limit in enumerate((5, 0, 6))
    ]
    with pytest.raises(ConfigError, match=r"keys\.tokens_per_min: two keys of tenant 'a' say 5 and 6"):
        from_table({"keys": keys})


def test_a_reload_keeps_what_was_used() -> None:
    found = RateLimits([key("a", 60, 1000)], 0.0)
    of = found.of("a")
    assert of is not None
    running = begin(of, 0.0, 400, 100)
    found.reconfigure([key("a", 120, 1000), key("b", 5)], 0.0)
    of = found.of("a")
    assert of is not None and of.requests is not None and of.tokens is not None
    assert of.requests.level(0.0) == 118 and of.tokens.level(0.0) == 500, "as full as it was"
    running.settle(400, 0)
    assert of.tokens.level(0.0) == 600, "who runs across a reload settles, too"
    found.reconfigure([key("a")], 0.0)
    assert not found
    running.settle(400, 0)


@given(st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(1, 40)), max_size=60))
def test_no_more_goes_through_than_was_there_and_came(asked: list[tuple[float, int]]) -> None:
    bucket, now_s, taken = Bucket(100, 0.0), 0.0, 0
    for pause_s, amount in asked:
        now_s += pause_s
        wait_s = bucket.wait_s(amount, now_s)
        if not wait_s:
            bucket.take(amount)
            taken += amount
        else:
            later = Bucket(100, now_s, bucket.level(now_s))
            assert later.wait_s(amount, now_s + 0.99 * wait_s) and not later.wait_s(amount, now_s + wait_s + 1e-6)
        assert taken <= 100 + now_s * 100 / 60 + 1e-6 and bucket.level(now_s) >= -1e-6


def test_a_look_says_what_would_be_and_takes_nothing() -> None:
    of = limits(requests=2, tokens=6000)
    for _ in range(5):
        of.check(2000, 500, 0.0, 0, answers=True)
    begin(of, 0.0, 4000, 1000)
    with pytest.raises(RateLimited) as looked:
        of.check(2000, 500, 0.0, 0, answers=True)
    with pytest.raises(RateLimited) as refused:
        begin(of, 0.0, 2000, 500)
    assert (looked.value.what, looked.value.needed) == (refused.value.what, refused.value.needed) == ("tokens", 2500)
    assert looked.value.retry_after_s == refused.value.retry_after_s
    of.check(900, 500, 0.0, 0, answers=False)
    with pytest.raises(RateLimited):
        of.check(None, 0, 0.0, 4400, answers=False)
    begin(of, 0.0, 500, 500)
    with pytest.raises(RateLimited) as looked:
        of.check(0, 0, 0.0, 0, answers=False)
    assert looked.value.what == "requests"
