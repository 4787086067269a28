"""What the router learns from responses that are not streamed, and from rejections.

The first byte of a response that is not streamed is its last, so it says nothing about the first token. A rejection
costs the node nothing, so it says nothing about its speed.
"""

from __future__ import annotations

import pytest
from routing_harness import RoutingHarness, prompt

from warmroute.core.demand import DemandMeter
from warmroute.core.messages import Outcome
from warmroute.core.speeds import DEFAULT_MS_PER_TOKEN
from warmroute.core.tickets import PromptTicket

TOKEN_MS = 12.0


def send(harness: RoutingHarness, tokens: int, *, streams: bool = False) -> PromptTicket:
    decision = harness.decide(prompt(tokens), streams=streams)
    ticket = harness.router.open_ticket(decision, decision.node, harness.now_s)
    assert isinstance(ticket, PromptTicket)
    return ticket


def finish(harness: RoutingHarness, ticket: PromptTicket, output: int | None) -> None:
    ticket.first_token(harness.now_s)
    ticket.record_usage(ticket.tokens, 0, output, harness.now_s)
    ticket.close(Outcome.OK, harness.now_s)


def test_a_prefill_counts_until_it_is_expected_to_be_done() -> None:
    harness = RoutingHarness(1)
    node = harness.nodes[0]
    tickets = [send(harness, 2000), send(harness, 2000)]  # 104 ms each
    assert node.pending_work > 4000
    harness.advance(0.12)
    harness.tick()
    assert 2000 < node.pending_work < 2200
    harness.advance(0.12)
    harness.tick()
    assert node.pending_work == pytest.approx(0.0, abs=1e-6) and node.inflight == 2
    for ticket in tickets:
        finish(harness, ticket, 100)
    harness.assert_all_counters_are_zero()


def test_a_response_that_ends_before_its_expected_prefill_leaves_no_pending_work() -> None:
    harness = RoutingHarness(1)
    first, second = send(harness, 8000), send(harness, 8000)
    finish(harness, first, 5)
    second.close(Outcome.CANCELLED, harness.now_s)
    harness.advance(10.0)
    harness.tick()
    harness.assert_all_counters_are_zero()


def test_queued_requests_do_not_wait_for_the_end_of_responses() -> None:
    harness = RoutingHarness(1)
    for _ in range(5):  # one after the other, three seconds each
        ticket = send(harness, 2000)
        harness.advance(3.0)
        finish(harness, ticket, 250)
    assert harness.nodes[0].speed.ms_per_token == pytest.approx(DEFAULT_MS_PER_TOKEN, rel=0.01)
    for _ in range(40):
        harness.submit(2000, streams=False)
        harness.advance(0.06)
        harness.tick()
    assert harness.nodes[0].inflight > 15, "decoding for seconds does not block the next prefill"


@pytest.mark.parametrize("streams", [True, False])
def test_the_decode_speed_is_learned_with_and_without_streaming(streams: bool) -> None:
    harness = RoutingHarness(1)
    node = harness.nodes[0]
    for _ in range(200):
        ticket = send(harness, 1000, streams=streams)
        harness.advance(1000 * DEFAULT_MS_PER_TOKEN / 1000.0)
        if streams:
            ticket.first_token(harness.now_s)
        harness.advance(299 * TOKEN_MS / 1000.0)
        if streams:
            ticket.record_usage(1000, 0, 300, harness.now_s)
            ticket.close(Outcome.OK, harness.now_s)
        else:
            finish(harness, ticket, 300)
    assert harness.group.decode_speed.token_ms(1000) * node.speed.factor == pytest.approx(TOKEN_MS, rel=0.1)
    assert node.speed.ms_per_token == pytest.approx(DEFAULT_MS_PER_TOKEN, rel=0.35)


@pytest.mark.parametrize("output", [None, 1])
def test_the_prefill_speed_is_learned_from_responses_without_decoding(output: int | None) -> None:
    harness = RoutingHarness(1)
    for _ in range(60):
        ticket = send(harness, 4000)
        harness.advance(0.9)
        finish(harness, ticket, output)
        harness.advance(1.0)
    assert harness.nodes[0].speed.ms_per_token == pytest.approx(0.9 * 1000.0 / (4000 * 1.08), rel=0.1)


def test_an_answer_counts_again_when_the_interval_after_the_last_one_has_passed() -> None:
    harness = RoutingHarness(1)
    times = harness.nodes[0].whole_answer_times
    for _ in range(3):
        harness.now_s = max(harness.now_s, times.next_s)
        tickets = [send(harness, 2000) for _ in range(2)]
        harness.advance(1.0)
        times.next_s = harness.now_s
        finish(harness, tickets[0], 10)
        assert times.next_s > harness.now_s, "it counted"
        next_s = times.next_s
        finish(harness, tickets[1], 10)
        assert times.next_s == next_s, "it came too soon"


def test_a_node_that_rejects_long_prompts_at_once_does_not_appear_fast() -> None:
    harness = RoutingHarness(1)
    for _ in range(10):
        ticket = send(harness, 100_000, streams=True)
        harness.advance(0.002)
        ticket.first_token(harness.now_s, served=False)
        assert harness.nodes[0].pending_work == pytest.approx(0.0, abs=1e-3)
        ticket.close(Outcome.REJECTED, harness.now_s)
    assert harness.nodes[0].speed.ms_per_token == DEFAULT_MS_PER_TOKEN
    harness.assert_all_counters_are_zero()


def test_the_demand_meter_counts_neither_as_a_time_to_first_token() -> None:
    harness = RoutingHarness(1)
    harness.router.demand_meter = demand_meter = DemandMeter()
    whole, rejected, streamed = (harness.submit(1000, streams=streams) for streams in (False, True, True))
    assert demand_meter.sent == 3 and demand_meter.prompt_tokens == 3000
    harness.advance(5.0)
    whole.answer((1000, 0, 100))
    assert demand_meter.responses == 1
    rejected.answer(status=400)
    assert sum(demand_meter.ttft_counts) == 0 and sum(demand_meter.latency_counts) == 1
    streamed.start()
    assert sum(demand_meter.ttft_counts) == 0, "a first byte is not a first token"
    streamed.first_token()
    assert sum(demand_meter.ttft_counts) == 1
