"""The sentences that explain decisions, and the records that they are made from."""

from __future__ import annotations

import gc
import weakref
from array import array
from heapq import nsmallest
from random import Random
from typing import Any

import msgspec
import pytest
from routing_harness import MODEL, RoutingHarness, explained, prompt

from warmroute.config import Admission as AdmissionConfig
from warmroute.config import Health, Index, NodeConfig, Pricing, Routing
from warmroute.config.routing import HIGH, LOW
from warmroute.core import decision_record
from warmroute.core.cache_view import CacheView
from warmroute.core.decision_record import _DRAWBACKS, KEEP_ALL_UP_TO, TERMS, DecisionRecord, Price, explain_decision
from warmroute.core.fleet import Fleet
from warmroute.core.messages import Lookup, Outcome, RoutingRequest
from warmroute.core.node import Ticket
from warmroute.core.rejections import QueueFull, RoutingError
from warmroute.core.router import Router

TIED = "decided by load, then at random"


def explain(harness: RoutingHarness, lookup: Lookup | None = None) -> str:
    return explained(harness.decide(lookup))


# The policy `price`.


def test_a_node_with_a_cached_prefix_and_its_rival() -> None:
    harness = RoutingHarness(2)
    harness.warm(harness.nodes[1], prompt(6144, 1))
    assert explain(harness, prompt(8210, 1)) == (
        "n1: 6,144 of 8,210 tokens cached, saves 345 ms; n0 is idle but has none of them cached"
    )


def test_a_rival_with_a_shorter_cached_prefix() -> None:
    harness = RoutingHarness(3)
    harness.warm(harness.nodes[1], prompt(6144, 1))
    harness.warm(harness.nodes[2], prompt(2048, 1))
    assert explain(harness, prompt(8210, 1)).endswith("; n2 is idle but has only 2,048 of them cached")


def test_a_rival_with_a_cached_prefix_that_is_too_busy() -> None:
    harness = RoutingHarness(3)
    harness.warm(harness.nodes[1], prompt(6144, 1))
    harness.busy(harness.nodes[1], 16_000)
    harness.busy(harness.nodes[2], 4000)
    assert explain(harness, prompt(8210, 1)) == (
        "n0: nothing cached, 8,210 tokens to prefill; n1 has 6,144 tokens cached but 1,056 ms of prefill queued"
    )


def test_without_any_cached_prefix_load_decides() -> None:
    harness = RoutingHarness(3)
    sentence = explain(harness, prompt(8210, 1))
    name, _, rest = sentence.partition(": ")
    first = next(node.name for node in harness.nodes if node.name != name)
    assert rest == f"no node has any of its 8,210 tokens cached; same cost as {first} and 1 other, {TIED}"
    two = RoutingHarness(2)
    sentence = explain(two, prompt(8210, 1))
    other = "n1" if sentence.startswith("n0") else "n0"
    assert sentence.endswith(f"; same cost as {other}, {TIED}")


def test_a_tie_without_cached_prefixes_still_names_the_node_that_has_one() -> None:
    harness = RoutingHarness(3)
    harness.warm(harness.nodes[1], prompt(6144, 1))
    harness.busy(harness.nodes[1], 16_000)
    assert f", {TIED}; n1 has 6,144 tokens cached but" in explain(harness, prompt(8210, 1))


def test_a_prompt_that_was_not_looked_up() -> None:
    harness = RoutingHarness(2)
    harness.busy(harness.nodes[1], 4000)
    assert explain(harness) == (
        "n0: the prompt was not looked up, so load decided: no prefill queued; n1 has 216 ms of prefill queued"
    )


def test_the_only_available_node() -> None:
    harness = RoutingHarness(1)
    assert explain(harness) == "n0: the only candidate"
    assert explain(harness, prompt(8210, 1)) == "n0: the only candidate; nothing cached, 8,210 tokens to prefill"
    harness.warm(harness.nodes[0], prompt(8210, 1))
    assert explain(harness, prompt(8210, 1)) == "n0: the only candidate; 8,208 of 8,210 tokens cached, saves 478 ms"


