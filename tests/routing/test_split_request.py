"""A request that one node prefills and another one decodes: order, failures, tickets."""

from __future__ import annotations

from typing import Any

import pytest
from routing_harness import prompt
from split_harness import TRANSFER, SplitHarness, other

from warmroute.core.calls import Attempts
from warmroute.core.messages import Outcome
from warmroute.core.node import Ticket
from warmroute.core.overdue import send_hedge
from warmroute.core.tickets import DecodeDispatch


def test_the_decode_request_follows_the_prefill() -> None:
    harness = SplitHarness()
    attempts, driver, split = harness.split()
    decode = attempts.ticket.node
    assert driver.events == [f"prefill p0 for {decode.name}"] and not driver.sent
    assert harness.node("p0").inflight == decode.inflight == 1
    assert harness.node("p0").pending_work > 0.0 and decode.pending_work == 0.0 and decode.kv_new == 2000
    harness.advance(0.2)
    split.prefill_ended(TRANSFER, (2000, 512, 1), harness.now_s)
    assert driver.sent == [decode.name] and harness.node("p0").inflight == 0 and split.transfer == TRANSFER
    assert harness.node("p0").speed.answers == 1 and harness.node("p0").outcomes[Outcome.OK] == 1
    harness.advance(0.05)
    assert attempts.response_started(200, None, harness.now_s)
    attempts.first_token(harness.now_s)
    harness.advance(1.0)
    attempts.response_ended((2000, 0, 40), harness.now_s)
    assert attempts.reported == (2000, 512, 40), "the prefill node's cached tokens count"
    assert decode.speed.answers == 0, "the decode node did no prefill"
    assert harness.counters.split_requests == {"transferred": 1}
    harness.assert_all_counters_are_zero()


def test_the_decode_node_is_chosen_again_when_the_prompt_is_prefilled() -> None:
    harness = SplitHarness()
    attempts, driver, split = harness.split(30_000)
    first, second = attempts.ticket.node, harness.node(other(attempts.ticket.node.name))
    running = [harness.send(first, prompt(90_000, number)) for number in range(1, 3)]
    for ticket in running:
        ticket.first_token(harness.now_s, False)
    harness.advance(2.0)
    split.prefill_ended(TRANSFER, None, harness.now_s)
    assert driver.sent == [second.name] and attempts.ticket.node is second, "long contexts slow down the first one now"
    assert attempts.tried == 1 and first.kv_new == 180_000 and second.kv_new == 30_000
    for ticket in running:
        ticket.close(Outcome.OK, harness.now_s)
    harness.finish(attempts)


def test_a_decode_node_that_is_still_as_good_keeps_the_request() -> None:
    harness = SplitHarness()
    attempts, driver, split = harness.split(30_000)
    decode = attempts.ticket.node
    split.prefill_ended(TRANSFER, None, harness.now_s)
    assert driver.sent == [decode.name] and decode.kv_new == 30_000
    harness.finish(attempts)


def test_a_decode_node_that_prefills_a_long_prompt_meanwhile_is_left() -> None:
    harness = SplitHarness()
    attempts, driver, split = harness.split(30_000)
    first = attempts.ticket.node
    prefilling = harness.send(first, prompt(60_000, 1))
    split.prefill_ended(TRANSFER, None, harness.now_s)
    assert driver.sent == [other(first.name)]
    prefilling.close(Outcome.OK, harness.now_s)
    harness.finish(attempts)


def test_a_mixed_node_does_not_fetch_what_it_has_prefilled_itself() -> None:
    harness = SplitHarness(prefill=0, decode=1)
    mixed = harness.add("x0", 400_000, engine="vllm")
    mixed.kv_connector = True
    harness.fleet.set_role("x0", "mixed")
    harness.send(harness.node("x0"), prompt(1000, 3))
    attempts, driver, split = harness.split(30_000)
    assert split.pair.prefill_node.name == "x0" and attempts.ticket.node.name == "d0"
    running = [harness.send(harness.node("d0"), prompt(90_000, number)) for number in range(1, 4)]
    for ticket in running:
        ticket.first_token(harness.now_s, False)
    split.prefill_ended(TRANSFER, None, harness.now_s)
    assert driver.sent == ["d0"]


