"""InferencePools and InferenceObjectives of the Gateway API Inference Extension.

A pool selects Pods by their labels, and names the ports of their engines: each port is a node. An objective gives the
requests that name it (header `x-gateway-inference-objective`) a priority. Objectives began in the extension's group and
moved to llm-d's: a cluster may have both.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, Final, NamedTuple

import httpx2

from warmroute.discovery.target import SourceError
from warmroute.event_log import EventLog
from warmroute.kubernetes.objects import Object, meta
from warmroute.kubernetes.watch import ApiFailure, list_and_watch

log = EventLog("warmroute.discovery")

POOLS: Final = "/apis/inference.networking.k8s.io/v1/{}/inferencepools"
OBJECTIVES: Final = "/apis/{}/v1alpha2/{}/inferenceobjectives"
OBJECTIVE_GROUPS: Final = ("inference.networking.x-k8s.io", "llm-d.ai")
MAX_OBJECTS: Final = 1_000
MAX_PORTS: Final = 8
FORBIDDEN, NOT_FOUND = 403, 404
RETRY_S: Final = 10.0
"""After the objectives could not be read."""
ABSENT_S: Final = 60.0
"""After a cluster did not know what an objective is."""


class Pool(NamedTuple):
    selector: str
    ports: tuple[int, ...]


def read_pool(one: Object) -> Pool:
    """Raises SourceError for a pool that selects nothing."""
    spec: Any = one.get("spec")
    try:
        labels = spec["selector"]["matchLabels"]
        selector = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
        ports = tuple(dict.fromkeys(port["number"] for port in spec["targetPorts"]))[:MAX_PORTS]
    except (KeyError, TypeError, AttributeError):
        selector, ports = "", ()
    if not selector or not ports or not all(isinstance(port, int) and 0 < port < 65536 for port in ports):
        raise SourceError("the InferencePool has no selector.matchLabels or no valid targetPorts")
    return Pool(selector, ports)


def read_priority(one: Object, pool: str) -> str:
    """Return the priority of an objective as X-Priority has it; empty if it belongs to another pool."""
    spec: Any = one.get("spec")
    reference = spec.get("poolRef") if isinstance(spec, dict) else None
    if not isinstance(reference, dict) or reference.get("name") != pool:
        return ""
    number = spec.get("priority") or 0
    if not isinstance(number, int):
        return ""
    return "high" if number > 0 else "low" if number < 0 else "normal"


async def watch_pool(client: httpx2.AsyncClient, namespace: str, name: str) -> AsyncIterator[Pool]:
    """Yield the pool, and again whenever it changes. Raises SourceError if it does not exist."""
    last: Pool | None = None
    try:
        async with aclosing(list_and_watch(client, POOLS.format(namespace), "", MAX_OBJECTS)) as changes:
            async for change in changes:
                ours = [one for one in change.objects if meta(one).get("name") == name]
                if (change.kind == "listed" and not ours) or (change.kind == "deleted" and ours):
                    raise SourceError(f"the InferencePool {name!r} does not exist")
                if ours and (pool := read_pool(ours[-1])) != last:
                    last = pool
                    yield pool
    except ApiFailure as failure:
        raise SourceError(str(failure)) from None


async def watch_objectives(
    client: httpx2.AsyncClient, namespace: str, pool: str, source: str, report: Callable[[dict[str, str]], None]
) -> None:
    """Report the priority of each objective of the pool, now and after each change. Never fails: without objectives,
    all requests have the priority that they ask for."""
    objectives = _Objectives(source, report)
    async with asyncio.TaskGroup() as tasks:
        for group in OBJECTIVE_GROUPS:
            tasks.create_task(_watch_group(client, group, OBJECTIVES.format(group, namespace), pool, objectives))


class _Objectives:
    """The priorities of all objectives, by API group."""

    def __init__(self, source: str, report: Callable[[dict[str, str]], None]) -> None:
        self._source = source
        self._report = report
        self._by_group: dict[str, dict[str, str]] = {}
        self._failing: set[str] = set()

    def changed(self, group: str, priorities: dict[str, str]) -> None:
        self._failing.clear()
        self._by_group[group] = dict(priorities)
        self._report({name: priority for found in self._by_group.values() for name, priority in found.items()})

    def failed(self, group: str, failure: ApiFailure) -> None:
        """Log it, once. A cluster that grants the right to read one of the groups need not have the other."""
        if failure.status == FORBIDDEN and self._by_group.keys() - {group}:
            return
        if group not in self._failing:
            self._failing.add(group)
            log.warning(
                "objectives_unreadable",
                "The priorities of InferenceObjectives stay as they are. The router tries again.",
                source=self._source,
                reason=f"{group}: {failure}",
            )


async def _watch_group(client: httpx2.AsyncClient, group: str, path: str, pool: str, objectives: _Objectives) -> None:
    while True:
        priorities: dict[str, str] = {}
        pause_s = RETRY_S
        try:
            async with aclosing(list_and_watch(client, path, "", MAX_OBJECTS)) as changes:
                async for change in changes:
                    if change.kind == "listed":
                        priorities.clear()
                    for one in change.objects:
                        name, priority = str(meta(one).get("name")), read_priority(one, pool)
                        if change.kind == "deleted" or not priority:
                            priorities.pop(name, None)
                        elif len(priorities) < MAX_OBJECTS:
                            priorities[name] = priority
                    objectives.changed(group, priorities)
        except ApiFailure as failure:
            if failure.status == NOT_FOUND:  # the cluster has no such resource
                pause_s = ABSENT_S
            else:
                objectives.failed(group, failure)
        await asyncio.sleep(pause_s)
