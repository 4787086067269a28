"""Alerts about the fleet: nodes that are down, slow, short of KV memory or without usable KV events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Final

from warmroute.fleet.fleet import Fleet
from warmroute.fleet.health import HealthState
from warmroute.fleet.node import Node
from warmroute.index.cache_view import CacheView
from warmroute.telemetry.alerts import Alert, Severity

SLOW_FACTOR: Final = 2.0
"""A node is slow if it prefills a token this many times as slowly as the median of its model's nodes."""
MIN_ANSWERS: Final = 50
"""First tokens from which a node's learned speed is compared, if too few nodes had long prompts."""
MIN_LONG_PREFILLS: Final = 5
"""Long prompts from which a node's speed with these is compared. It is the better measure: the time of a short prefill
is mostly that of one step."""
MIN_PEERS: Final = 3
FULL_KV: Final = 0.95
LASTING_S: Final = 30.0
FIRST_CHECK_S: Final = 10.0
"""How long nodes may stay unchecked after the start before it is an alert that none can serve."""
SHOWN_NAMES: Final = 4
MAX_DOWN: Final = 16
"""Nodes that are down and have an alert each. Further ones share one, so that the list stays readable."""


class FleetAlerts:
    def __init__(self, fleet: Fleet, cache_view: CacheView) -> None:
        self._fleet = fleet
        self._cache_view = cache_view

    def __call__(self, _now_s: float) -> Iterator[Alert]:
        nodes = list(self._fleet)
        yield from self._health(nodes)
        yield from _slow(nodes)
        full = [node.name for node in nodes if node.kv_usage >= FULL_KV]
        if full:
            yield Alert(
                id="kv_memory_full", severity="warning", after_s=LASTING_S, nodes=tuple(full),
                title=f"{_names(full)}: KV memory is full",
                cause=f"Running requests use {FULL_KV:.0%} or more of the KV blocks. The engine preempts requests, and "
                "cached prefixes are evicted.",
                what_to_do="Add nodes, or lower the engine's maximum number of sequences. If only some nodes are full, "
                "check that they are not used by other clients.",
            )  # fmt: skip
        yield from self._caches()

    def _health(self, nodes: Sequence[Node]) -> Iterator[Alert]:
        down = [node for node in nodes if node.health.state in (HealthState.DOWN, HealthState.HALF_OPEN)]
        if nodes and not self._fleet.can_serve:
            unchecked = all(node.health.state is HealthState.UNKNOWN for node in nodes)
            yield Alert(
                id="no_node", severity="critical", title="No node can serve requests",
                after_s=FIRST_CHECK_S if unchecked else 0.0,
                cause="All nodes are down, draining or not yet checked. Clients receive 503.",
                what_to_do="Start the engines or end the drains. The router notices within a second.",
            )  # fmt: skip
        unhealthy = [node for node in down if node.health.state is HealthState.DOWN]
        severity: Severity = "critical" if 2 * len(unhealthy) >= len(nodes) else "warning"
        yield from (_down(node, severity) for node in down[:MAX_DOWN])
        if more := down[MAX_DOWN:]:
            names = tuple(node.name for node in more)
            yield Alert(
                id="node_down", severity=severity, nodes=names, title=f"{_names(names)}: down, too",
                cause=_sentence("; ".join(list(dict.fromkeys(node.health.failure for node in more))[:SHOWN_NAMES])),
                what_to_do=_RESTART,
            )  # fmt: skip

        ejected = [node for node in nodes if node.health.state is HealthState.EJECTED]
        if ejected:
            names = tuple(node.name for node in ejected)
            yield Alert(
                id="node_ejected", severity="warning", nodes=names,
                title=f"{_names(names)} {'is' if len(ejected) == 1 else 'are'} ejected",
                cause=_sentence("; ".join(dict.fromkeys(node.health.reason for node in ejected))),
                what_to_do="Look at the engine's log and its GPU. The router sends it requests again after a while.",
            )  # fmt: skip

    def _caches(self) -> Iterator[Alert]:
        caches = list(self._cache_view)
        missing = [cache.name for cache in caches if cache.events_missing]
        if missing:
            yield Alert(
                id="kv_events_missing", severity="warning", nodes=tuple(missing),
                title=f"{_names(missing)}: no KV events",
                cause="The engine prefilled prompts and sent no KV events. The router infers its cache from routed "
                "requests, and does not see evictions.",
                what_to_do="Start the engine with KV events enabled, and check that the router reaches their port.",
            )  # fmt: skip
        differ = [cache.name for cache in caches if cache.token_mismatch]
        if differ:
            yield Alert(
                id="token_mismatch", severity="warning", nodes=tuple(differ),
                title=f"{_names(differ)}: the engine's tokens differ from the router's",
                cause="The engine uses another tokenizer or chat template, so its KV events match no prompt.",
                what_to_do="Set tokenizer and chat_template in [[models]] to those of the engine.",
            )  # fmt: skip


_RESTART: Final = (
    "Look at the engine's log and restart it. The router sends requests again, slowly at first, once its health check "
    "passes."
)


def _down(node: Node, severity: Severity) -> Alert:
    health, name = node.health, node.name
    if health.state is HealthState.HALF_OPEN:
        return Alert(
            id=f"node_down {name}", severity="warning", nodes=(name,), title=f"{name} waits for a trial request",
            cause=_sentence(health.failure),
            what_to_do="Its health check passes. Look at the engine's log. If a trial request succeeds, the router "
            "sends the node more of them, slowly at first.",
        )  # fmt: skip
    return Alert(
        id=f"node_down {name}", severity=severity, nodes=(name,), title=f"{name} is down",
        cause=_sentence(health.reason), what_to_do=_RESTART,
    )  # fmt: skip


def _slow(nodes: Sequence[Node]) -> Iterator[Alert]:
    by_model: dict[str, list[Node]] = {}
    for node in nodes:
        if node.groups:
            by_model.setdefault(node.groups[0].model, []).append(node)
    slow: list[str] = []
    worst = 0.0
    for peers in by_model.values():
        measured = [node for node in peers if node.speed.long_prefills >= MIN_LONG_PREFILLS]
        speeds = {node.name: node.speed.long_ms_per_token for node in measured}
        if len(speeds) < MIN_PEERS:
            speeds = {node.name: node.speed.ms_per_token for node in peers if node.speed.answers >= MIN_ANSWERS}
        if len(speeds) < MIN_PEERS:
            continue
        usual = median(speeds.values())
        for name, ms_per_token in speeds.items():
            factor = ms_per_token / usual if usual > 0 else 0.0
            if factor >= SLOW_FACTOR:
                slow.append(name)
                worst = max(worst, factor)
    if slow:
        yield Alert(
            id="slow_node", severity="warning", after_s=LASTING_S, nodes=tuple(slow),
            title=f"{_names(slow)}: prefill is up to {worst:.1f} times as slow as on other nodes",
            cause="The GPU is throttled, shared with another process, or of another type.",
            what_to_do="Compare clocks and processes with nvidia-smi. Drain the node if it stays slow: the router "
            "already sends it less.",
        )  # fmt: skip


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:SHOWN_NAMES])
    return shown if len(names) <= SHOWN_NAMES else f"{shown} and {len(names) - SHOWN_NAMES} more nodes"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
