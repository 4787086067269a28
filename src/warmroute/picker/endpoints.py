"""The endpoints of nodes as Envoy knows them: IP address and port. Names in URLs are resolved in the background."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from warmroute.event_log import EventLog
from warmroute.fleet.fleet import Fleet
from warmroute.fleet.node import Node

log = EventLog("warmroute.picker")

REFRESH_S: Final = 1.0
"""How often the endpoints are compared with the fleet."""
CHECK_S: Final = 0.02
RESOLVE_S: Final = 30.0
"""How often a name is resolved again."""
RETRY_S: Final = 2.0
MAX_HOSTS: Final = 1 << 16
"""Hosts of nodes that are kept as parsed."""
MAX_NAMED: Final = 8
"""Nodes that a log event names."""


def join_endpoint(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@lru_cache(MAX_HOSTS)
def _literal(host: str) -> str:
    """Return an IP address in its usual spelling; empty for a name."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return ""


class Endpoints:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._by_node: dict[Node, str] = {}
        self._by_endpoint: dict[str, Node] = {}
        self._by_address: dict[str, list[str]] = {}
        """The names of the nodes at each address: a Pod may have several engines, one for each port."""
        self._addresses: dict[str, str] = {}
        """Of the names that were resolved."""
        self._failing: set[str] = set()
        self._membership: tuple[int, int] | None = None
        """The fleet's, as of the last refresh; None: an address has changed since."""
        self._warned = False
        """Of prefill nodes."""

    def of(self, node: Node) -> str:
        """Return the node's endpoint; empty if its name is not resolved."""
        found = self._by_node.get(node)
        return found if found is not None else self._endpoint(node)

    def node_at(self, endpoint: str) -> Node | None:
        if self._membership != self._fleet.membership:
            self.refresh()
        return self._by_endpoint.get(endpoint)

    def names_at(self, endpoints: Iterable[str]) -> frozenset[str]:
        """Return the names of the nodes at these endpoints. An address without a port names all nodes there."""
        if self._membership != self._fleet.membership:
            self.refresh()
        by_endpoint, by_address = self._by_endpoint, self._by_address
        names: set[str] = set()
        for one in endpoints:
            if (node := by_endpoint.get(one)) is not None:
                names.add(node.name)
            else:
                names.update(by_address.get(one.strip("[]"), ()))
        return frozenset(names)

    def refresh(self) -> None:
        """Take over the fleet's nodes."""
        self._membership = self._fleet.membership
        found = {node: self._endpoint(node) for node in self._fleet}
        self._by_node = {node: endpoint for node, endpoint in found.items() if endpoint}
        self._by_endpoint = {endpoint: node for node, endpoint in self._by_node.items()}
        self._by_address = {}
        for endpoint, node in self._by_endpoint.items():
            address = endpoint.rpartition(":")[0].strip("[]")
            self._by_address.setdefault(address, []).append(node.name)
        if not self._warned and (prefill := [node.name for node in self._fleet if node.role == "prefill"]):
            self._warned = True
            log.warning(
                "picker_without_pairs",
                "Envoy sends a request to one node, so these nodes prefill nothing for others. They get requests only "
                'while no other node is up. Give them role = "mixed", or use warmroute serve.',
                nodes=",".join(prefill[:MAX_NAMED]),
            )

    def _endpoint(self, node: Node) -> str:
        host = _literal(node.host) or self._addresses.get(node.host, "")
        return join_endpoint(host, node.port) if host else ""

    # Names.

    async def run(self) -> None:
        """Resolve names, for ever."""
        loop = asyncio.get_running_loop()
        due_s: dict[str, float] = {}
        while True:
            names = {node.host for node in self._fleet if not _literal(node.host)}
            for name in names:
                if due_s.get(name, 0.0) <= loop.time():
                    resolved = await self._resolve(name)
                    due_s[name] = loop.time() + (RESOLVE_S if resolved else RETRY_S)
            for gone in due_s.keys() - names:
                del due_s[gone]
                self._addresses.pop(gone, None)
                self._membership = None
            if self._membership != self._fleet.membership:
                self.refresh()
            await self._until_changed(loop.time() + REFRESH_S)

    async def _until_changed(self, until_s: float) -> None:
        """Wait, but not longer than until a node joins or leaves."""
        loop, before = asyncio.get_running_loop(), self._fleet.membership
        while loop.time() < until_s and self._fleet.membership == before:  # noqa: ASYNC110 (the fleet has no event)
            await asyncio.sleep(CHECK_S)

    async def _resolve(self, name: str) -> bool:
        """An address that was known before stays if the name cannot be resolved now."""
        try:
            found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
            addresses = sorted({str(address[0]) for *_, address in found}, key=lambda one: (":" in one, one))
        except (OSError, UnicodeError) as error:
            if name not in self._failing:
                self._failing.add(name)
                log.warning(
                    "picker_name_unresolved",
                    "Envoy needs the address of a node: the picker does not choose nodes with this name.",
                    host=name,
                    reason=error,
                )
            return False
        self._failing.discard(name)
        if self._addresses.get(name) not in addresses:
            self._addresses[name] = addresses[0]
            self._membership = None
        return True
