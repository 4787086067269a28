"""A request that one node prefills and another one decodes: order, failures, tickets."""

from __future__ import annotations

import pytest
from routing_harness import prompt
from split_harness import SplitHarness, other

from warmroute.core.messages import UNKNOWN, Outcome, Role
from warmroute.core.node import Ticket
from warmroute.core.tickets import DecodeTicket


def test_the_decode_request_follows_the_prefill() -> None:
    harness = SplitHarness()
    request = harness.submit_split()
    decode = request.main.node
    assert request.events == [f"prefill p0 for {decode.name}"] and not request.sent
    assert harness.node("p0").inflight == decode.inflight == 1
    assert harness.node("p0").pending_work > 0.0 and decode.pending_work == 0.0 and decode.kv_new == 2000
    harness.advance(0.2)
    request.prefilled(usage=(2000, 512, 1))
    assert request.sent == [decode.name] and harness.node("p0").inflight == 0
    assert harness.node("p0").speed.answers == 1 and harness.node("p0").outcomes[Outcome.OK] == 1
    harness.advance(0.05)
    request.first_token()
    harness.advance(1.0)
    request.answer((2000, 0, 40))
    assert request.call.usage == (2000, 512, 40), "the prefill node's cached tokens count"
    assert decode.speed.answers == 0, "the decode node did no prefill"
    assert harness.counters.split_requests == {"transferred": 1}
    harness.assert_all_counters_are_zero()


def test_a_decode_node_that_prefills_a_long_prompt_meanwhile_is_left() -> None:
    harness = SplitHarness()
    request = harness.submit_split(30_000)
    first = request.main.node
    prefilling = harness.send(first, prompt(60_000, 1))
    request.prefilled()
    assert request.sent == [other(first.name)]
    prefilling.close(Outcome.OK, harness.now_s)
    harness.finish(request)


def test_a_mixed_node_does_not_fetch_what_it_has_prefilled_itself() -> None:
    harness = SplitHarness(prefill=0, decode=1)
    mixed = harness.add("x0", 400_000, engine="vllm")
    mixed.kv_connector = True
    harness.fleet.set_role("x0", "mixed")
    harness.send(harness.node("x0"), prompt(1000, 3))
    request = harness.submit_split(30_000)
    assert request.split.pair.prefill_node.name == "x0" and request.main.node.name == "d0"
    running = [harness.send(harness.node("d0"), prompt(90_000, number)) for number in range(1, 4)]
    for ticket in running:
        ticket.first_token(harness.now_s, False)
    request.prefilled()
    assert request.sent == ["d0"]


def test_a_prompt_that_is_prefilled_elsewhere_does_not_slow_down_the_decode_node_yet() -> None:
    harness = SplitHarness(decode=1)
    decode = harness.node("d0")
    request = harness.submit_split(30_000)
    assert decode.context_tokens < 1000 and decode.kv_new == 30_000, "its memory is taken"
    request.prefilled()
    assert decode.context_tokens > 30_000
    harness.finish(request)
    harness.submit_split(30_000).cancel()
    assert decode.context_tokens == 0
    harness.assert_all_counters_are_zero()


def test_the_transfer_speed_is_learned_from_the_stream() -> None:
    harness = SplitHarness(decode=1)
    group = harness.fleet.group("m")
    assert group is not None
    speed = group.transfer_speeds.between("local", "local")
    for _ in range(50):
        request = harness.submit_split(20_000)
        harness.advance(0.5)
        request.prefilled()
        harness.advance(2.0)
        request.answer()
    assert speed.measured == 50 and speed.ms_per_token(harness.now_s) == pytest.approx(0.1, rel=0.2)


def test_predictions_are_compared_with_the_prefill_node() -> None:
    harness = SplitHarness(decode=1)
    request = harness.submit_split(2000)
    cache = harness.cache_view.cache("p0")
    assert cache is not None
    request.prefilled(usage=(2000, 0, 1))
    assert request.lookup is not None
    assert harness.cache_view.hits("m", request.lookup, harness.now_s)["p0"].tokens > 1900


def test_a_decode_node_that_fails_after_a_prefill_node_leaves_no_prefill_behind() -> None:
    harness = SplitHarness(prefill=3, decode=2, engine="sglang")
    request = harness.submit_split()
    request.prefill_fails()
    second = request.split.prefill
    request.fail()
    third = request.split.prefill
    assert third is not second and request.events[1:] == [
        "withdraw", f"prefill {second.node.name} for {request.sent[1]}", "withdraw prefill",
        f"prefill {third.node.name} for {request.sent[2]}",
    ]  # fmt: skip
    request.fail(try_=second)  # late: ignored
    assert request.split.prefill is third and third.node.inflight == 1 and not second.node.inflight
    request.prefilled()
    harness.finish(request)


