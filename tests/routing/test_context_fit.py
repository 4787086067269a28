"""Requests go to nodes whose context window holds them, and leave long windows to those that need them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from routing_harness import MODEL, RoutingHarness, prompt

from warmroute.config import Pricing, Routing
from warmroute.core.decision import Decision
from warmroute.core.messages import RoutingRequest
from warmroute.core.node import Node
from warmroute.core.rejections import ContextTooLong, NoNodeAvailable

POLICIES = [
    "round_robin", "random", "least_loaded", "power_of_two", "latency", "session", "prefix_hash", "overlap", "price",
]  # fmt: skip


def set_window(harness: RoutingHarness, node: Node, window: int | None) -> None:
    harness.fleet.update_models(node, [MODEL], [{"id": MODEL, "max_model_len": window}])


def mixed(*windows: int | None, policy: str = "price", **more: Any) -> RoutingHarness:
    harness = RoutingHarness(len(windows), **more)
    harness.router.reconfigure(Routing(policy=policy, seed=3), Pricing())  # type: ignore[arg-type]
    for node, window in zip(harness.nodes, windows, strict=True):
        set_window(harness, node, window)
    return harness


def decide(
    harness: RoutingHarness, tokens: int, *, exact: bool = True, max_output: int | None = None, **fields: Any
) -> Decision:
    request = RoutingRequest(MODEL, user=b"hi", max_output_tokens=max_output, **fields)
    request.input_tokens, request.input_exact = tokens, exact
    return harness.router.decide(request, harness.now_s, prompt(min(tokens, 5000)))


def names(decision: Decision) -> set[str]:
    return {decision.node.name, *(node.name for node in decision.fallbacks())}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_long_prompt_never_goes_to_a_short_window(policy: str) -> None:
    harness = mixed(2048, 32_000, 2048, None, policy=policy)
    for _ in range(20):
        assert names(decide(harness, 4500)) == {"n1", "n3"}, "fallbacks included"
        assert names(decide(harness, 40_000)) == {"n3"}
        assert len(names(decide(harness, 500))) == 4


def test_the_output_counts() -> None:
    harness = mixed(2048, 32_000)
    assert names(decide(harness, 1900, max_output=100)) == {"n0", "n1"}
    assert names(decide(harness, 1900, max_output=200)) == {"n1"}
    assert names(decide(harness, 1900)) == {"n1"}, "without a limit, the expected output: 256 tokens"
    assert names(decide(harness, 1000, max_output=40_000)) == {"n1"}, "an engine may shorten the output"


def test_a_prompt_that_fits_nowhere_is_rejected_with_the_numbers() -> None:
    harness = mixed(2048, 32_000)
    with pytest.raises(ContextTooLong) as rejected:
        decide(harness, 32_001)
    assert (rejected.value.prompt_tokens, rejected.value.max_model_len) == (32_001, 32_000)
    assert names(decide(harness, 32_000)) == {"n1"}


def test_an_estimated_length_rejects_nothing() -> None:
    harness = mixed(2048, 32_000)
    assert names(decide(harness, 100_000, exact=False)) == {"n1"}
    assert names(decide(harness, 4500, exact=False)) == {"n1"}
    harness.fleet.check_failed(harness.nodes[1], 1.0, "refused")
    assert names(decide(harness, 4500, exact=False)) == {"n0"}, "it may be shorter than estimated"


def test_no_length_is_exact_for_a_node_with_another_tokenizer() -> None:
    harness = mixed(2048, 32_000)
    cache = harness.cache_view.cache("n0")
    assert cache is not None
    cache.token_mismatch = True
    assert names(decide(harness, 32_001)) == {"n1"}


def test_a_prompt_that_fits_only_a_node_that_is_down_gets_503() -> None:
    harness = mixed(2048, 32_000)
    harness.fleet.check_failed(harness.nodes[1], 1.0, "refused")
    with pytest.raises(NoNodeAvailable):
        decide(harness, 4500)


def test_a_suspected_node_with_a_long_window_is_better_than_a_short_window() -> None:
    harness = mixed(2048, 32_000)
    harness.fleet.check_timed_out(harness.nodes[1], 1.0)
    for at in range(2, 10):
        harness.fleet.check_timed_out(harness.nodes[1], float(at))
    assert harness.nodes[1].health.usable_as_last_resort
    assert names(decide(harness, 4500)) == {"n1"} and names(decide(harness, 500)) == {"n0"}


def test_a_half_open_node_gets_only_trial_requests_that_fit() -> None:
    harness = mixed(2048, 32_000)
    small = harness.nodes[0]
    for at in range(1, 10):
        harness.fleet.check_timed_out(small, float(at))
    harness.fleet.check_passed(small, 500.0)
    assert harness.group.sort_if_changed().half_open == (small,)
    assert names(decide(harness, 4500)) == {"n1"}
    assert decide(harness, 500).node is small


def test_a_queued_request_is_decided_again_among_windows_that_hold_it() -> None:
    harness = mixed(2048, 32_000)
    small, long = harness.nodes
    running = harness.busy(long, 40_000)
    queued = harness.submit(prompt(4500), input_tokens=4500, input_exact=True)
    assert queued.queued and queued.request.input_tokens == 4500
    harness.freed(small)
    harness.tick()
    assert queued.queued, "the short window is idle, but cannot hold it"
    harness.free(running)
    assert queued.node is long


def test_other_islands_do_not_change_what_fits() -> None:
    harness = RoutingHarness(0)
    for name, island, window in (("a", "east", 2048), ("b", "east", 32_000), ("c", "west", 32_000)):
        set_window(harness, harness.add(name, island=island), window)
    fields: dict[str, Any] = {"session_header": b"s"}
    first = decide(harness, 500, **fields)
    harness.router.open_ticket(first, harness.fleet.node("a"), harness.now_s)
    assert decide(harness, 500, **fields).node.island == "east"
    for _ in range(5):
        decision = decide(harness, 4500, **fields)
        assert decision.node.name == "b" and names(decision) == {"b", "c"}


def test_a_retry_goes_to_a_node_whose_window_holds_the_request() -> None:
    harness = mixed(2048, 32_000, 2048, 32_000)
    request = harness.submit(1000, input_tokens=4500, input_exact=True)
    request.fail()
    request.fail()
    assert sorted(request.sent) == ["n1", "n3"] and request.why == "upstream_failed", "and no other node after them"


# Keeping long windows free.


@pytest.mark.parametrize("policy", ["price", "least_loaded"])
def test_of_equal_nodes_the_one_with_the_shorter_window_is_chosen(policy: str) -> None:
    harness = mixed(32_000, 2048, 32_000, policy=policy)
    assert {decide(harness, 500).node.name for _ in range(20)} == {"n1"}


def test_requests_that_need_the_long_window_make_it_more_expensive_for_others() -> None:
    harness = mixed(2048, 32_000)
    before = decide(harness, 1000, max_output=10)
    for _ in range(50):
        harness.advance(0.1)
        long = decide(harness, 20_000)
        harness.close(harness.router.open_ticket(long, long.node, harness.now_s))
    harness.advance(1.0)
    after = decide(harness, 1000, max_output=10)
    for node, is_long in zip(harness.nodes, (False, True), strict=True):
        rows = [dict(decision.record().ranked())[node] for decision in (before, after)]
        assert rows[1].congestion > rows[0].congestion if is_long else rows[1].congestion == rows[0].congestion


def test_short_requests_still_use_long_windows_under_load() -> None:
    harness = mixed(2048, 32_000, 2048)
    sent: Counter[str] = Counter()
    for _ in range(12):
        request = harness.submit(prompt(1500), input_tokens=1500, input_exact=True, max_output_tokens=20)
        if not request.queued:
            sent[request.node.name] += 1
    assert sent["n1"] >= 2


def test_a_group_with_one_window_decides_as_before() -> None:
    harness = mixed(2048, 2048)
    assert harness.group.windows is None
    assert len(names(decide(harness, 10**6))) == 2, "the engine checks the length itself"
