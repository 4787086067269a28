"""A router as the chart deploys it, with the configuration in its ConfigMap and the rights of its service account, but
as a process on this machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from support.free_port import free_port
from support.kubernetes_workload import Cluster
from support.polling import until

ROOT = Path(__file__).resolve().parents[2]
HELM = ROOT / ".venv-deploy" / "bin" / "helm"
CHART = ROOT / "deploy" / "helm" / "warmroute"


def run(cluster: Cluster, *command: str | Path) -> str:
    """Run kubectl or helm as the cluster's administrator."""
    environment = os.environ | {"KUBECONFIG": cluster.kubeconfig("admin"), "HOME": str(cluster.folder)}
    done = subprocess.run(
        [str(one) for one in command], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def _account_kubeconfig(cluster: Cluster, account: str) -> str:
    """Return a kubeconfig with a token of the service account."""
    path = f"/api/v1/namespaces/default/serviceaccounts/{account}/token"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"audiences": None}}
    token = cluster.request("POST", path, request)["status"]["token"]
    config = json.loads(Path(cluster.kubeconfig("admin")).read_text())
    config["users"][0]["user"]["token"] = token
    found: Path = cluster.folder / f"{account}.conf"
    found.write_text(json.dumps(config))
    return str(found)


class ChartRouter:
    def __init__(self, cluster: Cluster, name: str) -> None:
        self.name = name
        self.config_map_path = f"/api/v1/namespaces/default/configmaps/{name}"
        self.config_map: Any = cluster.request("GET", self.config_map_path)
        self.file: Path = cluster.folder / f"{name}.toml"
        self.log: Path = cluster.folder / f"{name}.log"
        self.port = free_port()
        self.admin_port = free_port()
        self.file.write_text(self.config_map["data"]["warmroute.toml"])

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the log records of this event."""
        lines = self.log.read_text().splitlines()
        records = [json.loads(line) for line in lines if line.endswith("}")]
        return [one for one in records if one.get("event") == name]

    def times(self, event: str) -> dict[str, float]:
        """Return when it happened first, by node."""
        found: dict[str, float] = {}
        for one in self.events(event):
            found.setdefault(one["node"], datetime.fromisoformat(one["time"]).timestamp())
        return found


@asynccontextmanager
async def chart_router(cluster: Cluster, release: str, values: str) -> AsyncIterator[ChartRouter]:
    """Install the chart into the namespace `default`, and run its router."""
    path = cluster.folder / f"{release}.yaml"
    path.write_text(values)
    await asyncio.to_thread(run, cluster, HELM, "install", release, CHART, "--namespace", "default", "-f", path)
    router = ChartRouter(cluster, f"{release}-warmroute")
    environment = os.environ | {"KUBECONFIG": _account_kubeconfig(cluster, router.name)}
    with router.log.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "warmroute", "serve", "--config", str(router.file), "--port",
            str(router.port), "--admin-port", str(router.admin_port), env=environment, stderr=log,
        )  # fmt: skip
    try:
        await until(lambda: router.events("startup_complete") or process.returncode is not None, "started", 30)
        assert process.returncode is None, router.log.read_text()
        yield router
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        await asyncio.to_thread(run, cluster, HELM, "uninstall", release, "--namespace", "default")
