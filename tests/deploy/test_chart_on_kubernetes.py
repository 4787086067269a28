"""The chart on a real API server: applied by helm, checked by kubectl. A router runs with its configuration and the
rights of its service account, while a Deployment of engines is scaled under load.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.free_port import free_port
from support.kubelet import kubelet
from support.kubernetes_workload import MERGE, Cluster, Workload
from support.polling import until
from support.raw_client import RawConnection, post
from support.real_kubernetes import RealCluster, missing

ROOT = Path(__file__).resolve().parents[2]
HELM = ROOT / ".venv-deploy" / "bin" / "helm"
CHART = ROOT / "deploy" / "helm" / "warmroute"
CONFIG_MAPS = "/api/v1/namespaces/default/configmaps"
VALUES = """
engines: {deployment: engines, podSelector: app=engines}
keda: {enabled: true}
networkPolicy: {enabled: true}
admin: {token: secret}
serviceMonitor: {enabled: true}
config: |
  [routing]
  policy = "round_robin"     # every node gets requests, whatever its cache holds
"""
pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    assert not missing(), f"{', '.join(missing())} missing. `make test-real-kubernetes` builds them."
    created = RealCluster(tmp_path_factory.mktemp("cluster"))
    for group, version, kind in (
        ("monitoring.coreos.com", "v1", "ServiceMonitor"), ("monitoring.coreos.com", "v1", "PrometheusRule"),
        ("keda.sh", "v1alpha1", "ScaledObject"),
    ):  # fmt: skip
        schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        names = {"kind": kind, "plural": f"{kind.lower()}s", "singular": kind.lower(), "listKind": f"{kind}List"}
        versions = [{"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}]
        definition = {
            "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
            "metadata": {"name": f"{kind.lower()}s.{group}"},
            "spec": {"group": group, "scope": "Namespaced", "names": names, "versions": versions},
        }  # fmt: skip
        created.request("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
    yield created
    created.close()


def run(cluster: Cluster, *command: str | Path) -> str:
    environment = os.environ | {"KUBECONFIG": cluster.kubeconfig("admin"), "HOME": str(cluster.folder)}
    done = subprocess.run(
        [str(one) for one in command], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def test_the_manifests_pass_the_api_servers_checks(cluster: Cluster) -> None:
    """1.20 knows PodDisruptionBudgets only as policy/v1beta1."""
    for name in ("warmroute.yaml", "warmroute-keda.yaml", "vllm.yaml"):
        text = (ROOT / "deploy" / "kubernetes" / name).read_text().replace("policy/v1\n", "policy/v1beta1\n")
        path = cluster.folder / name
        path.write_text(text)
        applied = run(cluster, "kubectl", "apply", "--dry-run=server", "-f", path)
        assert all("(server dry run)" in line for line in applied.splitlines()), applied


def account_kubeconfig(cluster: Cluster, account: str) -> str:
    """Return a kubeconfig with a token of the service account."""
    path = f"/api/v1/namespaces/default/serviceaccounts/{account}/token"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"audiences": None}}
    token = cluster.request("POST", path, request)["status"]["token"]
    config = json.loads(Path(cluster.kubeconfig("admin")).read_text())
    config["users"][0]["user"]["token"] = token
    found = cluster.folder / "account.conf"
    found.write_text(json.dumps(config))
    return str(found)


async def test_an_applied_chart_serves_a_deployment_that_is_scaled_under_load(cluster: Cluster) -> None:
    port, workload = free_port(), Workload(cluster, "engines")
    values = cluster.folder / "values.yaml"
    values.write_text(VALUES)
    await asyncio.to_thread(run, cluster, HELM, "install", "r", CHART, "--namespace", "default", "-f", values)
    config_map: Any = cluster.request("GET", f"{CONFIG_MAPS}/r-warmroute")
    file = cluster.folder / "warmroute.toml"
    file.write_text(config_map["data"]["warmroute.toml"])
    environment = os.environ | {"KUBECONFIG": account_kubeconfig(cluster, "r-warmroute")}
    workload.create(2, port=port)
    log = (cluster.folder / "router.log").open("wb")
    router_port = free_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "warmroute.cli.main", "serve", "--config", str(file), "--port", str(router_port),
        "--admin-port", "0", env=environment, stderr=log,
    )  # fmt: skip
    statuses: list[int] = []
    added: set[str] = set()

    async def client() -> None:
        while True:
            peer = RawConnection(*await asyncio.open_connection("127.0.0.1", router_port))
            peer.write(post())
            statuses.append((await peer.response()).status)
            peer.close()

    def events(name: str) -> int:
        lines = (cluster.folder / "router.log").read_text().splitlines()
        return sum(1 for line in lines if line.endswith("}") and json.loads(line).get("event") == name)

    tasks: list[asyncio.Future[None]] = []
    try:
        async with kubelet(workload, port, 2.0) as pods:
            await until(lambda: events("startup_complete") or process.returncode is not None, "started", 30)
            assert process.returncode is None, (cluster.folder / "router.log").read_text()
            load_s = time.monotonic()
            tasks = [asyncio.ensure_future(client()) for _ in range(4)]
            removed = 0
            for count in (2, 5, 1):
                await asyncio.to_thread(workload.scale, count)
                await until(lambda count=count: len(pods.running) == count, f"{count} Pods", 30)
                added |= pods.pods.keys()
                removed = len(added) - count
                await until(lambda removed=removed: events("node_removed") >= removed, "nodes removed", 30)
                await until(lambda: all(pod.first_request_s for pod in pods.running), "requests for all", 30)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert set(statuses) == {200} and len(pods.pods) == 5 and removed == 4
            for pod in pods.pods.values():
                assert pod.first_request_s is not None and pod.first_request_s - max(pod.ready_s, load_s) < 2.0
                if pod.terminating_s:
                    assert pod.requests_after(pod.terminating_s + 0.5) == 0, "it was terminating"
            # a changed ConfigMap, which the kubelet would write to the volume, is reloaded
            config_map["data"]["warmroute.toml"] += "\n[limits]\nconnections = 1000\n"
            patch = {"data": config_map["data"]}
            changed: Any = cluster.request("PATCH", f"{CONFIG_MAPS}/r-warmroute", patch, MERGE)
            file.write_text(changed["data"]["warmroute.toml"])
            await until(lambda: events("config_reloaded"), "reloaded")
            assert events("discovery_failed") == 0
    finally:
        for task in tasks:
            task.cancel()
        if process.returncode is None:
            process.terminate()
        await process.wait()
        log.close()
    await asyncio.to_thread(run, cluster, HELM, "uninstall", "r", "--namespace", "default")
