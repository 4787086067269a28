"""The estimate of output lengths."""

from __future__ import annotations

import pytest
from routing_harness import RoutingHarness, prompt

from warmroute.core.output_length import DEFAULT_TOKENS, MAX_AVERAGES, MAX_RAISED_TOKENS, OutputLengthEstimate
from warmroute.core.speeds import DecodeSpeed
from warmroute.core.tickets import PromptTicket


def test_the_estimate_is_the_average_of_model_and_tenant() -> None:
    lengths = OutputLengthEstimate()
    assert lengths.expected("m", "t") == DEFAULT_TOKENS
    for _ in range(200):
        lengths.record("m", "t", 1000)
        lengths.record("m", "terse", 10)
    assert lengths.expected("m", "t") == pytest.approx(1000)
    assert lengths.expected("m", "terse") == pytest.approx(10)
    assert 300 < lengths.expected("m", "new") < 700, "the average of the model"
    assert lengths.expected("another", "t") == DEFAULT_TOKENS


def test_the_request_limits_the_estimate() -> None:
    lengths = OutputLengthEstimate()
    assert lengths.expected("m", "", 16) == 16
    assert lengths.expected("m", "", 10_000) == DEFAULT_TOKENS


def test_the_estimate_follows_a_change_and_ignores_an_outlier() -> None:
    lengths = OutputLengthEstimate()
    for _ in range(50):
        lengths.record("m", "", 100)
    lengths.record("m", "", 2000)
    assert lengths.expected("m", "") < 200
    for _ in range(60):
        lengths.record("m", "", 500)
    assert lengths.expected("m", "") == pytest.approx(500, rel=0.1)


def test_streams_that_are_under_way_raise_the_estimate_until_responses_have_ended() -> None:
    """Responses of 1,000 tokens, of which none has ended yet, and then short ones that end first."""
    lengths, speed = OutputLengthEstimate(), DecodeSpeed()
    for number in range(100):
        assert lengths.stream_began("m", speed, 0.1 * number)
    raised = 1000.0 * 9.9 / 2 / speed.mean_ms
    assert lengths.expected("m", "") == pytest.approx(raised)
    assert lengths.expected("m", "", 100) == 100
    for _ in range(10):
        lengths.record("m", "", 20)
    assert lengths.expected("m", "") == pytest.approx((20 + raised) / 2)
    for _ in range(10):
        lengths.record("m", "", 20)
    assert lengths.expected("m", "") == pytest.approx(20)
    assert not lengths.stream_began("m", speed, 10.0)
    for number in range(100):
        lengths.stream_ended("m", 0.1 * number, 10.0)
    assert not lengths._under_way


def test_a_stream_that_hangs_raises_the_estimate_within_bounds() -> None:
    lengths, speed = OutputLengthEstimate(), DecodeSpeed()
    lengths.stream_began("m", speed, 1.0)
    lengths.stream_began("m", speed, 100_000.0)
    assert lengths.expected("m", "") == MAX_RAISED_TOKENS
    lengths.stream_ended("m", 1.0, 100_001.0)
    assert lengths.expected("m", "") == DEFAULT_TOKENS
    speed.mean_ms = 0.0
    lengths.stream_began("m", speed, 100_010.0)
    assert lengths.expected("m", "") == MAX_RAISED_TOKENS


def test_a_ticket_counts_its_stream_once_and_until_it_is_closed() -> None:
    harness = RoutingHarness(1)
    lengths = harness.router.output_lengths
    tickets = [harness.busy(harness.nodes[0], 1000) for _ in range(2)]
    for ticket in tickets:
        ticket.first_token(harness.now_s)
        ticket.first_token(harness.now_s)
    assert sum(one.count for one in lengths._under_way.values()) == 2
    for ticket in tickets:
        harness.close(ticket)
        harness.close(ticket)
    assert not lengths._under_way


def test_the_number_of_averages_is_bounded() -> None:
    lengths = OutputLengthEstimate()
    for number in range(10_000):
        lengths.record("m", f"t{number}", 10)
    assert len(lengths._by_tenant) <= 4096 and len(lengths._by_model) == 1
    assert lengths.expected("m", "t9999") == pytest.approx(10)


def test_the_estimate_is_learned_from_reported_usage() -> None:
    harness = RoutingHarness(1)
    for _ in range(100):
        ticket = harness.busy(harness.nodes[0], 1000)
        assert isinstance(ticket, PromptTicket)
        harness.advance(0.1)
        ticket.first_token(harness.now_s)
        harness.advance(1.0)
        ticket.record_usage(1000, 0, 50, harness.now_s)
        harness.close(ticket)
    assert harness.price(harness.nodes[0], prompt(1000)).output == pytest.approx(50, rel=0.05)
    harness.assert_all_counters_are_zero()


def test_an_absurdly_fast_step_does_not_raise_the_estimate_without_limit() -> None:
    """At 0.5 ms a step, streams of 100 ms have 200 tokens and are half done. No step counts as less than 0.1 ms."""
    lengths, speed = OutputLengthEstimate(), DecodeSpeed()
    lengths.record("m", "", 1)
    for at_s in (0.0, 0.2):
        assert lengths.stream_began("m", speed, at_s)
    for mean_ms, raised in ((0.5, 200.0), (0.1, 1000.0), (0.001, 1000.0)):
        speed.mean_ms = mean_ms
        assert lengths.expected("m", "") == pytest.approx(1 + (raised - 1) * 19 / 20)


def test_streams_of_more_models_than_the_table_holds_are_not_counted() -> None:
    lengths, speed = OutputLengthEstimate(), DecodeSpeed()
    assert all(lengths.stream_began(f"m{number}", speed, 0.0) for number in range(MAX_AVERAGES))
    assert lengths.stream_began("another", speed, 0.0) is False
    assert lengths.stream_began("m0", speed, 100.0)
    assert lengths.expected("another", "") == DEFAULT_TOKENS < lengths.expected("m0", "")
