"""kind = "dns" against a DNS server on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import dns.rcode
import pytest
from support.dns_server import DnsServer, dns_server
from support.polling import until

from warmroute.config import DiscoveryConfig
from warmroute.engines.discovery import dns_records
from warmroute.engines.discovery.dns_records import DnsRecords
from warmroute.engines.discovery.target import SourceError, Targets


@asynccontextmanager
async def reports_of(server: DnsServer, **more: object) -> AsyncIterator[list[Targets]]:
    config = {"dns_name": "engines.test", "dns_server": server.address, **more}
    reports: list[Targets] = []
    running = asyncio.ensure_future(DnsRecords(DiscoveryConfig(kind="dns", **config)).run(reports.append))  # type: ignore[arg-type]
    try:
        await until(lambda: reports or running.done())
        if running.done():
            await running
        yield reports
    finally:
        running.cancel()


def urls(report: Targets) -> list[str]:
    return sorted(target.node.url for target in report.found)


async def test_addresses_are_nodes_and_are_resolved_again_after_their_ttl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dns_records, "MIN_REFRESH_S", 0.3)
    async with dns_server() as server:
        server.set("engines.test", "A", "10.0.0.1", "10.0.0.2", ttl_s=60)
        async with reports_of(server, max_refresh_s=0.3) as reports:
            assert urls(reports[0]) == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
            server.set("engines.test", "A", "10.0.0.3", ttl_s=0)
            await until(lambda: len(reports) > 1)
            assert urls(reports[1]) == ["http://10.0.0.3:8000"]
        async with reports_of(server, max_refresh_s=30.0) as reports:
            await until(lambda: len(reports) > 2)  # its TTL is 0: the shortest time between two resolutions
            server.set("engines.test", "A", "10.0.0.4", ttl_s=60)
            await until(lambda: urls(reports[-1]) == ["http://10.0.0.4:8000"])
            asked = len(server.asked)
            await asyncio.sleep(0.7)
            assert len(server.asked) == asked, "the TTL has not passed"


async def test_ipv6_addresses() -> None:
    async with dns_server() as server:
        server.set("engines.test", "AAAA", "fd00::1")
        async with reports_of(server, record_type="AAAA", port=9000) as reports:
            assert urls(reports[0]) == ["http://[fd00::1]:9000"]


async def test_srv_records_give_hosts_and_ports() -> None:
    async with dns_server() as server:
        server.set("engines.test", "SRV", "0 1 8001 a.test.", "9 1 8002 b.test.", "0 1 8003 gone.test.", "0 1 1 .")
        server.set("a.test", "A", "10.0.0.1")
        server.set("b.test", "AAAA", "fd00::2")
        async with reports_of(server, record_type="SRV") as reports:
            assert urls(reports[0]) == ["http://10.0.0.1:8001", "http://[fd00::2]:8002"]
            assert {target.node.name for target in reports[0].found} == {"a.test:8001", "b.test:8002"}
        async with reports_of(server, record_type="SRV", port=8100, scheme="https") as reports:
            assert "https://a.test:8100" in urls(reports[0]), "the certificate has the host's name"


async def test_a_long_answer_comes_over_tcp() -> None:
    async with dns_server() as server:
        server.set("engines.test", "A", *(f"10.0.{number // 250}.{number % 250 + 1}" for number in range(1000)))
        async with reports_of(server) as reports:
            assert len(reports[0].found) == 1000 and server.over_tcp == 1


async def test_a_name_without_records_lists_nothing() -> None:
    async with dns_server() as server, reports_of(server) as reports:
        assert reports[0] == Targets([], [])
        server.set("engines.test", "TXT", "x")
        count = len(reports)
        await until(lambda: len(reports) > count + 1)
        assert reports[-1] == Targets([], [])


async def test_a_server_that_fails_is_an_error() -> None:
    async with dns_server() as server:
        server.rcode = dns.rcode.SERVFAIL
        with pytest.raises(SourceError, match=r"A engines\.test: .*SERVFAIL"):
            async with reports_of(server):
                pass
        server.is_silent = True
        with pytest.raises(SourceError, match=r"lifetime expired|timed out"):
            async with reports_of(server, timeout_s=0.2):
                pass
        server.is_silent, server.rcode = False, dns.rcode.NOERROR
        with pytest.raises(SourceError, match=r"label|empty"):
            async with reports_of(server, dns_name="a..test"):
                pass
