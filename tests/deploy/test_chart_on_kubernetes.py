"""The chart on a real API server: applied by helm, checked by kubectl. A router runs with its configuration and the
rights of its service account, while a Deployment of engines is scaled under load.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import pytest
from support.chart_router import ROOT, chart_router, run
from support.engine_scripts import http_response, script
from support.free_port import free_port
from support.kubelet import kubelet
from support.kubernetes_workload import MERGE, Cluster, Workload
from support.polling import until
from support.raw_client import RawConnection, chat, post

VALUES = """
engines: {{deployment: {name}, podSelector: app={name}}}
keda: {{enabled: true}}
networkPolicy: {{enabled: true}}
admin: {{token: secret}}
serviceMonitor: {{enabled: true}}
prometheusRule: {{enabled: true}}
grafanaDashboard: {{enabled: true}}
config: |
  [routing]
  policy = "{policy}"
"""
ANSWER_S = 0.05
CLIENTS = 12
"""More than two for each engine, and each with prompts of its own: so every engine has to get some."""
WORDS = " ".join(f"word{number}" for number in range(300))
pytestmark = pytest.mark.real


def test_the_manifests_pass_the_api_servers_checks(cluster: Cluster) -> None:
    """1.20 knows PodDisruptionBudgets only as policy/v1beta1."""
    for name in ("warmroute.yaml", "warmroute-keda.yaml", "vllm.yaml", "redis.yaml"):
        text = (ROOT / "deploy" / "kubernetes" / name).read_text().replace("policy/v1\n", "policy/v1beta1\n")
        path = cluster.folder / name
        path.write_text(text)
        applied = run(cluster, "kubectl", "apply", "--dry-run=server", "-f", path)
        assert all("(server dry run)" in line for line in applied.splitlines()), applied


@pytest.mark.parametrize("policy", ["price", "round_robin"])
async def test_an_applied_chart_serves_a_deployment_that_is_scaled_under_load(cluster: Cluster, policy: str) -> None:
    """2 → 5 → 1. The router may use each Pod within 2 s of its being ready. The load needs all of them, so each gets
    requests by then, too."""
    name = policy.replace("_", "-")
    port, workload = free_port(), Workload(cluster, name)
    workload.create(2, port=port)
    statuses: list[int] = []
    added: set[str] = set()
    numbers = itertools.count()
    answer = script(ANSWER_S, http_response())
    async with (
        kubelet(workload, port, 2.0, answer) as pods,
        chart_router(cluster, name, VALUES.format(name=name, policy=policy)) as router,
    ):

        async def client() -> None:
            while True:
                peer = RawConnection(*await asyncio.open_connection("127.0.0.1", router.port))
                peer.write(post(chat(f"{next(numbers)} {WORDS}")))
                statuses.append((await peer.response()).status)
                peer.close()

        await until(lambda: len(router.times("node_up")) == 2, "nodes up", 30)
        load_s = time.monotonic()
        tasks = [asyncio.ensure_future(client()) for _ in range(CLIENTS)]
        try:
            for count in (2, 5, 1):
                await asyncio.to_thread(workload.scale, count)
                await until(lambda count=count: len(pods.running) == count, f"{count} Pods", 30)
                added |= pods.pods.keys()
                removed = len(added) - count
                await until(lambda removed=removed: len(router.events("node_removed")) >= removed, "nodes removed", 30)
                await until(lambda: all(pod.first_request_s for pod in pods.running), "requests for all", 30)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert set(statuses) == {200} and len(pods.pods) == 5 and removed == 4
        up = router.times("node_up")
        eligible_s = {pod.name: up[pod.name] - pod.ready_at for pod in pods.pods.values() if pod.ready_s > load_s}
        first_s = {
            pod.name: (pod.first_request_s or 1e9) - max(pod.ready_s, load_s) for pod in pods.pods.values()
        }  # fmt: skip
        late = {
            pod.name: max([0.0, *(one.at_s - pod.terminating_s for one in pod.engine.seen)])
            for pod in pods.pods.values() if pod.terminating_s
        }  # fmt: skip
        print(f"{policy}: {len(statuses)} requests: eligible {eligible_s}, first {first_s}, last {late}")
        assert max(eligible_s.values()) < 2.0 and max(first_s.values()) < 2.0
        assert max(late.values()) < 0.5, "it was terminating"
        # a changed ConfigMap, which the kubelet would write to the volume, is reloaded
        data = router.config_map["data"]
        data["warmroute.toml"] += "\n[limits]\nbody_bytes = 1000000\n"
        changed: Any = cluster.request("PATCH", router.config_map_path, {"data": data}, MERGE)
        router.file.write_text(changed["data"]["warmroute.toml"])
        await until(lambda: router.events("config_reloaded"), "reloaded")
        assert not router.events("discovery_failed")
