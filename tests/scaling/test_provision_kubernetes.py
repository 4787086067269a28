"""The `kubernetes` provisioner: against a stand-in for the API server always, and, where it has been built, against
a real one with the rights that docs/provisioners.md asks for and no others.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_kubernetes import StandIn
from real_kubernetes import RealCluster, missing

from warmroute.config import ConfigError, ProvisionerConfig
from warmroute.scaling.provisioner import Machine, MachineState, NoCapacity, ProvisionerError
from warmroute.scaling.provisioners.kubernetes import KubernetesProvisioner

PODS = "/api/v1/namespaces/default/pods"
DEPLOYMENTS = "/apis/apps/v1/namespaces/default/deployments"
SETS = "/apis/apps/v1/namespaces/default/statefulsets"
GROUPS = "/apis/leaderworkerset.x-k8s.io/v1/namespaces/default/leaderworkersets"
MERGE, STRATEGIC = "application/merge-patch+json", "application/strategic-merge-patch+json"
DOCS = Path(__file__).resolve().parents[2] / "docs" / "provisioners.md"

Cluster = Any
"""StandIn or RealCluster: both have kubeconfig, ask and close."""


@pytest.fixture(scope="module", params=["stand-in", pytest.param("real", marks=pytest.mark.real)])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    if request.param == "real":
        if missing():
            pytest.skip(f"{', '.join(missing())} missing: run `make test-real-kubernetes`, which builds them")
        made: Cluster = RealCluster(folder)
        give_rights(made)
        define_groups(made)
    else:
        made = StandIn(folder)
    yield made
    made.close()


def give_rights(cluster: Cluster) -> None:
    """What the documentation says the router needs."""
    found = re.search(r"```yaml\n(apiVersion: rbac.*?)```", DOCS.read_text(), re.DOTALL)
    assert found
    paths = {"Role": "namespaces/default/roles", "ClusterRole": "clusterroles"}
    for role in yaml.safe_load_all(found[1]):
        kind = role["kind"]
        cluster.ask("POST", f"/apis/rbac.authorization.k8s.io/v1/{paths[kind]}", role)
        binding = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": f"{kind}Binding",
            "metadata": {"name": "router"},
            "subjects": [{"kind": "User", "name": "router", "apiGroup": "rbac.authorization.k8s.io"}],
            "roleRef": {"kind": kind, "name": role["metadata"]["name"], "apiGroup": "rbac.authorization.k8s.io"},
        }
        cluster.ask("POST", f"/apis/rbac.authorization.k8s.io/v1/{paths[kind].removesuffix('s')}bindings", binding)


def define_groups(cluster: Cluster) -> None:
    """The resource of LeaderWorkerSet; its controller is not there."""
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
    cluster.ask("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)


class Bench:
    """A workload of its own in the cluster, and the kubelet's part of the play."""

    def __init__(self, cluster: Cluster, name: str, kind: str = "deployment") -> None:
        self.cluster, self.name, self.kind = cluster, name, kind
        self.path = {"deployment": DEPLOYMENTS, "statefulset": SETS, "leaderworkerset": GROUPS}[kind] + f"/{name}"

    def create(self, replicas: int, also: dict[str, str] | None = None) -> None:
        labels = {"app": self.name} | (also or {})
        spec: dict[str, Any] = {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "engine", "image": "e"}]}},
        }
        group, kind = "apps/v1", {"deployment": "Deployment", "statefulset": "StatefulSet"}.get(self.kind, "")
        if self.kind == "statefulset":
            spec |= {"serviceName": self.name, "podManagementPolicy": "Parallel"}
        if self.kind == "leaderworkerset":
            group, kind, spec = "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", {"replicas": replicas}
        body = {"apiVersion": group, "kind": kind, "metadata": {"name": self.name}, "spec": spec}
        self.cluster.ask("POST", self.path.rpartition("/")[0], body)

    def pods(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.cluster.ask("GET", f"{PODS}?labelSelector=app%3D{self.name}")["items"]
        return sorted(found, key=lambda pod: pod["metadata"]["name"])

    def live(self) -> list[str]:
        return [pod["metadata"]["name"] for pod in self.pods() if "deletionTimestamp" not in pod["metadata"]]

    def replicas(self) -> int:
        count: int = self.cluster.ask("GET", self.path)["spec"]["replicas"]
        return count

    def run(
        self, pod: str, *, ready: bool = True, address: str = "10.0.0.9", node: str = "n1", since: str = "2026-01-02"
    ) -> None:
        """As its scheduler and its kubelet would say."""
        target = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": pod},
            "target": {"kind": "Node", "name": node},
        }
        self.cluster.ask("POST", f"{PODS}/{pod}/binding", target)
        condition = {
            "type": "Ready",
            "status": "True" if ready else "False",
            "lastTransitionTime": f"{since}T00:00:00Z",
        }
        status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "conditions": [condition]}
        self.cluster.ask("PATCH", f"{PODS}/{pod}/status", {"status": status}, STRATEGIC)

    async def until(self, what: Callable[[], bool]) -> None:
        give_up_s = time.monotonic() + 20
        while not await asyncio.to_thread(what):
            assert time.monotonic() < give_up_s, "the controller did not do it"
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