def test_a_second_home() -> None:
    harness = RoutingHarness(3, pricing=Pricing(second_home_ms=600.0))
    harness.warm(harness.nodes[0], prompt(8210, 1))
    harness.use_regularly(harness.nodes[0], prompt(8210, 1), 0.1)
    for _ in range(9):
        Ticket(harness.nodes[0], 0.0)
    decision = harness.decide(prompt(8210, 1))
    assert decision.reason == "second home" and decision.price is not None
    home_price = Price(*decision.prices[0])  # type: ignore[index]
    more_ms = decision.price.total - home_price.total
    assert explained(decision) == (
        f"{decision.node.name}: second home for 8,208 tokens cached on n0, which is crowded; "
        f"costs {more_ms:.0f} ms more this time"
    )


def test_another_island() -> None:
    harness = RoutingHarness(2)
    harness.nodes[0].island, harness.nodes[1].island = "aws/eu", "gcp/us"
    harness.nodes[1].distance_ms = 140.0
    assert explain(harness, prompt(8210, 1)).endswith("; n1 is idle but 140 ms away")
    harness.warm(harness.nodes[1], prompt(8210, 1))
    assert explain(harness, prompt(8210, 1)) == (
        "n1: 8,208 of 8,210 tokens cached, saves 478 ms; on gcp/us, 140 ms away; n0 is idle but has none of them cached"
    )


@pytest.mark.parametrize(
    ("term", "words"),
    [
        ("wait", "n1 has 300 ms of prefill queued"),
        ("prefill", "n1 is idle but takes 300 ms longer to prefill"),
        ("room", "n1 is idle but short of KV memory (300 ms until enough is free)"),
        ("contention", "n1 is idle but would decode more slowly in its larger batch"),
        ("distance", "n1 is idle but 300 ms away"),
        ("adapter", "n1 is idle but would have to load the LoRA adapter first (300 ms)"),
        ("risk", "n1 is idle but would be more likely to miss the deadline"),
        ("memory", "n1 is idle but would evict cached blocks that others are likely to need (300 ms)"),
        ("congestion", "n1 is idle but would delay other requests by 300 ms more"),
    ],
)
def test_each_term_of_the_price_has_its_own_words(term: str, words: str) -> None:
    harness = RoutingHarness(2)
    zero = dict.fromkeys(Price._fields, 0.0)
    cheap = Price(**{**zero, "total": 50.0, "new": 1000.0, "output": 100.0})
    expensive = cheap._replace(total=350.0, **{term: 300.0})
    a, b = harness.nodes
    a.island, b.island = "here", "there"
    record = DecisionRecord(a, "price", "cheapest", 1000, 0.0, 0, ([cheap, expensive], (a, b)), 2, a.speed.ms_per_token)
    assert explain_decision(record) == f"n0: no node has any of its 1,000 tokens cached; {words}"


def test_no_term_of_the_price_is_without_words() -> None:
    assert set(_DRAWBACKS) == set(TERMS)


def test_a_term_that_follows_from_another_is_not_the_cause() -> None:
    """A long prefill delays others by more than it takes itself. The prefill is the cause."""
    harness = RoutingHarness(2)
    harness.warm(harness.nodes[0], prompt(8210, 1))
    for _ in range(200):
        harness.nodes[1].record_arrival(harness.now_s)
    decision = harness.decide(prompt(8210, 1))
    expensive = Price(*decision.prices[1])  # type: ignore[index]
    assert expensive.congestion > expensive.prefill
    assert explained(decision).endswith("n1 is idle but has none of them cached")


