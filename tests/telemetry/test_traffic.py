"""What routing was worth: tokens, saved prefill time, time to first token, popular prefixes."""

from __future__ import annotations

import pytest
from routing_harness import MODEL, RoutingHarness, prompt

from warmroute._kernel import (
    ATTENTION_WORK,
    EXACT_ESTIMATES,
    MAX_COUNTED_TOKENS,
    SAMPLED_HITS,
    TIME_BOUNDS_MS,
    Hit,
    RouteTraffic,
    TokenTraffic,
    TrafficRecorder,
)
from warmroute.core.brain import Brain
from warmroute.core.hot_prefixes import REFRESH_S
from warmroute.core.messages import Arrive, Ended, FirstToken, Lookup, RoutingRequest, Usage
from warmroute.core.node import Ticket
from warmroute.core.prefill_work import work
from warmroute.core.traffic import (
    MAX_NODES,
    MAX_RECORDERS,
    MAX_ROUTES,
    MAX_TENANTS,
    OTHER,
    Counters,
    Traffic,
    time_percentile,
)


class Harness(RoutingHarness):
    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.traffic = Traffic()
        self.brain = Brain(self.fleet, self.router, self.admission, Counters(), traffic=self.traffic)
        self.served = 0

    def serve(
        self, lookup: Lookup | None, usage: Usage | None, *, status: int = 200, route: str = "", streams: bool = True
    ) -> None:
        """Serve a request: its first byte comes after 100 ms."""
        self.served += 1
        request = RoutingRequest(MODEL, arrived_s=self.now_s, streams=streams, route=route, tenant="search")
        self.brain.handle(Arrive(self.served, b"", request, lookup), self.now_s)
        self.advance(0.1)
        self.brain.handle(FirstToken(self.served, 1, status), self.now_s)
        self.brain.handle(Ended(self.served, 1, status, self.now_s, usage), self.now_s)


def counted(gpus: int = 1) -> tuple[RouteTraffic, TrafficRecorder, Ticket]:
    """Return the counters of a route, a recorder for it, and the ticket of a streamed response after 0.5 s."""
    harness = Harness(1)
    ticket = Ticket(harness.nodes[0], 0.0)
    ticket.first_token(0.5)
    sums = RouteTraffic()
    return sums, TrafficRecorder(sums, TokenTraffic(), TokenTraffic(), gpus), ticket


def test_a_complete_response_counts_its_tokens_and_its_time_to_first_token() -> None:
    harness = Harness(2)
    harness.serve(prompt(1000), (1000, 0, 50), route="chat")
    total = harness.traffic.total
    assert (total.requests, total.prompt_tokens, total.cached_tokens, total.output_tokens) == (1, 1000, 0, 50)
    assert harness.traffic.by_route[MODEL, "chat"].requests == 1
    assert time_percentile(total.ttft_counts, 0.5) == pytest.approx(100.0, rel=0.25)


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
    ms_per_token = harness.nodes[0].speed.long_ms_per_token
    expected_ms = ms_per_token * (work(4000, 0) - work(800, 3200))
    assert harness.traffic.total.saved_ms == pytest.approx(expected_ms)


def test_short_prefills_do_not_make_a_saved_token_look_expensive() -> None:
    """A node takes 40 ms for each step and 0.2 ms for each token. Most prompts are cached but for 50 tokens."""
    harness = Harness(1)
    node, speed = harness.nodes[0], harness.nodes[0].speed
    speed._step_ms = 40.0
    for number in range(200):
        new = 4000 if number % 20 == 0 else 50
        took_s = max(40.0, 0.2 * work(new, 0)) / 1000.0
        speed.learn(work(new, 0), 0.0, 10.0 * number, 10.0 * number + took_s, True)
    assert speed.ms_per_token == pytest.approx(0.2, rel=0.1) and speed.long_ms_per_token == pytest.approx(0.2)
    lookup = prompt(4000, 7)
    harness.warm(node, lookup)
    harness.serve(lookup, (4000, 3990, 10))
    total = harness.traffic.total
    assert total.prompt_gpu_ms == pytest.approx(0.2 * work(4000, 0), rel=0.05)
    assert total.saved_ms == pytest.approx(total.prompt_gpu_ms - 40.0, rel=0.01), "the last step is not saved"


