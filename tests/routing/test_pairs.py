"""Pairs of a prefill node and a decode node: when they are chosen, and what they cost."""

from __future__ import annotations

import msgspec
import pytest
from routing_harness import RoutingHarness, explained, prompt

from warmroute.config import Pricing
from warmroute.core.decision import Decision
from warmroute.core.decision_record import explain_decision
from warmroute.core.demand import LongPrompts
from warmroute.core.messages import Lookup, Outcome
from warmroute.core.node import Node, Ticket
from warmroute.core.pairs import _interference_ms
from warmroute.core.rejections import NoNodeAvailable
from warmroute.core.speeds import HALF_LIFE_S, LATENCY_MS, PRIOR_MS_PER_TOKEN, TransferSpeed


class PairHarness(RoutingHarness):
    """Prefill nodes p0, p1…, and decode nodes d0, d1…"""

    def __init__(
        self, prefill: int = 1, decode: int = 1, engine: str = "vllm", pricing: Pricing | None = None,
        long_prompts: float = 20.0,
    ) -> None:  # fmt: skip
        """`long_prompts`: how many came per second. With many of them, prefill nodes serve no whole requests."""
        super().__init__(0, pricing=pricing)
        for number in range(prefill):
            self.add(f"p{number}", 400_000, role="prefill", engine=engine)
        for number in range(decode):
            self.add(f"d{number}", 400_000, role="decode", engine=engine)
        self.group = self.fleet.group("m") or self.group
        self.expect_long_prompts(long_prompts)

    def expect_long_prompts(self, per_s: float) -> None:
        """Let as many long prompts arrive in the last minutes."""
        seen = self.group.long_prompts = LongPrompts()
        for number in range(int(300 * per_s)):
            seen.record(2000.0, self.now_s - 300.0 + number / per_s)

    def node(self, name: str) -> Node:
        return self.fleet.node(name)

    def decodes(self, name: str, answers: int, tokens: int = 1000) -> list[Ticket]:
        """Let a node decode answers."""
        tickets = [self.send(self.node(name), prompt(tokens)) for _ in range(answers)]
        for ticket in tickets:
            ticket.first_token(self.now_s, False)
        return tickets

    def choose(self, lookup: Lookup | None, **fields: object) -> Decision:
        return self.decide(lookup, **{"may_split": True, **fields})


def pair_of(decision: Decision) -> tuple[str | None, str]:
    return (decision.pair.prefill_node.name if decision.pair is not None else None, decision.node.name)


def test_a_long_prompt_goes_to_a_pair_when_the_decode_node_is_decoding() -> None:
    harness = PairHarness()
    assert pair_of(harness.choose(prompt(30_000))) == (None, "d0"), "an idle node prefills itself: nobody is delayed"
    harness.decodes("d0", 20)
    decision = harness.choose(prompt(30_000))
    assert pair_of(decision) == ("p0", "d0")
    price, pair = decision.price, decision.pair
    assert price is not None and pair is not None
    assert pair.transfer_ms == pytest.approx(LATENCY_MS + 30_000 * PRIOR_MS_PER_TOKEN)
    assert price.total < pair.alone_ms
    assert price.prefill > 30_000 * 0.05 and price.distance >= pair.transfer_ms
    assert price.own == pytest.approx(price.wait + price.prefill + price.room + price.adapter + price.distance)


def test_requests_that_do_not_decode_yet_are_delayed_as_well() -> None:
    harness = PairHarness()
    for number in range(20):
        harness.send(harness.node("d0"), prompt(50, number))
    assert pair_of(harness.choose(prompt(30_000))) == ("p0", "d0"), "by the time of the prefill they decode"


def test_one_long_gap_costs_more_than_several_short_ones() -> None:
    harness = PairHarness(decode=2)
    harness.decodes("d0", 1)
    busy, idle = harness.node("d0"), harness.node("d1")
    assert _interference_ms(busy, 4000.0) == pytest.approx(4 * 4 * _interference_ms(busy, 1000.0))
    assert _interference_ms(busy, 1000.0) > 1000.0 > 100.0 > _interference_ms(busy, 100.0) > 0.0
    assert not _interference_ms(busy, -5.0) and not _interference_ms(idle, 4000.0)


