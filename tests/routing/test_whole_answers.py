"""Answers that are not streamed: their first byte is their last, so it says nothing of the first token. And answers
that say no: they cost the node nothing, so they say nothing of its speed."""

from __future__ import annotations

import pytest
from priced import MODEL, PendingRequest, World, prompt

from warmroute.fleet.demand import DemandMeter
from warmroute.fleet.node import Outcome
from warmroute.fleet.speed import USUAL_MS_PER_TOKEN
from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing.dispatch import Dispatch

TOKEN_MS = 12.0


def send(world: World, tokens: int, *, streams: bool = False) -> Dispatch:
    request = RoutingRequest(MODEL)
    request.streams = streams
    decision = world.decide(prompt(tokens), request)
    ticket = world.router.dispatch(decision, decision.node, world.now_s)
    assert isinstance(ticket, Dispatch)
    return ticket


def ends(world: World, ticket: Dispatch, output: int | None) -> None:
    ticket.first_byte(world.now_s)
    ticket.answered(ticket.tokens, 0, output, world.now_s)
    ticket.close(Outcome.OK, world.now_s)


def test_its_prefill_counts_until_it_is_expected_to_be_done() -> None:
    world = World(1)
    node = world.nodes[0]
    tickets = [send(world, 2000), send(world, 2000)]  # 104 ms each
    assert node.pending_work > 4000
    world.later(0.12)
    world.tick()
    assert 2000 < node.pending_work < 2200
    world.later(0.12)
    world.tick()
    assert node.pending_work == pytest.approx(0.0, abs=1e-6) and node.inflight == 2
    for ticket in tickets:
        ends(world, ticket, 100)
    world.books_are_closed()


def test_one_that_ends_before_it_was_expected_to_begin_leaves_nothing() -> None:
    world = World(1)
    first, second = send(world, 8000), send(world, 8000)
    ends(world, first, 5)
    second.close(Outcome.LEFT, world.now_s)
    world.later(10.0)
    world.tick()
    world.books_are_closed()


def test_they_do_not_wait_for_each_others_ends() -> None:
    world = World(1)
    for _ in range(5):  # one after the other, three seconds each
        ticket = send(world, 2000)
        world.later(3.0)
        ends(world, ticket, 250)
    assert world.nodes[0].speed.ms_per_token == pytest.approx(USUAL_MS_PER_TOKEN, rel=0.01)
    for _ in range(40):
        guest = PendingRequest(world, prompt(2000))
        guest.request.streams = False
        guest.enter()
        world.later(0.06)
        world.tick()
    assert world.nodes[0].inflight > 15, "an answer that takes seconds keeps nobody from its prefill"


@pytest.mark.parametrize("streams", [True, False])
def test_how_fast_answers_flow_is_learned_alike(streams: bool) -> None:
    world = World(1)
    node = world.nodes[0]
    for _ in range(200):
        ticket = send(world, 1000, streams=streams)
        world.later(1000 * USUAL_MS_PER_TOKEN / 1000.0)
        if streams:
            ticket.first_byte(world.now_s)
        world.later(299 * TOKEN_MS / 1000.0)
        if streams:
            ticket.answered(1000, 0, 300, world.now_s)
            ticket.close(Outcome.OK, world.now_s)
        else:
            ends(world, ticket, 300)
    assert world.group.pace.token_ms(1000) * node.speed.factor == pytest.approx(TOKEN_MS, rel=0.1)
    assert node.speed.ms_per_token == pytest.approx(USUAL_MS_PER_TOKEN, rel=0.35)


@pytest.mark.parametrize("output", [None, 1])
def test_where_there_is_no_answer_to_speak_of_the_prefill_is_learned(output: int | None) -> None:
    world = World(1)
    for _ in range(60):
        ticket = send(world, 4000)
        world.later(0.9)
        ends(world, ticket, output)
        world.later(1.0)
    assert world.nodes[0].speed.ms_per_token == pytest.approx(0.9 * 1000.0 / (4000 * 1.08), rel=0.1)


def test_a_node_that_refuses_long_prompts_at_once_is_not_believed_to_be_quick() -> None:
    world = World(1)
    for _ in range(10):
        ticket = send(world, 100_000, streams=True)
        world.later(0.002)
        ticket.first_byte(world.now_s, served=False)
        assert world.nodes[0].pending_work == pytest.approx(0.0, abs=1e-3)
        ticket.close(Outcome.REJECTED, world.now_s)
    assert world.nodes[0].speed.ms_per_token == USUAL_MS_PER_TOKEN
    world.books_are_closed()


def test_neither_is_a_time_to_first_token_for_scaling() -> None:
    world = World(1)
    world.router.demand_meter = demand_meter = DemandMeter()
    whole, refused, streamed = send(world, 1000), send(world, 1000, streams=True), send(world, 1000, streams=True)
    world.later(5.0)
    ends(world, whole, 100)
    refused.first_byte(world.now_s, served=False)
    assert sum(demand_meter.ttft_counts) == 0 and sum(demand_meter.latency_counts) == 1
    streamed.first_byte(world.now_s)
    assert sum(demand_meter.ttft_counts) == 1