def test_a_prompt_that_fits_into_one_step_saves_nothing() -> None:
    harness = Harness(1)
    harness.nodes[0].speed.guess(0.2)
    harness.nodes[0].speed._step_ms = 40.0
    lookup = prompt(64, 7)
    harness.warm(harness.nodes[0], lookup)
    harness.serve(lookup, (64, 48, 10))
    assert harness.traffic.total.cached_tokens == 48 and harness.traffic.total.saved_ms == 0.0


def test_the_round_robin_estimate_is_the_mean_over_all_candidates() -> None:
    harness = Harness(4)
    lookup = prompt(4000, 7)
    harness.warm(harness.nodes[0], lookup)
    harness.serve(lookup, None)
    total = harness.traffic.total
    assert total.cached_tokens == pytest.approx(total.predicted_tokens) and total.predicted_tokens > 1000
    assert total.round_robin_tokens == pytest.approx(total.predicted_tokens / 4, rel=0.01)
    assert total.round_robin_saved_ms == pytest.approx(total.saved_ms / 4, rel=0.01)


@pytest.mark.parametrize(("predicted", "hits"), [(None, {}), (0, None)])
def test_a_choice_without_looking_up_caches_counts_as_one_of_round_robin(
    predicted: int | None, hits: dict[str, Hit] | None
) -> None:
    sums, recorder, ticket = counted()
    recorder.record(ticket, 0.0, 0.0, 1.0, True, 1000, 600, 1, predicted, hits, {"a": 1})
    assert sums.round_robin_tokens == sums.cached_tokens == 600
    assert sums.round_robin_saved_ms == sums.saved_ms > 0.0
    recorder.record(ticket, 0.0, 0.0, 1.0, True, 1000, 600, 1, 0, {}, {"a": 1})
    assert sums.round_robin_tokens == 600, "looked up, and no node has any of it"


def test_the_round_robin_estimate_ignores_nodes_that_are_no_candidates() -> None:
    sums, recorder, ticket = counted()
    hits = {"a": Hit(10, 10.0, 0), "b": Hit(4, 2.0, 0), "gone": Hit(9, 9.0, 0)}
    recorder.record(ticket, 0.0, 0.0, 1.0, True, 100, 0, 1, 0, hits, {"a": 1, "b": 1, "cold": 1})
    ms_per_token = ticket.node.speed.ms_per_token
    assert sums.round_robin_tokens == pytest.approx(4.0)
    assert sums.round_robin_saved_ms == pytest.approx(ms_per_token * (4.0 + 0.5 * ATTENTION_WORK * 104.0 / 3))
    with pytest.raises(TypeError):
        recorder.record(ticket, 0.0, 0.0, 1.0, True, 100, 0, 1, 0, {"a": 1}, {"a": 1})  # type: ignore[dict-item]


def test_the_round_robin_estimate_of_many_hits_looks_at_some_of_them() -> None:
    sums, recorder, ticket = counted()
    count = 8 * SAMPLED_HITS
    hits = {f"n{number}": Hit(number, float(number), 0) for number in range(count)}
    for number in range(1000):
        recorder.record(ticket, 0.0, 0.0, 2.0 * number, True, 10_000, 0, 1, 0, hits, hits)
    assert sums.round_robin_tokens / 1000 == pytest.approx((count - 1) / 2, rel=0.02)


