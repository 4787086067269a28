"""The gRPC server that Envoy talks to. To the service it is the clients' listener."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from warmroute.config import Limits, Picker
from warmroute.edge.api_keys import Rights
from warmroute.edge.body_reader import BodyMemory
from warmroute.edge.http1 import RequestHead
from warmroute.edge.listening_sockets import listen_tcp
from warmroute.edge.plain_sockets import Server
from warmroute.edge.proxy import Proxy
from warmroute.event_log import EventLog
from warmroute.fleet.node import Node
from warmroute.picker import messages
from warmroute.picker.endpoints import Endpoints, join_endpoint
from warmroute.picker.exchange import PickerExchange
from warmroute.picker.grpc_call import Call, CallHandler, UnknownMethod
from warmroute.picker.health import CHECK, WATCH, HealthCall
from warmroute.picker.http2 import Http2Connection
from warmroute.picker.stream import PickerStream
from warmroute.picker.tls import server_tls
from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing.attempts import Attempts
from warmroute.routing.decision import Decision

if TYPE_CHECKING:
    from warmroute.fleet.fleet import Fleet

log = EventLog("warmroute.picker")

MAX_PEERS: Final = 4_096
"""Envoys that the picker remembers."""
MAX_MISSED: Final = 64
"""Requests in a row without the head of a response, after which an Envoy is taken for one that shows none."""
PROCESS: Final = f"/{messages.SERVICE}/Process"
MESSAGE_BYTES: Final = 1 << 20
"""What a message may have beside a body."""
SPARE_CALLS: Final = 64
"""Calls of a connection beyond the limit of requests: these get an answer of HTTP, and checks of health are served."""
_CLIENT_KEYS: Final = ("authorization", "x-api-key")


class PickerServer:
    def __init__(
        self, proxy: Proxy, fleet: Fleet, limits: Limits, config: Callable[[], Picker],
        objectives: Callable[[], Mapping[str, str]],
    ) -> None:  # fmt: skip
        """`objectives`: the priority of each InferenceObjective, as X-Priority has it."""
        self.proxy = proxy
        proxy.create_exchange = _for_envoy
        self.limits = limits
        self.objectives = objectives
        self._config = config
        self.endpoints = Endpoints(fleet)
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
        for stream in list(self.connections):
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

    def named_endpoints(self, decision: Decision, node: Node, attempts: Attempts) -> str:
        """Return the endpoints of the node and its fallbacks, separated by commas; empty if the node has none."""
        first = self.endpoints.of(node)
        most = self.config.max_endpoints
        if not first or most == 1:
            return first
        of, key = self.endpoints.of, self._api_key(node)
        subset = attempts.request.subset
        named = [first]
        for other in (decision.node, *decision.fallbacks()):
            if len(named) == most:
                break
            if (
                other is node
                or other.needs_partner
                or (subset is not None and other.name not in subset)
                or self._api_key(other) != key
            ):
                continue
            # A node that cannot serve a whole request, or has as many requests as it may have.
            if other.role == "prefill" or other.needs_partner or other.is_full:
                continue
            if endpoint := of(other):
                named.append(endpoint)
        return ",".join(named)

    def _api_key(self, node: Node) -> str:
        return self.proxy.pools.for_node(node).api_key if node.config.api_key_env else ""

    def credentials(self, node: Node, rights: Rights) -> tuple[str, tuple[str, ...]]:
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


def _for_envoy(
    proxy: Proxy, client: PickerStream, head: RequestHead, body: bytes, request: RoutingRequest
) -> PickerExchange:
    request.subset = client.subset
    if not client.sees_responses:
        request.streams = False  # then nothing is known before the end
    return PickerExchange(proxy, client, head, body)
