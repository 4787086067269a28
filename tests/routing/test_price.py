"""The policy `price`, one term after the other, by small examples.

The defaults: a token of a short prompt takes 0.05 ms to prefill, a decode step takes 15 ms, and a response has 256
tokens. So 8,000 uncached tokens take 464 ms, and 22 ms for the steps of the batch.
"""

from __future__ import annotations

from collections import Counter

import pytest
from routing_harness import MODEL, RoutingHarness, prompt

from warmroute.config import Pricing
from warmroute.core.messages import Lookup, PromptBatch
from warmroute.core.node import Node, Ticket
from warmroute.core.output_length import DEFAULT_TOKENS
from warmroute.core.policies.price import MAX_CACHE_LISTS, PricePolicy
from warmroute.core.prefill_work import work
from warmroute.core.tickets import PromptTicket


def record_arrivals(harness: RoutingHarness, *ages_s: float) -> None:
    """Record arrivals on each node, at these ages."""
    for age_s in sorted(ages_s, reverse=True):
        for node in harness.nodes:
            node.record_arrival(harness.now_s - age_s)


def running(node: Node, count: int) -> list[Ticket]:
    """Put requests without a prompt on a node."""
    return [Ticket(node, 0.0) for _ in range(count)]


# The request's own time.


def test_the_node_with_the_cached_prefix_wins() -> None:
    harness = RoutingHarness(4)
    shared = prompt(8000, 1)
    harness.warm(harness.nodes[2], shared)
    decision = harness.decide(shared)
    assert decision.node is harness.nodes[2] and decision.policy == "price"
    assert decision.price is not None
    assert (decision.price.cached, decision.price.new) == (7984, 16), "an engine computes at least the last token"


def test_the_longest_cached_prefix_wins() -> None:
    harness = RoutingHarness(3)
    for node, tokens in zip(harness.nodes, (2000, 6000, 4000), strict=True):
        harness.warm(node, prompt(tokens, 1))
    assert harness.decide(prompt(8000, 1)).node is harness.nodes[1]


def test_the_price_is_the_sum_of_its_terms_in_milliseconds() -> None:
    harness = RoutingHarness(1)
    node = harness.nodes[0]
    harness.busy(node, 4000)
    price = harness.price(node, prompt(8000))
    assert price.wait == pytest.approx(0.05 * work(4000, 0), rel=1e-6)
    steps_ms = price.prefill - 0.05 * work(8000, 0)
    assert 1.5 * 15.0 <= steps_ms < 1.5 * 16.0
    assert price.own == pytest.approx(price.wait + price.prefill + price.room)
    assert price.total == pytest.approx(price.own + price.contention + price.memory + price.congestion)


def test_an_idle_node_wins_if_waiting_for_the_cached_prefix_costs_more() -> None:
    harness = RoutingHarness(2)
    warm, cold = harness.nodes
    shared = prompt(8000, 1)
    harness.warm(warm, shared)
    harness.busy(warm, 5000)
    assert harness.decide(shared).node is warm, "275 ms of waiting against 464 ms of prefill"
    harness.busy(warm, 5000)
    assert harness.decide(shared).node is cold


def test_tokens_behind_a_long_prefix_cost_more() -> None:
    """Attention covers the whole prefix."""
    harness = RoutingHarness(1)
    node = harness.nodes[0]
    harness.warm(node, prompt(50_000, 1))
    behind, alone = harness.price(node, prompt(52_000, 1)), harness.price(node, prompt(2000))
    assert behind.new == alone.new == 2000 and behind.prefill > 2 * alone.prefill


def test_without_a_lookup_load_decides() -> None:
    harness = RoutingHarness(3)
    running(harness.nodes[0], 2)
    running(harness.nodes[2], 1)
    decision = harness.decide()
    assert decision.node is harness.nodes[1]
    assert decision.fallbacks()[0] in (harness.nodes[0], harness.nodes[2])


def test_ties_are_decided_at_random() -> None:
    harness = RoutingHarness(4)
    chosen = Counter(harness.decide(prompt(1000)).node.name for _ in range(400))
    assert len(chosen) == 4 and min(chosen.values()) > 60


def test_ties_go_to_the_less_loaded_node() -> None:
    harness = RoutingHarness(3)
    running(harness.nodes[0], 1)
    running(harness.nodes[1], 1)
    assert {harness.decide(prompt(1000)).node for _ in range(20)} == {harness.nodes[2]}


def test_work_spreads_by_queued_work() -> None:
    harness = RoutingHarness(4)
    for _ in range(40):
        lookup = prompt(4000)
        harness.send(harness.decide(lookup).node, lookup)
    assert {node.inflight for node in harness.nodes} == {10}