def by_token(machines: list[Machine]) -> dict[str, Machine]:
    found = {machine.token: machine for machine in machines}
    assert len(found) == len(machines)
    return found


async def test_a_token_adds_one_replica_however_often_it_is_sent(cluster: Cluster) -> None:
    bench = Bench(cluster, "once")
    bench.create(1)
    await bench.all_running(1)
    cloud = bench.provisioner()
    (offer,) = await cloud.offers()
    assert (offer.name, offer.gpu, offer.usd_per_hour) == ("once", "L4", 0.0)
    await cloud.provision(offer, "t1")
    await cloud.provision(offer, "t1")
    again = bench.provisioner()  # another process, after a crash
    await again.provision(offer, "t1")
    assert bench.replicas() == 2
    await bench.until(lambda: len(bench.live()) == 2)
    machines = by_token(await cloud.status())
    (first,) = [token for token in machines if token.startswith("pod-")]
    assert machines[first].state is MachineState.RUNNING and machines[first].url == "http://10.0.0.1:8000"
    assert machines["t1"].state is MachineState.PENDING and machines["t1"].offer == "once"
    await asyncio.to_thread(bench.run, machines["t1"].id, ready=False, address="fd00::7")
    machines = by_token(await again.status())
    assert machines["t1"].state is MachineState.RUNNING and machines["t1"].url == "http://[fd00::7]:8000"
    assert machines["t1"].started_s == pytest.approx(time.time(), abs=300)
    await cloud.close()
    await again.close()


async def test_concurrent_writers_lose_no_update(cluster: Cluster) -> None:
    bench = Bench(cluster, "race")
    bench.create(0)
    clouds = [bench.provisioner() for _ in range(3)]
    (offer,) = await clouds[0].offers()
    tokens = [f"t{number}" for number in range(4)]
    for _attempt in range(20):  # one that lost against the others eight times in a row is told so, and tries again
        told = await asyncio.gather(
            *(cloud.provision(offer, token) for cloud in clouds for token in tokens), return_exceptions=True
        )
        if not any(told):
            break
        assert all(one is None or "changed by others" in str(one) for one in told)
    assert bench.replicas() == 4
    await bench.until(lambda: len(bench.live()) == 4)
    assert sorted(by_token(await clouds[0].status())) == tokens
    for cloud in clouds:
        await cloud.close()


