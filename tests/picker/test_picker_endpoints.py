"""The endpoints of nodes: looked up without a pass over the fleet, and never out of date."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from warmroute.core.messages import NodeRow, Tables
from warmroute.edge.envoy.server import Endpoints


class CountingEndpoints(Endpoints):
    computed = 0

    def _endpoint(self, node: NodeRow) -> str:
        self.computed += 1
        return super()._endpoint(node)


class Nodes:
    """The tables of an edge, with these nodes."""

    def __init__(self, *addresses: tuple[str, int]) -> None:
        self._added = 0
        self.tables = Tables()
        for number, (host, port) in enumerate(addresses):
            self.add(f"n{number}", host, port)

    def add(self, name: str, host: str, port: int = 8000) -> NodeRow:
        self._added += 1
        row = NodeRow(self._added, name, "http", host, port, "", "vllm", "mixed", 0)
        self.tables = Tables(nodes={**self.tables.nodes, row.number: row})
        return row

    def remove(self, name: str) -> None:
        self.tables = Tables(nodes={number: row for number, row in self.tables.nodes.items() if row.name != name})

    def __call__(self) -> Tables:
        return self.tables


def test_unknown_endpoints_and_subsets_do_not_compute_all_endpoints_anew() -> None:
    nodes = Nodes(*((f"10.0.{number // 250}.{number % 250 + 1}", 8000) for number in range(1_000)))
    endpoints = CountingEndpoints(nodes)
    for number in range(100):
        assert endpoints.node_at(f"192.168.0.{number}:1") is None
        assert endpoints.names_at(["10.0.0.1:8000", "10.0.1.1:8000", "10.9.9.9:1"]) == {"n0", "n250"}
    assert endpoints.computed == 1_000


def test_an_address_without_a_port_names_all_nodes_there() -> None:
    endpoints = Endpoints(Nodes(("10.0.0.1", 8000), ("10.0.0.1", 8001), ("fd00::1", 8000), ("10.0.0.2", 8000)))
    assert endpoints.names_at(["10.0.0.1"]) == {"n0", "n1"}
    assert (
        endpoints.names_at(["10.0.0.1:8001", "fd00::1"])
        == {"n1", "n2"}
        == endpoints.names_at(["n", "[fd00::1]", "10.0.0.1:8001"])
    )
    assert endpoints.names_at(["10.0.0", ":8000", "", "[]"]) == frozenset()


def test_a_change_of_the_fleet_counts_at_once() -> None:
    nodes = Nodes(("10.0.0.1", 8000), ("10.0.0.2", 8000))
    endpoints = Endpoints(nodes)
    assert endpoints.names_at(["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"]) == {"n0", "n1"}
    nodes.remove("n1")
    moved = nodes.add("n1", "10.0.0.3")  # as many nodes as before
    assert endpoints.names_at(["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"]) == {"n0", "n1"}
    assert endpoints.node_at("10.0.0.2:8000") is None and endpoints.node_at("10.0.0.3:8000") is moved
    nodes.remove("n0")
    assert endpoints.names_at(["10.0.0.1:8000"]) == frozenset() and endpoints.node_at("10.0.0.1:8000") is None


class Resolver:
    """In place of the event loop."""

    address = ""

    async def getaddrinfo(self, *_: Any, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (self.address, 0))]


async def test_a_name_with_a_new_address_counts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoints, resolver = Endpoints(Nodes(("node.test", 8000))), Resolver()
    assert endpoints.names_at(["10.0.0.1:8000"]) == frozenset()
    for resolver.address in ("10.0.0.1", "10.0.0.2"):
        with monkeypatch.context() as patched:
            patched.setattr("warmroute.edge.envoy.server.asyncio.get_running_loop", lambda: resolver)
            assert await endpoints._resolve("node.test")
        assert endpoints.names_at([f"{resolver.address}:8000"]) == {"n0"}
    assert endpoints.node_at("10.0.0.1:8000") is None