def test_the_fallbacks_are_ordered_by_price() -> None:
    harness = RoutingHarness(4)
    a, b, c, d = harness.nodes
    for node, tokens in ((a, 30_000), (b, 10_000), (c, 20_000)):
        harness.busy(node, tokens)
    decision = harness.decide(prompt(4000))
    assert [decision.node, *decision.fallbacks()] == [d, b, c, a]


def test_the_saving_of_a_cached_prefix_is_limited() -> None:
    shared = prompt(8000, 1)
    prices = []
    for most_ms in (60_000.0, 100.0):
        harness = RoutingHarness(1, pricing=Pricing(max_saving_ms=most_ms))
        harness.warm(harness.nodes[0], shared)
        prices.append(harness.price(harness.nodes[0], shared).prefill)
    cold = harness.price(harness.nodes[0], prompt(8000)).prefill
    assert prices[0] < 30 and cold - prices[1] == pytest.approx(100.0)


# Room in KV memory.


def set_kv_usage(harness: RoutingHarness, node: Node, share: float) -> None:
    node.update_load(running=1, waiting=0, kv_usage=share, now_s=harness.now_s)


def test_a_full_node_is_avoided_without_a_cached_prefix() -> None:
    harness = RoutingHarness(2, cache_tokens=100_000)
    full, other = harness.nodes
    running(other, 3)
    set_kv_usage(harness, full, 0.97)
    assert harness.decide(prompt(4000)).node is other
    assert harness.price(full, prompt(4000)).room > 100 > 10 > harness.price(other, prompt(4000)).room


def test_a_full_node_is_avoided_even_with_a_cached_prefix() -> None:
    harness = RoutingHarness(2, cache_tokens=100_000)
    shared = prompt(1500, 1)
    harness.warm(harness.nodes[0], shared)
    assert harness.decide(shared).node is harness.nodes[0]
    set_kv_usage(harness, harness.nodes[0], 1.0)
    assert harness.decide(shared).node is harness.nodes[1]


def test_room_costs_little_until_a_node_is_nearly_full() -> None:
    harness = RoutingHarness(1, cache_tokens=100_000)
    node = harness.nodes[0]
    costs = []
    for share in (0.0, 0.3, 0.6, 0.9, 0.95, 1.0):
        set_kv_usage(harness, node, share)
        costs.append(harness.price(node, prompt(4000)).room)
    assert costs[2] < 10 and costs[3:] == sorted(costs[3:]) and costs[5] > 5 * costs[3] > 0


def test_room_counts_requests_sent_since_the_last_poll() -> None:
    harness = RoutingHarness(1, cache_tokens=100_000)
    node = harness.nodes[0]
    set_kv_usage(harness, node, 0.7)
    before = harness.price(node, prompt(4000)).room
    ticket = harness.busy(node, 25_000)
    assert harness.price(node, prompt(4000)).room > 10 * before
    harness.close(ticket)
    assert harness.price(node, prompt(4000)).room == pytest.approx(before)


def test_room_does_not_count_if_the_capacity_is_unknown() -> None:
    harness = RoutingHarness(1)
    set_kv_usage(harness, harness.nodes[0], 0.99)
    assert harness.price(harness.nodes[0], prompt(4000)).room == 0.0


# Contention.


def test_decoding_in_a_large_batch_costs_more() -> None:
    harness = RoutingHarness(2)
    large, other = harness.nodes
    ticket = harness.busy(large, 100_000)
    harness.advance(0.05 * work(100_000, 0) / 1000.0)
    ticket.first_token(harness.now_s)
    running(other, 5)
    assert large.pending_work == pytest.approx(0.0, abs=1e-3)
    assert harness.decide(prompt(300)).node is other
    harness.close(ticket)
    assert harness.decide(prompt(300)).node is large


def test_the_expected_output_is_limited_by_the_request() -> None:
    harness = RoutingHarness(1)
    price = harness.decide(prompt(4000), max_output_tokens=8).price
    assert price is not None and price.output == 8
    assert harness.price(harness.nodes[0], prompt(4000)).output == DEFAULT_TOKENS


# The time of other requests.


def test_congestion_grows_with_the_arrival_rate() -> None:
    harness = RoutingHarness(1)
    node = harness.nodes[0]
    idle = harness.price(node, prompt(8000))
    assert idle.congestion == pytest.approx(0.0, abs=1e-9)
    record_arrivals(harness, *(0.1 * number for number in range(50)))
    busy = harness.price(node, prompt(8000))
    assert busy.congestion > 0.5 * busy.prefill
    assert harness.price(node, prompt(1000)).congestion < 0.1 * busy.congestion
    harness.advance(600.0)
    assert harness.price(node, prompt(8000)).congestion == pytest.approx(0.0, abs=1e-3)


