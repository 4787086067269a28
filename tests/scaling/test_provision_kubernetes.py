"""The `kubernetes` provisioner against a fake API server and, in the suite `real`, against a real one with the rights
that docs/reference/provisioners.md asks for.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_kubernetes import FakeCluster
from kubernetes_workload import PODS, Cluster, Workload, define_leader_worker_sets, grant_rights
from real_kubernetes import RealCluster, missing

from warmroute.config import ConfigError, ProvisionerConfig
from warmroute.scaling.provisioner import Machine, MachineState, NoCapacity, ProvisionerError
from warmroute.scaling.provisioners.kubernetes import KubernetesProvisioner


@pytest.fixture(scope="module", params=["fake", pytest.param("real", marks=pytest.mark.real)])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    if request.param == "real":
        assert not missing(), f"{', '.join(missing())} missing. `make test-real-kubernetes` builds them."
        created: Cluster = RealCluster(folder)
        grant_rights(created)
        define_leader_worker_sets(created)
    else:
        created = FakeCluster(folder)
    yield created
    created.close()


def by_token(machines: list[Machine]) -> dict[str, Machine]:
    found = {machine.token: machine for machine in machines}
    assert len(found) == len(machines)
    return found


async def test_a_token_adds_one_replica_however_often_it_is_sent(cluster: Cluster) -> None:
    workload = Workload(cluster, "once")
    workload.create(1)
    await workload.all_running(1)
    provisioner = workload.provisioner()
    (offer,) = await provisioner.offers()
    assert (offer.name, offer.gpu, offer.usd_per_hour) == ("once", "L4", 0.0)
    await provisioner.provision(offer, "t1")
    await provisioner.provision(offer, "t1")
    again = workload.provisioner()  # another process, after a crash
    await again.provision(offer, "t1")
    assert workload.replicas() == 2
    await workload.until(lambda: len(workload.live()) == 2)
    machines = by_token(await provisioner.status())
    (first,) = [token for token in machines if token.startswith("pod-")]
    assert machines[first].state is MachineState.RUNNING and machines[first].url == "http://10.0.0.1:8000"
    assert machines["t1"].state is MachineState.PENDING and machines["t1"].offer == "once"
    await asyncio.to_thread(workload.run, machines["t1"].id, ready=False, address="fd00::7")
    machines = by_token(await again.status())
    assert machines["t1"].state is MachineState.RUNNING and machines["t1"].url == "http://[fd00::7]:8000"
    await provisioner.close()
    await again.close()


async def test_concurrent_writers_lose_no_update(cluster: Cluster) -> None:
    workload = Workload(cluster, "race")
    workload.create(0)
    provisioners = [workload.provisioner() for _ in range(3)]
    (offer,) = await provisioners[0].offers()
    tokens = [f"t{number}" for number in range(4)]
    for _attempt in range(20):  # a writer that lost eight times in a row gets an error
        results = await asyncio.gather(
            *(provisioner.provision(offer, token) for provisioner in provisioners for token in tokens),
            return_exceptions=True,
        )
        if not any(results):
            break
        assert all(one is None or "changed by others" in str(one) for one in results)
    assert workload.replicas() == 4
    await workload.until(lambda: len(workload.live()) == 4)
    assert sorted(by_token(await provisioners[0].status())) == tokens
    for provisioner in provisioners:
        await provisioner.close()


async def test_the_controller_ends_exactly_the_chosen_pod(cluster: Cluster) -> None:
    workload = Workload(cluster, "chosen")
    workload.create(0)
    provisioner = workload.provisioner()
    (offer,) = await provisioner.offers()
    for token in ("t1", "t2", "t3", "t4"):
        await provisioner.provision(offer, token)
        await workload.until(lambda token=token: len(workload.live()) == int(token[1]))  # type: ignore[misc]
        await provisioner.status()  # assigns the token
    machines = by_token(await provisioner.status())
    for token, machine in machines.items():  # the chosen Pod has been ready for longest: by itself it would be last
        await asyncio.to_thread(workload.run, machine.id, since="2026-01-01" if token == "t1" else "2026-01-02")
    before = workload.live()
    oldest = by_token(await provisioner.status())["t1"]
    await provisioner.terminate(oldest)
    await workload.until(lambda: oldest.id not in workload.live())
    assert workload.live() == [name for name in before if name != oldest.id]
    await provisioner.terminate(oldest)
    assert workload.replicas() == 3
    machines = by_token(await provisioner.status())
    assert machines["t1"].state is MachineState.TERMINATING and not machines["t1"].reclaimed
    assert {machines[token].state for token in ("t2", "t3", "t4")} == {MachineState.RUNNING}
    await provisioner.provision(offer, "t5")
    assert workload.replicas() == 4
    await provisioner.close()


async def test_no_pod_is_ended_while_another_is_starting(cluster: Cluster) -> None:
    workload = Workload(cluster, "starts")
    workload.create(2)
    await workload.all_running(2)
    provisioner = workload.provisioner()
    (offer,) = await provisioner.offers()
    await provisioner.provision(offer, "new")
    await workload.until(lambda: len(workload.live()) == 3)
    machines = by_token(await provisioner.status())
    serving = next(one for one in machines.values() if one.token != "new")
    with pytest.raises(
        ProvisionerError, match=f"{machines['new'].id} is starting, and the controller would end it before"
    ):
        await provisioner.terminate(serving)
    assert workload.replicas() == 3
    await provisioner.terminate(machines["new"])
    await workload.until(lambda: len(workload.live()) == 2)
    assert serving.id in workload.live() and workload.replicas() == 2
    assert "new" not in by_token(await provisioner.status())
    await provisioner.close()


class LateControllers(FakeCluster):
    """Controllers that see a change after a delay, as real ones do."""

    late_s = 0.0
    _seeing = False

    def _reconcile(self) -> None:
        if not self.late_s:
            super()._reconcile()
        elif not self._seeing:
            self._seeing = True
            threading.Timer(self.late_s, self._see).start()

    def _see(self) -> None:
        with self._lock:
            self._seeing = False
            super()._reconcile()


@pytest.fixture
def late(tmp_path: Path) -> Iterator[LateControllers]:
    created = LateControllers(tmp_path)
    yield created
    created.close()


async def running(workload: Workload, *tokens: str) -> KubernetesProvisioner:
    workload.create(0)
    provisioner = workload.provisioner()
    (offer,) = await provisioner.offers()
    for token in tokens:
        await provisioner.provision(offer, token)
        await provisioner.status()
    await workload.all_running(len(tokens))
    return provisioner


async def test_two_concurrent_terminations_end_the_right_pods(late: LateControllers) -> None:
    workload = Workload(late, "two")
    provisioner = await running(workload, "t1", "t2", "t3", "t4")
    machines = by_token(await provisioner.status())
    late.late_s = 0.25

    async def end(token: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await provisioner.terminate(machines[token])

    await asyncio.gather(end("t1", 0.0), end("t2", 0.3), end("t3", 0.4))
    await workload.until(lambda: workload.live() == [machines["t4"].id])
    assert workload.replicas() == 1
    await provisioner.close()


async def test_an_eviction_meanwhile_replaces_the_termination(late: LateControllers) -> None:
    workload = Workload(late, "meanwhile")
    provisioner = await running(workload, "t1", "t2", "t3")
    machines = by_token(await provisioner.status())
    late.late_s = 0.6
    ending = asyncio.create_task(provisioner.terminate(machines["t1"]))
    await workload.until(lambda: workload.replicas() == 2)
    await asyncio.to_thread(late.request, "DELETE", f"{PODS}/{machines['t2'].id}")
    with pytest.raises(ProvisionerError, match=f"ended {machines['t2'].id} instead of {machines['t1'].id}"):
        await ending
    await provisioner.terminate(machines["t1"])  # the controller loop tries again
    await asyncio.sleep(2 * late.late_s)
    assert workload.replicas() == 2 and workload.live() == sorted(machines[token].id for token in ("t1", "t3"))
    after = {machine.token: machine for machine in await provisioner.status() if machine.id in workload.live()}
    assert {token: machine.id for token, machine in after.items()} == {
        "t2": machines["t1"].id,
        "t3": machines["t3"].id,
    }
    await provisioner.close()


@pytest.mark.parametrize("kind", ["deployment", "statefulset"])
async def test_pods_of_other_workloads_with_the_same_labels_are_ignored(cluster: Cluster, kind: str) -> None:
    """Controllers find their Pods by their owner, whatever labels match."""
    workload, other = Workload(cluster, f"mine-{kind}", kind), Workload(cluster, f"mine-{kind}-canary", kind)
    workload.create(1)
    await workload.all_running(1)
    (mine,) = workload.live()
    other.create(1, also={"app": workload.name, "track": "canary"})
    labels = {"app": workload.name, "debugged-by": "somebody"}
    stray = {
        "metadata": {"name": f"stray-{kind}", "labels": labels},
        "spec": {"containers": [{"name": "e", "image": "e"}]},
    }
    if kind == "statefulset":  # a StatefulSet adopts only Pods with its own names
        await asyncio.to_thread(cluster.request, "POST", PODS, {"apiVersion": "v1", "kind": "Pod", **stray})
    await workload.until(lambda: len(workload.live()) == (3 if kind == "statefulset" else 2))
    provisioner = workload.provisioner()
    assert [machine.id for machine in await provisioner.status()] == [mine]
    await provisioner.close()


async def test_a_token_without_a_pod_can_be_terminated(cluster: Cluster) -> None:
    workload = Workload(cluster, "gone")
    workload.create(0)
    provisioner = workload.provisioner()
    (offer,) = await provisioner.offers()
    await provisioner.provision(offer, "t1")
    machine = Machine(id="token t1", token="t1", offer="gone", state=MachineState.PENDING)
    await provisioner.terminate(machine)
    await provisioner.terminate(machine)
    assert workload.replicas() == 0
    await workload.until(lambda: workload.live() == [])
    assert await provisioner.status() == []
    await provisioner.close()


async def test_an_evicted_pod_is_reclaimed_and_its_token_goes_to_the_next(cluster: Cluster) -> None:
    workload = Workload(cluster, "evicted")
    workload.create(0)
    provisioner = workload.provisioner()
    (offer,) = await provisioner.offers()
    await provisioner.provision(offer, "t1")
    await workload.all_running(1)
    old = by_token(await provisioner.status())["t1"]
    await asyncio.to_thread(cluster.request, "DELETE", f"{PODS}/{old.id}")
    await workload.until(lambda: len(workload.live()) == 1)
    machines = await provisioner.status()
    leaving = next(machine for machine in machines if machine.id == old.id)
    assert leaving.state is MachineState.TERMINATING and leaving.reclaimed
    assert by_token(machines)["t1"].id == workload.live()[0] != old.id
    await provisioner.close()


async def test_island_and_reclaim_come_from_the_kubernetes_node(cluster: Cluster) -> None:
    workload = Workload(cluster, "nodes")
    workload.create(2)
    await workload.until(lambda: len(workload.live()) == 2)
    labels = {"topology.kubernetes.io/region": "us-east-1", "karpenter.sh/capacity-type": "spot"}
    for name, taints in (("spot-1", []), ("spot-2", [{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}])):
        node = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": labels},
            "spec": {"providerID": f"aws:///us-east-1a/{name}", "taints": taints},
        }
        cluster.request("POST", "/api/v1/nodes", node)
    first, second = workload.live()
    workload.run(first, node="spot-1")
    workload.run(second, node="spot-2")
    provisioner = workload.provisioner()
    machines = {machine.id: machine for machine in await provisioner.status()}
    assert machines[first].island == machines[second].island == "aws/us-east-1"
    assert not machines[first].reclaimed
    assert machines[second].reclaimed and machines[second].reason == "its node has the taint karpenter.sh/disrupted"
    await provisioner.close()


async def test_only_the_last_pod_of_a_stateful_set_is_removable(cluster: Cluster) -> None:
    workload = Workload(cluster, "ordered", "statefulset")
    workload.create(3)
    await workload.all_running(3)
    provisioner = workload.provisioner()
    machines = {machine.id: machine for machine in await provisioner.status()}
    assert [name for name, machine in machines.items() if machine.removable] == ["ordered-2"]
    with pytest.raises(ProvisionerError, match="a statefulset ends its last Pod, ordered-2, before ordered-0"):
        await provisioner.terminate(machines["ordered-0"])
    await provisioner.terminate(machines["ordered-2"])
    assert workload.replicas() == 2
    await workload.until(lambda: workload.live() == ["ordered-0", "ordered-1"])
    await provisioner.close()


async def test_a_leader_worker_set_scales_by_groups(cluster: Cluster) -> None:
    """Neither cluster has its controller: the test creates the Pods."""
    workload = Workload(cluster, "groups", "leaderworkerset")
    workload.create(1)
    provisioner = workload.provisioner()
    (offer,) = await provisioner.offers()
    await provisioner.provision(offer, "t1")
    await provisioner.provision(offer, "t1")
    assert workload.replicas() == 2
    for name, worker in (("groups-0", "0"), ("groups-0-1", "1"), ("groups-1", "0")):
        labels = {
            "app": "groups",
            "leaderworkerset.sigs.k8s.io/name": "groups",
            "leaderworkerset.sigs.k8s.io/worker-index": worker,
        }
        spec = {"containers": [{"name": "engine", "image": "e"}]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}
        await asyncio.to_thread(cluster.request, "POST", PODS, pod)
        await asyncio.to_thread(workload.run, name)
    machines = {machine.id: machine for machine in await provisioner.status()}
    assert sorted(machines) == ["groups-0", "groups-1"]
    assert machines["groups-1"].token == "t1" and machines["groups-1"].removable and not machines["groups-0"].removable
    ending = asyncio.create_task(provisioner.terminate(machines["groups-1"]))
    await workload.until(lambda: workload.replicas() == 1)
    await asyncio.to_thread(cluster.request, "DELETE", f"{PODS}/groups-1")  # as its controller does
    await ending
    assert [machine.id for machine in await provisioner.status() if machine.state is MachineState.RUNNING] == [
        "groups-0"
    ]
    await provisioner.close()


async def test_max_nodes_limits_the_replicas(cluster: Cluster) -> None:
    workload = Workload(cluster, "maximum")
    workload.create(1)
    provisioner = workload.provisioner(max_nodes=1)
    (offer,) = await provisioner.offers()
    with pytest.raises(NoCapacity, match="1 replicas, maximum is 1"):
        await provisioner.provision(offer, "t1")
    await provisioner.close()


async def test_a_refusal_by_the_cluster_is_a_provisioner_error(cluster: Cluster) -> None:
    provisioner = Workload(cluster, "nowhere").provisioner()
    with pytest.raises(ProvisionerError, match=r'k8s: status: .*"nowhere" not found'):
        await provisioner.status()
    await provisioner.close()


async def test_an_unreachable_cluster_is_a_provisioner_error(tmp_path: Path) -> None:
    gone = FakeCluster(tmp_path)
    provisioner = Workload(gone, "x").provisioner(timeout_s=2.0)
    gone.close()
    with pytest.raises(ProvisionerError, match="k8s: status: "):
        await provisioner.status()
    await provisioner.close()


def kubeconfig_with_plugin(cluster: Cluster, plugin: Path) -> str:
    """Return a kubeconfig whose user's token comes from this program."""
    file = Path(cluster.kubeconfig("router"))
    table = json.loads(file.read_text())
    variables = [{"name": "OF_THE_KUBECONFIG", "value": "a=b"}]
    version = "client.authentication.k8s.io/v1beta1"
    table["users"][0]["user"] = {"exec": {"apiVersion": version, "command": str(plugin), "env": variables}}
    file.write_text(json.dumps(table))
    return str(file)


