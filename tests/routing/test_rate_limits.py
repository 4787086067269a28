"""Rate limits: taken before a request, settled after it, and given back if no node served it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmroute.config import ConfigError, KeyConfig, from_table
from warmroute.core.messages import RoutingRequest
from warmroute.core.rate_limits import Bucket, RateLimits, RequestCharge, TenantLimits
from warmroute.core.rejections import RateLimited, rejection


def key(tenant: str, requests: int = 0, tokens: int = 0, number: int = 0) -> KeyConfig:
    return KeyConfig(sha256=f"{number:064x}", tenant=tenant, requests_per_min=requests, tokens_per_min=tokens)


def limits(requests: int = 0, tokens: int = 0) -> TenantLimits:
    found = RateLimits([key("t", requests, tokens)], 0.0).of("t")
    assert found is not None
    return found


def begin(
    tenant: TenantLimits, now_s: float, prompt: float | None = 100, output: float = 50, body: int = 0
) -> RequestCharge:
    charge = tenant.begin(now_s, body, has_output=True)
    try:
        charge.take_tokens(prompt, output, now_s)
    except RateLimited:
        charge.cancel()
        raise
    return charge


def test_requests_are_limited_per_minute_and_refill_evenly() -> None:
    tenant = limits(requests=60)
    for _ in range(60):
        begin(tenant, 0.0)
    with pytest.raises(RateLimited) as rejected:
        begin(tenant, 0.0)
    assert rejected.value.retry_after_s == 1 and rejected.value.what == "requests"
    assert rejected.value.reason == "requests_per_min"
    begin(tenant, 1.0)
    with pytest.raises(RateLimited):
        begin(tenant, 1.5)
    begin(tenant, 2.0)


def test_after_retry_after_the_request_passes() -> None:
    tenant = limits(tokens=6000)
    begin(tenant, 0.0, 4000, 1000)
    with pytest.raises(RateLimited) as rejected:
        begin(tenant, 0.0, 2000, 500)
    after_s = rejected.value.retry_after_s
    assert after_s == 15 and rejected.value.needed == 2500, "1,500 are missing, and 100 are refilled per second"
    with pytest.raises(RateLimited):
        begin(tenant, after_s - 1.0, 2000, 500)
    begin(tenant, after_s, 2000, 500)


def test_the_real_usage_is_settled_once() -> None:
    tenant = limits(tokens=1000)
    assert tenant.tokens is not None
    charge = begin(tenant, 0.0, 100, 400)
    assert tenant.tokens.level(0.0) == 500
    charge.settle(100, 50)
    assert tenant.tokens.level(0.0) == 850
    charge.settle(100, 900)
    assert tenant.tokens.level(0.0) == 850
    charge.cancel()
    assert tenant.tokens.level(0.0) == 850


def test_a_response_longer_than_expected_leaves_a_debt() -> None:
    tenant = limits(tokens=600)
    begin(tenant, 0.0, 100, 100).settle(100, 1700)
    assert tenant.tokens is not None and tenant.tokens.level(0.0) == -1200
    with pytest.raises(RateLimited) as rejected:
        tenant.begin(0.0, 0, has_output=True)
    assert rejected.value.retry_after_s == 121
    begin(tenant, 140.0, 100, 90)


def test_without_reported_usage_the_expected_usage_counts() -> None:
    tenant = limits(tokens=1000)
    assert tenant.tokens is not None
    begin(tenant, 0.0, 100, 200).settle(None, None)
    assert tenant.tokens.level(0.0) == 700
    begin(tenant, 0.0, 100, 200).settle(90, None)
    assert tenant.tokens.level(0.0) == 610, "an embedding has no output tokens"


def test_an_unread_prompt_is_estimated_by_its_bytes() -> None:
    tenant = limits(tokens=1000)
    assert tenant.tokens is not None
    begin(tenant, 0.0, None, 100, body=400)
    assert tenant.tokens.level(0.0) == 800
    charge = tenant.begin(0.0, 400, has_output=False)
    charge.take_tokens(None, 100, 0.0)
    assert tenant.tokens.level(0.0) == 700


def test_a_request_that_no_node_served_takes_nothing() -> None:
    tenant = limits(requests=10, tokens=1000)
    assert tenant.tokens is not None and tenant.requests is not None
    begin(tenant, 0.0).cancel()
    assert (tenant.requests.level(0.0), tenant.tokens.level(0.0)) == (10, 1000)
    begin(tenant, 0.0).settle(0, 0)
    assert (tenant.requests.level(0.0), tenant.tokens.level(0.0)) == (9, 1000)
    with pytest.raises(RateLimited):
        begin(tenant, 0.0, 5000, 0) and begin(tenant, 0.0, 5000, 0)
    assert tenant.requests.level(0.0) == 8


def test_a_request_larger_than_the_limit_passes_when_the_bucket_is_full() -> None:
    tenant = limits(tokens=1000)
    assert tenant.tokens is not None
    begin(tenant, 0.0, 5000, 1000)
    assert tenant.tokens.level(0.0) == -5000
    with pytest.raises(RateLimited) as rejected:
        begin(tenant, 0.0, 5000, 1000)
    assert rejected.value.retry_after_s == 301, "not before the debt is paid"
    with pytest.raises(RateLimited) as rejected:
        begin(tenant, 301.0, 5000, 1000)
    begin(tenant, 301.0 + rejected.value.retry_after_s, 5000, 1000)


def test_headers_are_those_of_openai() -> None:
    tenant = limits(requests=60, tokens=6000)
    begin(tenant, 0.0, 1000, 500)
    assert dict(tenant.headers(0.0)) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1.000s",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "4500",
        "x-ratelimit-reset-tokens": "15.000s",
    }
    assert [name for name, _ in limits(requests=1).headers(0.0)] == [
        "x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests",
    ]  # fmt: skip


def test_the_keys_of_one_tenant_share_a_limit() -> None:
    found = RateLimits([key("a", 2, number=1), key("a", 0, 500, number=2), key("b", 2), key("free")], 0.0)
    assert found and found.of("free") is None and found.of("") is None
    tenant = found.of("a")
    assert tenant is not None and tenant.requests is not None and tenant.tokens is not None
    assert (tenant.requests.limit, tenant.tokens.limit) == (2, 500)
    begin(tenant, 0.0)
    begin(tenant, 0.0)
    with pytest.raises(RateLimited):
        begin(tenant, 0.0)
    other = found.of("b")
    assert other is not None
    begin(other, 0.0)
    assert not RateLimits([key("free")], 0.0)


def test_contradicting_limits_of_one_tenant_are_rejected() -> None:
    keys = [
        {"sha256": f"{number:064x}", "tenant": "a", "tokens_per_min": limit} for number, limit in enumerate((5, 0, 6))
    ]
    with pytest.raises(ConfigError, match=r"keys\.tokens_per_min: two keys of tenant 'a' set different limits"):
        from_table({"keys": keys})


def test_a_reload_keeps_the_usage() -> None:
    found = RateLimits([key("a", 60, 1000)], 0.0)
    tenant = found.of("a")
    assert tenant is not None
    running = begin(tenant, 0.0, 400, 100)
    found.reconfigure([key("a", 120, 1000), key("b", 5)], 0.0)
    tenant = found.of("a")
    assert tenant is not None and tenant.requests is not None and tenant.tokens is not None
    assert tenant.requests.level(0.0) == 118 and tenant.tokens.level(0.0) == 500, "as full as it was"
    running.settle(400, 0)
    assert tenant.tokens.level(0.0) == 600, "a request that was running during the reload is settled, too"
    found.reconfigure([key("a")], 0.0)
    assert not found
    running.settle(400, 0)


@given(st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(1, 40)), max_size=60))
def test_no_more_passes_than_the_capacity_and_the_refill(amounts: list[tuple[float, int]]) -> None:
    bucket, now_s, taken = Bucket(100, 0.0), 0.0, 0
    for pause_s, amount in amounts:
        now_s += pause_s
        wait_s = bucket.wait_s(amount, now_s)
        if not wait_s:
            bucket.take(amount)
            taken += amount
        else:
            later = Bucket(100, now_s, bucket.level(now_s))
            assert later.wait_s(amount, now_s + 0.99 * wait_s) and not later.wait_s(amount, now_s + wait_s + 1e-6)
        assert taken <= 100 + now_s * 100 / 60 + 1e-6 and bucket.level(now_s) >= -1e-6


def test_a_check_decides_like_a_request_and_takes_nothing() -> None:
    tenant = limits(requests=2, tokens=6000)
    for _ in range(5):
        tenant.check(2000, 500, 0.0, 0, has_output=True)
    begin(tenant, 0.0, 4000, 1000)
    with pytest.raises(RateLimited) as checked:
        tenant.check(2000, 500, 0.0, 0, has_output=True)
    with pytest.raises(RateLimited) as rejected:
        begin(tenant, 0.0, 2000, 500)
    assert (
        (checked.value.what, checked.value.needed) == (rejected.value.what, rejected.value.needed) == ("tokens", 2500)
    )
    assert checked.value.retry_after_s == rejected.value.retry_after_s
    tenant.check(900, 500, 0.0, 0, has_output=False)
    with pytest.raises(RateLimited):
        tenant.check(None, 0, 0.0, 4400, has_output=False)
    begin(tenant, 0.0, 500, 500)
    with pytest.raises(RateLimited) as checked:
        tenant.check(0, 0, 0.0, 0, has_output=False)
    assert checked.value.what == "requests"


def test_an_absurd_usage_shuts_a_tenant_out_for_ten_minutes_at_most() -> None:
    tenant = limits(tokens=6000)
    charge = begin(tenant, 0.0)
    charge.settle(999_999_999, 999_999_999)
    with pytest.raises(RateLimited):
        begin(tenant, 600.0)
    begin(tenant, 605.0)


def test_the_error_names_the_part_of_the_limit_that_this_process_may_use() -> None:
    tenant = limits(requests=3)
    assert tenant.requests is not None
    tenant.requests.fraction = 1 / 3
    tenant.requests.level(0.0)
    begin(tenant, 0.0)
    with pytest.raises(RateLimited) as raised:
        begin(tenant, 0.0)
    message = rejection(raised.value, 1, RoutingRequest(model="m")).message
    assert message.startswith(
        "The rate limit of 3 requests per minute is reached. "
        "This router uses 33% of it while it cannot reach the other routers. Retry in"
    )