def test_a_long_prompt_rather_waits_for_a_prefill_node_than_to_stop_one_answer() -> None:
    harness = PairHarness()
    harness.decodes("d0", 1)
    harness.busy(harness.node("p0"), 60_000)
    decision = harness.choose(prompt(30_000))
    assert pair_of(decision) == ("p0", "d0"), "an answer that stops for 1.5 s counts more than a wait of 3 s"


def test_short_and_cached_prompts_skip_the_split() -> None:
    harness = PairHarness()
    harness.decodes("d0", 20)
    assert pair_of(harness.choose(prompt(50))) == (None, "d0")
    long = prompt(30_000, 1)
    harness.warm(harness.node("d0"), long)
    assert pair_of(harness.choose(long)) == (None, "d0")


def test_a_short_prompt_is_split_only_if_the_queue_is_long() -> None:
    harness = PairHarness()
    harness.decodes("d0", 40)
    assert pair_of(harness.choose(prompt(600))) == (None, "d0"), "30 ms: nobody notices that"
    harness.send(harness.node("d0"), prompt(60_000, 5))
    assert pair_of(harness.choose(prompt(600))) == ("p0", "d0")


def test_what_the_decode_node_has_is_not_transferred() -> None:
    harness = PairHarness()
    harness.decodes("d0", 30)
    harness.warm(harness.node("d0"), prompt(16_000, 1))
    decision = harness.choose(prompt(48_000, 1))
    assert decision.pair is not None and pair_of(decision) == ("p0", "d0")
    assert decision.pair.transfer_tokens == pytest.approx(32_000, abs=16)


def test_the_prefill_node_that_has_the_prompt_is_chosen_and_a_queue_there_counts() -> None:
    harness = PairHarness(prefill=3)
    harness.decodes("d0", 30)
    long = prompt(60_000, 1)
    harness.warm(harness.node("p1"), long)
    assert pair_of(harness.choose(long)) == ("p1", "d0")
    for _ in range(4):
        harness.busy(harness.node("p1"), 60_000)
    assert pair_of(harness.choose(long))[0] in ("p0", "p2")


def test_without_room_on_the_prefill_nodes_the_decode_node_prefills() -> None:
    harness = PairHarness()
    harness.decodes("d0", 5)
    for _ in range(20):
        harness.busy(harness.node("p0"), 60_000)
    assert pair_of(harness.choose(prompt(20_000))) == (None, "d0")


def test_ties_between_pairs_spread() -> None:
    harness = PairHarness(prefill=2, decode=2)
    for name in ("d0", "d1"):
        harness.decodes(name, 20)
    assert {pair_of(harness.choose(prompt(30_000))) for _ in range(60)} == {
        (p, d) for p in ("p0", "p1") for d in ("d0", "d1")
    }


def test_a_request_that_may_not_be_split_goes_to_one_node() -> None:
    harness = PairHarness()
    harness.decodes("d0", 20)
    assert harness.choose(prompt(30_000), may_split=False).pair is None
    assert harness.choose(None).pair is None


def test_never_and_always() -> None:
    never, always = (PairHarness(pricing=Pricing(split=split)) for split in ("never", "always"))
    never.decodes("d0", 20)
    assert never.choose(prompt(30_000)).pair is None
    assert pair_of(always.choose(prompt(100))) == ("p0", "d0")
    always.fleet.check_failed(always.node("p0"), always.now_s, "connection refused")
    assert pair_of(always.choose(prompt(30_000))) == (None, "d0"), "the only prefill node is down"


def test_a_half_open_prefill_node_gets_a_trial_request() -> None:
    harness = PairHarness(prefill=2)
    harness.decodes("d0", 20)
    node = harness.node("p0")
    for _ in range(20):
        harness.close(Ticket(node, harness.now_s), Outcome.FAILED)
    assert node.health.state.value == "down"
    harness.advance(1000.0)
    harness.fleet.check_passed(node, harness.now_s)
    assert node.health.state.value == "half_open"
    assert pair_of(harness.choose(prompt(30_000))) == ("p0", "d0")


