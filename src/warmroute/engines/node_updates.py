"""What the router does with a node's health checks and load reports. No I/O.

The asyncio watcher applies real responses here, and replay applies simulated ones in virtual time.
"""

from __future__ import annotations

from typing import Protocol

from warmroute.engines.load_report import LoadReport
from warmroute.event_log import EventLog
from warmroute.fleet.fleet import Fleet
from warmroute.fleet.node import Node
from warmroute.index.node_cache import NodeCache

log = EventLog("warmroute.engines")


class KvEvents(Protocol):
    """A node's KV events, as load reports need them (see kv_rank.NodeKvEvents)."""

    @property
    def cache(self) -> NodeCache: ...
    @property
    def block_size(self) -> int: ...
    @property
    def is_connected(self) -> bool: ...
    def restarted(self, started_s: float) -> object: ...


def apply_health_pass(fleet: Fleet, node: Node, round_trip_ms: float, now_s: float) -> None:
    fleet.islands.record_round_trip(node, round_trip_ms, now_s)
    fleet.check_passed(node, now_s)


def apply_load_report(node: Node, report: LoadReport, kv_events: KvEvents | None, now_s: float) -> None:
    """Take over a node's load. Another incarnation means that the engine restarted, with an empty cache and without
    adapters."""
    node.update_load(report.running, report.waiting, report.kv_usage, now_s)
    before, node.incarnation = node.incarnation, report.incarnation
    restarted = before and report.incarnation and report.incarnation != before
    if restarted:
        node.loaded_adapters.clear()
    node.loaded_adapters.update_running(report.adapters, report.adapter_slots)
    if kv_events is None:
        return
    cache = kv_events.cache
    if restarted:
        log.info("node_restarted", "Its KV cache is empty.", node=node.name)
        kv_events.restarted(report.incarnation)
    cache.last_contact_s = now_s
    cache.event_lag_s *= 0.5  # no late event has arrived since
    block_size = kv_events.block_size
    if not block_size and (kv_events.is_connected or not cache.has_events):
        block_size = report.block_size  # unless block reports to the admin API give another size
    cache.set_size(block_size, report.capacity_tokens)