def test_queueing_and_retries() -> None:
    harness = RoutingHarness(3)
    harness.warm(harness.nodes[1], prompt(6144, 1))
    record = harness.decide(prompt(8210, 1)).record()
    plain = explain_decision(record)
    assert explain_decision(record, queued_ms=0.4) == plain
    assert explain_decision(record, queued_ms=1140.0) == f"{plain}; queued for 1,140 ms first"
    n0, n1, n2 = harness.nodes
    n1.update_config(msgspec.structs.replace(n1.config, max_inflight=1))
    limit = "(n1 gets at most 1 request at a time: max_inflight)"
    assert explain_decision(record, queued_ms=1140.0) == f"{plain}; queued for 1,140 ms first {limit}"
    assert explain_decision(record, tried=2, last=n0) == f"n0: retry after n1 failed; first choice was {plain}"
    failed = explain_decision(record, tried=2, last=n0, failed=True)
    assert failed == f"no node answered (2 nodes tried); first choice was {plain}"
    assert explain_decision(record, tried=3, last=n2).startswith("n2: retry after n1 and 1 other failed; first choice")


def test_a_trial_request() -> None:
    harness = RoutingHarness(3)
    harness.warm(harness.nodes[0], prompt(6144, 1))
    node = harness.nodes[2]
    for _ in range(10):
        harness.fleet.close_ticket(Ticket(node, harness.now_s), Outcome.FAILED, harness.now_s, "no")
    harness.advance(3600.0)
    harness.warm(harness.nodes[0], prompt(6144, 1))
    harness.fleet.check_passed(node, harness.now_s)
    decision = harness.decide(prompt(8210, 1))
    assert decision.policy == "half_open" and decision.price is None
    assert explained(decision) == ("n2: trial request to a half-open node after failures; the cheapest node is n0")


def test_a_record_does_not_change_with_the_nodes() -> None:
    harness = RoutingHarness(2)
    harness.warm(harness.nodes[1], prompt(6144, 1))
    record = harness.decide(prompt(8210, 1)).record()
    before = explain_decision(record)
    harness.nodes[1].speed.ms_per_token = 3.0
    harness.busy(harness.nodes[0], 30_000)
    harness.busy(harness.nodes[1], 30_000)
    assert explain_decision(record) == before


# Admission and islands.


@pytest.mark.parametrize("count", [2, 3])
def test_nodes_over_the_queue_threshold(count: int) -> None:
    harness = RoutingHarness(count, admission=AdmissionConfig(queue_threshold=4))
    harness.warm(harness.nodes[0], prompt(8192, 1))
    harness.nodes[0].update_load(1, 6, 0.1, harness.now_s)
    request = harness.submit(prompt(8210, 1))
    sentence = explained(request.decision)
    assert request.node is not harness.nodes[0]
    assert sentence.startswith(f"{request.node.name}: nothing cached, 8,210 tokens to prefill; other nodes are over ")
    request.finish()
    decision, queues = harness.admission.dry_run(RoutingRequest(MODEL), prompt(8210, 1), harness.now_s)
    assert decision.reason == "other nodes are over the queue threshold" and not queues


def test_a_dry_run_returns_whether_the_request_would_queue() -> None:
    harness = RoutingHarness(1)
    harness.busy(harness.nodes[0], 16_000)
    before = harness.nodes[0].arrival_rate
    decision, queues = harness.admission.dry_run(RoutingRequest(MODEL), prompt(8210, 1), harness.now_s)
    assert decision.node is harness.nodes[0] and queues
    assert harness.admission.queue.waiting == harness.admission.queue.queued_total == 0
    assert harness.nodes[0].arrival_rate == before
    with pytest.raises(RoutingError):
        harness.admission.dry_run(RoutingRequest(MODEL, may_queue=False), prompt(8210, 1), harness.now_s)


