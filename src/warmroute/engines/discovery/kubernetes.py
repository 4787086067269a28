"""The source `kubernetes`: Pods, Services, InferencePools."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import httpx2
import msgspec

from warmroute.config import ConfigError, DiscoveryConfig
from warmroute.config.scaling import COMMON_VARIABLES
from warmroute.engines.discovery.target import LABELS, MAX_TARGETS, SourceError, Target, Targets, Turn, create_target
from warmroute.event_log import EventLog
from warmroute.kubernetes_api import (
    REGION,
    ZONE,
    ApiFailure,
    Change,
    Object,
    annotations_of,
    cluster_config,
    condition,
    first_label,
    get_object,
    http_client,
    island_of,
    labels_of,
    list_and_watch,
    meta,
)

# Turns Pods and EndpointSlices into targets.
#
# A label or annotation `warmroute/model`, `warmroute/role`, `warmroute/gpu`, `warmroute/engine`, `warmroute/island` or
# `warmroute/usd-per-hour` sets that property of the node. An annotation overrides a label.

Nodes = Mapping[str, Object]
"""Kubernetes nodes by name."""
PREFIX: Final = "warmroute/"
GPU_PRODUCT: Final = "nvidia.com/gpu.product"
"""Label of a Kubernetes node with its GPU, from NVIDIA's GPU feature discovery."""


def key_of(one: Object) -> str:
    return str(meta(one).get("uid") or meta(one).get("name"))


def node_names(one: Object) -> list[str]:
    """Return the Kubernetes nodes that a Pod or the endpoints of a slice run on."""
    if "endpoints" in one:
        return [name for endpoint in one["endpoints"] or () if (name := _endpoint_node(endpoint))]
    own = (one.get("spec") or {}).get("nodeName")
    return [str(own)] if own else []


def pod_targets(config: DiscoveryConfig, pod: Object, nodes: Nodes, invalid: list[str]) -> Iterator[Target]:
    """Yield the Pod's target; none before it has an address, or after it has ended."""
    status = pod.get("status") or {}
    host = str(status.get("podIP") or "")
    if not host or status.get("phase") in ("Succeeded", "Failed"):
        return
    # A terminating Pod stays Ready until its engine stops. New requests would meet the end of it.
    ready = condition(pod, "Ready").get("status") == "True" and not meta(pod).get("deletionTimestamp")
    node = nodes.get(str((pod.get("spec") or {}).get("nodeName") or ""))
    labels = _settings(pod, node, first_label(labels_of(pod), REGION), first_label(labels_of(pod), ZONE))
    port = config.port or _container_port(pod, config.port_name)
    target = create_target(config, host, port, labels, invalid, name=str(meta(pod).get("name") or ""), ready=ready)
    if target is not None:
        yield target


def slice_targets(config: DiscoveryConfig, one: Object, nodes: Nodes, invalid: list[str]) -> Iterator[Target]:
    """Yield a target for each endpoint of an EndpointSlice."""
    port = config.port or _slice_port(one, config.port_name)
    for endpoint in one.get("endpoints") or ():
        addresses = endpoint.get("addresses") or ()
        state = endpoint.get("conditions") or {}
        # `ready` may be absent, which the API defines as true.
        ready = state.get("ready") is not False and not state.get("terminating")
        zone = endpoint.get("zone") or first_label(endpoint.get("topology") or {}, ZONE)
        labels = _settings(one, nodes.get(_endpoint_node(endpoint)), "", str(zone or ""))
        pod = endpoint.get("targetRef") or {}
        name = str(pod.get("name") or "") if pod.get("kind") == "Pod" else ""
        if not addresses:
            continue
        target = create_target(config, str(addresses[0]), port, labels, invalid, name=name, ready=ready)
        if target is not None:
            yield target


def _endpoint_node(endpoint: Object) -> str:
    return str(endpoint.get("nodeName") or (endpoint.get("topology") or {}).get("kubernetes.io/hostname") or "")


