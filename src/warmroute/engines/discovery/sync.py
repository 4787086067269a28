"""Keeps the fleet equal to what the sources of discovery list."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any, Final, Protocol

import msgspec
from msgspec.structs import replace

from warmroute.config import ConfigError, DiscoveryConfig, NodeConfig, canonical_address, missing_extra, node_name
from warmroute.core.fleet import Fleet
from warmroute.core.node import Node
from warmroute.core.rejections import NameTaken, UnknownNode
from warmroute.engines.discovery.target import MAX_TARGETS, Address, Source, SourceError, Target, Targets, Turn
from warmroute.event_log import EventLog, where_it_failed

# Keeps the fleet equal to what the sources list. No I/O of its own.
#
#     a target is listed and ready        its node joins the fleet
#     not ready, or terminating           the node drains: no new requests, running ones finish
#     ready again                         the node gets requests again, unless an operator drained it
#     not listed any more                 the node drains, and leaves the fleet after its last request
#
# - Targets with the same address are one node. It is ready if every source says so.
# - A node with that address that is in the fleet already ([[nodes]], the admin API, the autoscaler) stays as it is.
# - A discovered node that an operator or the autoscaler removes stays away until its source has stopped listing it.
# - If a source lists nothing any more, its nodes stay, except those that drained before: a source that fails often
#   answers with nothing.

log = EventLog("warmroute.discovery")


class DiscoveryNodes(Protocol):
    """Adds nodes to the service, drains and removes them."""

    def add_node(self, config: NodeConfig) -> Node: ...
    def remove_node(self, name: str) -> Node: ...
    def drain_node(self, name: str, draining: bool) -> Node: ...


class _Discovered:
    """A node that discovery added."""

    __slots__ = ("drained", "node", "removed", "source", "target")

    def __init__(self, node: Node, target: NodeConfig, source: str) -> None:
        self.node = node
        self.target = target
        """The node's configuration as the source lists it."""
        self.source = source
        self.drained = False
        """Whether discovery drained the node. What an operator drained, discovery does not undrain."""
        self.removed = False
        """Whether somebody else removed the node from the fleet."""


class DiscoveredNodes:
    def __init__(self, fleet: Fleet, registry: DiscoveryNodes) -> None:
        self._fleet = fleet
        self._registry = registry
        self._listed: dict[str, dict[Address, Target]] = {}
        """The targets that each source lists, by address."""
        self._discovered: dict[Address, _Discovered] = {}
        self._addresses: dict[Node, Address] = {}
        self._refused: set[Address] = set()
        self.leaving = False
        """Whether nodes wait for their last requests."""
        self.changes: Counter[tuple[str, str]] = Counter()
        """Number of changes by source and kind."""

    def listed(self, source: str) -> list[Target]:
        return list(self._listed.get(source, {}).values())

    def node_at(self, address: Address) -> str:
        """Return the name of the node that discovery added at this address; empty if there is none."""
        found = self._discovered.get(address)
        return found.node.name if found is not None and not found.removed else ""

    def update(self, source: str, targets: list[Target]) -> tuple[bool, int]:
        """Take over what a source lists. Return whether it lists nothing although it did before, and how many targets
        were ignored because there are too many: those that the router knows stay."""
        before = self._listed.get(source, {})
        wanted: dict[Address, Target] = {}
        for target in targets:
            same = wanted.get(target.address)
            wanted[target.address] = target if same is None else same._replace(ready=same.ready and target.ready)
        # An API server that restarts, or a truncated file, lists nothing. To drain the whole fleet for it would be an
        # outage.
        if not wanted and any(target.ready for target in before.values()):
            self._listed[source] = {address: target for address, target in before.items() if target.ready}
            return True, 0
        ignored = max(0, len(wanted) - MAX_TARGETS)
        if ignored:
            # Known targets first: at the maximum, an engine that serves must not make room for one that just appeared.
            order = sorted(wanted.values(), key=lambda target: target.address not in before)
            wanted = {target.address: target for target in order[:MAX_TARGETS]}
        self._listed[source] = wanted
        return False, ignored

    def forget(self, source: str) -> None:
        """The configuration does not have this source any more: its nodes drain and leave."""
        self._listed.pop(source, None)

    async def apply(self) -> None:
        """Make the fleet equal to what the sources list."""
        wanted, sources = self._merged()
        others = self._addresses_of_others()
        turn = Turn()
        for address, target in wanted.items():
            self._apply(address, target, sources[address], address in others)
            await turn.share()
        for address in [one for one in self._discovered if one not in wanted]:
            self._leave(address)
            await turn.share()
        self.leaving = any(address not in wanted for address in self._discovered)
        self._refused &= wanted.keys()

    def _merged(self) -> tuple[dict[Address, Target], dict[Address, str]]:
        wanted: dict[Address, Target] = {}
        sources: dict[Address, str] = {}
        for source, targets in self._listed.items():
            for address, target in targets.items():
                first = wanted.get(address)
                if first is None:
                    wanted[address], sources[address] = target, source
                elif not target.ready:
                    wanted[address] = first._replace(ready=False)
        return wanted, sources

    def _addresses_of_others(self) -> set[Address]:
        """Return the addresses of nodes that discovery did not add."""
        known = self._addresses
        self._addresses = {node: known.get(node) or canonical_address(node.url) for node in self._fleet}
        ours = {one.node for one in self._discovered.values()}
        return {address for node, address in self._addresses.items() if node not in ours}

    def _apply(self, address: Address, target: Target, source: str, taken: bool) -> None:
        known = self._discovered.get(address)
        if known is not None and not self._is_in_fleet(known):
            if taken:
                del self._discovered[address]
            known.removed = True
            return
        if known is not None and (taken or not _is_same_engine(known.target, target.node)):
            self._remove(address, known)
            known = None
        if known is None:
            if not taken and target.ready:
                self._add(address, target, source)
            return
        if known.target != target.node:
            known.target = target.node
            self._fleet.update_config(known.node, replace(target.node, name=known.node.name))
        self._set_draining(known, not target.ready)

    def _add(self, address: Address, target: Target, source: str) -> None:
        # Two clusters may both have a Pod `vllm-0`. The second name has the source and the address in it.
        for name in (target.node.name, f"{source}-{node_name(target.node)}"):
            try:
                node = self._registry.add_node(replace(target.node, name=name))
            except NameTaken:
                continue
            except ConfigError as error:
                reason = str(error)
                break
            self._discovered[address] = _Discovered(node, target.node, source)
            self.changes[source, "added"] += 1
            return
        else:
            reason = "other nodes have its name"
        if address not in self._refused:
            self._refused.add(address)
            log.warning(
                "discovered_node_refused", "The node cannot join the fleet.", node=node_name(target.node),
                source=source, reason=reason,
            )  # fmt: skip

    def _leave(self, address: Address) -> None:
        """Drain a node that no source lists any more, and remove it once it has no request."""
        known = self._discovered[address]
        if not self._is_in_fleet(known):
            del self._discovered[address]
        elif known.node.inflight:
            self._set_draining(known, True)
        else:
            self._remove(address, known)

    def _remove(self, address: Address, known: _Discovered) -> None:
        del self._discovered[address]
        self._registry.remove_node(known.node.name)
        self.changes[known.source, "removed"] += 1

    def _set_draining(self, known: _Discovered, draining: bool) -> None:
        if draining and not known.node.draining:
            self._registry.drain_node(known.node.name, True)
            known.drained = True
            self.changes[known.source, "drained"] += 1
        elif not draining and known.drained:
            known.drained = False
            if known.node.draining:
                self._registry.drain_node(known.node.name, False)

    def _is_in_fleet(self, known: _Discovered) -> bool:
        try:
            return self._fleet.node(known.node.name) is known.node
        except UnknownNode:
            return False


