"""How fast a shared KV store is: learned from first tokens, and forgotten with time."""

from __future__ import annotations

import pytest
from routing_harness import MODEL, RoutingHarness, prompt

from warmroute.core.messages import Outcome
from warmroute.core.speeds import HALF_LIFE_S, LATENCY_MS, MAX_LOAD_TOKENS, PRIOR_MS_PER_TOKEN, TransferSpeed
from warmroute.core.tickets import StoreTicket

DOCUMENT = prompt(20_000, 7)


def serve(harness: RoutingHarness, name: str, ttft_s: float) -> bool:
    """Serve the document on a node. Return whether the node should load it from the store."""
    decision = harness.decide(DOCUMENT, streams=True)
    ticket = harness.router.open_ticket(decision, harness.fleet.node(name), harness.now_s)
    harness.advance(ttft_s)
    ticket.first_token(harness.now_s)
    harness.fleet.close_ticket(ticket, Outcome.OK, harness.now_s)
    return isinstance(ticket, StoreTicket)


def test_a_store_that_was_slow_is_used_again_after_a_while() -> None:
    harness = RoutingHarness(5, cache_tokens=100_000)
    view = harness.cache_view
    view.set_stores({"shared": 1_000_000})
    for node in harness.nodes:
        view.attach(node.name, "shared")
    assert not serve(harness, "n0", 1.0)
    for name in ("n1", "n2", "n3"):
        serve(harness, name, 5.0)
    assert "n4" not in view.hits(MODEL, DOCUMENT, harness.now_s), "prefilling takes 1 s, loading took 5"
    harness.advance(6 * HALF_LIFE_S)
    assert view.hits(MODEL, DOCUMENT, harness.now_s)["n4"].expected > 0.5 * 20_000
    assert serve(harness, "n4", 0.5)


def test_one_late_first_token_says_little_about_the_store() -> None:
    speed = TransferSpeed(max_tokens=MAX_LOAD_TOKENS)
    speed.learn(20_000, 5_000.0, 100.0)
    assert speed.ms_per_token(100.0) < 3.0 * PRIOR_MS_PER_TOKEN
    speed.learn(10, 1e9, 100.0)
    assert speed.measured == 1, "too short to say anything"


def test_load_speeds_are_learned_and_return_to_the_prior() -> None:
    speed = TransferSpeed(max_tokens=MAX_LOAD_TOKENS)
    for second in range(300):
        speed.learn(10_000, LATENCY_MS + 1000.0, 100.0 + second)
    assert speed.ms_per_token(400.0) == pytest.approx(0.1, rel=0.1) and speed.measured == 300
    assert speed.ms_per_token(0.0) == speed.ms_per_token(399.0)
    later = [speed.ms_per_token(400.0 + HALF_LIFE_S * age) for age in range(16)]
    assert later == sorted(later, reverse=True) and later[-1] == pytest.approx(PRIOR_MS_PER_TOKEN, rel=0.01)
    for second in range(1000):
        speed.learn(10_000, -5.0, 400.0 + second)
    assert 0.0 < speed.ms_per_token(1400.0) < 0.01


def test_an_engine_that_loads_although_prefilling_is_faster_is_recognized_by_its_report() -> None:
    harness = RoutingHarness(1, cache_tokens=100_000)
    view, node = harness.cache_view, harness.nodes[0]
    view.set_stores({"shared": 10_000_000})
    view.attach(node.name, "shared")
    group = harness.fleet.group(MODEL)
    assert group is not None
    speed = group.transfer_speeds.from_store("shared", node.island)
    for _ in range(300):
        speed.learn(20_000, 6_000.0, harness.now_s)
    assert speed.ms_per_token(harness.now_s) > node.speed.ms_per_token

    def load(seed: int, ttft_s: float, loads: bool) -> bool:
        """Serve a prompt that the store holds. Return whether the router expected a load."""
        document = prompt(20_000, seed)
        cache = view.cache(node.name)
        assert cache is not None and cache.store is not None
        chain = document.blocks(MODEL, "", cache.block_size)
        cache.store.prefilled(chain, cache.block_size, harness.now_s)
        ticket = harness.router.open_ticket(harness.decide(document, streams=True), node, harness.now_s)
        harness.advance(ttft_s)
        ticket.first_token(harness.now_s)
        ticket.record_usage(20_000, 19_984 if loads else 0, 10, harness.now_s)  # type: ignore[attr-defined]
        harness.fleet.close_ticket(ticket, Outcome.OK, harness.now_s)
        return isinstance(ticket, StoreTicket)

    assert not load(1, 6.0, loads=True), "loading seemed slower than prefilling"
    learned = node.speed.ms_per_token
    assert load(2, 6.0, loads=True) and load(3, 6.0, loads=True), "its report showed that the engine loads anyway"
    assert node.speed.ms_per_token == learned, "the loads are not its prefill speed"
    assert speed.ms_per_token(harness.now_s) == pytest.approx(0.3, rel=0.3)
