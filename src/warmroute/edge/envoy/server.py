"""The gRPC server that Envoy asks, its TLS, and the addresses of nodes as Envoy knows them."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

from warmroute.config import ConfigError, Limits, Picker
from warmroute.core.messages import NodeRow, Tables
from warmroute.edge.arrival import Rights
from warmroute.edge.client_connection import BodyMemory
from warmroute.edge.envoy import ext_proc
from warmroute.edge.envoy.grpc import CHECK, WATCH, Call, CallHandler, HealthCall, UnknownMethod
from warmroute.edge.envoy.http2 import Http2Connection
from warmroute.edge.envoy.stream import PickerStream
from warmroute.edge.proxy import Proxy
from warmroute.edge.sockets import Server, listen_tcp
from warmroute.event_log import EventLog

# The endpoints of nodes as Envoy knows them: IP address and port. Names in URLs are resolved in the background.

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
    def __init__(self, tables: Callable[[], Tables]) -> None:
        self._tables = tables
        self._by_number: dict[int, str] = {}
        self._by_endpoint: dict[str, NodeRow] = {}
        self._by_address: dict[str, list[str]] = {}
        """The names of the nodes at each address: a Pod may have several engines, one for each port."""
        self._addresses: dict[str, str] = {}
        """Of the names that were resolved."""
        self._failing: set[str] = set()
        self._nodes: dict[int, NodeRow] | None = None
        """The nodes as of the last refresh; None: an address has changed since."""
        self._warned = False
        """Of prefill nodes."""

    def of(self, node: NodeRow) -> str:
        """Return the node's endpoint; empty if its name is not resolved."""
        found = self._by_number.get(node.number)
        return found if found is not None else self._endpoint(node)

    def node_at(self, endpoint: str) -> NodeRow | None:
        self.refresh()
        return self._by_endpoint.get(endpoint)

    def names_at(self, endpoints: Iterable[str]) -> frozenset[str]:
        """Return the names of the nodes at these endpoints. An address without a port names all nodes there."""
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
        """Take over the fleet's nodes, if they have changed."""
        nodes = self._tables().nodes
        if nodes is self._nodes:
            return
        self._nodes = nodes
        found = [(node, self._endpoint(node)) for node in nodes.values()]
        self._by_number = {node.number: endpoint for node, endpoint in found if endpoint}
        self._by_endpoint = {endpoint: node for node, endpoint in found if endpoint}
        self._by_address = {}
        for endpoint, node in self._by_endpoint.items():
            address = endpoint.rpartition(":")[0].strip("[]")
            self._by_address.setdefault(address, []).append(node.name)
        if not self._warned and (prefill := [node.name for node in nodes.values() if node.role == "prefill"]):
            self._warned = True
            log.warning(
                "picker_without_pairs",
                "Envoy sends a request to one node, so these nodes prefill nothing for others. They get requests only "
                'while no other node is up. Give them role = "mixed", or use warmroute serve.',
                nodes=",".join(prefill[:MAX_NAMED]),
            )

    def _endpoint(self, node: NodeRow) -> str:
        host = _literal(node.host) or self._addresses.get(node.host, "")
        return join_endpoint(host, node.port) if host else ""

    # Names.

    async def run(self) -> None:
        """Resolve names, for ever."""
        loop = asyncio.get_running_loop()
        due_s: dict[str, float] = {}
        while True:
            names = {node.host for node in self._tables().nodes.values() if not _literal(node.host)}
            for name in names:
                if due_s.get(name, 0.0) <= loop.time():
                    resolved = await self._resolve(name)
                    due_s[name] = loop.time() + (RESOLVE_S if resolved else RETRY_S)
            for gone in due_s.keys() - names:
                del due_s[gone]
                self._addresses.pop(gone, None)
                self._nodes = None
            self.refresh()
            await self._until_changed(loop.time() + REFRESH_S)

    async def _until_changed(self, until_s: float) -> None:
        """Wait, but not longer than until the nodes change."""
        loop = asyncio.get_running_loop()
        while loop.time() < until_s and self._tables().nodes is self._nodes:  # noqa: ASYNC110 (they have no event)
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
            self._nodes = None
        return True


# The picker's TLS: its certificate, and whether Envoy must present one.


class FreshContext(ssl.SSLContext):
    """Reads the files anew for each connection, so that a new certificate or authority counts at once."""

    _config: Picker
    _current: ssl.SSLContext

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        try:
            self._current = _read(self._config)
        except ConfigError as error:
            log.error("certificates_rejected", "The picker keeps the previous certificates.", reason=error)
        return self._current.wrap_bio(*args, **options)


def server_tls(config: Picker) -> ssl.SSLContext | None:
    """Return None if no certificate is configured. Raises ConfigError if the files are unusable."""
    if not config.tls_cert:
        return None
    fresh = FreshContext(ssl.PROTOCOL_TLS_SERVER)
    fresh._config, fresh._current = config, _read(config)
    return fresh


def _read(config: Picker) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key)
        if config.tls_client_ca:
            context.load_verify_locations(config.tls_client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"picker.tls_cert, tls_key, tls_client_ca: cannot load the files: {error}") from None
    context.set_alpn_protocols(["h2"])
    return context


# The gRPC server that Envoy talks to. To the service it is the clients' listener.

MAX_PEERS: Final = 4_096
"""Envoys that the picker remembers."""
MAX_MISSED: Final = 64
"""Requests in a row without the head of a response, after which an Envoy is taken for one that shows none."""
PROCESS: Final = f"/{ext_proc.SERVICE}/Process"
MESSAGE_BYTES: Final = 1 << 20
"""What a message may have beside a body."""
SPARE_CALLS: Final = 64
"""Calls of a connection beyond the limit of requests: these get an answer of HTTP, and checks of health are served."""
_CLIENT_KEYS: Final = ("authorization", "x-api-key")


