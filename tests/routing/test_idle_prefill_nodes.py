"""Prefill nodes that serve whole requests while they are idle."""

from __future__ import annotations

import pytest
from routing_harness import explained, prompt
from test_pairs import PairHarness

from warmroute.config import Pricing
from warmroute.core.demand import LongPrompts
from warmroute.core.group import MAX_RATIO_TO_EXPECTED, blocking_ms
from warmroute.core.messages import Outcome
from warmroute.core.tickets import WholeAnswerTicket


def idle_harness(**fields: object) -> PairHarness:
    """Prefill nodes without long prompts, beside busy decode nodes."""
    harness = PairHarness(**{"prefill": 3, "long_prompts": 0, **fields})  # type: ignore[arg-type]
    for node in list(harness.fleet):
        if node.role == "decode":
            harness.decodes(node.name, 3, 500)
    return harness


def test_an_idle_prefill_node_serves_a_long_prompt_without_a_transfer() -> None:
    harness = idle_harness()
    decision = harness.choose(prompt(30_000))
    assert decision.pair is None and decision.node.role == "prefill"
    assert decision.fallbacks() == [harness.node("d0")]
    assert "idle prefill node" in explained(decision)


def test_an_idle_prefill_node_serves_a_short_prompt_if_the_decode_nodes_are_busy() -> None:
    harness = idle_harness()
    assert harness.choose(prompt(1000)).node.role == "prefill"
    calm = PairHarness(prefill=3, long_prompts=0)
    assert calm.choose(prompt(1000)).node.name == "d0", "it waits for nobody there"


def test_long_prompts_that_come_often_keep_the_prefill_nodes_free() -> None:
    harness = idle_harness()
    harness.expect_long_prompts(10)
    assert harness.choose(prompt(1000)).node.name == "d0"
    assert harness.choose(prompt(30_000)).pair is not None


@pytest.mark.parametrize("why", ["peers", "subset", "island", "engine", "always", "busy", "window"])
def test_other_prefill_nodes_serve_no_whole_request(why: str) -> None:
    engine = "sglang" if why == "engine" else "vllm"
    pricing = Pricing(split="always" if why == "always" else "by_price")
    harness = PairHarness(prefill=0, engine=engine, pricing=pricing, long_prompts=0)
    island = "far" if why == "island" else "local"
    fields = {"max_model_len": 30_050} if why == "window" else {}
    node = harness.add("p0", 400_000, island, role="prefill", engine=engine, **fields)
    if why != "engine":
        harness.decodes("p0" if why == "busy" else "d0", 3, 500)
    if why == "peers":
        harness.router.on_dispatch = lambda: None
    subset = frozenset(("d0",)) if why == "subset" else None
    assert harness.choose(prompt(30_000), subset=subset).node is not node


def test_a_node_prefills_for_no_other_one_until_its_answer_ends() -> None:
    harness = idle_harness(prefill=1)
    first = harness.submit(30_000, may_split=True)
    assert first.decision.node.name == "p0" and isinstance(first.ticket, WholeAnswerTicket)
    first.ticket.first_token(harness.now_s)
    second = harness.submit(30_000, may_split=True)
    assert second.queued and second.harness.admission.queue.waiting == 1
    price = harness.choose(prompt(30_000)).price
    assert price is not None and price.wait > 100.0, "it waits for the end of the answer"
    harness.free(first.ticket)
    assert not second.queued and harness.node("p0").whole_answers == (second.decision.pair is None)


def test_an_answer_that_does_not_end_blocks_its_node_only_for_a_while() -> None:
    harness = idle_harness(prefill=1)
    first = harness.submit(30_000, may_split=True)
    node = harness.node("p0")
    assert node.is_blocked(harness.now_s)
    harness.advance(node.blocked_until_s - harness.now_s)
    assert not node.is_blocked(harness.now_s) and MAX_RATIO_TO_EXPECTED > 1.0
    first.ticket.first_token(harness.now_s)
    assert harness.admission.has_room(node, harness.now_s)


@pytest.mark.parametrize("outcome", list(Outcome))
def test_whatever_ends_the_answer_frees_the_node(outcome: Outcome) -> None:
    harness = idle_harness(prefill=1)
    ticket = harness.submit(30_000, may_split=True).ticket
    for _ in range(2):
        harness.close(ticket, outcome)
        assert not harness.node("p0").whole_answers and not harness.node("p0").is_blocked(harness.now_s)


def test_a_node_that_changes_its_role_is_not_blocked() -> None:
    harness = idle_harness(prefill=1)
    harness.submit(30_000, may_split=True)
    node = harness.node("p0")
    assert node.is_blocked(harness.now_s)
    node.role = "decode"
    assert not node.is_blocked(harness.now_s)


def test_what_an_answer_costs_long_prompts() -> None:
    harness = PairHarness(prefill=3, long_prompts=0)
    group, now_s = harness.fleet.group("m"), harness.now_s
    assert group is not None and not blocking_ms(group, 2000.0, 0, now_s)
    harness.expect_long_prompts(0.2)
    few = blocking_ms(group, 2000.0, 0, now_s)
    assert 0.0 < few < 1000.0
    assert blocking_ms(group, 2000.0, 1, now_s) < few < blocking_ms(group, 4000.0, 0, now_s)
    assert blocking_ms(group, 2000.0, 1_000_000, now_s) == pytest.approx(0.0, abs=1.0)
    harness.expect_long_prompts(2.0)
    assert blocking_ms(group, 2000.0, 0, now_s) > 5 * few
    before = blocking_ms(group, 2000.0, 0, now_s)
    group.waiting += 3
    assert blocking_ms(group, 2000.0, 0, now_s) == pytest.approx(before + 2000.0)


def test_the_arrivals_of_long_prompts_are_averaged() -> None:
    seen = LongPrompts()
    assert seen.recent(0.0) == (0.0, 0.0)
    for second in range(200):
        seen.record(500.0, float(second))
    per_ms, busy_nodes = seen.recent(200.0)
    assert per_ms == pytest.approx(0.001, rel=0.05) and busy_nodes == pytest.approx(0.5, rel=0.05)
    assert seen.recent(500.0)[0] < 1e-6
    once = LongPrompts()
    once.record(500.0, 10.0)
    assert once.recent(10.0)[0] < 0.0006, "one prompt is no rate"
    assert once.recent(5.0)[0] < 0.0006, "a clock that goes back"