async def test_the_controller_ends_exactly_the_chosen_pod(cluster: Cluster) -> None:
    bench = Bench(cluster, "victim")
    bench.create(0)
    cloud = bench.provisioner()
    (offer,) = await cloud.offers()
    for token in ("t1", "t2", "t3", "t4"):
        await cloud.provision(offer, token)
        await bench.until(lambda token=token: len(bench.live()) == int(token[1]))  # type: ignore[misc]
        await cloud.status()  # hands out the token
    machines = by_token(await cloud.status())
    for token, machine in machines.items():  # the victim has been ready for longest: left to itself, it would be last
        await asyncio.to_thread(bench.run, machine.id, since="2026-01-01" if token == "t1" else "2026-01-02")
    before = bench.live()
    oldest = by_token(await cloud.status())["t1"]
    await cloud.terminate(oldest)
    await bench.until(lambda: oldest.id not in bench.live())
    assert bench.live() == [name for name in before if name != oldest.id]
    await cloud.terminate(oldest)
    assert bench.replicas() == 3
    machines = by_token(await cloud.status())
    assert machines["t1"].state is MachineState.TERMINATING and not machines["t1"].reclaimed
    assert {machines[token].state for token in ("t2", "t3", "t4")} == {MachineState.RUNNING}
    await cloud.provision(offer, "t5")
    assert bench.replicas() == 4
    await cloud.close()


async def test_no_pod_is_ended_while_another_is_starting(cluster: Cluster) -> None:
    bench = Bench(cluster, "starts")
    bench.create(2)
    await bench.all_running(2)
    cloud = bench.provisioner()
    (offer,) = await cloud.offers()
    await cloud.provision(offer, "new")
    await bench.until(lambda: len(bench.live()) == 3)
    machines = by_token(await cloud.status())
    serving = next(one for one in machines.values() if one.token != "new")
    with pytest.raises(ProvisionerError, match=f"{machines['new'].id} still starts, and the controller would end that"):
        await cloud.terminate(serving)
    assert bench.replicas() == 3
    await cloud.terminate(machines["new"])  # given back, it makes room
    await bench.until(lambda: len(bench.live()) == 2)
    assert serving.id in bench.live() and bench.replicas() == 2
    assert "new" not in by_token(await cloud.status())
    await cloud.close()


class LateControllers(StandIn):
    """They see a change a while after it was written, as real ones do."""

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
    made = LateControllers(tmp_path)
    yield made
    made.close()


async def running(bench: Bench, *tokens: str) -> KubernetesProvisioner:
    bench.create(0)
    cloud = bench.provisioner()
    (offer,) = await cloud.offers()
    for token in tokens:
        await cloud.provision(offer, token)
        await cloud.status()
    await bench.all_running(len(tokens))
    return cloud


