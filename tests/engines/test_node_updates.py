"""What health checks and load reports do to a node and its cache. Production and replay share this code."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from kv_event_factory import hit, one_node, payload, prompt, stored

from warmroute.config import Health, NodeConfig
from warmroute.core.fleet import Fleet
from warmroute.core.health import HealthState
from warmroute.core.node import EngineCounters, LoadReport, Node
from warmroute.core.node_cache import NodeCache
from warmroute.core.node_reports import apply_health_pass, apply_load_report
from warmroute.engines.kv_events import NodeKvEvents, RankEvents, decode_batch, sent_time_s


def a_node() -> Node:
    return Node(NodeConfig(url="http://node:8000"), Health())


def load_report(incarnation: float = 100.0, **more: object) -> LoadReport:
    return LoadReport(3, 2, 0.5, incarnation, **more)  # type: ignore[arg-type]


def test_a_passed_health_check_brings_a_node_up_and_measures_its_island() -> None:
    fleet = Fleet(Health())
    node = fleet.add(NodeConfig(url="http://node:8000", island="far"))
    apply_health_pass(fleet, node, 40.0, 1.0)
    assert node.health.state is HealthState.UP
    [island] = fleet.islands
    assert island.name == "far" and island.measured_ms == 40.0


def test_a_load_report_sets_load_adapters_and_cache_size() -> None:
    node, (_, cache) = a_node(), one_node()
    report = load_report(block_size=32, capacity_tokens=3200, adapters=("ad1",), adapter_slots=2)
    apply_load_report(node, report, NodeKvEvents(cache), 5.0)
    assert (node.running, node.waiting, node.kv_usage, node.incarnation) == (3, 2, 0.5, 100.0)
    assert "ad1" in node.loaded_adapters and cache.last_contact_s == 5.0
    assert (cache.block_size, cache.capacity_blocks) == (32, 100)


def test_the_block_size_of_events_overrides_that_of_the_report() -> None:
    node, (cache_view, cache) = a_node(), one_node()
    events = NodeKvEvents(cache)
    rank = events.ranks[0] = RankEvents(cache, 0, lambda: lambda payload: decode_batch(payload).events, sent_time_s)
    rank.receive(0, payload(stored([1], prompt(1, 1))))
    rank.work(float("inf"))
    apply_load_report(node, load_report(block_size=64), events, 5.0)
    assert cache.block_size == 16 and hit(cache_view, prompt(1, 1)) == 16


def test_another_incarnation_empties_cache_and_adapters_once() -> None:
    node, (cache_view, cache) = a_node(), one_node()
    events = NodeKvEvents(cache)
    rank = events.ranks[0] = RankEvents(cache, 0, lambda: lambda payload: decode_batch(payload).events, sent_time_s)
    apply_load_report(node, load_report(adapters=("ad1",)), events, 1.0)
    rank.receive(0, payload(stored([1], prompt(1, 1)), sent_s=150.0))
    rank.work(float("inf"))
    apply_load_report(node, load_report(), events, 2.0)
    assert hit(cache_view, prompt(1, 1)) == 16 and "ad1" in node.loaded_adapters
    apply_load_report(node, load_report(incarnation=200.0), events, 3.0)
    assert hit(cache_view, prompt(1, 1)) == 0 and not len(node.loaded_adapters) and not cache.complete


def test_load_is_dropped_when_its_report_is_stale() -> None:
    node = a_node()
    apply_load_report(node, load_report(), None, 1.0)
    node.drop_stale_load(5.0, 6.0)
    assert node.running == 3
    node.drop_stale_load(5.0, 6.1)
    assert node.running == node.waiting == 0


# The engine's own counters.


def poll(node: Node, cache: NodeCache, count: int, now_s: float, waiting: int = 0, **per_poll: Any) -> float:
    """Apply `count` reports, one a second, whose counters grow by `per_poll`. Return the time after them."""
    events = NodeKvEvents(cache)
    for number in range(count):
        counters = EngineCounters(**{name: 1000.0 + value * number for name, value in per_poll.items()})
        apply_load_report(node, LoadReport(3, waiting, 0.5, 100.0, counters=counters), events, now_s)
        now_s += 1.0
    return now_s


def test_preemptions_raise_the_pressure_on_the_nodes_memory_while_they_last() -> None:
    node, (_, cache) = a_node(), one_node()
    now_s = poll(node, cache, 10, 10.0, preemptions=2.0)
    assert node.kv_pressure > 0.7 and node.kv_usage == 0.5, "the usage stays what the node reports"
    node.drop_stale_load(5.0, now_s + 10.0)
    assert node.kv_pressure == 0.0


def test_queue_times_are_expected_of_a_node_with_a_queue() -> None:
    node, (_, cache) = a_node(), one_node()
    now_s = poll(node, cache, 10, 10.0, waiting=5, queue_times=1.0, queue_time_s=0.8)
    assert node.queue_ms == pytest.approx(800.0)
    apply_load_report(node, load_report(), NodeKvEvents(cache), now_s)  # without counters, and two requests wait
    assert 200.0 < node.queue_ms < 500.0
    apply_load_report(node, LoadReport(3, 0, 0.5, 100.0), NodeKvEvents(cache), now_s + 1.0)
    assert node.queue_ms == 0.0


def test_a_restarted_engine_starts_without_rates() -> None:
    node, (_, cache) = a_node(), one_node()
    now_s = poll(node, cache, 10, 10.0, waiting=5, queue_times=1.0, queue_time_s=0.8, preemptions=3.0)
    apply_load_report(node, load_report(incarnation=500.0), NodeKvEvents(cache), now_s)
    assert (node.queue_ms, node.kv_pressure) == (0.0, 0.0)


@pytest.mark.parametrize(("predicted", "hits", "logged"), [(0, 900, "more"), (900, 0, "less"), (600, 800, "")])
def test_a_gross_disagreement_about_hits_is_logged_once(
    predicted: int, hits: int, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    node, (_, cache) = a_node(), one_node()
    events, now_s = NodeKvEvents(cache), 10.0
    with caplog.at_level(logging.WARNING):
        for number in range(120):
            counters = EngineCounters(queried_tokens=10_000.0 * number, hit_tokens=10.0 * hits * number)
            cache.routed_prompts, cache.routed_tokens = number, 10_000 * number
            cache.predicted_tokens = 10 * predicted * number
            apply_load_report(node, LoadReport(0, 0, 0.1, 100.0, counters=counters), events, now_s + number)
    found = [record.message for record in caplog.records if "cache_prediction_disagrees" in record.message]
    assert len(found) == bool(logged) and all(f"far {logged} in its cache" in message for message in found)


def test_hits_of_other_clients_are_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    node, (_, cache) = a_node(), one_node()
    with caplog.at_level(logging.WARNING):
        for number in range(60):
            cache.routed_prompts, cache.routed_tokens = number, 10_000 * number
            counters = EngineCounters(queried_tokens=50_000.0 * number, hit_tokens=50_000.0 * number)
            apply_load_report(node, LoadReport(0, 0, 0.1, 100.0, counters=counters), NodeKvEvents(cache), 10.0 + number)
    assert not caplog.records


def test_few_long_prompts_are_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    """The router counts a prompt when it sends it, the engine when it begins to prefill it, here four seconds later.
    Every fourth prompt is not cached, as both know."""
    node, (_, cache) = a_node(), one_node()
    with caplog.at_level(logging.WARNING):
        for number in range(400):
            sent, begun = number // 16, max(0, number - 4) // 16
            cache.routed_prompts, cache.routed_tokens = sent, 80_000 * sent
            cache.predicted_tokens = 80_000 * (sent - sent // 4)
            counters = EngineCounters(queried_tokens=80_000.0 * begun, hit_tokens=80_000.0 * (begun - begun // 4))
            apply_load_report(node, LoadReport(0, 0, 0.1, 100.0, counters=counters), NodeKvEvents(cache), 10.0 + number)
    assert not caplog.records
