"""Workloads in a fake or real cluster, and what the kubelet and the cluster's administrator would write."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from warmroute.config import ProvisionerConfig
from warmroute.scaling.provisioners.kubernetes import KubernetesProvisioner

PODS = "/api/v1/namespaces/default/pods"
DEPLOYMENTS = "/apis/apps/v1/namespaces/default/deployments"
SETS = "/apis/apps/v1/namespaces/default/statefulsets"
GROUPS = "/apis/leaderworkerset.x-k8s.io/v1/namespaces/default/leaderworkersets"
MERGE, STRATEGIC = "application/merge-patch+json", "application/strategic-merge-patch+json"
DOCS = Path(__file__).resolve().parents[2] / "docs" / "reference" / "provisioners.md"

Cluster = Any
"""FakeCluster or RealCluster: both have kubeconfig, request and close."""


def grant_rights(cluster: Cluster, page: Path = DOCS) -> None:
    """Grant the rights that a page of the documentation lists."""
    found = re.search(r"```yaml\n(apiVersion: rbac.*?)```", page.read_text(), re.DOTALL)
    assert found
    paths = {"Role": "namespaces/default/roles", "ClusterRole": "clusterroles"}
    for role in yaml.safe_load_all(found[1]):
        kind = role["kind"]
        cluster.request("POST", f"/apis/rbac.authorization.k8s.io/v1/{paths[kind]}", role)
        binding = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": f"{kind}Binding",
            "metadata": {"name": "router"},
            "subjects": [{"kind": "User", "name": "router", "apiGroup": "rbac.authorization.k8s.io"}],
            "roleRef": {"kind": kind, "name": role["metadata"]["name"], "apiGroup": "rbac.authorization.k8s.io"},
        }
        cluster.request("POST", f"/apis/rbac.authorization.k8s.io/v1/{paths[kind].removesuffix('s')}bindings", binding)


def define_leader_worker_sets(cluster: Cluster) -> None:
    """Define the resource LeaderWorkerSet, without its controller."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    names = {
        "kind": "LeaderWorkerSet",
        "plural": "leaderworkersets",
        "singular": "leaderworkerset",
        "listKind": "LwsList",
    }
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "leaderworkersets.leaderworkerset.x-k8s.io"},
        "spec": {
            "group": "leaderworkerset.x-k8s.io",
            "scope": "Namespaced",
            "names": names,
            "versions": [{"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}],
        },
    }
    cluster.request("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)


class Workload:
    """A workload in the cluster, and what the kubelet would write."""

    def __init__(self, cluster: Cluster, name: str, kind: str = "deployment") -> None:
        self.cluster, self.name, self.kind = cluster, name, kind
        self.path = {"deployment": DEPLOYMENTS, "statefulset": SETS, "leaderworkerset": GROUPS}[kind] + f"/{name}"

    def create(
        self, replicas: int, also: dict[str, str] | None = None, *, port: int = 0,
        annotations: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        labels = {"app": self.name} | (also or {})
        container: dict[str, Any] = {"name": "engine", "image": "e"}
        if port:
            container["ports"] = [{"containerPort": port}]
        spec: dict[str, Any] = {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels, "annotations": annotations or {}},
                "spec": {"containers": [container]},
            },
        }
        group, kind = "apps/v1", {"deployment": "Deployment", "statefulset": "StatefulSet"}.get(self.kind, "")
        if self.kind == "statefulset":
            spec |= {"serviceName": self.name, "podManagementPolicy": "Parallel"}
        if self.kind == "leaderworkerset":
            group, kind, spec = "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", {"replicas": replicas}
        body = {"apiVersion": group, "kind": kind, "metadata": {"name": self.name}, "spec": spec}
        self.cluster.request("POST", self.path.rpartition("/")[0], body)

    def pods(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.cluster.request("GET", f"{PODS}?labelSelector=app%3D{self.name}")["items"]
        return sorted(found, key=lambda pod: pod["metadata"]["name"])

    def live(self) -> list[str]:
        return [pod["metadata"]["name"] for pod in self.pods() if "deletionTimestamp" not in pod["metadata"]]

    def replicas(self) -> int:
        count: int = self.cluster.request("GET", self.path)["spec"]["replicas"]
        return count

    def run(
        self, pod: str, *, ready: bool = True, address: str = "10.0.0.9", node: str = "n1", since: str = "2026-01-02"
    ) -> None:
        """Write what its scheduler and its kubelet would write."""
        target = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": pod},
            "target": {"kind": "Node", "name": node},
        }
        self.cluster.request("POST", f"{PODS}/{pod}/binding", target)
        condition = {
            "type": "Ready",
            "status": "True" if ready else "False",
            "lastTransitionTime": f"{since}T00:00:00Z",
        }
        status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "conditions": [condition]}
        self.cluster.request("PATCH", f"{PODS}/{pod}/status", {"status": status}, STRATEGIC)

    def set_ready(self, pod: str, ready: bool) -> None:
        condition = {"type": "Ready", "status": "True" if ready else "False"}
        patch = {"status": {"conditions": [condition]}}
        self.cluster.request("PATCH", f"{PODS}/{pod}/status", patch, STRATEGIC)

    def scale(self, replicas: int) -> None:
        self.cluster.request("PATCH", self.path, {"spec": {"replicas": replicas}}, MERGE)

    def end(self, pod: str) -> None:
        """The kubelet has ended the Pod's processes: it is gone."""
        self.cluster.request("DELETE", f"{PODS}/{pod}", {"gracePeriodSeconds": 0})

    async def until(self, what: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 20
        while not await asyncio.to_thread(what):
            assert time.monotonic() < deadline_s, "the controller did not act"
            await asyncio.sleep(0.05)

    async def all_running(self, count: int) -> None:
        await self.until(lambda: len(self.live()) == count)
        for number, pod in enumerate(self.live()):
            await asyncio.to_thread(self.run, pod, address=f"10.0.0.{number + 1}")

    def provisioner(self, **changes: Any) -> KubernetesProvisioner:
        return KubernetesProvisioner(
            ProvisionerConfig(
                kind="kubernetes",
                name="k8s",
                gpu="L4",
                workload=self.kind,  # type: ignore[arg-type]
                workload_name=self.name,
                kubeconfig=self.cluster.kubeconfig("router"),
                **changes,
            )
        )