def _settings(one: Object, node: Object | None, region: str, zone: str) -> dict[str, Any]:
    """Return the labels of a target. The island is the region of its Kubernetes node. Without the right to read nodes,
    it is the zone."""
    island = island_of(node) or (f"kubernetes/{region}" if region else f"kubernetes/{zone}" if zone else "")
    gpu = str(labels_of(node or {}).get(GPU_PRODUCT) or "").removeprefix("NVIDIA-")
    found: dict[str, Any] = {"island": island, "gpu": gpu}
    for values in (labels_of(one), annotations_of(one)):
        for key in LABELS:
            value = values.get(PREFIX + key.replace("_", "-"))
            if value:
                found[key] = value
    return found


def _container_port(pod: Object, name: str) -> int:
    """Return the named port, or the only one; 0 if it is unknown."""
    containers = (pod.get("spec") or {}).get("containers") or ()
    return _pick([port for one in containers for port in one.get("ports") or ()], "containerPort", name)


def _slice_port(one: Object, name: str) -> int:
    return _pick(one.get("ports") or (), "port", name)


def _pick(ports: Any, key: str, name: str) -> int:
    numbers = [port.get(key) for port in ports if not name or port.get("name") == name]
    found = {number for number in numbers if isinstance(number, int) and 0 < number < 65536}
    return found.pop() if len(found) == 1 else 0


# InferencePools and InferenceObjectives of the Gateway API Inference Extension.
#
# A pool selects Pods by their labels, and names the ports of their engines: each port is a node. An objective gives the
# requests that name it (header `x-gateway-inference-objective`) a priority. Objectives began in the extension's group
# and moved to llm-d's: a cluster may have both.

log = EventLog("warmroute.discovery")

POOLS: Final = "/apis/inference.networking.k8s.io/v1/{}/inferencepools"
OBJECTIVES: Final = "/apis/{}/v1alpha2/{}/inferenceobjectives"
OBJECTIVE_GROUPS: Final = ("inference.networking.x-k8s.io", "llm-d.ai")
MAX_OBJECTS: Final = 1_000
"""Bounds memory: a namespace with more objectives than this is broken or hostile."""
MAX_PORTS: Final = 8
"""Ports of a pool that the router uses: data-parallel ranks of one Pod."""
FORBIDDEN, NOT_FOUND = 403, 404
RETRY_S: Final = 10.0
"""Pause after the objectives could not be read."""
ABSENT_S: Final = 60.0
"""Pause if the cluster does not know what an objective is. Somebody may install the extension later."""


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
        """Log the failure once. A cluster that grants the right to read one of the two groups need not have the
        other."""
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


# kind = "kubernetes": the Pods with certain labels or of an InferencePool, or the endpoints of a Service, watched.
#
# A Pod that is not ready, or that terminates, gets no new requests, and leaves the fleet when its requests have ended.

SERVICE_LABEL: Final = "kubernetes.io/service-name"
SLICE_VERSIONS: Final = ("v1", "v1beta1")
"""Versions of EndpointSlices; clusters before 1.21 have only the second."""
REPORT_S: Final = 0.05
"""Shortest time between two reports: changes that arrive meanwhile are reported together."""
NODE_LOOKUPS: Final = 16
"""Nodes that are read at the same time."""
NODE_LOOKUP_S: Final = 2.0
"""Time for the nodes of one change. Islands and GPUs that are still unknown then follow with the next change."""
NODE_AGE_S: Final = 600.0
"""For how long the labels of a Kubernetes node are kept."""


ODD_SHAPE: Final = (AttributeError, TypeError, ValueError, KeyError, IndexError)
"""Errors that reading an object raises if its fields have other types than Kubernetes' own."""


def _plugin_variables(config: DiscoveryConfig) -> set[str]:
    patterns = (*COMMON_VARIABLES, "KUBECONFIG", "KUBERNETES_*", *config.pass_env)
    return {name for name in os.environ if any(fnmatchcase(name, pattern) for pattern in patterns)}


