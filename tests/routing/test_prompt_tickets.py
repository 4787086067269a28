"""Predictions of a dispatch: what the router shows, and what it learns from the response, also for several prompts."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from routing_harness import MODEL, RoutingHarness, prompt

from warmroute.core.messages import Lookup, Outcome
from warmroute.core.node import Node
from warmroute.core.node_cache import NodeCache
from warmroute.core.prefill_work import work
from warmroute.core.tickets import PromptTicket
from warmroute.edge.arrival import lookup_of
from warmroute.prompt.prompt import Prompt, exact_prompt


def prompt_of(number: int, tokens: int) -> Prompt:
    """Return a prompt; those with the same number share a prefix."""
    return exact_prompt(array("I", range(number << 16, (number << 16) + tokens)).tobytes())


def several(*prompts: Prompt) -> Lookup:
    first, *others = prompts
    first.others = tuple(others)
    return lookup_of(first, "")


def cache_of(harness: RoutingHarness, node: Node) -> NodeCache:
    cache = harness.cache_view.cache(node.name)
    assert cache is not None
    return cache


def send(harness: RoutingHarness, lookup: Lookup, **fields: Any) -> PromptTicket:
    decision = harness.decide(lookup, **fields)
    ticket = harness.router.open_ticket(decision, decision.node, harness.now_s)
    assert isinstance(ticket, PromptTicket)
    return ticket


def end(harness: RoutingHarness, ticket: PromptTicket, usage: tuple[int, int, int]) -> None:
    harness.advance(0.1)
    if not ticket.first_token_s:
        ticket.first_token(harness.now_s)
    ticket.record_usage(*usage, harness.now_s)
    harness.close(ticket, Outcome.OK)


def test_the_predicted_tokens_are_shown_however_little_the_node_is_trusted() -> None:
    harness = RoutingHarness(1)
    [node] = harness.nodes
    lookup = prompt(8001, 1)
    harness.warm(node, lookup)
    for _ in range(10):
        cache_of(harness, node).accuracy.compare(8000, 0, harness.now_s)
    ticket = send(harness, lookup)
    assert ticket.prediction is not None
    assert ticket.cached == ticket.prediction.tokens == 8000
    assert ticket._new_tokens > 6000, "its price counts only what the router trusts"


def test_the_hits_and_the_work_of_several_prompts_add_up() -> None:
    harness = RoutingHarness(1)
    [node] = harness.nodes
    for number in (1, 2):
        harness.warm(node, lookup_of(prompt_of(number, 1601), ""))
    lookup = several(prompt_of(1, 2000), prompt_of(2, 2000), prompt_of(3, 2000), prompt_of(4, 2000))
    price = harness.decide(lookup).price
    assert price is not None
    assert (price.cached, price.new, price.output) == (3200.0, 4800.0, 4 * 256.0)
    one = harness.decide(lookup_of(prompt_of(5, 8000), "")).price
    alone = harness.decide(lookup_of(prompt_of(5, 2000), "")).price
    assert one is not None and alone is not None
    cold = harness.decide(several(*(prompt_of(number, 2000) for number in range(5, 9)))).price
    assert cold is not None and cold.prefill == pytest.approx(4 * alone.prefill) and cold.prefill < one.prefill
    ticket = send(harness, lookup)
    assert (ticket.tokens, ticket.cached) == (8000, 3200)
    assert node.pending_work == pytest.approx(4 * work(1200, 800))
    harness.close(ticket)
    harness.assert_all_counters_are_zero()


def test_every_prompt_of_a_list_is_cached_once_the_node_answers() -> None:
    harness = RoutingHarness(2)
    lists = [prompt_of(number, 1601) for number in range(3)]
    ticket = send(harness, several(*lists))
    end(harness, ticket, (4803, 0, 30))
    for each in lists:
        hits = harness.cache_view.hits(MODEL, lookup_of(Prompt(each.tokens, each.exact_tokens), ""), harness.now_s)
        assert [(name, hit.tokens) for name, hit in hits.items()] == [(ticket.node.name, 1600)]


def test_a_list_that_no_node_answered_leaves_nothing() -> None:
    harness = RoutingHarness(1)
    lists = [prompt_of(number, 1601) for number in range(3)]
    ticket = send(harness, several(*lists))
    harness.close(ticket, Outcome.FAILED)
    assert not harness.cache_view.hits(MODEL, several(*lists), harness.now_s)


@pytest.mark.parametrize("kind", ["several", "logprobs", "truncated"])
def test_requests_whose_report_cannot_be_compared_cost_no_confidence(kind: str) -> None:
    """vLLM reports the cached tokens of one prompt of a list, and none where it skips its cache."""
    harness = RoutingHarness(1)
    [node] = harness.nodes
    cache = cache_of(harness, node)

    def lookup() -> Lookup:
        first = prompt_of(1, 4801)
        if kind == "several":
            first.others = (prompt_of(2, 4801),)
        first.skips_cache, first.truncated = kind == "logprobs", kind == "truncated"
        return lookup_of(first, "")

    for _ in range(5):
        ticket = send(harness, lookup())
        end(harness, ticket, (9602 if kind == "several" else 4801, 0, 10))
    assert cache.accuracy.trust(harness.now_s) == 1.0 and cache.accuracy.compared == 0
    assert not cache.token_mismatch and not cache.token_mismatches
    assert ticket.cached == {"several": 9600, "logprobs": 0, "truncated": 4800}[kind]


def test_a_truncated_prompt_matches_only_others_like_it() -> None:
    harness = RoutingHarness(1)
    truncated = prompt_of(1, 1601)
    truncated.truncated = True
    harness.warm(harness.nodes[0], lookup_of(truncated, ""))
    assert harness.cache_view.hits(MODEL, lookup_of(truncated, ""), harness.now_s)
    assert not harness.cache_view.hits(MODEL, lookup_of(prompt_of(1, 1601), ""), harness.now_s)


def test_several_prompts_teach_the_output_of_one_and_no_wrong_prefill_speed() -> None:
    harness = RoutingHarness(1)
    [node] = harness.nodes
    before = node.speed.ms_per_token
    for round_ in range(20):
        ticket = send(harness, several(*(prompt_of(16 * round_ + number, 2000) for number in range(16))), streams=True)
        harness.advance(0.005)  # the first token of the first prompt: after a sixteenth of the prefill
        ticket.first_token(harness.now_s)
        harness.advance(2.0)
        end(harness, ticket, (32_000, 0, 16 * 50))
    assert harness.router.output_lengths.expected(MODEL, "") == 50.0
    assert node.speed.ms_per_token > 0.5 * before


def test_the_expected_time_to_first_token_includes_the_work_ahead() -> None:
    harness = RoutingHarness(1)
    [node] = harness.nodes
    speed = node.speed.ms_per_token
    first = harness.busy(node, 4000).expected_ttft_ms
    second = harness.busy(node, 4000).expected_ttft_ms
    assert first >= 4000 * speed and second >= 2 * first * 0.99
    node.queue_ms = 5000.0
    assert harness.busy(node, 4000).expected_ttft_ms >= 5000.0 + 4000 * speed


def test_the_log_counts_the_requests_that_left_a_node_together(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    harness = RoutingHarness(2)
    down = harness.nodes[0]
    requests = [harness.submit_to(down, 100) for _ in range(3)]
    for _ in range(10):
        harness.fleet.check_failed(down, harness.now_s, "connection refused")
        harness.advance(1.0)
    harness.settle()
    assert {request.node for request in requests} == {harness.nodes[1]}
    [line] = [record.getMessage() for record in caplog.records if "requests_moved" in record.getMessage()]
    assert "node=n0 requests=3" in line
