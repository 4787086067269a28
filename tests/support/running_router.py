"""A running router, and a check that it holds nothing at the end."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from support.polling import until
from support.raw_client import RawConnection, Response, post
from support.scripted_engine import BlackHole, ScriptedEngine
from warmroute.app.service import Service
from warmroute.config import Config, from_table
from warmroute.core.node import Node
from warmroute.edge.exchange import Exchange

QUICK: dict[str, dict[str, Any]] = {
    "listen": {"port": 0},
    "admin": {"port": 0},
    "limits": {},
    "upstream": {"connect_timeout_s": 1.0, "first_byte_timeout_s": 20.0, "between_chunks_timeout_s": 20.0},
    "health": {"interval_s": 0.05, "timeout_s": 1.0, "breaker_open_s": 0.05, "slow_start_s": 0.0},
    "polling": {"interval_s": 0.1},
    "routing": {"policy": "round_robin", "seed": 7},
    "shutdown": {"deadline_s": 2.0},
}


def quick_table(nodes: Iterable[ScriptedEngine | BlackHole | dict[str, Any]] = (), **tables: Any) -> dict[str, Any]:
    """Return a configuration with short times. The nodes are named node0, node1, … in the order given."""
    table: dict[str, Any] = {name: {**values, **tables.pop(name, {})} for name, values in QUICK.items()}
    listed = []
    for number, node in enumerate(nodes):
        entry: dict[str, Any] = node if isinstance(node, dict) else {"url": node.url}
        if isinstance(node, BlackHole):
            entry["models"] = ["m"]
        listed.append({"name": f"node{number}", **entry})
    return {**table, "nodes": listed, **tables}


class RunningRouter:
    """A running service, and a client for it."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.peers: list[RawConnection] = []
        self.loop_errors: list[str] = []
        """Exceptions that reached the event loop."""

    @property
    def port(self) -> int:
        return self.service.port

    def node(self, number: int) -> Node:
        return self.service.fleet.node(f"node{number}")

    async def connect(self, port: int | None = None, host: str = "127.0.0.1", **more: Any) -> RawConnection:
        peer = RawConnection(*await asyncio.open_connection(host, port or self.port, limit=1 << 24, **more))
        self.peers.append(peer)
        return peer

    async def request(self, request: bytes | None = None, without_body: bool = False) -> Response:
        """Send one request on a new connection."""
        peer = await self.connect()
        peer.write(post() if request is None else request)
        response = await peer.response(without_body)
        peer.close()
        return response

    async def admin(self, method: str, path: str, body: bytes = b"", *headers: str) -> Response:
        peer = await self.connect(self.service.admin_port)
        lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(body)}", *headers]
        peer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        response = await peer.response(method == "HEAD")
        peer.close()
        return response

    def inflight(self) -> int:
        return sum(node.inflight for node in self.service.fleet)


@asynccontextmanager
async def router(
    *nodes: ScriptedEngine | BlackHole | dict[str, Any],
    wait: bool | int = True,
    config: Config | None = None,
    check_leaks: bool = True,
    health_checks_hang: bool = False,
    wait_for_tokenizers: bool = True,
    **tables: Any,
) -> AsyncIterator[RunningRouter]:
    """A router over these nodes. `wait`: how many nodes must be up (True: all).

    `check_leaks`: check that nothing is left at the end. `health_checks_hang`: a node does not answer its health
    checks, so that their connections may outlive the router. `wait_for_tokenizers`: those that the configuration names.
    """
    config = config or from_table(quick_table(nodes, **tables), experiment=True)
    running = RunningRouter(Service(lambda: config))
    service = running.service
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(
        lambda _loop, context: running.loop_errors.append(f"{context.get('message')}: {context!r}")
    )
    await service.start()
    try:
        if wait_for_tokenizers and config.models:
            await service.tokenizer_registry.until_loaded()
        wanted = len(nodes) if wait is True else int(wait)
        await until(lambda: count_up(service) >= wanted, f"{wanted} nodes up")
        if wanted:
            await until(lambda: not service.proxy.own_endpoints.starting, "the router has started")
        yield running
        for peer in running.peers:
            peer.close()
        if check_leaks:
            await check_nothing_in_flight(service)
    finally:
        for peer in running.peers:
            peer.disconnect()
        await asyncio.sleep(0)
        await service.stop()
        loop.set_exception_handler(None)
    if check_leaks:
        assert not service.listener.connections, "client connections are left"
        for node in nodes:
            if isinstance(node, ScriptedEngine) and not health_checks_hang:
                await until(lambda node=node: node.connections == 0, "connections to a node are left", 5)
        await check_no_exchange_left(service)
        assert not running.loop_errors, running.loop_errors


def count_up(service: Service) -> int:
    return sum(1 for node in service.fleet if node.health.state.value == "up" and node.models is not None)


async def check_nothing_in_flight(service: Service) -> None:
    """Check that every counter returns to zero and that no client is connected."""
    listener, fleet = service.listener, service.fleet

    def settled() -> bool:
        groups = [group for name in fleet.models if (group := fleet.group(name)) is not None]
        return (
            all(node.inflight == 0 for node in fleet)
            and all(group.inflight == 0 for group in groups)
            and service.admission.queue.waiting == 0
            and not service.brain.open
            and not any(group.waiting for group in service.fleet.groups)
            and listener.buffered_bytes == 0
            and not listener.connections
        )

    try:
        await until(settled, patience_s=5)
    except AssertionError:
        raise AssertionError(
            f"something is left: in flight {[(node.name, node.inflight) for node in fleet]}, "
            f"buffered {listener.buffered_bytes} bytes, {len(listener.connections)} connections"
        ) from None


async def check_no_exchange_left(service: Service) -> None:
    """Check that no exchange of this router is alive, without a garbage collection: their bodies may be large."""
    for attempt in range(30):
        if attempt:
            await asyncio.sleep(0.1)
        exchanges = [thing for thing in gc.get_objects() if type(thing) is Exchange]
        if not any(exchange.proxy is service.proxy for exchange in exchanges):
            return
        del exchanges
    raise AssertionError("an exchange is left over")
