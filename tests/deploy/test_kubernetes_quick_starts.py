"""The quick starts on Kubernetes, followed word for word on a real API server, as far as it goes without a container
engine, a kubelet and the network. And the chain of KEDA, from the queue to the serving Pod.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import tomllib

import pytest
from support.chart_router import HELM, ROOT, chart_router, run
from support.engine_scripts import http_response, script
from support.free_port import free_port
from support.kubelet import kubelet
from support.kubernetes_workload import Cluster, Workload
from support.polling import until
from support.quick_start import blocks_of
from support.raw_client import RawConnection, chat, get, post

from warmroute import __version__
from warmroute.config import from_table

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

CANNOT_RUN = re.compile(r"podman |kubectl .*(rollout status|port-forward)|helm repo |helm -n keda |curl ")
"""A container engine, a kubelet, or the network is missing."""


def follow(cluster: Cluster, page: str) -> list[str]:
    """Run the commands of a page in the repository's directory. Return those that were run."""
    ran = []
    for block in blocks_of(page):
        block = re.sub(r"(?m)^(curl .*\\\n.*)$", "", block)
        commands = re.split(r"\n(?! |EOF|image:|config:)", block.replace("\\\n", " "))
        for command in filter(None, (one.strip() for one in commands)):
            if CANNOT_RUN.match(command):
                continue
            # the repository stays as it is
            text = command.replace("values.yaml <<", f"{cluster.folder}/values.yaml <<")
            text = text.replace("-f values.yaml", f"-f {cluster.folder}/values.yaml")
            text = re.sub(r"^helm ", f"{HELM} ", text)
            ran.append(command.splitlines()[0])
            run(cluster, "sh", "-euc", f"cd {ROOT}\n{text}")
    return ran


def test_the_quick_starts_on_kubernetes(cluster: Cluster) -> None:
    ran = follow(cluster, "kubernetes.md")
    for begin in (
        "kubectl create namespace", "kubectl -n llm apply -f deploy/kubernetes/vllm.yaml", "cat > values",
        "helm -n llm install", "kubectl -n llm scale", "helm -n llm upgrade", "kubectl -n llm get scaledobject",
        "kubectl -n llm apply -f deploy/kubernetes/redis.yaml",
    ):  # fmt: skip
        assert any(command.startswith(begin) for command in ran), (begin, ran)
    found = json.loads(run(cluster, "kubectl", "-n", "llm", "get", "deploy,scaledobject,configmap,pod", "-o", "json"))
    objects = {(one["kind"], one["metadata"]["name"]): one for one in found["items"]}
    assert objects["Deployment", "vllm"]["spec"]["replicas"] == 5
    router = objects["Deployment", "warmroute"]["spec"]
    assert router["replicas"] == 3
    assert router["template"]["spec"]["containers"][0]["image"] == f"REGISTRY/warmroute:{__version__}"
    assert objects["ScaledObject", "warmroute-engines"]["spec"]["scaleTargetRef"]["name"] == "vllm"
    config = from_table(tomllib.loads(objects["ConfigMap", "warmroute"]["data"]["warmroute.toml"]))
    assert config.prompts.download_tokenizers and config.admin.token_sha256 and config.scaling.max_nodes == 8
    pods = [name for kind, name in objects if kind == "Pod"]
    assert sum(name.startswith("vllm-") for name in pods) == 5, "the controller created them"


VALUES = """
engines: {deployment: chain, podSelector: app=chain}
keda: {enabled: true, minReplicas: 0, maxReplicas: 4}
admin: {token: secret}
tables:
  scaling:
    {interval_s: 0.5, stable_window_s: 4, panic_window_s: 2, cooldown_up_s: 1, cooldown_down_s: 3,
     scale_to_zero_after_s: 4, max_queue_per_node: 2, prewarm_prefixes: 0}
config: |
  [admission]
  max_node_backlog_ms = 50.0
"""


async def keda(workload: Workload, port: int, seen: list[int]) -> None:
    """What KEDA's operator and its HorizontalPodAutoscaler do: read the number, and set the replicas."""
    while True:
        peer = RawConnection(*await asyncio.open_connection("127.0.0.1", port))
        peer.write(get("/admin/scaling", "Authorization: Bearer secret"))
        desired = json.loads((await peer.response()).body)["desired_nodes"]
        peer.close()
        if not seen or seen[-1] != desired:
            seen.append(desired)
            await asyncio.to_thread(workload.scale, desired)
        await asyncio.sleep(0.2)


@pytest.mark.usefixtures("experiment")
async def test_the_chain_from_the_queue_to_a_serving_pod(cluster: Cluster) -> None:
    """From zero: a request waits, KEDA starts the first Pod, which serves it. More load, more Pods. No load, none."""
    port, workload, seen = free_port(), Workload(cluster, "chain"), list[int]()
    statuses: list[int] = []
    workload.create(0, port=port)
    answer = script(0.4, http_response())
    async with kubelet(workload, port, 1.0, answer) as pods, chart_router(cluster, "chain", VALUES) as router:

        async def ask(request: bytes) -> int:
            peer = RawConnection(*await asyncio.open_connection("127.0.0.1", router.port))
            peer.write(request)
            status = (await peer.response()).status
            peer.close()
            return status

        async def client(number: int) -> None:
            while True:
                statuses.append(await ask(post(chat(f"{number} {time.monotonic()}"))))

        assert await ask(get("/ready")) == 200, "without a ready router, no request would start the first Pod"
        scaling = asyncio.ensure_future(keda(workload, router.admin_port, seen))
        tasks: list[asyncio.Future[None]] = []
        try:
            await until(lambda: seen == [0])
            started_s = time.monotonic()
            assert await ask(post(chat("first"))) == 200
            print(f"first request from zero: {time.monotonic() - started_s:.1f} s")
            tasks = [asyncio.ensure_future(client(number)) for number in range(24)]
            await until(lambda: sum(1 for pod in pods.running if pod.first_request_s) >= 3, "more Pods serve", 60)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await until(lambda: seen[-1] == 0 and not pods.running, "no Pods", 90)
        finally:
            for task in [*tasks, scaling]:
                task.cancel()
            ended = await asyncio.gather(scaling, return_exceptions=True)
        assert isinstance(ended[0], asyncio.CancelledError), ended
        print(f"KEDA's metric: {seen}; {len(statuses)} requests")
        assert set(statuses) == {200} and seen[:2] == [0, 1] and max(seen) >= 3
        first_s = [pod.first_request_s - pod.ready_s for pod in pods.pods.values() if pod.first_request_s]
        assert len(first_s) >= 3 and max(first_s) < 5  # one more may start when the load ends