async def test_two_concurrent_terminations_end_the_right_pods(late: LateControllers) -> None:
    bench = Bench(late, "two")
    cloud = await running(bench, "t1", "t2", "t3", "t4")
    machines = by_token(await cloud.status())
    late.late_s = 0.25

    async def end(token: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await cloud.terminate(machines[token])

    await asyncio.gather(end("t1", 0.0), end("t2", 0.3), end("t3", 0.4))
    await bench.until(lambda: bench.live() == [machines["t4"].id])
    assert bench.replicas() == 1
    await cloud.close()


async def test_an_eviction_meanwhile_replaces_the_termination(late: LateControllers) -> None:
    bench = Bench(late, "meanwhile")
    cloud = await running(bench, "t1", "t2", "t3")
    machines = by_token(await cloud.status())
    late.late_s = 0.6
    ending = asyncio.create_task(cloud.terminate(machines["t1"]))
    await bench.until(lambda: bench.replicas() == 2)
    await asyncio.to_thread(late.ask, "DELETE", f"{PODS}/{machines['t2'].id}")
    with pytest.raises(ProvisionerError, match=f"ended {machines['t2'].id} instead of {machines['t1'].id}"):
        await ending
    await cloud.terminate(machines["t1"])  # as whoever asked for its end does
    await asyncio.sleep(2 * late.late_s)
    assert bench.replicas() == 2 and bench.live() == sorted(machines[token].id for token in ("t1", "t3"))
    after = {machine.token: machine for machine in await cloud.status() if machine.id in bench.live()}
    assert {token: machine.id for token, machine in after.items()} == {
        "t2": machines["t1"].id,
        "t3": machines["t3"].id,
    }
    await cloud.close()


@pytest.mark.parametrize("kind", ["deployment", "statefulset"])
async def test_pods_of_other_workloads_with_the_same_labels_are_ignored(cluster: Cluster, kind: str) -> None:
    """Controllers tell their own by their owner, whatever labels fit."""
    bench, other = Bench(cluster, f"mine-{kind}", kind), Bench(cluster, f"mine-{kind}-canary", kind)
    bench.create(1)
    await bench.all_running(1)
    (mine,) = bench.live()
    other.create(1, also={"app": bench.name, "track": "canary"})
    labels = {"app": bench.name, "debugged-by": "somebody"}
    stray = {
        "metadata": {"name": f"stray-{kind}", "labels": labels},
        "spec": {"containers": [{"name": "e", "image": "e"}]},
    }
    if kind == "statefulset":  # there a Pod is taken in by its name alone, which this one has not
        await asyncio.to_thread(cluster.ask, "POST", PODS, {"apiVersion": "v1", "kind": "Pod", **stray})
    await bench.until(lambda: len(bench.live()) == (3 if kind == "statefulset" else 2))
    cloud = bench.provisioner()
    assert [machine.id for machine in await cloud.status()] == [mine]
    await cloud.close()


async def test_a_token_without_a_pod_can_be_terminated(cluster: Cluster) -> None:
    bench = Bench(cluster, "gone")
    bench.create(0)
    cloud = bench.provisioner()
    (offer,) = await cloud.offers()
    await cloud.provision(offer, "t1")
    machine = Machine(id="token t1", token="t1", offer="gone", state=MachineState.PENDING)
    await cloud.terminate(machine)
    await cloud.terminate(machine)
    assert bench.replicas() == 0
    await bench.until(lambda: bench.live() == [])
    assert await cloud.status() == []
    await cloud.close()


async def test_an_evicted_pod_is_reclaimed_and_its_token_goes_to_the_next(cluster: Cluster) -> None:
    bench = Bench(cluster, "evicted")
    bench.create(0)
    cloud = bench.provisioner()
    (offer,) = await cloud.offers()
    await cloud.provision(offer, "t1")
    await bench.all_running(1)
    old = by_token(await cloud.status())["t1"]
    await asyncio.to_thread(cluster.ask, "DELETE", f"{PODS}/{old.id}")
    await bench.until(lambda: len(bench.live()) == 1)
    machines = await cloud.status()
    going = next(machine for machine in machines if machine.id == old.id)
    assert going.state is MachineState.TERMINATING and going.reclaimed
    assert by_token(machines)["t1"].id == bench.live()[0] != old.id
    await cloud.close()


async def test_island_and_reclaim_come_from_the_kubernetes_node(cluster: Cluster) -> None:
    bench = Bench(cluster, "nodes")
    bench.create(2)
    await bench.until(lambda: len(bench.live()) == 2)
    labels = {"topology.kubernetes.io/region": "us-east-1", "karpenter.sh/capacity-type": "spot"}
    for name, taints in (("spot-1", []), ("spot-2", [{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}])):
        node = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": labels},
            "spec": {"providerID": f"aws:///us-east-1a/{name}", "taints": taints},
        }
        cluster.ask("POST", "/api/v1/nodes", node)
    first, second = bench.live()
    bench.run(first, node="spot-1")
    bench.run(second, node="spot-2")
    cloud = bench.provisioner()
    machines = {machine.id: machine for machine in await cloud.status()}
    assert machines[first].island == machines[second].island == "aws/us-east-1"
    assert not machines[first].reclaimed
    assert machines[second].reclaimed and machines[second].reason == "its node has the taint karpenter.sh/disrupted"
    await cloud.close()