def _node_names(one: Object) -> list[str]:
    try:
        return node_names(one)
    except ODD_SHAPE:
        return []


class KubernetesObjects:
    max_retry_s = 30.0

    def __init__(self, config: DiscoveryConfig) -> None:
        """Raises ConfigError."""
        self._config = config
        try:
            cluster = cluster_config(config.kubeconfig, config.context, _plugin_variables(config))
            http_client(cluster, config.timeout_s)
        except ConfigError as error:
            raise ConfigError(f"discovery.kubeconfig ({config.label}): {error}") from None
        self._cluster = cluster
        self._namespace = config.namespace or cluster.namespace
        self._targets: dict[str, tuple[list[Target], list[str]]] = {}
        """The targets of each object, and what is wrong with it."""
        self._nodes: dict[str, tuple[float, Object]] = {}
        self._may_read_nodes = not (config.island and config.gpu)
        self._pool: Pool | None = None
        self._priorities: dict[str, str] = {}

    async def run(self, report: Callable[[Targets], None]) -> None:
        config = self._config
        namespace = f"namespaces/{quote(self._namespace, safe='')}"
        async with http_client(self._cluster, config.timeout_s) as client:
            if config.inference_pool:
                await self._follow_pool(client, namespace, report)
            if config.pod_selector:
                await self._follow(client, f"/api/v1/{namespace}/pods", config.pod_selector, report)
            for version in SLICE_VERSIONS:
                path = f"/apis/discovery.k8s.io/{version}/{namespace}/endpointslices"
                await self._follow(client, path, f"{SERVICE_LABEL}={config.service}", report, version == "v1")
        raise SourceError("the cluster has no EndpointSlices")

    async def _follow_pool(self, client: httpx2.AsyncClient, namespace: str, report: Callable[[Targets], None]) -> None:
        """Follow the Pods that the pool selects, anew when the pool changes."""
        config = self._config

        def objectives_changed(priorities: dict[str, str]) -> None:
            self._priorities = priorities
            if self._pool is not None:
                report(self._all())

        async def follow(pool: Pool) -> None:
            self._targets = {}
            await self._follow(client, f"/api/v1/{namespace}/pods", pool.selector, report)

        async def watch() -> None:
            async for pool in watch_pool(client, namespace, config.inference_pool):
                if following := tasks.pop("pods", None):
                    following.cancel()
                self._pool = pool
                tasks["pods"] = loop.create_task(follow(pool))

        loop = asyncio.get_running_loop()
        watching = loop.create_task(watch())
        objectives = loop.create_task(
            watch_objectives(client, namespace, config.inference_pool, config.label, objectives_changed)
        )
        tasks: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                pods = tasks.get("pods")
                await asyncio.wait({watching, *([pods] if pods else [])}, timeout=0.5, return_when="FIRST_COMPLETED")
                for task in (watching, pods):
                    if task is not None and task.done() and not task.cancelled():
                        task.result()  # raises why it ended
                        raise SourceError("the watch ended")
        finally:
            for task in (watching, objectives, *tasks.values()):
                task.cancel()

    async def _follow(
        self, client: httpx2.AsyncClient, path: str, selector: str, report: Callable[[Targets], None],
        may_be_missing: bool = False,
    ) -> None:  # fmt: skip
        """Report each change, for ever. Return only if the API server does not know the path."""
        loop = asyncio.get_running_loop()
        pending: asyncio.TimerHandle | None = None
        reported_s = -REPORT_S

        def report_all() -> None:
            nonlocal pending, reported_s
            pending, reported_s = None, loop.time()
            report(self._all())

        try:
            async with aclosing(list_and_watch(client, path, selector, MAX_TARGETS)) as changes:
                async for change in changes:
                    await self._apply(client, change)
                    # A rollout changes every Pod several times within a second. Each report compares the whole fleet.
                    pending = pending or loop.call_at(reported_s + REPORT_S, report_all)
        except ApiFailure as failure:
            if failure.status == 404 and may_be_missing:
                return
            raise SourceError(str(failure)) from None
        finally:
            if pending is not None:
                pending.cancel()
                report_all()

    async def _apply(self, client: httpx2.AsyncClient, change: Change) -> None:
        if change.kind == "deleted":
            for one in change.objects:
                self._targets.pop(key_of(one), None)
            return
        await self._look_up(client, {name for one in change.objects for name in _node_names(one)})
        nodes = {name: node for name, (_read_s, node) in self._nodes.items()}
        read = self._pool_targets if self._pool is not None else slice_targets if self._config.service else pod_targets
        known = {} if change.kind == "listed" else self._targets
        turn = Turn()
        for one in change.objects:
            key = key_of(one)
            if len(known) >= MAX_TARGETS and key not in known:
                continue
            found: list[Target] = []
            invalid: list[str] = []
            try:
                for target in read(self._config, one, nodes, invalid):
                    found.append(target)
                    await turn.share()
            except ODD_SHAPE as error:
                found, invalid = [], [f"{str(meta(one).get('name'))[:80]}: {error!r}"]
            known[key] = found, invalid
        self._targets = known

    def _pool_targets(self, config: DiscoveryConfig, pod: Object, nodes: Nodes, invalid: list[str]) -> Iterator[Target]:
        """Yield a target for each of the pool's ports."""
        ports = self._pool.ports if self._pool is not None else ()
        for port in ports:
            for target in pod_targets(msgspec.structs.replace(config, port=port), pod, nodes, invalid):
                if len(ports) == 1:
                    yield target
                else:
                    name = f"{target.node.name}:{port}"
                    yield target._replace(node=msgspec.structs.replace(target.node, name=name))

    def _all(self) -> Targets:
        """Return the targets of all objects. A Pod may have an IPv4 and an IPv6 address, in two slices: the router uses
        the first."""
        every = [target for targets, _invalid in self._targets.values() for target in targets]
        # A dual-stack Service has two slices for the same Pods. Without this, each engine would be two nodes with half
        # the load each.
        with_ipv4 = {target.node.name for target in every if ":" not in target.address[0]} - {""}
        found = [target for target in every if ":" not in target.address[0] or target.node.name not in with_ipv4]
        invalid = [problem for _targets, invalid in self._targets.values() for problem in invalid]
        return Targets(found, invalid, self._priorities)

    # Kubernetes nodes, for the islands and GPUs.

    async def _look_up(self, client: httpx2.AsyncClient, names: Iterable[str]) -> None:
        now_s = time.monotonic()
        missing = [name for name in names if now_s - self._nodes.get(name, (-NODE_AGE_S, {}))[0] >= NODE_AGE_S]
        if not missing or not self._may_read_nodes:
            return
        # Clusters replace their nodes: without a bound, the labels of every node that ever was would stay.
        if len(self._nodes) > 2 * MAX_TARGETS:
            self._nodes.clear()
        slots = asyncio.Semaphore(NODE_LOOKUPS)

        async def look_up(name: str) -> None:
            async with slots:
                if self._may_read_nodes:
                    self._nodes[name] = now_s, await self._get_node(client, name)

        try:
            async with asyncio.timeout(NODE_LOOKUP_S):
                await asyncio.gather(*map(look_up, missing))
        except TimeoutError:
            pass  # with the next change the rest is asked again

    async def _get_node(self, client: httpx2.AsyncClient, name: str) -> Object:
        try:
            return await get_object(client, f"/api/v1/nodes/{quote(name, safe='')}")
        except ApiFailure as failure:
            if failure.status == 403:
                self._may_read_nodes = False
                log.warning(
                    "discovery_nodes_forbidden",
                    "The router may not read Kubernetes nodes, so islands are zones and GPUs are unknown.",
                    source=self._config.label,
                )
            return {}