def test_sglang_decode_nodes_always_get_a_prefill_node() -> None:
    harness = PairHarness(prefill=2, engine="sglang")
    assert pair_of(harness.choose(prompt(100)))[0] in ("p0", "p1")
    assert pair_of(harness.choose(None))[0] in ("p0", "p1"), "also if the prompt was not read"
    harness.add("x0", 400_000, engine="sglang")
    assert pair_of(harness.choose(prompt(100), may_split=False)) == (None, "x0")
    assert pair_of(harness.choose(prompt(100))) == (None, "x0"), "no transfer"
    harness.decodes("x0", 50)
    assert pair_of(harness.choose(prompt(30_000)))[1] == "d0"


def test_an_earlier_node_that_takes_no_kv_cache_does_not_hide_the_pairs() -> None:
    harness = PairHarness(decode=0, pricing=Pricing(split="always"))
    harness.add("x0", 400_000)
    harness.add("d0", 400_000, role="decode", engine="vllm")
    assert pair_of(harness.choose(prompt(30_000))) == ("p0", "d0")


def test_a_request_that_may_not_be_split_waits_rather_than_go_to_a_node_that_needs_a_partner() -> None:
    harness = PairHarness(engine="sglang")
    harness.add("x0", 400_000, engine="sglang")
    harness.busy(harness.node("x0"), 60_000)
    assert pair_of(harness.choose(prompt(30_000), may_split=False)) == (None, "x0")


def test_a_queued_request_waits_for_its_prefill_node() -> None:
    harness = PairHarness(pricing=Pricing(split="always"))
    busy = [harness.busy(harness.node("p0"), 60_000) for _ in range(2)]
    waiting = harness.submit(30_000, may_split=True)
    assert waiting.queued and waiting.harness.admission.queue.waiting == 1
    for ticket in busy:
        harness.free(ticket)
    assert not waiting.queued and pair_of(waiting.decision) == ("p0", "d0")


def test_nobody_pays_where_no_node_has_a_role() -> None:
    harness = RoutingHarness(3)
    group = harness.fleet.group("m")
    assert group is not None and not group.has_roles and not harness.fleet.has_roles
    assert harness.decide(prompt(30_000), may_split=True).pair is None


def test_the_explanation_names_both_nodes() -> None:
    harness = PairHarness()
    harness.decodes("d0", 20)
    text = explained(harness.choose(prompt(30_000)))
    assert "p0 prefills" in text and text.startswith("d0: ")


def test_the_explanation_names_the_decode_node_that_was_chosen_last() -> None:
    harness = PairHarness(decode=2)
    for name in ("d0", "d1"):
        harness.decodes(name, 20)
    decision = harness.choose(prompt(30_000))
    other = harness.node("d1" if decision.node.name == "d0" else "d0")
    text = explain_decision(decision.record(), last=other)
    assert f"{other.name} decodes" in text and "decodes" not in explained(decision)


def test_transfer_speeds_are_learned_within_bounds() -> None:
    speed = TransferSpeed(PRIOR_MS_PER_TOKEN)
    for _ in range(200):
        speed.learn(10_000, LATENCY_MS + 1000.0, 100.0)
    assert speed.ms_per_token(100.0) == pytest.approx(0.1, rel=0.05) and speed.measured == 200
    before = speed.ms_per_token(100.0)
    speed.learn(10, 1e9, 100.0)
    assert speed.ms_per_token(100.0) == before, "too short to say anything"
    speed.learn(10_000, 1e12, 100.0)
    assert speed.ms_per_token(100.0) < 2.0 * before