async def test_only_the_last_pod_of_a_stateful_set_is_removable(cluster: Cluster) -> None:
    bench = Bench(cluster, "ordered", "statefulset")
    bench.create(3)
    await bench.all_running(3)
    cloud = bench.provisioner()
    machines = {machine.id: machine for machine in await cloud.status()}
    assert [name for name, machine in machines.items() if machine.removable] == ["ordered-2"]
    with pytest.raises(ProvisionerError, match="a statefulset ends its last Pod, ordered-2, before ordered-0"):
        await cloud.terminate(machines["ordered-0"])
    await cloud.terminate(machines["ordered-2"])
    assert bench.replicas() == 2
    await bench.until(lambda: bench.live() == ["ordered-0", "ordered-1"])
    await cloud.close()


async def test_a_leader_worker_set_scales_by_groups(cluster: Cluster) -> None:
    """Its controller is in neither cluster: the test makes the leaders' Pods."""
    bench = Bench(cluster, "groups", "leaderworkerset")
    bench.create(1)
    cloud = bench.provisioner()
    (offer,) = await cloud.offers()
    await cloud.provision(offer, "t1")
    await cloud.provision(offer, "t1")
    assert bench.replicas() == 2
    for name, worker in (("groups-0", "0"), ("groups-0-1", "1"), ("groups-1", "0")):
        labels = {
            "app": "groups",
            "leaderworkerset.sigs.k8s.io/name": "groups",
            "leaderworkerset.sigs.k8s.io/worker-index": worker,
        }
        spec = {"containers": [{"name": "engine", "image": "e"}]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}
        await asyncio.to_thread(cluster.ask, "POST", PODS, pod)
        await asyncio.to_thread(bench.run, name)
    machines = {machine.id: machine for machine in await cloud.status()}
    assert sorted(machines) == ["groups-0", "groups-1"]
    assert machines["groups-1"].token == "t1" and machines["groups-1"].removable and not machines["groups-0"].removable
    ending = asyncio.create_task(cloud.terminate(machines["groups-1"]))
    await bench.until(lambda: bench.replicas() == 1)
    await asyncio.to_thread(cluster.ask, "DELETE", f"{PODS}/groups-1")  # as its controller does
    await ending
    assert [machine.id for machine in await cloud.status() if machine.state is MachineState.RUNNING] == ["groups-0"]
    await cloud.close()


async def test_max_nodes_limits_the_replicas(cluster: Cluster) -> None:
    bench = Bench(cluster, "most")
    bench.create(1)
    cloud = bench.provisioner(max_nodes=1)
    (offer,) = await cloud.offers()
    with pytest.raises(NoCapacity, match="1 replicas are there, which is the most"):
        await cloud.provision(offer, "t1")
    await cloud.close()


async def test_a_refusal_by_the_cluster_is_a_provisioner_error(cluster: Cluster) -> None:
    cloud = Bench(cluster, "nowhere").provisioner()
    with pytest.raises(ProvisionerError, match=r'k8s: status: .*"nowhere" not found'):
        await cloud.status()
    await cloud.close()


async def test_an_unreachable_cluster_is_a_provisioner_error(tmp_path: Path) -> None:
    gone = StandIn(tmp_path)
    cloud = Bench(gone, "x").provisioner(timeout_s=2.0)
    gone.close()
    with pytest.raises(ProvisionerError, match="k8s: status: "):
        await cloud.status()
    await cloud.close()


def test_a_missing_kubeconfig_is_a_configuration_error(tmp_path: Path) -> None:
    here = StandIn(tmp_path)
    with pytest.raises(ConfigError, match=r"provisioners.kubeconfig \(k8s\): Context 'other' not found"):
        Bench(here, "x").provisioner(context="other")
    here.close()
    nowhere = ProvisionerConfig(kind="kubernetes", gpu="L4", workload_name="x", kubeconfig=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"provisioners.kubeconfig \(kubernetes\): .*none"):
        KubernetesProvisioner(nowhere)
