"""kind = "kubernetes" with an InferencePool: its selector and ports, and the priorities of its InferenceObjectives."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fake_kubernetes import FakeCluster
from support.polling import until

from warmroute.config import DiscoveryConfig
from warmroute.engines.discovery import kubernetes
from warmroute.engines.discovery.kubernetes import read_pool, read_priority
from warmroute.engines.discovery.sync import create_source
from warmroute.engines.discovery.target import SourceError, Targets
from warmroute.kubernetes_api import ApiFailure

POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/default/inferencepools"
OBJECTIVES = "/apis/inference.networking.x-k8s.io/v1alpha2/namespaces/default/inferenceobjectives"
LLM_D_OBJECTIVES = "/apis/llm-d.ai/v1alpha2/namespaces/default/inferenceobjectives"
PODS = "/api/v1/namespaces/default/pods"
PATCH = "application/merge-patch+json"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[FakeCluster]:
    created = FakeCluster(tmp_path)
    yield created
    created.close()


def add_pool(cluster: FakeCluster, *ports: int, app: str = "vllm") -> None:
    spec = {"selector": {"matchLabels": {"app": app}}, "targetPorts": [{"number": port} for port in ports]}
    cluster.request("POST", POOLS, {"metadata": {"name": "pool"}, "spec": spec, "status": {}})


def add_pod(cluster: FakeCluster, name: str, address: str, app: str = "vllm") -> None:
    ready = {"podIP": address, "phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    metadata = {"name": name, "labels": {"app": app}}
    cluster.request("POST", PODS, {"metadata": metadata, "spec": {"containers": []}, "status": ready})


def objective(name: str, priority: int | None, pool: str = "pool") -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"priority": priority, "poolRef": {"name": pool}}, "status": {}}


class Source:
    def __init__(self, cluster: FakeCluster) -> None:
        config = DiscoveryConfig(kind="kubernetes", kubeconfig=cluster.kubeconfig("r"), inference_pool="pool")
        self.reports: list[Targets] = []
        self.task = asyncio.ensure_future(create_source(config).run(self.reports.append))

    def nodes(self) -> dict[str, str]:
        return {one.node.name: one.node.url for one in self.reports[-1].found} if self.reports else {}

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def test_the_pods_and_ports_of_a_pool_are_the_nodes_and_follow_its_changes(cluster: FakeCluster) -> None:
    add_pool(cluster, 8000)
    add_pod(cluster, "a", "10.0.0.1")
    add_pod(cluster, "other", "10.0.0.9", app="web")
    source = Source(cluster)
    await until(lambda: source.nodes() == {"a": "http://10.0.0.1:8000"})
    await asyncio.to_thread(add_pod, cluster, "b", "10.0.0.2")
    await until(lambda: len(source.nodes()) == 2)
    ports = {"spec": {"targetPorts": [{"number": 8001}, {"number": 8002}]}}
    await asyncio.to_thread(cluster.request, "PATCH", f"{POOLS}/pool", ports, PATCH)
    await until(lambda: source.nodes().get("a:8001") == "http://10.0.0.1:8001" and len(source.nodes()) == 4)
    labels = {"spec": {"selector": {"matchLabels": {"app": "web"}}, "targetPorts": [{"number": 80}]}}
    await asyncio.to_thread(cluster.request, "PATCH", f"{POOLS}/pool", labels, PATCH)
    await until(lambda: source.nodes() == {"other": "http://10.0.0.9:80"})
    await source.close()


async def test_a_missing_pool_is_an_error_that_names_it(cluster: FakeCluster) -> None:
    source = Source(cluster)
    with pytest.raises(SourceError, match="'pool' does not exist"):
        await source.task


async def test_objectives_of_the_pool_have_priorities(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "RETRY_S", 0.05)
    add_pool(cluster, 8000)
    add_pod(cluster, "a", "10.0.0.1")
    for one in (objective("chat", 10), objective("batch", -1), objective("plain", None), objective("x", 5, "other")):
        cluster.request("POST", OBJECTIVES, one)
    source = Source(cluster)
    expected = {"chat": "high", "batch": "low", "plain": "normal"}
    await until(lambda: source.reports and source.reports[-1].priorities == expected)
    await asyncio.to_thread(cluster.request, "DELETE", f"{OBJECTIVES}/batch")
    await until(lambda: "batch" not in source.reports[-1].priorities)
    assert source.nodes() == {"a": "http://10.0.0.1:8000"}
    await source.close()


async def test_objectives_may_be_of_the_extensions_group_or_of_llm_ds(cluster: FakeCluster) -> None:
    add_pool(cluster, 8000)
    add_pod(cluster, "a", "10.0.0.1")
    cluster.request("POST", OBJECTIVES, objective("batch", -1))
    cluster.request("POST", LLM_D_OBJECTIVES, objective("chat", 10))
    source = Source(cluster)
    await until(lambda: source.reports and source.reports[-1].priorities == {"batch": "low", "chat": "high"})
    await asyncio.to_thread(cluster.request, "DELETE", f"{LLM_D_OBJECTIVES}/chat")
    await until(lambda: source.reports[-1].priorities == {"batch": "low"})
    await source.close()


def test_a_group_that_may_not_be_read_is_logged_once_and_only_if_no_other_can_be(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reports: list[dict[str, str]] = []
    objectives = kubernetes._Objectives("source", reports.append)
    forbidden = ApiFailure("forbidden", 403)
    for _ in range(2):
        objectives.failed("llm-d.ai", forbidden)
    assert caplog.text.count("objectives_unreadable") == 1
    objectives.changed("inference.networking.x-k8s.io", {"batch": "low"})
    objectives.failed("llm-d.ai", forbidden)
    assert caplog.text.count("objectives_unreadable") == 1
    objectives.failed("llm-d.ai", ApiFailure("connection refused"))
    assert caplog.text.count("objectives_unreadable") == 2
    assert reports == [{"batch": "low"}]


def test_absurd_objects_are_ignored_or_named() -> None:
    no_port = {"selector": {"matchLabels": {"a": "b"}}, "targetPorts": [{"number": 0}]}
    pools: list[Any] = [None, [], {"selector": {}}, no_port]
    for spec in pools:
        with pytest.raises(SourceError):
            read_pool({"spec": spec})
    objectives: list[Any] = [None, [], {"poolRef": "pool"}, {"poolRef": {"name": "pool"}, "priority": "high"}]
    for spec in objectives:
        assert read_priority({"spec": spec}, "pool") == ""