def test_a_mixed_node_that_prefills_serves_the_request_alone_when_the_decode_node_is_down() -> None:
    harness = SplitHarness(prefill=0, decode=1)
    node = harness.add("x0", 400_000, engine="vllm")
    node.kv_connector = True
    harness.fleet.transfers_changed(node)
    decode = harness.node("d0")
    for _ in range(20):  # x0 is as good a decode node, and never with itself
        request = harness.submit_split()
        assert request.events == ["prefill x0 for d0"]
        harness.fleet.check_failed(decode, harness.now_s, "connection refused")
        harness.settle()
        assert request.sent == ["x0"] and not isinstance(request.ticket, DecodeTicket)
        assert request.events[1:] == ["withdraw prefill"]
        harness.finish(request)
        harness.fleet.check_passed(decode, harness.now_s)


def with_mixed(prefill: int = 1) -> SplitHarness:
    """SGLang nodes: d0 and d1 need a prefill node, x0 does not."""
    harness = SplitHarness(prefill=prefill, decode=2, engine="sglang")
    harness.add("x0", 400_000, engine="sglang")
    return harness


def test_a_request_that_may_not_be_split_never_fails_over_to_a_node_that_needs_a_partner() -> None:
    harness = with_mixed()
    request = harness.submit(2000)
    assert request.sent == ["x0"]
    request.fail()
    assert request.sent == ["x0"] and request.done and request.reject is not None
    harness.assert_all_counters_are_zero()


def test_a_request_that_fails_over_to_a_node_that_needs_a_partner_gets_one() -> None:
    harness = with_mixed()
    for name in ("d0", "d1"):
        harness.fleet.drain(name)
    request = harness.submit(2000, may_split=True)
    assert request.sent == ["x0"] and request.call.split is None
    for name in ("d0", "d1"):
        harness.fleet.drain(name, False)
    request.fail()
    assert request.events == [f"prefill p0 for {request.main.node.name}"]
    request.prefilled()
    harness.finish(request)


def test_a_node_that_needs_a_partner_is_no_hedge() -> None:
    harness = with_mixed()
    request = harness.submit(2000)
    harness.advance(100.0)
    for request.request.may_split in (False, True):
        harness.look()
        assert request.sent == ["x0"] and not request.events
    harness.add("x1", 400_000, engine="sglang")
    harness.look()
    assert request.events == ["hedge x1"]


@pytest.mark.parametrize("may_split", [False, True])
def test_the_trial_request_of_a_node_that_needs_a_partner_has_one(may_split: bool) -> None:
    harness = with_mixed()
    harness.fleet.drain("d1")
    node = harness.node("d0")
    for _ in range(20):
        harness.close(Ticket(node, harness.now_s), Outcome.FAILED)
    harness.advance(1000.0)
    harness.fleet.check_passed(node, harness.now_s)
    assert node.health.state.value == "half_open"
    request = harness.submit(2000, may_split=may_split)
    assert request.sent == (["d0"] if may_split else ["x0"]) and (request.call.split is not None) is may_split
    request.cancel()


def test_a_request_that_the_decode_node_rejects_teaches_no_prefill_speed() -> None:
    harness = SplitHarness(decode=1, engine="sglang")
    request = harness.submit_split(20_000)
    harness.advance(0.001)
    request.answer(status=400)
    prefill = harness.node("p0")
    assert prefill.speed.answers == 0 and prefill.outcomes[Outcome.CANCELLED] == 1
    assert not harness.counters.split_requests
    harness.assert_all_counters_are_zero()


def test_a_request_that_has_left_its_pair_is_prefilled_anew_for_the_next_decode_node() -> None:
    """Its decode node fails, a node that takes no KV cache is next, and fails as well."""
    harness = SplitHarness()
    harness.add("whole", 400_000)
    harness.fleet.drain("d1")
    request = harness.submit_split(60_000)
    request.prefilled()
    request.fail(UNKNOWN)
    assert request.sent == ["d0", "whole"]
    harness.fleet.drain("d1", False)
    request.fail(UNKNOWN)
    assert [send.role for send in request.sends] == [Role.PREFILL, Role.DECODE, Role.MOVE, Role.PREFILL]
    request.prefilled()
    assert request.node.name == "d1"
    harness.finish(request)
    assert harness.node("p0").transfer_tokens == 0.0
