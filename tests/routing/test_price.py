"""The policy `price`, term by term, by small cases: without I/O, by a clock of our own.

Where nothing was learned, a token of a short prompt takes 0.05 ms to prefill, a step of the batch 15 ms, and an answer
has 256 tokens. So 8,000 cold tokens are 464 ms, and 22 ms for the steps beside them.
"""

from __future__ import annotations

from collections import Counter

import pytest
from priced import MODEL, World, prompt

from warmroute.config import Pricing
from warmroute.fleet.node import Node
from warmroute.fleet.speed import work
from warmroute.fleet.ticket import Ticket
from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing.dispatch import Dispatch
from warmroute.routing.outputs import USUAL_TOKENS, OutputLengths
from warmroute.routing.policies.price import MOST_KEPT, PricePolicy


def arrives(world: World, *ages_s: float) -> None:
    """Requests came to each node, so long ago."""
    for age_s in sorted(ages_s, reverse=True):
        for node in world.nodes:
            node.saw_arrival(world.now_s - age_s)


def running(node: Node, count: int) -> list[Ticket]:
    """Requests with next to no prompt are there."""
    return [Ticket(node, 0.0) for _ in range(count)]


# Its own time.


def test_a_warm_node_wins() -> None:
    world = World(4)
    mine = prompt(8000, 1)
    world.warm(world.nodes[2], mine)
    decision = world.decide(mine)
    assert decision.node is world.nodes[2] and decision.policy == "price"
    assert decision.price is not None
    assert (decision.price.cached, decision.price.new) == (7984, 16), "an engine computes at least the last token"


def test_the_longer_beginning_wins() -> None:
    world = World(3)
    for node, tokens in zip(world.nodes, (2000, 6000, 4000), strict=True):
        world.warm(node, prompt(tokens, 1))
    assert world.decide(prompt(8000, 1)).node is world.nodes[1]


def test_the_price_is_the_sum_of_its_terms_in_milliseconds() -> None:
    world = World(1)
    node = world.nodes[0]
    world.busy(node, 4000)
    price = world.price(node, prompt(8000))
    assert price.wait == pytest.approx(0.05 * work(4000, 0), rel=1e-6)
    steps_ms = price.prefill - 0.05 * work(8000, 0)
    assert 1.5 * 15.0 <= steps_ms < 1.5 * 16.0
    assert price.own == pytest.approx(price.wait + price.prefill + price.room)
    assert price.total == pytest.approx(price.own + price.contention + price.memory + price.congestion)


def test_an_idle_cold_node_wins_when_the_queue_of_the_warm_one_costs_more() -> None:
    world = World(2)
    warm, cold = world.nodes
    mine = prompt(8000, 1)
    world.warm(warm, mine)
    world.busy(warm, 5000)
    assert world.decide(mine).node is warm, "275 ms of waiting against 464 ms of prefill"
    world.busy(warm, 5000)
    assert world.decide(mine).node is cold


def test_what_is_behind_a_long_beginning_is_dearer_than_a_short_prompt() -> None:
    """Attention looks back at everything."""
    world = World(1)
    node = world.nodes[0]
    world.warm(node, prompt(50_000, 1))
    behind, alone = world.price(node, prompt(52_000, 1)), world.price(node, prompt(2000))
    assert behind.new == alone.new == 2000 and behind.prefill > 2 * alone.prefill


def test_a_prompt_that_was_not_read_goes_by_load() -> None:
    world = World(3)
    running(world.nodes[0], 2)
    running(world.nodes[2], 1)
    decision = world.decide()
    assert decision.node is world.nodes[1]
    assert decision.fallbacks()[0] in (world.nodes[0], world.nodes[2])


def test_ties_spread() -> None:
    world = World(4)
    chosen = Counter(world.decide(prompt(1000)).node.name for _ in range(400))
    assert len(chosen) == 4 and min(chosen.values()) > 60


def test_of_equal_prices_the_less_loaded_node_wins() -> None:
    world = World(3)
    running(world.nodes[0], 1)
    running(world.nodes[1], 1)
    assert {world.decide(prompt(1000)).node for _ in range(20)} == {world.nodes[2]}


def test_work_spreads_by_what_is_queued() -> None:
    world = World(4)
    for _ in range(40):
        lookup = prompt(4000)
        world.send(world.decide(lookup).node, lookup)
    assert {node.inflight for node in world.nodes} == {10}


def test_the_fallbacks_are_all_others_the_cheapest_first() -> None:
    world = World(4)
    a, b, c, d = world.nodes
    for node, tokens in ((a, 30_000), (b, 10_000), (c, 20_000)):
        world.busy(node, tokens)
    decision = world.decide(prompt(4000))
    assert [decision.node, *decision.fallbacks()] == [d, b, c, a]


