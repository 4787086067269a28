"""Which of several equally cheap busy nodes gets a request."""

from __future__ import annotations

import pytest
from routing_harness import RoutingHarness, prompt

from warmroute.core.node import Ticket


def test_of_equal_busy_nodes_the_one_that_got_a_request_last_wins() -> None:
    """The requests of the others end sooner, so that a node becomes idle sooner."""
    harness = RoutingHarness(4)
    for node in harness.nodes:
        harness.advance(0.1)
        Ticket(node, harness.now_s)
    Ticket(harness.nodes[3], harness.now_s)
    assert {harness.decide(prompt(500)).node.name for _ in range(20)} == {"n2"}


def test_of_equal_busy_nodes_the_one_that_has_prefilled_more_wins() -> None:
    harness, tickets = RoutingHarness(3), []
    for node in harness.nodes:
        tickets.append(harness.busy(node))
        harness.advance(0.05)
    assert {harness.decide(prompt(8000)).node.name for _ in range(20)} == {"n0"}


def test_the_kernel_finds_the_node_with_the_least_work_left() -> None:
    harness = RoutingHarness(3)
    tickets = [harness.busy(node, tokens) for node, tokens in zip(harness.nodes, (8000, 2000, 4000), strict=True)]
    prices = harness.decide(prompt(100)).prices
    assert prices is not None and tickets
    assert prices.least_work_left([0, 1, 2], harness.now_s) == 1
    assert prices.least_work_left([2, 0], harness.now_s) == 2
    assert prices.least_work_left([], harness.now_s) == -1
    for wrong in ([3], [-1], [1 << 70]):
        with pytest.raises((IndexError, OverflowError)):
            prices.least_work_left(wrong, harness.now_s)
    with pytest.raises(TypeError):
        prices.least_work_left(["n0"], harness.now_s)  # type: ignore[list-item]
    with pytest.raises(TypeError):
        prices.least_work_left((0, 1), harness.now_s)  # type: ignore[arg-type]
