"""Discovery in the running router: reload, start, admin API, metrics, alerts, and several kinds of sources together."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.dns_server import dns_server
from support.dnsmasq import dnsmasq
from support.free_port import free_port
from support.polling import until
from support.raw_client import chat, post
from support.running_router import count_up, quick_table, router
from support.scripted_engine import ScriptedEngine, engines

from warmroute.app.alerts import discovery_alerts
from warmroute.app.startup import check_startup
from warmroute.config import Config, ConfigError, from_table
from warmroute.engines.discovery import dns_records
from warmroute.engines.discovery.dns_records import MIN_REFRESH_S


def write_targets(path: Path, *engines: ScriptedEngine, **labels: str) -> None:
    groups = [{"targets": [f"{engine.host}:{engine.port}"], "labels": labels} for engine in engines]
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(groups))
    temporary.rename(path)


async def scale_through_dns(
    server: str, set_hosts: Callable[[list[str]], object], source: dict[str, Any], port: int = 0
) -> float:
    """2 → 5 → 1 under load: an engine ends after its node has left the fleet, and no request fails. Return how long it
    took until the new nodes could get requests."""
    port = port or free_port()
    pool = [ScriptedEngine(host=f"127.0.78.{number}", port=port) for number in range(2, 7)]
    for engine in pool:
        await engine.listen()
    statuses: list[int] = []
    set_hosts([engine.host for engine in pool[:2]])
    table = {"kind": "dns", "dns_server": server, "port": port, **source}
    async with router(wait=2, check_leaks=False, discovery=[table]) as r:

        async def client() -> None:
            while True:
                statuses.append((await r.request()).status)

        tasks = [asyncio.ensure_future(client()) for _ in range(4)]
        eligible_s = 0.0
        for count in (5, 1):
            started_s = time.monotonic()
            set_hosts([engine.host for engine in pool[:count]])
            await until(lambda count=count: count_up(r.service) == len(r.service.fleet) == count)
            eligible_s = eligible_s or time.monotonic() - started_s
            for engine in pool[count:]:
                await engine.close()
            sent = len(statuses)
            await until(lambda sent=sent: len(statuses) > sent + 100)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert set(statuses) == {200} and all(engine.seen for engine in pool)
    for engine in pool:
        await engine.close()
    return eligible_s


async def test_nodes_of_a_file_join_and_leave_without_a_reload(tmp_path: Path) -> None:
    path = tmp_path / "targets.json"
    async with engines(2) as [one, two]:
        write_targets(path, one, island="aws/x")
        async with router(wait=1, discovery=[{"kind": "file", "file": str(path)}]) as r:
            assert (await r.request()).status == 200, "the router was ready only after the source had answered"
            write_targets(path, one, two, island="aws/x")
            await until(lambda: len(r.service.fleet) == 2)
            await until(lambda: all(node.health.state.value == "up" for node in r.service.fleet))
            for _ in range(4):
                assert (await r.request()).status == 200
            assert len(two.seen) == 2
            write_targets(path, two)
            await until(lambda: [node.url for node in r.service.fleet] == [two.url])
            assert (await r.request()).status == 200


async def test_scaling_through_dns_loses_no_request() -> None:
    async with dns_server() as server:
        await scale_through_dns(
            server.address, lambda hosts: server.set("engines.test", "A", *hosts, ttl_s=0), {"dns_name": "engines.test"}
        )


@pytest.mark.deploy
@pytest.mark.parametrize("record_type", ["A", "SRV"])
async def test_scaling_through_dnsmasq_loses_no_request(
    tmp_path: Path, record_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the shortest time between two resolutions that a router really has."""
    monkeypatch.setattr(dns_records, "MIN_REFRESH_S", MIN_REFRESH_S)
    port = free_port()
    async with dnsmasq(tmp_path, srv_port=port) as server:
        names = {"A": "engines.test", "SRV": "_http._tcp.engines.test"}
        source = {"dns_name": names[record_type], "record_type": record_type}
        eligible_s = await scale_through_dns(server.address, server.set_hosts, source, port)
    print(f"{record_type}: new nodes could get requests after {eligible_s:.2f} s")
    assert eligible_s < 2.0