def test_a_dry_run_is_rejected_like_the_request() -> None:
    harness = RoutingHarness(1, admission=AdmissionConfig(max_waiting=2))
    harness.busy(harness.nodes[0], 16_000)
    harness.submit()
    low, high = RoutingRequest(MODEL, priority=LOW), RoutingRequest(MODEL, priority=HIGH)
    with pytest.raises(QueueFull):
        harness.admission.dry_run(low, prompt(800), harness.now_s)
    assert harness.admission.dry_run(RoutingRequest(MODEL), prompt(800), harness.now_s)[1]
    harness.submit()
    with pytest.raises(QueueFull):
        harness.admission.dry_run(RoutingRequest(MODEL), prompt(800), harness.now_s)
    assert harness.admission.dry_run(high, prompt(800), harness.now_s)[1]
    assert harness.admission.queue.waiting == harness.admission.queue.queued_total == 2


def test_a_conversation_that_stays_on_its_island_and_one_that_moves() -> None:
    harness = RoutingHarness(0)
    for number, island in enumerate(("aws", "aws", "gcp")):
        harness.add(f"n{number}", island=island)
    first = harness.decide(prompt(8210, 1))
    harness.close(harness.router.open_ticket(first, harness.nodes[0], harness.now_s))
    staying = harness.decide(prompt(9000, 1))
    assert staying.node.island == "aws"
    assert "; stays on aws, its conversation's island; " in explained(staying)
    for node in harness.nodes[:2]:
        harness.fleet.check_failed(node, harness.now_s, "gone")
    assert "; moves to gcp: no node of its island aws is up" in explain(harness, prompt(9000, 1))


# Other policies.


@pytest.mark.parametrize(
    ("policy", "request_", "words"),
    [
        ("round_robin", RoutingRequest(MODEL), "next in turn (round_robin)"),
        ("random", RoutingRequest(MODEL), "picked at random"),
        ("least_loaded", RoutingRequest(MODEL), "no node has fewer requests"),
        ("power_of_two", RoutingRequest(MODEL), "no more requests than the other of two random nodes"),
        ("latency", RoutingRequest(MODEL), "lowest (requests + 1) × average latency"),
        ("session", RoutingRequest(MODEL, session=b"7"), "home node of its session"),
        ("session", RoutingRequest(MODEL), "no node has fewer requests"),
        ("prefix_hash", RoutingRequest(MODEL, b"system", b"user"), "home node of its prefix"),
        (
            "overlap",
            RoutingRequest(MODEL),
            "longest cached prefix, 6,144 of 8,210 tokens, among nodes with room",
        ),
        (
            "approximate",
            RoutingRequest(MODEL),
            "longest cached prefix, 6,144 of 8,210 tokens, among nodes with room",
        ),
    ],
)
def test_each_other_policy_has_its_own_words(policy: str, request_: RoutingRequest, words: str) -> None:
    harness = RoutingHarness(3)
    harness.warm(harness.nodes[1], prompt(6144, 1))
    router = Router(harness.fleet, harness.cache_view, Routing(policy=policy, seed=5))  # type: ignore[arg-type]
    lookup = prompt(8210, 1) if policy in ("overlap", "approximate") else None
    decision = router.decide(request_, harness.now_s, lookup)
    assert explained(decision) == f"{decision.node.name}: {words}"
    assert decision.record().considered == 3
    if policy in ("session", "prefix_hash") and "home" in words:
        for _ in range(9):
            Ticket(decision.node, 0.0)
        assert ": next in order: the home node of " in explained(router.decide(request_, harness.now_s))


def test_decisions_of_a_snapshot_do_not_advance_the_policy() -> None:
    harness = RoutingHarness(3)
    router = Router(harness.fleet, harness.cache_view, Routing(policy="round_robin"))
    assert [router.snapshot().decide(RoutingRequest(MODEL), 1.0).node.name for _ in range(3)] == ["n0"] * 3
    assert [router.decide(RoutingRequest(MODEL), 1.0).node.name for _ in range(3)] == ["n0", "n1", "n2"]
    assert router.snapshot().decide(RoutingRequest(MODEL), 1.0).node.name == "n0"
    assert harness.cache_view.saved_shares == router._saved_by_store, "no copy stays in use"


# Records.