def test_a_prompt_that_is_prefilled_elsewhere_does_not_slow_down_the_decode_node_yet() -> None:
    harness = SplitHarness(decode=1)
    decode = harness.node("d0")
    attempts, _driver, split = harness.split(30_000)
    assert decode.context_tokens < 1000 and decode.kv_new == 30_000, "its memory is taken"
    split.prefill_ended(TRANSFER, None, harness.now_s)
    assert decode.context_tokens > 30_000
    harness.finish(attempts)
    gone, _driver, _split = harness.split(30_000)
    gone.client_left(harness.now_s)
    assert decode.context_tokens == 0
    harness.assert_all_counters_are_zero()


def test_the_transfer_speed_is_learned_from_the_stream() -> None:
    harness = SplitHarness(decode=1)
    group = harness.fleet.group("m")
    assert group is not None
    speed = group.transfer_speeds.between("local", "local")
    for _ in range(50):
        attempts, _driver, split = harness.split(20_000)
        harness.advance(0.5)
        split.prefill_ended(TRANSFER, None, harness.now_s)
        harness.advance(2.0)
        harness.answer(attempts)
    assert speed.measured == 50 and speed.ms_per_token(harness.now_s) == pytest.approx(0.1, rel=0.2)


def test_predictions_are_compared_with_the_prefill_node() -> None:
    harness = SplitHarness(decode=1)
    _attempts, _driver, split = harness.split(2000)
    cache = harness.cache_view.cache("p0")
    assert cache is not None
    split.prefill_ended(TRANSFER, (2000, 0, 1), harness.now_s)
    assert harness.cache_view.hits("m", _attempts.lookup, harness.now_s)["p0"].tokens > 1900  # type: ignore[arg-type]
    attempts, _driver, split = harness.split(2000)
    assert attempts.ticket.node.name == "d0"


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.BUSY, Outcome.REJECTED])
def test_the_decode_node_prefills_if_the_prefill_node_fails(outcome: Outcome) -> None:
    harness = SplitHarness()
    attempts, driver, split = harness.split()
    decode = attempts.ticket.node
    split.prefill_failed(outcome, "HTTP status 500", harness.now_s)
    assert driver.sent == [decode.name] and not isinstance(attempts.ticket, DecodeDispatch)
    assert decode.pending_work > 0.0 and harness.node("p0").outcomes[outcome] == 1
    assert attempts.tried == 1 and harness.counters.split_requests == {"prefill_failed": 1}
    split.prefill_ended(TRANSFER, None, harness.now_s)  # late: ignored
    assert driver.sent == [decode.name]
    harness.finish(attempts)


def test_the_decode_node_prefills_if_the_prefill_node_goes_down_or_refuses() -> None:
    harness = SplitHarness()
    first, driver, split = harness.split()
    second, other_driver, _split = harness.split()
    split.prefill_refused("connection refused", harness.now_s)
    for attempts, one in ((first, driver), (second, other_driver)):
        assert one.sent == [attempts.ticket.node.name] and "withdraw prefill" in one.events
        harness.answer(attempts)
    harness.assert_all_counters_are_zero()


def test_an_answer_without_parameters_is_remembered() -> None:
    harness = SplitHarness()
    attempts, driver, split = harness.split()
    split.prefill_ended(None, None, harness.now_s)
    assert driver.sent == [attempts.ticket.node.name]
    assert harness.counters.split_requests == {"not_supported": 1}
    harness.finish(attempts)
    assert harness.start(may_split=True)[0].split is None, "not again for a while"
    harness.advance(61.0)
    assert harness.start(may_split=True)[0].split is not None