async def test_a_source_that_fails_or_is_empty_keeps_its_nodes_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "targets.json"
    async with engines() as [engine]:
        write_targets(path, engine)
        async with router(wait=1, discovery=[{"kind": "file", "name": "pool", "file": str(path)}]) as r:
            discovery = r.service.discovery

            async def settle() -> dict[str, Any]:
                failures, updates = discovery.sources["pool"].failures, discovery.sources["pool"].updates
                await until(lambda: discovery.sources["pool"].failures > failures + 2
                            or discovery.sources["pool"].updates > updates)  # fmt: skip
                state: dict[str, Any] = (await r.admin("GET", "/admin/discovery")).json["sources"][0]
                return state

            path.write_text("garbage")
            state = await settle()
            assert state["state"] == "failing" and "invalid JSON" in state["error"]
            assert [alert.id for alert in discovery_alerts(discovery)] == ["discovery_failing"]
            path.write_text("[]")
            state = await settle()
            assert state["state"] == "ok" and state["kept_although_empty"] and state["targets"] == 0
            assert state["nodes"] == [{"url": engine.url, "ready": True, "node": f"127.0.0.1:{engine.port}"}]
            assert [alert.id for alert in discovery_alerts(discovery)] == ["discovery_empty"]
            os.unlink(path)
            assert (await settle())["state"] == "failing"
            assert (await r.request()).status == 200
            events = [getattr(record, "event", "") for record in caplog.records]
            assert events.count("discovery_failed") == 2 and events.count("discovery_empty") == 1
            page = (await r.admin("GET", "/metrics")).body.decode()
            samples = {
                (sample.name, sample.labels.get("change", "")): sample.value
                for family in text_string_to_metric_families(page)
                for sample in family.samples
                if sample.labels.get("source") == "pool"
            }
            assert samples["warmroute_discovery_up", ""] == 0
            assert samples["warmroute_discovery_changes_total", "added"] == 1
            assert samples["warmroute_discovery_failures_total", ""] > 4
            write_targets(path, engine)
            await until(lambda: not discovery.sources["pool"].error)
            assert list(discovery_alerts(discovery)) == []


async def test_a_reload_starts_changes_and_stops_sources(tmp_path: Path) -> None:
    async with engines(3) as pool:
        for number, engine in enumerate(pool):
            write_targets(tmp_path / f"{number}.json", engine)

        def config(*sources: dict[str, Any]) -> Config:
            return from_table(
                quick_table(discovery=[{"kind": "file", **source} for source in sources]), experiment=True
            )

        def file(number: int) -> str:
            return str(tmp_path / f"{number}.json")

        async with router(wait=1, config=config({"name": "a", "file": file(0)})) as r:
            kept = next(iter(r.service.fleet))

            async def reload(*sources: dict[str, Any]) -> list[str]:
                r.service.config_reload.read_config = lambda: config(*sources)
                assert r.service.reload() is None
                await asyncio.sleep(0.2)
                await until(lambda: not r.service.discovery.pending)
                await asyncio.sleep(0.1)
                return sorted(node.url for node in r.service.fleet)

            assert await reload({"name": "a", "file": file(0)}, {"name": "b", "file": file(1)}) == sorted(
                engine.url for engine in pool[:2]
            )
            assert kept in list(r.service.fleet)
            assert await reload({"name": "b", "file": file(2)}) == [pool[2].url]
            assert await reload() == []


async def test_a_discovered_node_sends_the_sources_api_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_KEY", "secret")
    async with engines() as [engine]:
        write_targets(tmp_path / "t.json", engine, model="m")
        source = {"kind": "file", "file": str(tmp_path / "t.json"), "api_key_env": "ENGINE_KEY"}
        async with router(wait=1, discovery=[source]) as r:
            assert (await r.request(post(chat(model="m")))).status == 200
            assert engine.seen[0].get(b"authorization") == [b"Bearer secret"]


def test_contradictions_are_named() -> None:
    for table, problem in (
        ({"kind": "file"}, "discovery.file: kind 'file' requires it"),
        ({"kind": "dns"}, "discovery.dns_name: kind 'dns' requires it"),
        ({"kind": "dns", "dns_name": "a", "file": "b"}, "discovery.file: kind 'dns' does not have this key"),
        ({"kind": "kubernetes"}, "requires one of service, pod_selector and inference_pool"),
        ({"kind": "kubernetes", "service": "a", "pod_selector": "b"}, "requires one of service, pod_selector"),
        ({"kind": "kubernetes", "inference_pool": "a", "service": "b"}, "requires one of service, pod_selector"),
        ({"kind": "kubernetes", "inference_pool": "a", "port": 1}, "the InferencePool names the ports; remove port"),
        ({"kind": "consul"}, "unknown value 'consul'"),
        ({"kind": "dns", "dns_name": "a", "dns_server": "ns.test"}, "invalid format"),
    ):
        with pytest.raises(ConfigError, match=problem.replace("(", r"\(")):
            from_table({"discovery": [table]}, experiment=True)
    with pytest.raises(ConfigError, match="two sources have the name 'file'"):
        from_table({"discovery": [{"kind": "file", "file": "a"}, {"kind": "file", "file": "b"}]})


def test_a_start_is_refused_without_a_key_or_a_cluster(tmp_path: Path) -> None:
    table = [
        {"kind": "file", "file": "a", "api_key_env": "UNSET_VARIABLE"},
        {"kind": "kubernetes", "service": "a", "kubeconfig": str(tmp_path / "none")},
    ]
    report = check_startup(from_table({"discovery": table}, experiment=True))
    assert len(report.problems) == 2 and "discovery.kubeconfig (kubernetes)" in report.problems[0]
    assert report.problems[1].startswith("discovery.api_key_env: the environment variable UNSET_VARIABLE")
