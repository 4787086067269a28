"""The endpoints of nodes: looked up without a pass over the fleet, and never out of date."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from warmroute.config import Health, NodeConfig
from warmroute.core.fleet import Fleet
from warmroute.core.node import Node
from warmroute.edge.envoy.server import Endpoints


class CountingEndpoints(Endpoints):
    computed = 0

    def _endpoint(self, node: Node) -> str:
        self.computed += 1
        return super()._endpoint(node)


def fleet_of(*urls: str) -> Fleet:
    fleet = Fleet(Health())
    for number, url in enumerate(urls):
        fleet.add(NodeConfig(url=url, name=f"n{number}"))
    return fleet


def test_unknown_endpoints_and_subsets_do_not_compute_all_endpoints_anew() -> None:
    fleet = fleet_of(*(f"http://10.0.{number // 250}.{number % 250 + 1}:8000" for number in range(1_000)))
    endpoints = CountingEndpoints(fleet)
    for number in range(100):
        assert endpoints.node_at(f"192.168.0.{number}:1") is None
        assert endpoints.names_at(["10.0.0.1:8000", "10.0.1.1:8000", "10.9.9.9:1"]) == {"n0", "n250"}
    assert endpoints.computed == 1_000


def test_an_address_without_a_port_names_all_nodes_there() -> None:
    endpoints = Endpoints(
        fleet_of("http://10.0.0.1:8000", "http://10.0.0.1:8001", "http://[fd00::1]:8000", "http://10.0.0.2:8000")
    )
    assert endpoints.names_at(["10.0.0.1"]) == {"n0", "n1"}
    assert (
        endpoints.names_at(["10.0.0.1:8001", "fd00::1"])
        == {"n1", "n2"}
        == endpoints.names_at(["n", "[fd00::1]", "10.0.0.1:8001"])
    )
    assert endpoints.names_at(["10.0.0", ":8000", "", "[]"]) == frozenset()


def test_a_change_of_the_fleet_counts_at_once() -> None:
    fleet = fleet_of("http://10.0.0.1:8000", "http://10.0.0.2:8000")
    endpoints = Endpoints(fleet)
    assert endpoints.names_at(["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"]) == {"n0", "n1"}
    fleet.remove("n1")
    moved = fleet.add(NodeConfig(url="http://10.0.0.3:8000", name="n1"))  # as many nodes as before
    assert endpoints.names_at(["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"]) == {"n0", "n1"}
    assert endpoints.node_at("10.0.0.2:8000") is None and endpoints.node_at("10.0.0.3:8000") is moved
    fleet.remove("n0")
    assert endpoints.names_at(["10.0.0.1:8000"]) == frozenset() and endpoints.node_at("10.0.0.1:8000") is None


class Resolver:
    """In place of the event loop."""

    address = ""

    async def getaddrinfo(self, *_: Any, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (self.address, 0))]


async def test_a_name_with_a_new_address_counts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoints, resolver = Endpoints(fleet_of("http://node.test:8000")), Resolver()
    assert endpoints.names_at(["10.0.0.1:8000"]) == frozenset()
    for resolver.address in ("10.0.0.1", "10.0.0.2"):
        with monkeypatch.context() as patched:
            patched.setattr("warmroute.edge.envoy.server.asyncio.get_running_loop", lambda: resolver)
            assert await endpoints._resolve("node.test")
        assert endpoints.names_at([f"{resolver.address}:8000"]) == {"n0"}
    assert endpoints.node_at("10.0.0.1:8000") is None
