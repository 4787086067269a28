"""kind = "kubernetes": the Pods with certain labels or of an InferencePool, or the endpoints of a Service, watched.

A Pod that is not ready, or that terminates, gets no new requests, and leaves the fleet when its requests have ended.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import aclosing
from fnmatch import fnmatchcase
from typing import Final
from urllib.parse import quote

import httpx2
import msgspec

from warmroute.config import ConfigError, DiscoveryConfig
from warmroute.config.provisioner_settings import COMMON_VARIABLES
from warmroute.discovery.inference_pool import Pool, watch_objectives, watch_pool
from warmroute.discovery.kubernetes_targets import Nodes, key_of, node_names, pod_targets, slice_targets
from warmroute.discovery.target import MAX_TARGETS, SourceError, Target, Targets
from warmroute.discovery.turn import Turn
from warmroute.event_log import EventLog
from warmroute.kubernetes.cluster import cluster_config, http_client
from warmroute.kubernetes.objects import Object, meta
from warmroute.kubernetes.watch import ApiFailure, Change, get_object, list_and_watch

log = EventLog("warmroute.discovery")

SERVICE_LABEL: Final = "kubernetes.io/service-name"
SLICE_VERSIONS: Final = ("v1", "v1beta1")
"""Versions of EndpointSlices; clusters before 1.21 have only the second."""
REPORT_S: Final = 0.05
"""Shortest time between two reports: changes that arrive meanwhile are reported together."""
NODE_LOOKUPS: Final = 16
NODE_LOOKUP_S: Final = 2.0
NODE_AGE_S: Final = 600.0
"""For how long the labels of a Kubernetes node are kept."""


ODD_SHAPE: Final = (AttributeError, TypeError, ValueError, KeyError, IndexError)
"""What reading an object raises whose fields have other types than Kubernetes' own."""


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
        """By object: its targets, and what is wrong with it."""
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
