"""What health checks and load reports do to a node and its cache. Production and replay share this code."""

from __future__ import annotations

from kv_event_factory import hit, one_node, payload, prompt, stored

from warmroute.config import Health, NodeConfig
from warmroute.engines.kv_events import decode_batch, sent_time_s
from warmroute.engines.kv_rank import NodeKvEvents, RankEvents
from warmroute.engines.load_report import LoadReport
from warmroute.engines.node_updates import apply_health_pass, apply_load_report
from warmroute.fleet.fleet import Fleet
from warmroute.fleet.health import HealthState
from warmroute.fleet.node import Node


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
