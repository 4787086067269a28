"""Sources with many nodes: requests get their turn while the router reads, adds and removes them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.dns_server import dns_server
from support.fake_kubernetes import FakeCluster
from support.polling import until
from test_discovered_nodes import started, target

from warmroute.config import DiscoveryConfig
from warmroute.engines.discovery import kubernetes
from warmroute.engines.discovery import target as turn
from warmroute.engines.discovery.dns_records import DnsRecords
from warmroute.engines.discovery.target import Targets

COUNT = 300


class Turns:
    """Counts the turns of another task."""

    count = 0

    async def run(self) -> None:
        while True:
            self.count += 1
            await asyncio.sleep(0)


@asynccontextmanager
async def other_task() -> AsyncIterator[Turns]:
    turns = Turns()
    task = asyncio.ensure_future(turns.run())
    try:
        yield turns
    finally:
        task.cancel()


@asynccontextmanager
async def slices(folder: Path, *endpoints: int) -> AsyncIterator[tuple[FakeCluster, list[Targets]]]:
    """A cluster with EndpointSlices of so many endpoints, and what the source reports."""
    cluster = FakeCluster(folder)
    reports: list[Targets] = []
    for number, count in enumerate(endpoints):
        cluster.insert("endpointslices", endpoint_slice(number, count))
    kubeconfig = cluster.kubeconfig("router")
    config = DiscoveryConfig(kind="kubernetes", kubeconfig=kubeconfig, service="svc", island="x", gpu="y")
    task = asyncio.ensure_future(kubernetes.KubernetesObjects(config).run(reports.append))
    try:
        await until(lambda: reports and cluster.watches)
        yield cluster, reports
    finally:
        task.cancel()
        cluster.close()


def endpoint_slice(number: int, endpoints: int) -> dict[str, Any]:
    return {
        "metadata": {"name": f"s{number}", "labels": {"kubernetes.io/service-name": "svc"}},
        "ports": [{"port": 8000}],
        "endpoints": [
            {"addresses": [f"10.2.{number}.{n + 1}"], "targetRef": {"kind": "Pod", "name": f"p{number}-{n}"}}
            for n in range(endpoints)
        ],
    }


async def test_other_tasks_get_their_turn_while_nodes_come_and_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn, "TURN_S", -1.0)
    registry, nodes = started()
    async with other_task() as turns:
        nodes.update("a", [target(f"10.1.{n // 250}.{n % 250 + 1}") for n in range(COUNT)])
        await nodes.apply()
        assert len(registry.fleet) == COUNT and turns.count >= COUNT
        turns.count = 0
        nodes.update("a", [target("10.9.0.1")])
        await nodes.apply()
        assert len(registry.fleet) == 1 and turns.count >= COUNT


async def test_a_long_list_is_read_in_turns_and_reported_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = 0

    async def share(_self: turn.Turn) -> None:
        nonlocal shared
        shared += 1
        await asyncio.sleep(0)

    monkeypatch.setattr(turn.Turn, "share", share)
    monkeypatch.setattr(kubernetes, "REPORT_S", 0.0)
    async with slices(tmp_path, 100, 100, 100) as (cluster, reports):
        assert shared == COUNT
        cluster.end_watches(forget=True)  # it lists them again
        await until(lambda: len(reports) > 1)
        assert {len(report.found) for report in reports} == {COUNT} and shared == 2 * COUNT


async def test_changes_that_arrive_together_are_reported_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "REPORT_S", 0.5)
    async with slices(tmp_path, 1) as (cluster, reports):
        for number in range(1, 51):
            cluster.insert("endpointslices", endpoint_slice(number, 1))
        await until(lambda: len(reports[-1].found) == 51)
        assert len(reports) < 25


async def test_a_long_answer_of_dns_is_read_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[threading.Thread] = set()
    read = DnsRecords._records

    async def records(self: DnsRecords, *arguments: Any) -> Any:
        threads.add(threading.current_thread())
        return await read(self, *arguments)

    monkeypatch.setattr(DnsRecords, "_records", records)
    async with dns_server() as server:
        server.set("engines.test", "A", "10.0.0.1")
        reports: list[Targets] = []
        config = DiscoveryConfig(kind="dns", dns_name="engines.test", dns_server=server.address)
        task = asyncio.ensure_future(DnsRecords(config).run(reports.append))
        await until(lambda: reports)
        task.cancel()
    assert threads and threading.current_thread() not in threads
