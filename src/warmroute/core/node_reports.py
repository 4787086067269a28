"""What the router does with a node's health checks and load reports. No I/O.

The asyncio watcher applies real responses here, and replay applies simulated ones in virtual time.
"""

from __future__ import annotations

from typing import Final, Protocol

from warmroute.core.fleet import Fleet
from warmroute.core.node import EngineRates, LoadReport, Node
from warmroute.core.node_cache import NodeCache
from warmroute.event_log import EventLog

log = EventLog("warmroute.engines")

MIN_COMPARED_TOKENS: Final = 50_000
MIN_COMPARED_PROMPTS: Final = 20
"""The router compares the engine's hit rate with the predicted one if the last half minute has as many. It counts a
prompt when it sends it, the engine when it begins to prefill it: with few long prompts, they count different ones."""
DISAGREEMENT: Final = 0.4
"""Difference of the two rates that is logged."""
AGREEMENT: Final = 0.2
"""Difference below which a later disagreement is logged again."""
_TOO_LOW: Final = (
    "The engine finds far more in its cache than the router predicts. Check that the router has the model's tokenizer, "
    "and that it receives the node's KV events."
)
_TOO_HIGH: Final = (
    "The engine finds far less in its cache than the router predicts. Check that its prefix caching is on, and that no "
    "KV events are lost."
)


class KvEvents(Protocol):
    """A node's KV events, as load reports need them (see kv_rank.NodeKvEvents)."""

    @property
    def cache(self) -> NodeCache: ...
    @property
    def block_size(self) -> int: ...
    @property
    def is_connected(self) -> bool: ...
    def restarted(self, started_s: float, polled_s: float) -> object: ...


def apply_health_pass(fleet: Fleet, node: Node, round_trip_ms: float, now_s: float) -> None:
    fleet.islands.record_round_trip(node, round_trip_ms, now_s)
    fleet.check_passed(node, now_s)


def apply_load_report(node: Node, report: LoadReport, kv_events: KvEvents | None, now_s: float) -> None:
    """Take over a node's load. Another incarnation means that the engine restarted, with an empty cache and without
    adapters."""
    polled_s = node.polled_s
    node.update_load(report.running, report.waiting, report.kv_usage, now_s)
    incarnation = node.reported.start_time(report.incarnation, now_s)
    before, node.incarnation = node.incarnation, incarnation
    restarted = before and incarnation and incarnation != before
    if restarted:
        node.loaded_adapters.clear()
        node.rates.forget()
        node.concurrency.forget()
        node.update_is_limited()
    node.update_rates(report.counters, now_s)
    node.loaded_adapters.update_running(report.adapters, report.adapter_slots)
    if kv_events is None:
        return
    cache = kv_events.cache
    if restarted:
        log.info("node_restarted", "Its KV cache is empty.", node=node.name)
        kv_events.restarted(incarnation, polled_s)
    node.rates.update_predictions(cache.routed_prompts, cache.routed_tokens, cache.predicted_tokens)
    _check_predictions(node, cache)
    cache.last_contact_s = now_s
    cache.event_lag_s *= 0.5  # no late event has arrived since
    block_size = kv_events.block_size
    if not block_size and (kv_events.is_connected or not cache.has_events):
        block_size = report.block_size  # unless block reports to the admin API give another size
    cache.set_size(block_size, report.capacity_tokens)


def _check_predictions(node: Node, cache: NodeCache) -> None:
    """Log, once, that the engine's own hit rate is far from what the router predicts."""
    rates = node.rates
    share, predicted = rates.hit_share, rates.predicted_share
    if share is None or predicted is None or not _is_comparable(rates):
        return
    difference = abs(share - predicted)
    if difference < AGREEMENT:
        cache.disagrees = False
    elif difference > DISAGREEMENT and not cache.disagrees:
        cache.disagrees = True
        log.warning(
            "cache_prediction_disagrees",
            _TOO_LOW if predicted < share else _TOO_HIGH,
            node=node.name,
            predicted_hit_ratio=round(predicted, 2),
            engine_hit_ratio=round(share, 2),
        )


def _is_comparable(rates: EngineRates) -> bool:
    """Return whether prompts and tokens are enough, and nearly all from this router. Text is counted in other tokens
    than the engine's, and SGLang's gauge comes without a number of tokens."""
    queried, routed = rates.queried_tokens, rates.routed_tokens
    if rates.routed_prompts < MIN_COMPARED_PROMPTS:
        return False
    return routed >= MIN_COMPARED_TOKENS and (not queried or 0.5 * queried <= routed <= 2.0 * queried)
