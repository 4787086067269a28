"""An error of the cache index costs a request its cache hits, never its answer."""

from __future__ import annotations

import logging

import pytest
from routing_harness import MODEL, RoutingHarness, prompt

from warmroute.config import Pricing, RouteConfig, Routing
from warmroute.core.cache_view import CacheView
from warmroute.core.tickets import PromptTicket


def break_index(harness: RoutingHarness) -> None:
    """Give a node a block size with which no prompt can be hashed, as a node once could."""
    for node in harness.nodes[:1]:
        cache = harness.cache_view.cache(node.name)
        assert cache is not None
        cache.block_size = 70_000
    harness.cache_view._update_block_sizes()


@pytest.mark.parametrize("policy", ["price", "overlap", "approximate"])
def test_a_prompt_that_cannot_be_looked_up_is_routed_by_load(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    harness = RoutingHarness(3)
    harness.router.reconfigure(Routing(policy=policy, seed=3), Pricing())  # type: ignore[arg-type]
    break_index(harness)
    lookup = prompt(80_000)
    with pytest.raises(ValueError):
        harness.cache_view.hits(MODEL, lookup, 0.0)
    with caplog.at_level(logging.ERROR):
        for number in range(6):
            request = harness.submit(prompt(80_000))
            assert request.admitted and not isinstance(request.ticket, PromptTicket), number
    assert {node.inflight for node in harness.nodes} == {2}, "load decides"
    assert harness.cache_view.lookup_errors >= 6
    assert len([record for record in caplog.records if "lookup_failed" in record.message]) <= 2, "logged once"


@pytest.mark.interpreted
def test_an_error_while_the_prompt_is_recorded_costs_only_its_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = RoutingHarness(2)

    def fail(*_args: object) -> None:
        raise MemoryError

    monkeypatch.setattr(CacheView, "record_routed", fail)
    request = harness.submit(1000)
    assert request.admitted and harness.cache_view.lookup_errors == 1
    request.answer()
    harness.assert_all_counters_are_zero()


def test_a_queued_request_is_decided_again_by_load() -> None:
    harness = RoutingHarness(1)
    running = harness.busy(harness.nodes[0], 90_000)
    queued = harness.submit(prompt(80_000))
    assert queued.queued
    break_index(harness)
    harness.advance(1.0)  # its hits are looked up again
    harness.free(running)
    assert queued.admitted


@pytest.mark.parametrize("routes", [(), (RouteConfig(name="r"),)])
def test_islands_survive_an_error_too(routes: tuple[RouteConfig, ...]) -> None:
    harness = RoutingHarness(2)
    harness.add("far", island="far")
    harness.router.reconfigure(Routing(policy="price", seed=3), Pricing(), routes)
    break_index(harness)
    for _ in range(4):
        request = harness.submit(prompt(80_000))
        assert request.admitted
