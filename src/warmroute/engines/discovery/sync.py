"""Runs the sources, each in its own task, and keeps the fleet equal to what they list. Describes their state for the
admin API and the metrics.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any, Final

import msgspec

from warmroute.config import ConfigError, DiscoveryConfig, missing_extra
from warmroute.discovery.discovered_nodes import DiscoveredNodes, NodeRegistry
from warmroute.discovery.target import MAX_TARGETS, Source, SourceError, Targets
from warmroute.event_log import EventLog, where_it_failed
from warmroute.fleet.fleet import Fleet

log = EventLog("warmroute.discovery")

APPLY_S: Final = 0.05
"""Shortest time between two changes of the fleet: what happens meanwhile is applied together."""
CHECK_S: Final = 0.5
"""How often nodes that leave are looked at."""
COMPARE_S: Final = 5.0
"""How often the fleet is compared with the sources although nothing changed: others add and remove nodes, too."""
RETRY_S: Final = 1.0
STEADY_S: Final = 10.0
"""After this time without an error, the wait before the next retry is short again."""
SHOWN_TARGETS: Final = 1_000

_KINDS: Final = {
    "file": ("targets_file", "TargetsFile", ""),
    "dns": ("dns_records", "DnsRecords", "dns"),
    "kubernetes": ("kubernetes", "KubernetesObjects", "kubernetes"),
}
"""Module, class and extra of each kind."""


def create_source(config: DiscoveryConfig) -> Source:
    """Raises ConfigError, also if the kind's extra is not installed."""
    module, name, extra = _KINDS[config.kind]
    try:
        create: Callable[[DiscoveryConfig], Source] = getattr(import_module(f"warmroute.discovery.{module}"), name)
    except ImportError as error:
        if (error.name or "").startswith("warmroute"):
            raise
        raise missing_extra(f"discovery: kind {config.kind!r}", error, extra) from None
    return create(config)


class SourceStatus:
    def __init__(self, config: DiscoveryConfig) -> None:
        self.config = config
        self.name = config.label
        self.targets = 0
        self.updates = self.failures = 0
        self.error = ""
        """Why it cannot be read now."""
        self.empty = False
        self.ignored = 0
        """Targets beyond the maximum."""
        self.invalid: list[str] = []
        self.priorities: Mapping[str, str] = {}
        """Of InferenceObjectives."""
        self.last_update_s: float | None = None
        self.failed_since_s: float | None = None

    @property
    def is_pending(self) -> bool:
        """Whether nothing is known of it yet."""
        return self.last_update_s is None and not self.failures


