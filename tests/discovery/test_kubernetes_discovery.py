"""kind = "kubernetes" against a fake API server and, in the suite `real`, against a real one with the rights that
docs/guides/discovery.md asks for.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.fake_kubernetes import FakeCluster
from support.free_port import free_port
from support.kubelet import kubelet
from support.kubernetes_workload import Cluster, Workload, grant_rights
from support.polling import until
from support.real_kubernetes import RealCluster, missing
from support.running_router import RunningRouter, router

from warmroute.config import ConfigError, DiscoveryConfig
from warmroute.engines.discovery.sync import create_source
from warmroute.engines.discovery.target import SourceError, Targets

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "discovery.md"
NODES = "/api/v1/nodes"


@pytest.fixture(scope="module", params=["fake", pytest.param("real", marks=pytest.mark.real)])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    if request.param == "real":
        assert not missing(), f"{', '.join(missing())} missing. `make test-real-kubernetes` builds them."
        created: Cluster = RealCluster(folder)
        grant_rights(created, GUIDE)
    else:
        created = FakeCluster(folder)
    labels = {
        "topology.kubernetes.io/region": "eu-1", "topology.kubernetes.io/zone": "eu-1a",
        "nvidia.com/gpu.product": "NVIDIA-L4",
    }  # fmt: skip
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1", "labels": labels}}
    created.request("POST", NODES, node | {"spec": {"providerID": "gce://p/eu-1a/n1"}})
    yield created
    created.close()


def config(cluster: Cluster, **more: Any) -> DiscoveryConfig:
    return DiscoveryConfig(kind="kubernetes", kubeconfig=cluster.kubeconfig("router"), **more)


@asynccontextmanager
async def reports_of(discovery: DiscoveryConfig) -> AsyncIterator[list[Targets]]:
    reports: list[Targets] = []
    running = asyncio.ensure_future(create_source(discovery).run(reports.append))
    try:
        await until(lambda: reports or running.done())
        if running.done():
            running.result()
        yield reports
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def states(reports: list[Targets]) -> dict[str, bool]:
    return {target.node.name: target.ready for target in reports[-1].found}


async def test_pods_come_become_ready_terminate_and_go(cluster: Cluster) -> None:
    workload = Workload(cluster, "life")
    annotations = {"warmroute/model": "org/m", "warmroute/role": "decode", "warmroute/usd-per-hour": "0.9"}
    workload.create(1, port=8123, annotations=annotations)
    await workload.until(lambda: len(workload.live()) == 1)
    [pod] = workload.live()
    async with reports_of(config(cluster, pod_selector="app=life")) as reports:
        assert states(reports) == {}, "it has no address"
        await asyncio.to_thread(workload.run, pod, ready=False, address="10.2.0.1")
        await until(lambda: states(reports) == {pod: False})
        await asyncio.to_thread(workload.set_ready, pod, True)
        await until(lambda: states(reports) == {pod: True})
        [target] = reports[-1].found
        node = target.node
        assert (node.url, node.name, node.models, node.role) == ("http://10.2.0.1:8123", pod, ("org/m",), "decode")
        assert (node.island, node.gpu, node.usd_per_hour) == ("gce/eu-1", "L4", 0.9)
        await asyncio.to_thread(workload.set_ready, pod, False)
        await until(lambda: states(reports) == {pod: False})
        await asyncio.to_thread(workload.set_ready, pod, True)
        await until(lambda: states(reports) == {pod: True})
        await asyncio.to_thread(workload.scale, 0)
        await until(lambda: states(reports) == {pod: False})
        await asyncio.to_thread(workload.end, pod)
        await until(lambda: states(reports) == {})


def endpoint_slice(name: str, service: str, *endpoints: dict[str, Any], kind: str = "IPv4") -> dict[str, Any]:
    return {
        "apiVersion": "discovery.k8s.io/v1beta1", "kind": "EndpointSlice", "addressType": kind,
        "metadata": {
            "name": name,
            "labels": {"kubernetes.io/service-name": service, "warmroute/model": "m", "warmroute/role": "prefill"},
        },
        "ports": [{"name": "http", "port": 8200}, {"name": "metrics", "port": 9000}],
        "endpoints": list(endpoints),
    }  # fmt: skip


def endpoint(address: str, pod: str, ready: bool | None = True) -> dict[str, Any]:
    return {
        "addresses": [address], "conditions": {} if ready is None else {"ready": ready},
        "targetRef": {"kind": "Pod", "name": pod, "namespace": "default"},
        "topology": {"topology.kubernetes.io/zone": "eu-1a", "kubernetes.io/hostname": "n1"},
    }  # fmt: skip


async def test_endpoints_of_a_service(cluster: Cluster) -> None:
    path = "/apis/discovery.k8s.io/v1beta1/namespaces/default/endpointslices"
    cluster.request(
        "POST", path, endpoint_slice("one", "svc", endpoint("10.3.0.1", "a"), endpoint("10.3.0.2", "b", False))
    )
    cluster.request(
        "POST",
        path,
        endpoint_slice("six", "svc", endpoint("fd00::1", "a"), endpoint("fd00::3", "c", None), kind="IPv6"),
    )
    cluster.request("POST", path, endpoint_slice("other", "other", endpoint("10.3.0.9", "z")))
    async with reports_of(config(cluster, service="svc", port_name="http")) as reports:
        assert states(reports) == {"a": True, "b": False, "c": True}
        found = {target.node.name: target.node for target in reports[-1].found}
        assert found["a"].url == "http://10.3.0.1:8200", "of two addresses of a Pod, the router uses IPv4"
        assert found["c"].url == "http://[fd00::3]:8200"
        assert (found["a"].models, found["a"].role, found["a"].island) == (("m",), "prefill", "gce/eu-1")
        changed = endpoint_slice("one", "svc", endpoint("10.3.0.1", "a", False))
        await asyncio.to_thread(cluster.request, "PATCH", f"{path}/one", changed, "application/merge-patch+json")
        await until(lambda: states(reports) == {"a": False, "c": True})
        await asyncio.to_thread(cluster.request, "DELETE", f"{path}/six")
        await until(lambda: states(reports) == {"a": False})


async def test_missing_rights_are_an_error_that_names_them(cluster: Cluster, tmp_path: Path) -> None:
    if not cluster.real:
        cluster.fails_with = 403
    try:
        with pytest.raises(SourceError, match=r"/pods: 403 "):
            async with reports_of(config(cluster, pod_selector="app=x", namespace="kube-system")):
                pass
    finally:
        if not cluster.real:
            cluster.fails_with = 0
    with pytest.raises(ConfigError, match=r"discovery.kubeconfig \(kubernetes\): .*none"):
        create_source(DiscoveryConfig(kind="kubernetes", pod_selector="a", kubeconfig=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match=r"discovery.kubeconfig \(kubernetes\): Context 'other' not found"):
        create_source(config(cluster, pod_selector="a", context="other"))


@asynccontextmanager
async def load_on(r: RunningRouter, clients: int = 4) -> AsyncIterator[list[int]]:
    """Send requests all the time. Yields their statuses."""
    statuses: list[int] = []

    async def client() -> None:
        while True:
            statuses.append((await r.request()).status)
            await asyncio.sleep(0.002)

    tasks = [asyncio.ensure_future(client()) for _ in range(clients)]
    try:
        yield statuses
    finally:
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in ended), ended


async def test_a_deployment_is_scaled_under_load_without_a_lost_request(cluster: Cluster) -> None:
    """2 → 5 → 1: new Pods get requests within 2 s, terminating ones get no more, and no request fails."""
    port, workload = free_port(), Workload(cluster, "scaled")
    workload.create(2, port=port)
    source = {"kind": "kubernetes", "kubeconfig": cluster.kubeconfig("router"), "pod_selector": "app=scaled"}
    async with kubelet(workload, port) as pods, router(wait=2, check_leaks=False, discovery=[source]) as r:
        fleet = r.service.fleet

        def settled(count: int) -> Callable[[], bool]:
            return lambda: len(pods.running) == count and len(fleet) == count and not any(n.draining for n in fleet)

        async with load_on(r) as statuses:
            for count in (2, 5, 1):
                await asyncio.to_thread(workload.scale, count)
                await until(settled(count), f"{count} nodes", 30)
                sent = len(statuses)
                await until(lambda enough=sent + 40 * count: len(statuses) > enough)
        assert set(statuses) == {200}
        assert len(pods.pods) == 5
        for pod in pods.pods.values():
            first_s = pod.first_request_s
            assert first_s is not None and first_s - pod.ready_s < 2.0
            if pod.terminating_s:
                assert pod.requests_after(pod.terminating_s + 0.3) == 0, "it was terminating"


async def test_a_watch_that_ends_or_is_too_old_loses_nothing(tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path)
    try:
        workload = Workload(cluster, "w")
        workload.create(1)
        [pod] = workload.live()
        async with reports_of(config(cluster, pod_selector="app=w", island="x", gpu="y")) as reports:
            await until(lambda: cluster.watches == 1)
            cluster.end_watches()
            await until(lambda: cluster.watches == 2)
            workload.run(pod, address="10.0.0.1")
            await until(lambda: states(reports) == {pod: True})
            listed = len(reports)
            cluster.end_watches(forget=True)
            await until(lambda: len(reports) > listed and cluster.watches >= 4)
            workload.set_ready(pod, False)
            await until(lambda: states(reports) == {pod: False})
    finally:
        cluster.close()


async def test_a_cluster_that_fails_keeps_its_nodes(tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path)
    port, workload = free_port(), Workload(cluster, "w")
    workload.create(2, port=port)
    source = {"kind": "kubernetes", "kubeconfig": cluster.kubeconfig("router"), "pod_selector": "app=w"}
    try:
        async with kubelet(workload, port) as pods, router(wait=2, check_leaks=False, discovery=[source]) as r:
            cluster.fails_with = 500
            cluster.end_watches()

            def state() -> dict[str, Any]:
                return r.service.discovery.describe()[0]

            await until(lambda: state()["state"] == "failing")
            assert "500 the cluster is not well" in state()["error"]
            assert len(r.service.fleet) == 2 and (await r.request()).status == 200
            workload.scale(3)
            cluster.fails_with = 0
            await until(lambda: state()["state"] == "ok" and len(r.service.fleet) == 3)
            assert len(pods.running) == 3
    finally:
        cluster.close()


async def test_objects_of_other_shapes_are_ignored(tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path)
    labels = {"app": "odd"}
    odd: list[dict[str, Any]] = [
        {"metadata": {"name": "a", "labels": labels}, "spec": 5, "status": {"podIP": "10.0.0.1", "phase": "Running"}},
        {"metadata": {"name": "b", "labels": labels}, "spec": {}, "status": {"podIP": "not an address/../"}},
        {"metadata": {"name": "c", "labels": labels}, "spec": {}, "status": {"podIP": "10.0.0.3", "conditions": 7}},
        {"metadata": {"name": "d" * 500, "labels": labels}, "spec": {}, "status": {"podIP": "10.0.0.4"}},
        {
            "metadata": {"name": "good", "labels": labels | {"warmroute/role": "emperor"}},
            "spec": {"containers": [{"ports": [{"containerPort": 99999999}]}]},
            "status": {"podIP": "10.0.0.5", "conditions": [{"type": "Ready", "status": "True"}]},
        },
    ]
    try:
        for pod in odd:
            cluster.insert("pods", pod)  # a real API server would refuse them
        async with reports_of(config(cluster, pod_selector="app=odd", island="x", gpu="y")) as reports:
            assert [target.node.url for target in reports[-1].found] == ["http://10.0.0.5:8000"]
            assert len(reports[-1].invalid) >= 4
    finally:
        cluster.close()


async def test_a_node_with_a_stuck_request_drains_until_it_ends(tmp_path: Path) -> None:
    """A Pod that is gone leaves the fleet when its last request has ended."""
    from support.engine_scripts import DONE, SSE_HEAD, chunk, script, sse_event
    from support.raw_client import post

    cluster = FakeCluster(tmp_path)
    port, workload = free_port(), Workload(cluster, "w")
    workload.create(1, port=port)
    source = {"kind": "kubernetes", "kubeconfig": cluster.kubeconfig("router"), "pod_selector": "app=w"}
    try:
        async with kubelet(workload, port, 1.0) as pods, router(wait=1, check_leaks=False, discovery=[source]) as r:
            [pod] = pods.running
            gate = asyncio.Event()
            pod.engine.behave = script(SSE_HEAD, chunk(sse_event(0)), gate, DONE)
            peer = await r.connect()
            peer.write(post())
            await until(lambda: pod.engine.seen)
            workload.scale(0)
            await until(lambda: all(node.draining for node in r.service.fleet))
            assert len(r.service.fleet) == 1
            gate.set()
            assert (await peer.response()).status == 200
            started_s = time.monotonic()
            await until(lambda: len(r.service.fleet) == 0)
            assert time.monotonic() - started_s < 5
    finally:
        cluster.close()


def plugin_kubeconfig(cluster: FakeCluster, folder: Path) -> str:
    """Return a kubeconfig whose credentials come from a program, which writes its environment to the file `seen`."""
    plugin = folder / "plugin"
    answer = '{"apiVersion":"client.authentication.k8s.io/v1beta1","kind":"ExecCredential","status":{"token":"t"}}'
    plugin.write_text(f"#!/bin/sh\nenv > {folder}/seen\necho '{answer}'\n")
    plugin.chmod(0o755)
    path = Path(cluster.kubeconfig("router"))
    table = json.loads(path.read_text())
    exec_ = {"apiVersion": "client.authentication.k8s.io/v1beta1", "command": str(plugin)}
    table["users"][0]["user"] = {"exec": exec_}
    path.write_text(json.dumps(table))
    return str(path)


async def test_a_plugin_for_credentials_does_not_see_the_routers_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_KEY", "secret")
    monkeypatch.setenv("AWS_PROFILE", "p")
    cluster = FakeCluster(tmp_path)
    source = DiscoveryConfig(
        kind="kubernetes",
        pod_selector="app=x",
        kubeconfig=plugin_kubeconfig(cluster, tmp_path),
        pass_env=("AWS_*",),
        island="x",
        gpu="y",
    )
    try:
        async with reports_of(source) as reports:
            assert reports[0] == Targets([], [])
    finally:
        cluster.close()
    names = {line.partition("=")[0] for line in (tmp_path / "seen").read_text().splitlines()}
    assert "ENGINE_KEY" not in names and {"AWS_PROFILE", "PATH"} <= names