def test_long_prompts_go_where_few_requests_arrive() -> None:
    """Requests arrive at a node for its cached prefixes: a long uncached prompt would delay them."""
    harness = RoutingHarness(3)
    for node, count in zip(harness.nodes, (40, 2, 40), strict=True):
        for number in range(count):
            node.record_arrival(harness.now_s - 4.0 + 4.0 * number / count)
    assert {harness.decide(prompt(30_000, number)).node for number in range(10)} == {harness.nodes[1]}


def test_congestion_counts_the_admission_queue() -> None:
    harness = RoutingHarness(2)
    before = harness.decide(prompt(8000)).price
    harness.group.waiting = 20
    after = harness.decide(prompt(8000)).price
    assert before is not None and after is not None
    assert after.congestion - before.congestion == pytest.approx(0.5 * 20 / 2 * after.prefill)


def test_congestion_makes_waiting_for_a_cached_prefix_worthwhile() -> None:
    """Alone, a request prefills again elsewhere. With others behind it, that would cost their time."""
    harness = RoutingHarness(2)
    warm, cold = harness.nodes
    shared = prompt(8000, 1)
    harness.warm(warm, shared)
    harness.busy(warm, 10_000)
    assert harness.decide(shared).node is cold
    harness.group.waiting = 20
    assert harness.decide(shared).node is warm


def record_reuse(harness: RoutingHarness, every_s: float, until_s: float) -> None:
    """Record that prompts are used again after this interval."""
    chains = [prompt(1600).blocks(MODEL, "", 16) for _ in range(8)]
    at_s = harness.now_s - until_s
    for _ in range(40):
        for chain in chains:
            harness.cache_view.reuse.record(chain, at_s)
        at_s += every_s


def fill_cache(harness: RoutingHarness, node: Node, age_s: float) -> None:
    """Fill the node's cache with blocks last used this long ago."""
    prediction = harness.cache_view.record_routed(MODEL, prompt(40_000), node.name, None, harness.now_s - age_s)
    assert prediction is not None


def test_memory_prefers_free_blocks_to_used_ones() -> None:
    harness = RoutingHarness(2, cache_tokens=32_000)
    full, free = harness.nodes
    record_reuse(harness, 10.0, 4000.0)
    fill_cache(harness, full, 5.0)
    running(free, 2)
    assert harness.price(full, prompt(8000)).memory > 20 > harness.price(free, prompt(8000)).memory == 0.0
    assert harness.decide(prompt(8000)).node is free


def test_memory_prefers_older_blocks_to_newer_ones() -> None:
    harness = RoutingHarness(2, cache_tokens=32_000)
    newer, older = harness.nodes
    record_reuse(harness, 10.0, 4000.0)
    fill_cache(harness, newer, 5.0)
    fill_cache(harness, older, 500.0)
    running(older, 2)
    assert harness.price(newer, prompt(8000)).memory > 5 * harness.price(older, prompt(8000)).memory
    assert harness.decide(prompt(8000)).node is older


def test_blocks_that_are_not_reused_cost_nothing_to_evict() -> None:
    harness = RoutingHarness(1, cache_tokens=32_000)
    fill_cache(harness, harness.nodes[0], 5.0)
    assert harness.price(harness.nodes[0], prompt(8000)).memory == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("term", ["room", "memory", "congestion"])
def test_a_term_can_be_switched_off(term: str) -> None:
    prices = []
    for pricing in (Pricing(), Pricing(**{term: False})):  # type: ignore[arg-type]
        harness = RoutingHarness(1, cache_tokens=32_000, pricing=pricing)
        record_reuse(harness, 10.0, 4000.0)
        fill_cache(harness, harness.nodes[0], 5.0)
        set_kv_usage(harness, harness.nodes[0], 0.9)
        record_arrivals(harness, 0.1, 0.2, 0.3)
        prices.append(getattr(harness.price(harness.nodes[0], prompt(8000)), term))
    assert prices[0] > 1 and prices[1] == 0.0


# A second home.


def node_of_hot_prefix(tokens: int, **pricing: float) -> Node:
    """Return the node of a prompt that is cached on the first of four nodes, which has eight requests."""
    harness = RoutingHarness(4, pricing=Pricing(**pricing))  # type: ignore[arg-type]
    shared = prompt(tokens, 1)
    harness.warm(harness.nodes[0], shared)
    harness.use_regularly(harness.nodes[0], shared, 0.1)
    running(harness.nodes[0], 8)
    return harness.decide(shared).node


def test_a_hot_prefix_gets_a_second_home_if_that_costs_little() -> None:
    assert node_of_hot_prefix(2000).name != "n0"
    assert node_of_hot_prefix(20_000).name == "n0"
    assert node_of_hot_prefix(2000, second_home_ms=10.0).name == "n0"