def test_a_failed_transfer_is_not_the_decode_nodes_failure() -> None:
    harness = SplitHarness()
    attempts, driver, split = harness.split()
    decode = attempts.ticket.node
    split.prefill_ended(TRANSFER, None, harness.now_s)
    split.transfer_failed("HTTP status 500", harness.now_s)
    assert driver.sent == [decode.name, decode.name] and split.prefill_node is None
    assert decode.outcomes[Outcome.FAILED] == 0 and decode.pending_work > 0.0
    assert harness.counters.split_requests == {"transfer_failed": 1}
    attempts.node_failed(Outcome.FAILED, "HTTP status 500", harness.now_s)
    assert driver.sent[-1] == other(decode.name) and attempts.split is split, "the next failure is"
    harness.finish(attempts)


def test_another_decode_node_gets_the_same_kv_cache_if_nothing_was_sent() -> None:
    harness = SplitHarness()
    attempts, driver, split = harness.split()
    decode = attempts.ticket.node
    split.prefill_ended(TRANSFER, None, harness.now_s)
    split.decode_sent = False
    attempts.connection_refused("connection refused", harness.now_s)
    assert driver.sent == [decode.name, other(decode.name)] and attempts.split is split
    assert split.transfer == TRANSFER and isinstance(attempts.ticket, DecodeDispatch)
    harness.finish(attempts)


def test_another_decode_node_starts_over_if_the_kv_cache_may_be_released() -> None:
    harness = SplitHarness()
    attempts, driver, split = harness.split()
    decode = attempts.ticket.node
    split.prefill_ended(TRANSFER, None, harness.now_s)
    attempts.node_failed(Outcome.FAILED, "the node closed the connection", harness.now_s)
    assert driver.events[-1] == f"prefill p0 for {other(decode.name)}" and attempts.split is not split
    assert attempts.split is not None
    attempts.split.prefill_ended(TRANSFER, None, harness.now_s)
    assert driver.sent == [decode.name, other(decode.name)]
    harness.finish(attempts)


def test_a_prefill_node_that_drains_gets_no_request_a_second_time() -> None:
    harness = SplitHarness()
    attempts, driver, split = harness.split()
    decode = attempts.ticket.node
    split.prefill_ended(TRANSFER, None, harness.now_s)
    harness.fleet.drain("p0")
    attempts.node_failed(Outcome.FAILED, "the node closed the connection", harness.now_s)
    assert driver.sent == [decode.name, other(decode.name)], "it prefills itself"
    assert not harness.node("p0").inflight
    harness.finish(attempts)


def test_a_decode_node_that_goes_down_during_the_prefill_is_replaced() -> None:
    harness = SplitHarness()
    attempts, driver, split = harness.split()
    decode = attempts.ticket.node
    harness.fleet.check_failed(decode, harness.now_s, "connection refused")
    assert attempts.ticket.node.name == other(decode.name) and split.prefill_node is harness.node("p0")
    split.prefill_ended(TRANSFER, None, harness.now_s)
    assert driver.sent == [other(decode.name)]
    harness.finish(attempts)


@pytest.mark.parametrize("prefilled", [False, True])
def test_a_client_that_leaves_frees_both_nodes(prefilled: bool) -> None:
    harness = SplitHarness()
    attempts, driver, split = harness.split()
    if prefilled:
        split.prefill_ended(TRANSFER, None, harness.now_s)
    attempts.client_left(harness.now_s)
    assert ("withdraw prefill" in driver.events) is not prefilled
    split.prefill_ended(TRANSFER, None, harness.now_s)
    harness.assert_all_counters_are_zero()


def test_a_prefill_node_that_hangs_is_left() -> None:
    harness = SplitHarness(decode=1)
    for _ in range(3):  # so that its speed is known
        attempts, _driver, split = harness.split()
        harness.advance(0.1)
        split.prefill_ended(TRANSFER, None, harness.now_s)
        harness.answer(attempts)
    attempts, driver, split = harness.split()
    harness.dispatcher.tick(harness.now_s + 0.5)
    assert not driver.sent
    harness.advance(30.0)
    harness.dispatcher.tick(harness.now_s)
    assert driver.sent == ["d0"] and harness.counters.split_requests["prefill_slow"] == 1
    harness.finish(attempts)


