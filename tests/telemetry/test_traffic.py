"""What routing was worth: tokens, saved prefill time, time to first token, popular prefixes."""

from __future__ import annotations

import pytest
from routing_harness import MODEL, RoutingHarness, prompt

from warmroute._kernel import Hit, sum_hits
from warmroute.fleet.node import Node
from warmroute.fleet.node_speed import saved_work, work
from warmroute.index.lookup import Lookup
from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing.attempts import Attempts, Usage
from warmroute.routing.dispatcher import Dispatcher
from warmroute.routing.routing_errors import RoutingError
from warmroute.telemetry.counters import Counters
from warmroute.telemetry.popular_prefixes import REFRESH_S
from warmroute.telemetry.traffic import MAX_ROUTES, OTHER, Traffic, ttft_percentile


class SilentDriver:
    """Drives attempts without sending anything."""

    def send(self, node: Node) -> None:
        pass

    def reject(self, why: RoutingError) -> int:
        raise why

    def internal_error(self, error: Exception) -> None:
        raise error

    def withdraw(self) -> None:
        pass

    def send_hedge(self, node: Node) -> None:
        pass

    def withdraw_hedge(self) -> None:
        pass

    def promote_hedge(self) -> None:
        pass


class Harness(RoutingHarness):
    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.traffic = Traffic()
        self.dispatcher = Dispatcher(
            self.fleet, self.router, self.admission, Counters(), None, 3, lambda: self.now_s,
            self.admission.node_freed,
        )  # fmt: skip
        self.dispatcher.request_completed = self.traffic.request_completed

    def serve(
        self, lookup: Lookup | None, usage: Usage | None, *, status: int = 200, route: str = "", streams: bool = True
    ) -> None:
        """Serve a request: its first byte comes after 100 ms."""
        request = RoutingRequest(MODEL, arrived_s=self.now_s, streams=streams, route=route, tenant="search")
        attempts = Attempts(self.dispatcher, SilentDriver(), request, b"")
        attempts.enter(lookup, lookup.token_count if lookup is not None else None, self.now_s)
        self.advance(0.1)
        attempts.response_started(status, None, self.now_s)
        attempts.first_token(self.now_s)
        attempts.response_ended(usage, self.now_s)


def test_a_complete_response_counts_its_tokens_and_its_time_to_first_token() -> None:
    harness = Harness(2)
    harness.serve(prompt(1000), (1000, 0, 50), route="chat")
    total = harness.traffic.total
    assert (total.requests, total.prompt_tokens, total.cached_tokens, total.output_tokens) == (1, 1000, 0, 50)
    assert harness.traffic.by_route[MODEL, "chat"].requests == 1
    assert ttft_percentile(total.ttft_counts, 0.5) == pytest.approx(100.0, rel=0.25)


def test_the_total_is_the_sum_over_all_routes() -> None:
    harness = Harness(1)
    for route in ("a", "b", "b"):
        harness.serve(prompt(1000), (1000, 100, 5), route=route)
    total = harness.traffic.total
    assert (total.requests, total.prompt_tokens, total.cached_tokens, sum(total.ttft_counts)) == (3, 3000, 300, 3)
    assert harness.traffic.by_route[MODEL, "b"].requests == 2


def test_saved_time_is_the_prefill_time_of_the_cached_tokens() -> None:
    harness = Harness(1)
    lookup = prompt(4000, 7)
    harness.warm(harness.nodes[0], lookup)
    harness.serve(lookup, (4000, 3200, 10))
    ms_per_token = harness.nodes[0].speed.ms_per_token
    expected_ms = ms_per_token * (work(4000, 0) - work(800, 3200))
    assert harness.traffic.total.saved_ms == pytest.approx(expected_ms)
    assert saved_work(3200, 3200**2) == pytest.approx(work(4000, 0) - work(800, 3200))


def test_the_round_robin_estimate_is_the_mean_over_all_candidates() -> None:
    harness = Harness(4)
    lookup = prompt(4000, 7)
    harness.warm(harness.nodes[0], lookup)
    harness.serve(lookup, None)
    total = harness.traffic.total
    assert total.cached_tokens == pytest.approx(total.predicted_tokens) and total.predicted_tokens > 1000
    assert total.round_robin_tokens == pytest.approx(total.predicted_tokens / 4, rel=0.01)
    assert total.round_robin_saved_ms == pytest.approx(total.saved_ms / 4, rel=0.01)


def test_the_sum_over_hits_ignores_nodes_that_are_no_candidates() -> None:
    hits = {"a": Hit(10, 10.0, 0), "b": Hit(4, 2.0, 0), "gone": Hit(9, 9.0, 0)}
    assert sum_hits(hits, {"a": 1, "b": 1, "cold": 1}) == (12.0, 104.0)
    with pytest.raises(TypeError):
        sum_hits({"a": 1}, {"a": 1})  # type: ignore[dict-item]


def test_reported_tokens_replace_the_predicted_ones_and_are_bounded() -> None:
    harness = Harness(1)
    harness.serve(prompt(1000), (1000, 10**12, 1))
    total = harness.traffic.total
    assert (total.cached_tokens, total.reported_tokens) == (1000, 1000)


def test_rejected_responses_and_prompts_that_nobody_counted_do_not_count() -> None:
    harness = Harness(1)
    harness.serve(prompt(1000), (1000, 0, 1), status=400)
    assert harness.traffic.total.requests == 0
    harness.serve(None, None, streams=False)
    total = harness.traffic.total
    assert (total.requests, total.prompt_tokens, sum(total.ttft_counts)) == (1, 0, 0)


def test_the_number_of_routes_is_bounded() -> None:
    harness = Harness(1)
    for number in range(MAX_ROUTES + 20):
        harness.serve(None, None, route=f"r{number}")
    by_route = harness.traffic.by_route
    assert len(by_route) == MAX_ROUTES + 1 and by_route[OTHER].requests == 20


def test_popular_prefixes_have_their_share_and_their_sender_but_no_text() -> None:
    harness = Harness(2)
    shared = prompt(4000, 7)
    for number in range(20):
        harness.serve(shared if number % 2 else prompt(1000), None, route="chat")
    prefixes = harness.traffic.prefixes
    [first, *_] = prefixes.popular(harness.now_s)
    assert first.tokens > 1000 and first.share == pytest.approx(0.5, abs=0.05)
    harness.serve(shared, None, route="chat")
    harness.advance(REFRESH_S)
    [first, *_] = prefixes.popular(harness.now_s)
    assert first.sender == (MODEL, "chat", "search")
    assert all(not count.example.tokens for count in prefixes._hot._counts.values() if count.example is not None)


def test_a_percentile_without_responses_is_none() -> None:
    assert ttft_percentile([0] * 54, 0.5) is None