def test_a_network_that_was_slow_is_tried_again_after_a_while() -> None:
    harness = PairHarness()
    harness.decodes("d0", 20)
    long = prompt(30_000)
    group = harness.choose(long).query.group  # type: ignore[union-attr]
    speed = group.transfer_speeds.between("local", "local")
    for _ in range(300):
        speed.learn(30_000, 9e5, harness.now_s)
    assert harness.choose(long).pair is None, "the transfer takes minutes"
    harness.advance(20 * HALF_LIFE_S)
    harness.expect_long_prompts(20.0)
    assert pair_of(harness.choose(long)) == ("p0", "d0")
    assert speed.ms_per_token(harness.now_s) == pytest.approx(PRIOR_MS_PER_TOKEN, rel=0.2)


def test_both_nodes_of_a_pair_run_the_same_engine() -> None:
    harness = PairHarness(prefill=0, pricing=Pricing(split="always"))
    harness.add("s0", 400_000, role="prefill", engine="sglang")
    assert pair_of(harness.choose(prompt(30_000))) == (None, "d0")
    harness.add("p0", 400_000, role="prefill", engine="vllm")
    assert pair_of(harness.choose(prompt(30_000))) == ("p0", "d0")


def test_the_trial_request_of_a_prefill_node_is_one_for_its_engine() -> None:
    harness = PairHarness(pricing=Pricing(split="always"))
    node = harness.add("s0", 400_000, role="prefill", engine="sglang")
    for _ in range(20):
        harness.close(Ticket(node, harness.now_s), Outcome.FAILED)
    harness.advance(1000.0)
    harness.fleet.check_passed(node, harness.now_s)
    assert node.health.state.value == "half_open"
    assert pair_of(harness.choose(prompt(30_000))) == ("p0", "d0")


def test_cheaper_prefill_nodes_of_another_engine_hide_no_partner() -> None:
    harness = PairHarness(engine="sglang")
    for number in range(6):
        harness.warm(harness.add(f"v{number}", 400_000, role="prefill", engine="vllm"), prompt(30_000, 1))
    assert pair_of(harness.choose(prompt(30_000, 1))) == ("p0", "d0")


def test_a_node_of_an_unknown_engine_takes_part_in_no_pair() -> None:
    harness = PairHarness(engine="auto", pricing=Pricing(split="always"))
    with pytest.raises(NoNodeAvailable):  # it could be one that needs a partner
        harness.choose(prompt(30_000))
    harness.node("d0").engine_undetected = True
    harness.fleet.transfers_changed(harness.node("d0"))
    assert pair_of(harness.choose(prompt(30_000))) == (None, "d0")
    for name in ("p0", "d0"):
        harness.node(name).engine = "vllm"
        harness.fleet.transfers_changed(harness.node(name))
    assert pair_of(harness.choose(prompt(30_000))) == ("p0", "d0")


def test_prefill_nodes_serve_whole_requests_if_no_other_node_is_up() -> None:
    harness = PairHarness(prefill=2, decode=2)
    for name in ("d0", "d1"):
        harness.fleet.check_failed(harness.node(name), harness.now_s, "connection refused")
    decision = harness.choose(prompt(30_000))
    assert decision.pair is None and decision.node.role == "prefill"
    harness.fleet.check_passed(harness.node("d1"), harness.now_s)
    assert harness.choose(prompt(100)).node.name == "d1", "a decode node serves again"


def test_a_prefill_node_of_sglang_serves_nothing_alone() -> None:
    harness = PairHarness(engine="sglang")
    harness.fleet.check_failed(harness.node("d0"), harness.now_s, "connection refused")
    with pytest.raises(NoNodeAvailable):
        harness.choose(prompt(100))


def test_a_changed_configuration_keeps_the_detected_engine() -> None:
    harness = PairHarness(engine="auto")
    node = harness.node("d0")
    node.engine = "sglang"
    node.update_config(msgspec.structs.replace(node.config, usd_per_hour=2.0))
    assert node.engine == "sglang" and node.needs_partner
    node.update_config(msgspec.structs.replace(node.config, engine="vllm"))
    assert node.engine == "vllm"
    node.update_config(msgspec.structs.replace(node.config, engine="auto"))
    assert node.engine == "auto", "to be detected again"
