"""Scaling in the service: which requests wait for the first node, for which models, and which nodes may join."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.running_router import quick_table

from warmroute.app.service import Service
from warmroute.config import Config, ConfigError, NodeConfig, from_table
from warmroute.core.messages import RoutingRequest
from warmroute.core.rejections import NoNodeAvailable, UnknownModel
from warmroute.scaling.lease import FileLease, LeaderLock
from warmroute.scaling.scaling_service import ScalingService

WAIT_S = 77.0


def scaled(folder: Path, provisioner: dict[str, Any] | None = None, **scaling: Any) -> Config:
    settings = {"enabled": True, "min_nodes": 0, "first_node_wait_s": WAIT_S, **scaling}
    one = {"kind": "process", "gpu": "L4", "state_dir": str(folder), "port": 9650, **(provisioner or {})}
    return from_table(
        quick_table([], scaling=settings, provisioners=[one] if provisioner != {} else []), experiment=True
    )


async def test_no_request_waits_for_the_first_node_in_a_dry_run(tmp_path: Path) -> None:
    now = scaled(tmp_path)
    service = Service(lambda: now)
    assert service.admission.without_node.first_node_wait_s == WAIT_S
    now = scaled(tmp_path, dry_run=True)
    service.reload()
    assert service.admission.without_node.first_node_wait_s == 0.0
    now = scaled(tmp_path, first_node_wait_s=5.0)
    service.reload()
    assert service.admission.without_node.first_node_wait_s == 5.0


async def test_requests_do_not_wait_at_a_process_that_is_not_the_leader(tmp_path: Path) -> None:
    other = LeaderLock(tmp_path / "lock")
    assert other.is_leader()
    service = Service(lambda: scaled(tmp_path, lock_file=str(tmp_path / "lock")))
    assert service.scaling is not None
    service.scaling.loop.turn()
    assert service.admission.without_node.first_node_wait_s == 0.0
    other.release()
    service.scaling.loop.turn()
    assert service.admission.without_node.first_node_wait_s == WAIT_S
    await asyncio.sleep(0)
    await service.scaling.close()


async def test_requests_wait_at_a_worker_while_a_worker_of_its_own_router_leads(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    service = Service(lambda: scaled(tmp_path))
    assert service.scaling is not None

    def wait_s() -> float:
        worker.loop.turn()
        return worker.first_node_wait_s

    waits: list[float] = []
    worker = ScalingService(
        service.config, service.fleet, service.cache_view, service.shared_nodes, service.scaling.loop._prefiller._post,
        lambda: 0, waits.append, FileLease(path, "this router"),
    )  # fmt: skip
    for other, expected_s in (
        (FileLease(path, "another router"), 0.0),
        (FileLease(path, "this router"), WAIT_S),
        (LeaderLock(path), 0.0),  # a router without workers
    ):
        assert other.is_leader()
        assert wait_s() == expected_s == waits[-1] and not worker.loop.leading
        await other.close() if isinstance(other, FileLease) else other.release()
    assert wait_s() == WAIT_S == waits[-1] and worker.loop.leading
    await asyncio.sleep(0)
    await worker.close()
    await service.scaling.close()
    assert FileLease(tmp_path / "own").leader_is_here, "only workers of this router know that file"


async def test_without_provisioners_requests_wait_at_every_process(tmp_path: Path) -> None:
    other = LeaderLock(tmp_path / "lock")
    assert other.is_leader()
    service = Service(lambda: scaled(tmp_path, {}, lock_file=str(tmp_path / "lock")))
    assert service.scaling is not None
    service.scaling.loop.turn()
    assert service.admission.without_node.first_node_wait_s == WAIT_S
    other.release()


async def test_without_provisioners_every_process_knows_the_desired_number(tmp_path: Path) -> None:
    """KEDA may ask any of them, and keeps its connection."""
    other = LeaderLock(tmp_path / "lock")
    assert other.is_leader()
    service = Service(lambda: scaled(tmp_path, {}, lock_file=str(tmp_path / "lock"), min_nodes=3))
    assert service.scaling is not None
    service.scaling.loop.turn()
    assert service.scaling.autoscaler.desired_nodes == 3
    described = service.scaling.describe()
    assert (described["desired_nodes"], described["workloads"]["decode"]) == (3, {"desired_nodes": 3})
    assert described["workloads"]["prefill"] == {"desired_nodes": 1}, "the minimum of a workload without nodes"
    other.release()


async def test_a_fleet_that_is_scaled_to_zero_is_ready(tmp_path: Path) -> None:
    """Otherwise Kubernetes would send the router no request, and nothing would start the first node."""
    now = scaled(tmp_path, {})
    service = Service(lambda: now)
    assert service.readiness()[0] == 200
    service.add_node(NodeConfig(url="http://127.0.0.1:9", name="down"))
    assert service.readiness()[0] == 503, "there is a node, and it cannot serve"
    service.drain_node("down", True)
    assert service.readiness()[0] == 200, "the last node leaves"
    service.remove_node("down")
    now = scaled(tmp_path, {}, dry_run=True)
    service.reload()
    assert service.readiness()[0] == 503, "nobody adds a node"


async def test_provisioned_nodes_may_use_the_api_key_of_the_start_after_a_reload(tmp_path: Path) -> None:
    now = scaled(tmp_path, {"api_key_env": "OLD_KEY"})
    service = Service(lambda: now)
    now = scaled(tmp_path, {"api_key_env": "NEW_KEY"})
    assert service.reload() is None
    for name in ("OLD_KEY", "NEW_KEY"):
        service.add_node(NodeConfig(url="http://127.0.0.1:9", name=name, api_key_env=name))
        service.remove_node(name)
    with pytest.raises(ConfigError, match="api_key_env"):
        service.add_node(NodeConfig(url="http://127.0.0.1:9", name="c", api_key_env="HOME"))


async def test_requests_wait_for_the_first_node_only_for_models_it_may_serve(tmp_path: Path) -> None:
    table = {**quick_table([]), "scaling": {"enabled": True, "min_nodes": 0}, "models": [{"name": "configured"}]}
    service = Service(lambda: from_table(table, experiment=True))

    def refused(model: str) -> type[Exception]:
        with pytest.raises((NoNodeAvailable, UnknownModel)) as why:
            service.router.decide(RoutingRequest(model), 1.0)
        return why.type

    assert refused("nonsense") is NoNodeAvailable  # no node has served yet, so it may serve this model
    node = service.fleet.add(NodeConfig(url="http://127.0.0.1:9", name="was"))
    service.fleet.update_models(node, ["m", "alias"], [])
    service.fleet.remove("was")
    assert refused("nonsense") is UnknownModel
    assert [refused(model) for model in ("m", "alias", "configured")] == [NoNodeAvailable] * 3


def test_the_metrics_may_iterate_while_nodes_join() -> None:
    service = Service(lambda: from_table(quick_table([]), experiment=True))
    collections: tuple[Any, ...] = (service.fleet, service.fleet.islands, service.cache_view)
    for name in "ab":
        service.fleet.add(NodeConfig(url=f"http://{name}:1", name=name, island=name))
        service.cache_view.add_node(name, ["m"])
    iterators = [iter(each) for each in collections]
    service.fleet.add(NodeConfig(url="http://c:1", name="c", island="c"))
    service.cache_view.add_node("c", ["m"])
    assert [len(list(each)) for each in iterators] == [2, 2, 2]