@pytest.mark.parametrize(("interval_s", "moves"), [(0.1, True), (0.5, True), (5.0, False), (60.0, False)])
def test_a_rarely_used_prefix_gets_no_second_home(interval_s: float, moves: bool) -> None:
    """The node may be crowded by other requests, which a copy of this prefix would not help."""
    harness = RoutingHarness(4)
    shared = prompt(2000, 1)
    harness.warm(harness.nodes[0], shared)
    harness.use_regularly(harness.nodes[0], shared, interval_s)
    running(harness.nodes[0], 8)
    assert (harness.decide(shared).reason == "second home") is moves


def test_two_requests_in_quick_succession_give_a_prefix_no_second_home() -> None:
    harness = RoutingHarness(4)
    shared = prompt(2000, 1)
    harness.warm(harness.nodes[0], shared)
    harness.advance(0.05)
    running(harness.nodes[0], 8)
    assert harness.decide(shared).node is harness.nodes[0]


def test_the_prefix_of_a_node_that_is_not_crowded_gets_no_second_home() -> None:
    harness = RoutingHarness(4)
    shared = prompt(2000, 1)
    harness.warm(harness.nodes[0], shared)
    for node in harness.nodes:
        running(node, 6)
    running(harness.nodes[0], 2)
    assert harness.decide(shared).node is harness.nodes[0]


def list_of_prompts(count: int, tokens: int) -> Lookup:
    first, *others = [prompt(tokens, number) for number in range(1, count + 1)]
    first.batch = PromptBatch(others=tuple(others), prompts=count, total_tokens=count * tokens)
    for other in others:
        other.batch = PromptBatch(total_tokens=tokens)
    return first


@pytest.mark.parametrize(("interval_s", "moves"), [(0.1, True), (60.0, False)])
def test_a_rarely_used_list_of_prompts_gets_no_second_home(interval_s: float, moves: bool) -> None:
    harness = RoutingHarness(4)
    shared = list_of_prompts(4, 500)
    for number in range(1, 5):
        harness.warm(harness.nodes[0], prompt(500, number))
    harness.use_regularly(harness.nodes[0], shared, interval_s)
    running(harness.nodes[0], 8)
    assert (harness.decide(shared).reason == "second home") is moves


# Learned speeds.


def serve(harness: RoutingHarness, node: Node, ms_per_token: float, tokens: int = 8000) -> None:
    """Serve an uncached prompt at this speed."""
    ticket = harness.busy(node, tokens)
    harness.advance((ms_per_token * work(tokens, 0) + 22.5) / 1000.0)
    ticket.first_token(harness.now_s)
    harness.close(ticket)


def test_a_fast_node_gets_more_than_a_slow_one() -> None:
    harness = RoutingHarness(2)
    fast, slow = harness.nodes
    for _ in range(10):
        serve(harness, fast, 0.02)
        serve(harness, slow, 0.2)
    for _ in range(33):
        lookup = prompt(4000)
        harness.send(harness.decide(lookup).node, lookup)
    assert fast.inflight == pytest.approx(30, abs=2) and slow.inflight == pytest.approx(3, abs=2)


def test_a_slowdown_is_noticed_within_a_few_responses() -> None:
    harness = RoutingHarness(2)
    for _ in range(20):
        for node in harness.nodes:
            serve(harness, node, 0.05)
    slowed, other = harness.nodes
    for _ in range(4):
        serve(harness, slowed, 0.25)
    assert slowed.speed.ms_per_token > 0.1
    harness.busy(other, 4000)
    assert harness.decide(prompt(6000)).node is other, "waiting there costs less"


def test_a_node_of_unknown_speed_is_not_assumed_to_be_slow() -> None:
    harness = RoutingHarness(2)
    known, unknown = harness.nodes
    for _ in range(10):
        serve(harness, known, 0.05)
        ticket = harness.busy(known, 4000)
        assert isinstance(ticket, PromptTicket)
        harness.advance(0.25)
        ticket.first_token(harness.now_s)
        harness.advance(100 * 0.040)  # 40 ms per token; the default is 15
        ticket.record_usage(4000, 0, 101, harness.now_s)
        harness.close(ticket)
    assert harness.price(unknown, prompt(4000)).total == pytest.approx(
        harness.price(known, prompt(4000)).total, rel=0.3
    )
    running(known, 1)
    running(unknown, 1)
    chosen = Counter(harness.decide(prompt(2000)).node.name for _ in range(20))
    harness.busy(known, 3000)
    assert harness.decide(prompt(2000)).node is unknown, chosen


def test_remembered_candidate_lists_are_bounded() -> None:
    harness = RoutingHarness(3)
    policy = harness.router.policy
    assert isinstance(policy, PricePolicy)
    decision = harness.decide(prompt(1000))
    assert decision.query is not None
    for _ in range(5 * MAX_CACHE_LISTS):
        assert harness.router.decide_among(harness.nodes[:2], decision.query).node in harness.nodes[:2]
    assert len(policy._caches) <= MAX_CACHE_LISTS