def test_what_a_prefix_saves_is_capped() -> None:
    mine = prompt(8000, 1)
    prices = []
    for most_ms in (60_000.0, 100.0):
        world = World(1, pricing=Pricing(max_saving_ms=most_ms))
        world.warm(world.nodes[0], mine)
        prices.append(world.price(world.nodes[0], mine).prefill)
    cold = world.price(world.nodes[0], prompt(8000)).prefill
    assert prices[0] < 30 and cold - prices[1] == pytest.approx(100.0)


# Room.


def told_full(world: World, node: Node, share: float) -> None:
    node.saw_load(running=1, waiting=0, kv_usage=share, now_s=world.now_s)


def test_a_full_node_is_avoided() -> None:
    world = World(2, cache_tokens=100_000)
    full, other = world.nodes
    running(other, 3)
    told_full(world, full, 0.97)
    assert world.decide(prompt(4000)).node is other
    assert world.price(full, prompt(4000)).room > 100 > 10 > world.price(other, prompt(4000)).room


def test_a_full_node_is_avoided_even_by_those_who_are_warm_there() -> None:
    world = World(2, cache_tokens=100_000)
    mine = prompt(1500, 1)
    world.warm(world.nodes[0], mine)
    assert world.decide(mine).node is world.nodes[0]
    told_full(world, world.nodes[0], 1.0)
    assert world.decide(mine).node is world.nodes[1]


def test_room_costs_next_to_nothing_until_a_node_is_nearly_full_and_more_and_more_then() -> None:
    world = World(1, cache_tokens=100_000)
    node = world.nodes[0]
    costs = []
    for share in (0.0, 0.3, 0.6, 0.9, 0.95, 1.0):
        told_full(world, node, share)
        costs.append(world.price(node, prompt(4000)).room)
    assert costs[2] < 10 and costs[3:] == sorted(costs[3:]) and costs[5] > 5 * costs[3] > 0


def test_room_counts_what_was_sent_there_since_the_last_poll() -> None:
    world = World(1, cache_tokens=100_000)
    node = world.nodes[0]
    told_full(world, node, 0.7)
    before = world.price(node, prompt(4000)).room
    ticket = world.busy(node, 25_000)
    assert world.price(node, prompt(4000)).room > 10 * before
    world.close(ticket)
    assert world.price(node, prompt(4000)).room == pytest.approx(before)


def test_where_a_node_has_not_said_what_it_holds_room_does_not_count() -> None:
    world = World(1)
    told_full(world, world.nodes[0], 0.99)
    assert world.price(world.nodes[0], prompt(4000)).room == 0.0


# Contention.


def test_an_answer_flows_slower_beside_a_large_batch() -> None:
    world = World(2)
    large, other = world.nodes
    ticket = world.busy(large, 100_000)
    world.later(0.05 * work(100_000, 0) / 1000.0)
    ticket.first_byte(world.now_s)
    running(other, 5)
    assert large.pending_work == pytest.approx(0.0, abs=1e-3)
    assert world.decide(prompt(300)).node is other
    world.close(ticket)
    assert world.decide(prompt(300)).node is large


def test_a_short_answer_minds_less() -> None:
    world = World(1)
    request = RoutingRequest(MODEL)
    request.max_output_tokens = 8
    price = world.decide(prompt(4000), request).price
    assert price is not None and price.output == 8
    assert world.price(world.nodes[0], prompt(4000)).output == USUAL_TOKENS


# What others pay.


def test_congestion_is_nothing_on_an_idle_fleet_and_grows_with_the_rate() -> None:
    world = World(1)
    node = world.nodes[0]
    idle = world.price(node, prompt(8000))
    assert idle.congestion == pytest.approx(0.0, abs=1e-9)
    arrives(world, *(0.1 * number for number in range(50)))
    busy = world.price(node, prompt(8000))
    assert busy.congestion > 0.5 * busy.prefill
    assert world.price(node, prompt(1000)).congestion < 0.1 * busy.congestion
    world.later(600.0)
    assert world.price(node, prompt(8000)).congestion == pytest.approx(0.0, abs=1e-3)


def test_long_work_goes_where_few_come() -> None:
    """Many come to a node for what is cached there: a long cold prompt would stand in their way."""
    world = World(3)
    for node, count in zip(world.nodes, (40, 2, 40), strict=True):
        for number in range(count):
            node.saw_arrival(world.now_s - 4.0 + 4.0 * number / count)
    assert {world.decide(prompt(30_000, number)).node for number in range(10)} == {world.nodes[1]}