def test_the_round_robin_estimate_of_a_busy_route_looks_at_some_responses() -> None:
    sums, recorder, ticket = counted()
    responses = 40 * EXACT_ESTIMATES
    for number in range(responses):  # in one second, with a pattern
        hits = {"a": Hit(number % 8, float(number % 8), 0)}
        recorder.record(ticket, 0.0, 0.0, 5.0, True, 10_000, 0, 1, 0, hits, {"a": 1, "b": 1})
    assert sums.round_robin_tokens == pytest.approx(responses * 3.5 / 2, rel=0.1)
    exact, before = 0.0, sums.round_robin_tokens
    for number in range(EXACT_ESTIMATES):
        recorder.record(ticket, 0.0, 0.0, 6.5, True, 10_000, 0, 1, 0, {"a": Hit(number, number, 0)}, {"a": 1, "b": 1})
        exact += number / 2
    assert sums.round_robin_tokens - before == pytest.approx(exact), "few responses are all counted"


def test_no_prompt_has_more_cached_tokens_than_its_node_reports_prompt_tokens() -> None:
    """The node reports 40 prompt tokens, and the router expected 1,000 to be cached on it and 600 on another one."""
    sums, recorder, ticket = counted()
    hits, candidates = {"a": Hit(1000, 1000.0, 0), "b": Hit(600, 600.0, 0)}, {"a": 1, "b": 2}
    recorder.record(ticket, 0.0, 0.0, 1.0, True, 40, None, 1, 1000, hits, candidates)
    assert sums.predicted_tokens == sums.cached_tokens == 40 and sums.round_robin_tokens == 40.0
    assert sums.round_robin_saved_ms == pytest.approx(sums.saved_ms) and sums.short_reports == 1


@pytest.mark.parametrize(("reported", "counted_as_short"), [(1000, 0), (990, 0), (850, 0), (700, 1), (1, 1), (None, 0)])
def test_a_prompt_that_its_node_counts_a_little_shorter_is_not_noted(
    reported: int | None, counted_as_short: int
) -> None:
    """Where prompts are matched by their text, the router knows their tokens only roughly."""
    sums, recorder, ticket = counted()
    recorder.record(ticket, 0.0, 0.0, 1.0, True, reported, None, 1, 1000, {}, {"a": 1})
    assert sums.short_reports == counted_as_short
    total = RouteTraffic()
    total.add(sums)
    assert total.short_reports == counted_as_short


def test_reported_tokens_replace_the_predicted_ones_and_are_bounded() -> None:
    sums, recorder, ticket = counted()
    recorder.record(ticket, 0.0, 0.0, 1.0, True, 1000, 10**12, 1, 500, {}, {"a": 1})
    assert (sums.cached_tokens, sums.reported_tokens) == (1000, 1000)


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
    assert time_percentile(RouteTraffic().ttft_counts, 0.5) is None


# By tenant and node, times, and bounds.


def test_a_response_counts_for_its_route_its_tenant_and_its_node() -> None:
    harness = Harness(2)
    harness.serve(prompt(1000), (1000, 400, 50), route="chat")
    traffic = harness.traffic
    [node] = [key[1] for key in traffic.by_node]
    for counters in (traffic.by_route[MODEL, "chat"], traffic.by_tenant[MODEL, "search"], traffic.by_node[MODEL, node]):
        found = (counters.requests, counters.prompt_tokens, counters.reported_tokens, counters.output_tokens)
        assert found == (1, 1000, 400, 50)


def test_times_are_counted_by_route() -> None:
    sums, recorder, ticket = counted()
    recorder.record(ticket, -0.25, 0.125, 1.5, True, 100, 0, 11, 0, None, None)
    expected = {"ttft": 750.0, "inter_token": 100.0, "queue_wait": 125.0, "duration": 1750.0}
    for name, ms in expected.items():
        histogram = getattr(sums, name)
        assert histogram.sum_ms == pytest.approx(ms), name
        [bucket] = [at for at, count in enumerate(histogram.counts) if count]
        assert TIME_BOUNDS_MS[bucket - 1] < ms <= TIME_BOUNDS_MS[bucket], name
    recorder.record(ticket, 0.0, 0.0, 2.0, False, 100, 0, 11, 0, None, None)
    recorder.record(ticket, 0.0, 0.0, 2.0, True, 100, 0, None, 0, None, None)
    assert [sum(getattr(sums, name).counts) for name in expected] == [2, 1, 3, 3]


