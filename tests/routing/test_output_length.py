"""The estimate of output lengths."""

from __future__ import annotations

import pytest
from routing_harness import RoutingHarness, prompt

from warmroute.routing.dispatch import Dispatch
from warmroute.routing.output_length import DEFAULT_TOKENS, OutputLengthEstimate


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
        assert isinstance(ticket, Dispatch)
        harness.advance(0.1)
        ticket.first_token(harness.now_s)
        harness.advance(1.0)
        ticket.record_usage(1000, 0, 50, harness.now_s)
        harness.close(ticket)
    assert harness.price(harness.nodes[0], prompt(1000)).output == pytest.approx(50, rel=0.05)
    harness.assert_all_counters_are_zero()