async def test_a_plugin_of_the_kubeconfig_does_not_see_the_routers_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NODE_API_KEY", "secret")
    monkeypatch.setenv("MY_CLOUD_REGION", "here")
    seen, plugin = tmp_path / "seen", tmp_path / "plugin"
    plugin.write_text(f'#!/bin/sh\nenv > {seen}\necho \'{{"status": {{"token": "router"}}}}\'\n')
    plugin.chmod(0o755)
    cluster = FakeCluster(tmp_path)
    try:
        workload = Workload(cluster, "plugin")
        workload.create(1)
        file = kubeconfig_with_plugin(cluster, plugin)
        provisioner = KubernetesProvisioner(
            ProvisionerConfig(
                kind="kubernetes", gpu="L4", workload_name="plugin", kubeconfig=file, pass_env=("MY_CLOUD_*",)
            )
        )
        await provisioner.status()
        await provisioner.close()
    finally:
        cluster.close()
    variables = dict(line.split("=", 1) for line in seen.read_text().splitlines())
    assert "NODE_API_KEY" not in variables and "secret" not in seen.read_text()
    assert variables["OF_THE_KUBECONFIG"] == "a=b" and variables["MY_CLOUD_REGION"] == "here" and variables["PATH"]


def test_a_missing_kubeconfig_is_a_configuration_error(tmp_path: Path) -> None:
    here = FakeCluster(tmp_path)
    with pytest.raises(ConfigError, match=r"provisioners.kubeconfig \(k8s\): Context 'other' not found"):
        Workload(here, "x").provisioner(context="other")
    here.close()
    nowhere = ProvisionerConfig(kind="kubernetes", gpu="L4", workload_name="x", kubeconfig=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"provisioners.kubeconfig \(kubernetes\): .*none"):
        KubernetesProvisioner(nowhere)