def test_the_spread_of_the_hit_rate_is_counted() -> None:
    sums, recorder, ticket = counted()
    for cached in (0, 50):
        recorder.record(ticket, 0.0, 0.0, 1.0, True, 100, cached, 1, None, None, None)
    recorder.record(ticket, 0.0, 0.0, 1.0, True, None, None, 1, None, None, None)
    assert (sums.counted_prompts, sums.hit_shares, sums.hit_share_squares) == (2, 0.5, 0.25)
    sums.sampled_blocks, sums.known_blocks = 5, 3
    total = RouteTraffic()
    total.add(sums)
    total.add(sums)
    assert (total.counted_prompts, total.hit_share_squares, total.sampled_blocks, total.known_blocks) == (4, 0.5, 10, 6)
    assert recorder.route is sums


def test_saved_gpu_time_counts_all_gpus_of_the_node() -> None:
    sums, recorder, ticket = counted(gpus=8)
    recorder.record(ticket, 0.0, 0.0, 1.0, True, 1000, 500, 1, 0, {"a": Hit(100, 100.0, 0)}, {"a": 1})
    assert sums.saved_ms > sums.round_robin_saved_ms > 0.0
    assert sums.saved_gpu_ms == pytest.approx(8 * sums.saved_ms)
    assert sums.round_robin_saved_gpu_ms == pytest.approx(8 * sums.round_robin_saved_ms)


@pytest.mark.parametrize("absurd", [-1, -(10**400), 10**400, 2**63])
def test_absurd_numbers_of_tokens_are_bounded(absurd: int) -> None:
    sums, recorder, ticket = counted()
    for _ in range(3):
        recorder.record(ticket, 0.0, 0.0, 1.0, True, absurd, absurd, absurd, absurd, None, None)
    assert sums.requests == 3
    for tokens in (sums.prompt_tokens, sums.cached_tokens, sums.predicted_tokens, sums.output_tokens):
        assert 0 <= tokens <= 3 * MAX_COUNTED_TOKENS


@pytest.mark.parametrize("absurd", [float("nan"), float("inf"), float("-inf"), -5.0, 1e308])
def test_absurd_times_are_in_the_first_or_the_last_bucket(absurd: float) -> None:
    histogram = RouteTraffic().ttft
    histogram.observe(absurd)
    counts = histogram.counts
    assert counts[0] + counts[-1] == 1 and sum(counts) == 1 and 0.0 <= histogram.sum_ms <= 1e9


def test_nodes_that_left_the_fleet_are_forgotten_and_what_they_served_is_not() -> None:
    harness = Harness(2)
    harness.serve(prompt(1000), (1000, 0, 1))
    traffic = harness.traffic
    traffic.keep_nodes(())
    assert not traffic.by_node and traffic.total.prompt_tokens == 1000
    harness.serve(prompt(1000), (1000, 0, 1))
    assert traffic.total.prompt_tokens == 2000 and [one.requests for one in traffic.by_node.values()] == [1]


def test_ten_thousand_models_and_tenants_do_not_grow_memory() -> None:
    harness = Harness(1)
    traffic = harness.traffic
    for number in range(MAX_RECORDERS + 10):
        traffic._recorder(f"m{number % 10_000}", "", f"t{number}", harness.nodes[0])
    assert len(traffic._recorders) <= MAX_RECORDERS
    sizes = [len(traffic.by_route), len(traffic.by_tenant), len(traffic.by_node)]
    assert sizes == [MAX_ROUTES + 1, MAX_TENANTS + 1, MAX_NODES + 1]
