"""Two clusters whose routers know each other's engines: the commands of the page on two real API servers."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.chart_router import HELM, ROOT
from support.kubernetes_workload import STRATEGIC
from support.polling import until
from support.quick_start import blocks_of
from support.real_kubernetes import RealCluster, missing
from test_terraform import render_values

from warmroute.config import from_table
from warmroute.engines.discovery.sync import create_source
from warmroute.engines.discovery.target import Targets

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

PODS = "/api/v1/namespaces/llm/pods"
CLOUDS = {"eks": "aws/us-east-1", "gke": "gce/us-east4"}


@pytest.fixture
def clouds(tmp_path: Path) -> Iterator[dict[str, RealCluster]]:
    assert not missing(), f"{', '.join(missing())} missing. `make test-real-kubernetes` builds them."
    found: dict[str, RealCluster] = {}
    try:
        for name in CLOUDS:
            (tmp_path / name).mkdir()
            found[name] = RealCluster(tmp_path / name)
        yield found
    finally:
        for cluster in found.values():
            cluster.close()


def contexts(clouds: dict[str, RealCluster], path: Path) -> None:
    """Write a kubeconfig with both clusters."""
    merged: dict[str, Any] = {"apiVersion": "v1", "kind": "Config", "clusters": [], "users": [], "contexts": []}
    for name, cluster in clouds.items():
        one = json.loads(Path(cluster.kubeconfig("admin")).read_text())
        merged["clusters"].append({"name": name, "cluster": one["clusters"][0]["cluster"]})
        merged["users"].append({"name": name, "user": one["users"][0]["user"]})
        merged["contexts"].append({"name": name, "context": {"cluster": name, "user": name}})
    path.write_text(json.dumps(merged))


def pods_of(cluster: RealCluster) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = cluster.request("GET", f"{PODS}?labelSelector=app%3Dvllm")["items"]
    return found


async def test_each_router_reads_the_engines_of_both_clouds(clouds: dict[str, RealCluster], tmp_path: Path) -> None:
    contexts(clouds, tmp_path / "kubeconfig")
    for name, island in CLOUDS.items():
        other = next(one for one in CLOUDS if one != name)
        (tmp_path / f"values-{name}.yaml").write_text(render_values(tmp_path, island, CLOUDS[other], other))
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "helm").symlink_to(HELM)
    environment = os.environ | {
        "KUBECONFIG": str(tmp_path / "kubeconfig"), "HOME": str(tmp_path),
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
    }  # fmt: skip
    urls: dict[str, str] = {}
    ran = 0
    for block in blocks_of("two-clouds.md"):
        if re.match(r"cd deploy/terraform|kubectl .*device-plugin|kubectl .*port-forward", block):
            continue
        block = block.replace("rm eks.kubeconfig gke.kubeconfig", "")  # read below
        done = await asyncio.to_thread(
            subprocess.run, ["sh", "-euc", block], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{block}: {done.stdout}{done.stderr}"
        ran += 1
    assert ran == 3
    for name, cluster in clouds.items():
        await until(lambda cluster=cluster: len(pods_of(cluster)) == 2, "the engines' Pods", 30)
        address, ready = f"10.{ord(name[0])}.0.1", {"type": "Ready", "status": "True"}
        status = {"phase": "Running", "podIP": address, "conditions": [ready]}
        path = f"{PODS}/{pods_of(cluster)[0]['metadata']['name']}/status"
        cluster.request("PATCH", path, {"status": status}, STRATEGIC)
        urls[name] = f"http://{address}:8000"
    config_map = clouds["eks"].request("GET", "/api/v1/namespaces/llm/configmaps/warmroute")
    text = config_map["data"]["warmroute.toml"].replace("/etc/gke/kubeconfig", str(tmp_path / "gke.kubeconfig"))
    local, remote = from_table(tomllib.loads(text)).discovery
    assert (remote.label, remote.island, local.namespace) == ("gke", "gce/us-east4", "llm")
    reports: list[Targets] = []
    task = asyncio.ensure_future(create_source(remote).run(reports.append))
    await until(lambda: reports or task.done())
    assert [target.node.url for target in reports[-1].found] == [urls["gke"]]
    assert reports[-1].found[0].node.island == "gce/us-east4"
    task.cancel()
    for kind, allowed in (("pods", True), ("secrets", False)):
        done = await asyncio.to_thread(
            subprocess.run, ["kubectl", "--kubeconfig", str(tmp_path / "gke.kubeconfig"), "-n", "llm", "get", kind],
            capture_output=True, text=True,
        )  # fmt: skip
        assert (done.returncode == 0) is allowed, done.stderr