def test_a_transfer_that_hangs_is_given_up() -> None:
    harness = SplitHarness(decode=1)
    attempts, driver, split = harness.split()
    harness.advance(0.1)
    split.prefill_ended(TRANSFER, None, harness.now_s)
    harness.advance(60.0)
    harness.dispatcher.tick(harness.now_s)
    assert driver.sent == ["d0", "d0"] and harness.counters.split_requests["transfer_failed"] == 1
    harness.finish(attempts)


def test_sglang_gets_both_requests_at_once_and_another_prefill_node_after_a_failure() -> None:
    harness = SplitHarness(prefill=2, decode=1, engine="sglang")
    attempts, driver, split = harness.split()
    first = split.pair.prefill_node.name
    assert driver.events == [f"prefill {first} for d0"] and driver.sent == ["d0"]
    split.prefill_failed(Outcome.FAILED, "HTTP status 500", harness.now_s)
    second = "p1" if first == "p0" else "p0"
    assert driver.events[-1] == f"prefill {second} for d0" and driver.sent == ["d0", "d0"]
    assert attempts.split is not None and attempts.split is not split
    attempts.split.prefill_ended(b"{}", (2000, 100, 1), harness.now_s)
    harness.finish(attempts)
    attempts, driver, split = harness.split()
    for _ in range(2):
        assert attempts.split is not None
        attempts.split.prefill_failed(Outcome.FAILED, "HTTP status 500", harness.now_s)
    assert attempts.done and driver.error is not None
    harness.assert_all_counters_are_zero()


def test_a_decode_node_that_fails_after_a_prefill_node_leaves_no_prefill_behind() -> None:
    harness = SplitHarness(prefill=3, decode=2, engine="sglang")
    attempts, driver, split = harness.split()
    split.prefill_failed(Outcome.FAILED, "HTTP status 500", harness.now_s)
    second = attempts.split
    assert second is not None and second is not split
    attempts.node_failed(Outcome.FAILED, "HTTP status 500", harness.now_s)
    third = attempts.split
    assert third is not None and third is not second and second.prefill_node is None
    assert driver.events.count("withdraw prefill") == 2
    second.prefill_failed(Outcome.FAILED, "late", harness.now_s)
    assert attempts.split is third and third.prefill_node is not None
    third.prefill_ended(b"{}", None, harness.now_s)
    harness.finish(attempts)


@pytest.mark.parametrize("prefilled", [False, True])
def test_a_mixed_node_that_prefilled_decodes_alone_after_a_failure(prefilled: bool) -> None:
    harness = SplitHarness(prefill=0, decode=1)
    node = harness.add("x0", 400_000, engine="vllm")
    node.kv_connector = True
    harness.fleet.transfers_changed(node)
    for _ in range(20):  # x0 is as good a decode node, and never with itself
        attempts, driver, split = harness.split()
        assert (split.pair.prefill_node.name, attempts.ticket.node.name) == ("x0", "d0")
        if prefilled:
            split.prefill_ended(TRANSFER, None, harness.now_s)
            split.decode_sent = False
        attempts.node_failed(Outcome.BUSY, "HTTP status 503", harness.now_s)
        assert driver.sent[-1] == "x0" and not isinstance(attempts.ticket, DecodeDispatch)
        assert split.prefill_node is None and attempts.split is split and split.transfer is None
        harness.finish(attempts)


def with_mixed(prefill: int = 1) -> SplitHarness:
    """SGLang nodes: d0 and d1 need a prefill node, x0 does not."""
    harness = SplitHarness(prefill=prefill, decode=2, engine="sglang")
    harness.add("x0", 400_000, engine="sglang")
    return harness


def test_a_request_that_may_not_be_split_never_fails_over_to_a_node_that_needs_a_partner() -> None:
    harness = with_mixed()
    attempts, driver = harness.start(2000)
    assert driver.sent == ["x0"]
    harness.fail(attempts)
    assert driver.sent == ["x0"] and attempts.done and driver.error is not None
    harness.assert_all_counters_are_zero()