def test_congestion_counts_those_who_wait() -> None:
    world = World(2)
    before = world.decide(prompt(8000)).price
    world.group.waiting = 20
    after = world.decide(prompt(8000)).price
    assert before is not None and after is not None
    assert after.congestion - before.congestion == pytest.approx(0.5 * 20 / 2 * after.prefill)


def test_congestion_makes_the_warm_node_worth_more_waiting() -> None:
    """Alone, it would rather prefill anew elsewhere; with others behind it, it does not spend their time."""
    world = World(2)
    warm, cold = world.nodes
    mine = prompt(8000, 1)
    world.warm(warm, mine)
    world.busy(warm, 10_000)
    assert world.decide(mine).node is cold
    world.group.waiting = 20
    assert world.decide(mine).node is warm


def reused(world: World, every_s: float, until_s: float) -> None:
    """Prompts were seen to come again after so long, and not later."""
    chains = [prompt(1600).blocks(MODEL, "", 16) for _ in range(8)]
    at_s = world.now_s - until_s
    for _ in range(40):
        for chain in chains:
            world.cache_view.reuse.saw(chain, at_s)
        at_s += every_s


def fill(world: World, node: Node, age_s: float) -> None:
    """Its cache is full of what was last used so long ago."""
    sent = world.cache_view.sent(MODEL, prompt(40_000), node.name, None, world.now_s - age_s)
    assert sent is not None


def test_memory_prefers_free_blocks_to_used_ones() -> None:
    world = World(2, cache_tokens=32_000)
    full, free = world.nodes
    reused(world, 10.0, 4000.0)
    fill(world, full, 5.0)
    running(free, 2)
    assert world.price(full, prompt(8000)).memory > 20 > world.price(free, prompt(8000)).memory == 0.0
    assert world.decide(prompt(8000)).node is free


def test_memory_prefers_older_blocks_to_newer_ones() -> None:
    world = World(2, cache_tokens=32_000)
    newer, older = world.nodes
    reused(world, 10.0, 4000.0)
    fill(world, newer, 5.0)
    fill(world, older, 500.0)
    running(older, 2)
    assert world.price(newer, prompt(8000)).memory > 5 * world.price(older, prompt(8000)).memory
    assert world.decide(prompt(8000)).node is older


def test_what_nobody_uses_again_may_be_pushed_out() -> None:
    world = World(1, cache_tokens=32_000)
    fill(world, world.nodes[0], 5.0)
    assert world.price(world.nodes[0], prompt(8000)).memory == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("term", ["room", "memory", "congestion"])
def test_a_term_can_be_switched_off(term: str) -> None:
    prices = []
    for pricing in (Pricing(), Pricing(**{term: False})):  # type: ignore[arg-type]
        world = World(1, cache_tokens=32_000, pricing=pricing)
        reused(world, 10.0, 4000.0)
        fill(world, world.nodes[0], 5.0)
        told_full(world, world.nodes[0], 0.9)
        arrives(world, 0.1, 0.2, 0.3)
        prices.append(getattr(world.price(world.nodes[0], prompt(8000)), term))
    assert prices[0] > 1 and prices[1] == 0.0


# A second home.


def crowded(tokens: int, **pricing: float) -> Node:
    """Where a prompt of so many tokens goes that is warm on the first of four nodes, which has eight requests."""
    world = World(4, pricing=Pricing(**pricing))  # type: ignore[arg-type]
    mine = prompt(tokens, 1)
    world.warm(world.nodes[0], mine)
    running(world.nodes[0], 8)
    return world.decide(mine).node


def test_a_beginning_that_crowds_its_node_gets_a_second_home_where_that_costs_little() -> None:
    assert crowded(2000).name != "n0"
    assert crowded(20_000).name == "n0"
    assert crowded(2000, second_home_ms=10.0).name == "n0"


@pytest.mark.parametrize(("age_s", "moves"), [(0.1, True), (0.5, True), (5.0, False), (60.0, False)])
def test_a_second_home_is_for_a_beginning_that_many_come_for(age_s: float, moves: bool) -> None:
    """A node may be crowded by others: a copy of what is rarely asked for relieves nobody."""
    world = World(4)
    mine = prompt(2000, 1)
    world.warm(world.nodes[0], mine)
    world.later(age_s)
    running(world.nodes[0], 8)
    assert (world.decide(mine).reason == "second home") is moves


def test_a_node_that_is_not_crowded_stays_the_only_home() -> None:
    world = World(4)
    mine = prompt(2000, 1)
    world.warm(world.nodes[0], mine)
    for node in world.nodes:
        running(node, 6)
    running(world.nodes[0], 2)
    assert world.decide(mine).node is world.nodes[0]


# What is learned.