class DiscoveryService:
    def __init__(self, fleet: Fleet, registry: NodeRegistry, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.nodes = DiscoveredNodes(fleet, registry)
        self.sources: dict[str, SourceStatus] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._priorities: dict[str, str] = {}
        self._changed = asyncio.Event()
        self._applying: asyncio.Task[None] | None = None

    def reconfigure(self, configs: Iterable[DiscoveryConfig]) -> None:
        """Start and stop sources. Those that did not change continue."""
        wanted = {config.label: config for config in configs}
        loop = asyncio.get_running_loop()
        for name, status in list(self.sources.items()):
            if wanted.get(name) != status.config:
                self._tasks.pop(name).cancel()
                del self.sources[name]
                if name not in wanted:
                    self.nodes.forget(name)
        for name, config in wanted.items():
            if name not in self.sources:
                status = self.sources[name] = SourceStatus(config)
                self._tasks[name] = loop.create_task(self._run(status))
        if self._applying is None and self.sources:
            self._applying = loop.create_task(self._apply())
        self._changed.set()

    async def close(self) -> None:
        tasks = [*self._tasks.values(), *([self._applying] if self._applying is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def pending(self) -> list[str]:
        """Sources that have neither answered nor failed yet."""
        return [name for name, status in self.sources.items() if status.is_pending]

    def priorities(self) -> dict[str, str]:
        """Return the priority (`high`, `normal`, `low`) of each InferenceObjective of the sources' pools."""
        return self._priorities

    # The tasks.

    async def _run(self, status: SourceStatus) -> None:
        """Read a source for ever: no answer may end this."""
        retry_s = RETRY_S
        while True:
            started_s, max_retry_s = self._now(), RETRY_S
            try:
                source = create_source(status.config)
                max_retry_s = source.max_retry_s
                await source.run(lambda targets: self._report(status, targets))
                reason = "it ended"
            except (SourceError, ConfigError) as error:
                reason = str(error)
            except Exception as error:
                reason = where_it_failed(error)
            self._failed(status, reason)
            retry_s = RETRY_S if self._now() - started_s > STEADY_S else retry_s
            await asyncio.sleep(min(retry_s, max_retry_s))
            retry_s *= 2

    async def _apply(self) -> None:
        applied_s = -1e9
        while True:
            try:
                async with asyncio.timeout(CHECK_S):
                    await self._changed.wait()
                await asyncio.sleep(max(0.0, applied_s + APPLY_S - self._now()))
            except TimeoutError:
                if not self.nodes.leaving and self._now() - applied_s < COMPARE_S:
                    continue
            self._changed.clear()
            applied_s = self._now()
            try:
                await self.nodes.apply()
            except Exception:
                log.exception("discovery_apply_failed", "The router tries again.")

    def _report(self, status: SourceStatus, targets: Targets) -> None:
        if self.sources.get(status.name) is not status:
            return
        empty, ignored = self.nodes.update(status.name, targets.found)
        if status.failed_since_s is not None:
            log.info("discovery_recovered", source=status.name, targets=len(targets.found))
        if empty and not status.empty:
            log.warning(
                "discovery_empty", "The source lists no nodes any more. The router keeps those that it knows.",
                source=status.name, nodes=len(self.nodes.listed(status.name)),
            )  # fmt: skip
        if ignored and not status.ignored:
            log.warning(
                "discovery_limit", "The source lists too many nodes. The router ignores the rest.", source=status.name,
                targets=len(targets.found), max_targets=MAX_TARGETS,
            )  # fmt: skip
        if targets.invalid and not status.invalid:
            log.warning(
                "discovery_invalid", "The router ignores what is invalid.", source=status.name,
                count=len(targets.invalid), reason=targets.invalid[0],
            )  # fmt: skip
        status.targets, status.empty, status.ignored = len(targets.found), empty, ignored
        status.invalid = targets.invalid
        if status.priorities != targets.priorities:
            status.priorities = targets.priorities
            self._priorities = {name: one for other in self.sources.values() for name, one in other.priorities.items()}
        status.updates += 1
        status.last_update_s, status.error, status.failed_since_s = self._now(), "", None
        self._changed.set()

    def _failed(self, status: SourceStatus, reason: str) -> None:
        status.failures += 1
        if status.failed_since_s is None:
            status.failed_since_s = self._now()
            log.warning(
                "discovery_failed", "The router keeps the nodes that it knows, and tries again.", source=status.name,
                reason=reason,
            )  # fmt: skip
        status.error = reason

    # Reports.

    def describe(self) -> list[dict[str, Any]]:
        """Return the state for the admin API."""
        now_s = self._now()
        return [
            {
                "name": name,
                "kind": status.config.kind,
                "state": "failing" if status.error else "pending" if status.is_pending else "ok",
                "error": status.error or None,
                "last_update_age_s": None if status.last_update_s is None else round(now_s - status.last_update_s, 1),
                "targets": status.targets,
                "kept_although_empty": status.empty,
                "ignored_targets": status.ignored,
                "invalid": status.invalid[:8],
                "updates": status.updates,
                "failures": status.failures,
                "objectives": dict(status.priorities),
                "nodes": [
                    {"url": target.node.url, "ready": target.ready, "node": self.nodes.node_at(target.address) or None}
                    for target in self.nodes.listed(name)[:SHOWN_TARGETS]
                ],
            }
            for name, status in self.sources.items()
        ]

    def stats(self) -> list[SourceStats]:
        """Return the numbers for the metrics."""
        changes = self.nodes.changes.copy()
        return [
            SourceStats(
                name, not status.error and not status.is_pending, status.targets, status.failures,
                {change: changes[name, change] for change in ("added", "drained", "removed")},
            )
            for name, status in list(self.sources.items())
        ]  # fmt: skip


class SourceStats(msgspec.Struct, frozen=True):
    """For the metrics."""

    name: str
    up: bool
    targets: int
    failures: int
    changes: dict[str, int]