def _is_same_engine(before: NodeConfig, now: NodeConfig) -> bool:
    """Return whether two targets with the same address are the same engine. Another Pod may get the address of one that
    is gone."""
    return before.url == now.url and before.name == now.name


# Runs the sources, each in its own task, and keeps the fleet equal to what they list. Describes their state for the
# admin API and the metrics.

APPLY_S: Final = 0.05
"""Shortest time between two changes of the fleet: what happens meanwhile is applied together."""
CHECK_S: Final = 0.5
"""How often nodes that leave are looked at."""
COMPARE_S: Final = 5.0
"""How often the fleet is compared with the sources although nothing changed: others add and remove nodes, too."""
RETRY_S: Final = 1.0
"""First pause after a failure. It doubles, up to the source's `max_retry_s`."""
STEADY_S: Final = 10.0
"""After this time without an error, the wait before the next retry is short again."""
SHOWN_TARGETS: Final = 1_000
"""`GET /admin/discovery` lists no more: it is for people."""

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
        create: Callable[[DiscoveryConfig], Source] = getattr(
            import_module(f"warmroute.engines.discovery.{module}"), name
        )
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
        """Why the source cannot be read now; empty if it can."""
        self.empty = False
        self.ignored = 0
        """Number of targets that are ignored because MAX_TARGETS is reached."""
        self.invalid: list[str] = []
        self.priorities: Mapping[str, str] = {}
        """Priorities of the InferenceObjectives that the source lists."""
        self.last_update_s: float | None = None
        self.failed_since_s: float | None = None

    @property
    def is_pending(self) -> bool:
        """Whether the source has neither answered nor failed yet."""
        return self.last_update_s is None and not self.failures


class DiscoveryService:
    def __init__(self, fleet: Fleet, registry: DiscoveryNodes, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.nodes = DiscoveredNodes(fleet, registry)
        self.sources: dict[str, SourceStatus] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._priorities: dict[str, str] = {}
        self._changed = asyncio.Event()
        self._applying: asyncio.Task[None] | None = None

    def reconfigure(self, configs: Iterable[DiscoveryConfig]) -> None:
        """Start and stop sources. Sources whose configuration did not change continue."""
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
    """What the metrics page shows of one source."""

    name: str
    up: bool
    targets: int
    failures: int
    changes: dict[str, int]