def test_a_record_keeps_no_reference_to_the_request() -> None:
    class ReferencedLookup(Lookup, weakref=True):
        pass

    harness = RoutingHarness(3)
    tokens = array("I", range(8000)).tobytes()
    lookup = ReferencedLookup(tokens, 8000, 0)
    decision = harness.decide(lookup)
    record, gone = decision.record(), weakref.ref(lookup)
    del decision, lookup
    gc.collect()
    assert gone() is None, "the record keeps the prompt's tokens alive"
    assert explain_decision(record).startswith(record.node.name)


def large_fleet(count: int) -> tuple[Fleet, CacheView]:
    fleet, cache_view, random = Fleet(Health()), CacheView(Index()), Random(1)
    for number in range(count):
        node = fleet.add(NodeConfig(url=f"http://n{number}:1", name=f"n{number}", models=(MODEL,)))
        fleet.check_passed(node, 0.0)
        node.speed.ms_per_token = random.uniform(0.03, 0.2)
        cache_view.add_node(node.name, [MODEL])
    return fleet, cache_view


@pytest.mark.parametrize("tied", [False, True])
def test_of_very_many_candidates_only_the_best_are_kept(tied: bool) -> None:
    fleet, cache_view = large_fleet(1000)
    if tied:
        for node in fleet:
            node.speed.ms_per_token = 0.05
    decision = Router(fleet, cache_view, Routing(policy="price", seed=1)).decide(
        RoutingRequest(MODEL), 1000.0, prompt(8000)
    )
    record = decision.record()
    ranked, before = record.ranked(), explain_decision(record)
    assert len(ranked) == record.considered == 1000 > KEEP_ALL_UP_TO
    assert [price.total for _, price in ranked] == sorted(price.total for _, price in ranked)
    record.keep_best(8)
    kept = record.ranked()
    assert len(kept) == 8 and record.considered == 1000
    assert record.node in [node for node, _ in kept]
    if not tied:
        assert kept == ranked[:8]
    after = explain_decision(record)
    assert after == before or tied
    assert not tied or "and 998 others, decided by load" in after
    assert len(record.priced[0] or ()) == 8


def test_a_thread_that_reads_while_the_record_is_cut_sees_one_or_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, cache_view = large_fleet(200)
    decision = Router(fleet, cache_view, Routing(policy="price", seed=1)).decide(
        RoutingRequest(MODEL), 1000.0, prompt(8000)
    )
    record = decision.record()
    before = record.ranked()

    def cut_meanwhile(*given: Any, **more: Any) -> list[Any]:
        monkeypatch.undo()
        record.keep_best(8)
        return nsmallest(*given, **more)

    monkeypatch.setattr(decision_record, "nsmallest", cut_meanwhile)
    assert record.ranked() == before
    assert record.ranked() == before[:8]


def test_of_a_small_fleet_all_prices_are_kept() -> None:
    harness = RoutingHarness(4)
    decision = harness.decide(prompt(8000))
    record = decision.record()
    record.keep_best(2)
    assert record.priced[0] is decision.prices and len(record.ranked()) == 4
    assert len(record.ranked(2)) == 2


def test_the_chosen_node_is_always_among_the_best() -> None:
    harness = RoutingHarness(5)
    decision = harness.decide(prompt(8000))
    for node in harness.nodes:
        record = decision.record()
        record.node = node
        for count in (1, 2, 5):
            ranked = [one for one, _ in record.ranked(count)]
            assert node in ranked and len(ranked) == count


def test_with_cache_weight_0_caches_are_not_mentioned() -> None:
    harness = RoutingHarness(2, pricing=Pricing(cache_weight=0.0))
    harness.warm(harness.nodes[1], prompt(6144, 1))
    sentence = explain(harness, prompt(8210, 1))
    assert "caches do not count (cache_weight = 0), so load decided: no prefill queued" in sentence
    assert "cached" not in sentence
    alone = RoutingHarness(1, pricing=Pricing(cache_weight=0.0))
    assert "the only candidate; caches do not count" in explain(alone, prompt(8210, 1))