def serve(world: World, node: Node, ms_per_token: float, tokens: int = 8000) -> None:
    """A cold prompt that takes that long."""
    ticket = world.busy(node, tokens)
    world.later((ms_per_token * work(tokens, 0) + 22.5) / 1000.0)
    ticket.first_byte(world.now_s)
    world.close(ticket)


def test_a_quick_node_takes_more_than_a_slow_one() -> None:
    world = World(2)
    quick, slow = world.nodes
    for _ in range(10):
        serve(world, quick, 0.02)
        serve(world, slow, 0.2)
    for _ in range(33):
        lookup = prompt(4000)
        world.send(world.decide(lookup).node, lookup)
    assert quick.inflight == pytest.approx(30, abs=2) and slow.inflight == pytest.approx(3, abs=2)


def test_a_node_that_slows_down_is_noticed_within_a_few_answers() -> None:
    world = World(2)
    for _ in range(20):
        for node in world.nodes:
            serve(world, node, 0.05)
    slowed, other = world.nodes
    for _ in range(4):
        serve(world, slowed, 0.25)
    assert slowed.speed.ms_per_token > 0.1
    world.busy(other, 4000)
    assert world.decide(prompt(6000)).node is other, "rather behind another there"


def test_a_node_that_nothing_was_learned_of_is_not_believed_slower() -> None:
    world = World(2)
    known, unknown = world.nodes
    for _ in range(10):
        serve(world, known, 0.05)
        ticket = world.busy(known, 4000)
        assert isinstance(ticket, Dispatch)
        world.later(0.25)
        ticket.first_byte(world.now_s)
        world.later(100 * 0.040)  # 40 ms a token, where 15 is usual
        ticket.answered(4000, 0, 101, world.now_s)
        world.close(ticket)
    assert world.price(unknown, prompt(4000)).total == pytest.approx(world.price(known, prompt(4000)).total, rel=0.3)
    running(known, 1)
    running(unknown, 1)
    chosen = Counter(world.decide(prompt(2000)).node.name for _ in range(20))
    world.busy(known, 3000)
    assert world.decide(prompt(2000)).node is unknown, chosen


# How long answers are.


def test_answers_are_as_long_as_those_before() -> None:
    outputs = OutputLengths()
    assert outputs.expected("m", "t") == USUAL_TOKENS
    for _ in range(200):
        outputs.saw("m", "t", 1000)
        outputs.saw("m", "terse", 10)
    assert outputs.expected("m", "t") == pytest.approx(1000)
    assert outputs.expected("m", "terse") == pytest.approx(10)
    assert 300 < outputs.expected("m", "somebody new") < 700, "the model's average"
    assert outputs.expected("another", "t") == USUAL_TOKENS


def test_an_answer_is_no_longer_than_the_request_allows() -> None:
    outputs = OutputLengths()
    assert outputs.expected("m", "", 16) == 16
    assert outputs.expected("m", "", 10_000) == USUAL_TOKENS


def test_lengths_follow_a_change_and_not_one_odd_answer() -> None:
    outputs = OutputLengths()
    for _ in range(50):
        outputs.saw("m", "", 100)
    outputs.saw("m", "", 2000)
    assert outputs.expected("m", "") < 200
    for _ in range(60):
        outputs.saw("m", "", 500)
    assert outputs.expected("m", "") == pytest.approx(500, rel=0.1)


def test_tenants_without_number_take_no_memory_without_end() -> None:
    outputs = OutputLengths()
    for number in range(10_000):
        outputs.saw("m", f"t{number}", 10)
    assert len(outputs._of_tenants) <= 4096 and len(outputs._means) == 1
    assert outputs.expected("m", "t9999") == pytest.approx(10)


def test_the_answers_length_is_learned_from_what_engines_report() -> None:
    world = World(1)
    for _ in range(100):
        ticket = world.busy(world.nodes[0], 1000)
        assert isinstance(ticket, Dispatch)
        world.later(0.1)
        ticket.first_byte(world.now_s)
        world.later(1.0)
        ticket.answered(1000, 0, 50, world.now_s)
        world.close(ticket)
    assert world.price(world.nodes[0], prompt(1000)).output == pytest.approx(50, rel=0.05)
    world.books_are_closed()


def test_candidates_of_one_request_are_not_remembered_for_good() -> None:
    world = World(3)
    policy = world.router.policy
    assert isinstance(policy, PricePolicy)
    decision = world.decide(prompt(1000))
    assert decision.query is not None
    for _ in range(5 * MOST_KEPT):
        assert world.router.decide_among(world.nodes[:2], decision.query).node in world.nodes[:2]
    assert len(policy._caches) <= MOST_KEPT