def test_a_request_that_fails_over_to_a_node_that_needs_a_partner_gets_one() -> None:
    harness = with_mixed()
    for name in ("d0", "d1"):
        harness.fleet.drain(name)
    attempts, driver = harness.start(2000, may_split=True)
    assert driver.sent == ["x0"] and attempts.split is None
    for name in ("d0", "d1"):
        harness.fleet.drain(name, False)
    harness.fail(attempts)
    assert attempts.split is not None and driver.events[-1] == f"prefill p0 for {attempts.ticket.node.name}"
    attempts.split.prefill_ended(b"{}", None, harness.now_s)
    harness.finish(attempts)


def test_a_node_that_needs_a_partner_is_no_hedge() -> None:
    harness = with_mixed()
    attempts, driver = harness.start(2000)
    assert driver.sent == ["x0"] and not send_hedge(attempts, harness.dispatcher, harness.now_s)
    attempts.request.may_split = True
    assert not send_hedge(attempts, harness.dispatcher, harness.now_s)
    harness.finish(attempts)


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
    attempts, driver = harness.start(2000, may_split=may_split)
    assert driver.sent == (["d0"] if may_split else ["x0"]) and (attempts.split is not None) is may_split
    attempts.abandon(harness.now_s)


def test_a_node_that_needs_a_partner_gets_nothing_without_one() -> None:
    harness = with_mixed()
    harness.fleet.drain("x0")
    attempts, driver, split = harness.split()
    harness.fleet.drain("x0", False)
    split.prefill_failed(Outcome.FAILED, "HTTP status 500", harness.now_s)
    assert driver.sent[1:] == ["x0"], "no other prefill node is left"
    harness.finish(attempts)


def test_a_request_that_the_decode_node_rejects_teaches_no_prefill_speed() -> None:
    harness = SplitHarness(decode=1, engine="sglang")
    attempts, driver, split = harness.split(20_000)
    harness.advance(0.001)
    assert attempts.response_started(400, None, harness.now_s)
    attempts.response_ended(None, harness.now_s)
    prefill = harness.node("p0")
    assert "withdraw prefill" in driver.events and split.prefill_node is None
    assert prefill.speed.answers == 0 and prefill.outcomes[Outcome.CANCELLED] == 1
    assert not harness.counters.split_requests
    harness.assert_all_counters_are_zero()


@pytest.mark.parametrize("finish_reason", [None, "length", "stop"])
def test_an_answer_that_ends_with_its_first_token_needs_no_parameters(finish_reason: str | None) -> None:
    harness = SplitHarness()
    attempts, driver, split = harness.split()
    split.prefill_ended(None, None, harness.now_s, finish_reason)
    assert driver.sent == [attempts.ticket.node.name]
    harness.finish(attempts)
    again = harness.start(may_split=True)[0]
    assert (again.split is not None) is (finish_reason == "stop")


@pytest.mark.interpreted
def test_a_request_that_was_sent_elsewhere_meanwhile_is_not_sent_a_second_time() -> None:
    """Closing the prefill node's ticket can take a node down, which moves the request."""
    harness = SplitHarness(prefill=2)
    attempts, driver, split = harness.split()
    close_ticket = harness.dispatcher.close_ticket

    def close_and_move(moved: Attempts, ticket: Ticket, *args: Any, **more: Any) -> None:
        close_ticket(moved, ticket, *args, **more)
        if ticket is split.prefill_ticket:
            harness.dispatcher.close_ticket = close_ticket  # type: ignore[method-assign]
            attempts.send_alone(split._decision, harness.node("d0"), harness.now_s)

    harness.dispatcher.close_ticket = close_and_move  # type: ignore[assignment, method-assign]
    split.prefill_failed(Outcome.FAILED, "it broke", harness.now_s)
    assert driver.sent == ["d0"]
    harness.finish(attempts)