class PickerServer:
    def __init__(
        self, proxy: Proxy, limits: Limits, config: Callable[[], Picker], objectives: Callable[[], Mapping[str, str]]
    ) -> None:
        """`objectives`: the priority of each InferenceObjective, as X-Priority has it."""
        self.proxy = proxy
        self.limits = limits
        self.objectives = objectives
        self._config = config
        self.endpoints = Endpoints(proxy.tables)
        self.connections: set[PickerStream] = set()
        """Open streams: one for each request."""
        self.accepted = 0
        self.bodies = BodyMemory()
        self.partial_bytes = 0
        self.known_blocks: dict[bytes, str] = {}
        self.http2_connections: set[Http2Connection] = set()
        self.max_calls = limits.connections + SPARE_CALLS
        self._empty: asyncio.Event | None = None
        self._server: Server | None = None
        self._resolving: asyncio.Task[None] | None = None
        self._peers: dict[str, int] = {}
        """Envoys that show the heads of responses: how many requests in a row had none."""
        self._warned = False
        self.port = 0

    @property
    def buffered_bytes(self) -> int:
        """Bytes of requests in memory, of all streams."""
        return self.bodies.total_bytes

    @property
    def config(self) -> Picker:
        return self._config()

    # The listener.

    async def listen(self) -> str:
        """Return the address. Raises ConfigError if it cannot be used."""
        config = self.config
        self._server = await listen_tcp(self, config.host, config.port, server_tls(config))
        self.port = self._server.sockets[0].getsockname()[1]
        self._resolving = asyncio.get_running_loop().create_task(self.endpoints.run())
        return f"{'grpcs' if config.tls_cert else 'grpc'}://{join_endpoint(config.host, self.port)}"

    def protocol(self) -> Http2Connection:
        return Http2Connection(self)

    def may_buffer(self, size: int) -> bool:
        limits = self.limits
        return size <= 2 * limits.body_bytes + MESSAGE_BYTES and self.partial_bytes <= limits.buffered_bytes

    def handler_of(self, path: str, call: Call) -> CallHandler:
        if path == PROCESS:
            self.accepted += 1
            stream = PickerStream(self, call)
            self.connections.add(stream)
            return stream
        if path in (CHECK, WATCH):
            return HealthCall(call, self._is_ready, path == WATCH)
        return UnknownMethod(call)

    def _is_ready(self) -> bool:
        own = self.proxy.own_endpoints
        return not (own.starting or own.stopping)

    def stream_ended(self, stream: PickerStream) -> None:
        self.connections.discard(stream)
        if self._empty is not None and not self.connections:
            self._empty.set()

    def close_idle(self) -> None:
        """Accept no more streams. Those that are open finish."""
        if self._server is not None:
            self._server.close()
        for connection in list(self.http2_connections):
            connection.drain()

    async def until_empty(self) -> None:
        self._empty = asyncio.Event()
        if self.connections:
            await self._empty.wait()

    def cut_off_all(self) -> None:
        # Those that wait for a node go first: none may get the place of one that ends now.
        for stream in sorted(self.connections, key=lambda stream: stream.has_node):
            stream.cut_off()

    def abort_all(self) -> None:
        for stream in list(self.connections):
            stream.abort()

    @property
    def busy(self) -> int:
        return sum(1 for stream in self.connections if stream.busy)

    async def close(self) -> None:
        if self._resolving is not None:
            self._resolving.cancel()
        for connection in list(self.http2_connections):
            connection.close()
        if self._server is not None:
            self._server.close()

    # What its streams ask.

    def named_endpoints(self, node: NodeRow, fallbacks: Iterable[int]) -> str:
        """Return the endpoints of the node and its fallbacks, separated by commas; empty if the node has none."""
        of, most = self.endpoints.of, self.config.max_endpoints
        first = of(node)
        if not first or most == 1:
            return first
        nodes, key = self.proxy.tables().nodes, self._api_key(node)
        named = [first]
        for number in fallbacks:
            if len(named) == most:
                break
            other = nodes.get(number)
            if other is not None and self._api_key(other) == key and (endpoint := of(other)):
                named.append(endpoint)
        return ",".join(named)

    def _api_key(self, node: NodeRow) -> str:
        return self.proxy.pools.for_node(node).api_key if node.api_key_env else ""

    def credentials(self, node: NodeRow, rights: Rights) -> tuple[str, tuple[str, ...]]:
        """Return the node's Authorization header, and the headers with keys that are not for it."""
        key = self._api_key(node)
        if key:
            return f"Bearer {key}", ("x-api-key",)
        return "", () if rights.passes_authorization else _CLIENT_KEYS

    def shows_responses(self, host: str) -> None:
        """An Envoy showed the head of a response."""
        if len(self._peers) >= MAX_PEERS:
            self._peers.clear()
        self._peers[host] = 0

    def sees_heads_of(self, host: str) -> bool:
        """Return whether an Envoy shows the heads of responses. Asked for a request that ended without one."""
        missed = self._peers.get(host)
        if missed is None:
            return False
        self._peers[host] = missed + 1
        if missed >= MAX_MISSED:  # its configuration has changed
            del self._peers[host]
        return True

    def warn_without_bodies(self) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "picker_without_bodies",
                "Envoy does not send request bodies, so the picker routes by load only. Set request_body_mode to "
                "BUFFERED or FULL_DUPLEX_STREAMED.",
            )
