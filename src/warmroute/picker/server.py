"""The gRPC server that Envoy talks to. To the service it is the clients' listener."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc
import grpc.aio

from warmroute.config import ConfigError, Limits, Picker
from warmroute.edge.http1 import RequestHead
from warmroute.edge.proxy import Proxy
from warmroute.event_log import EventLog
from warmroute.fleet.node import Node
from warmroute.picker import messages
from warmroute.picker.endpoints import Endpoints, join_endpoint
from warmroute.picker.exchange import PickerExchange
from warmroute.picker.health import Health
from warmroute.picker.stream import PickerStream
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
STOP_S: Final = 3_600.0
"""gRPC ends streams this long after the picker stopped accepting new ones; the service ends them earlier."""
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
        self.buffered_bytes = 0
        """Bytes of requests in memory, of all streams."""
        self._empty: asyncio.Event | None = None
        self._server: Any = None
        self._resolving: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._peers: dict[str, int] = {}
        """Envoys that show the heads of responses: how many requests in a row had none."""
        self._warned = False
        self.port = 0

    @property
    def config(self) -> Picker:
        return self._config()

    # The listener.

    async def listen(self) -> str:
        """Return the address. Raises ConfigError if it cannot be used."""
        config = self.config
        most = 2 * self.limits.body_bytes + (1 << 20)  # a larger body gets an error of HTTP, not one of gRPC
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", min(most, (1 << 31) - 1)),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),
            ]
        )
        process = grpc.stream_stream_rpc_method_handler(self._process, messages.Request.FromString, None)
        health = Health(lambda: not (self.proxy.own_endpoints.starting or self.proxy.own_endpoints.stopping))
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(messages.SERVICE, {"Process": process}), health.handler())
        )
        address = join_endpoint(config.host, config.port)
        try:
            if config.tls_cert:
                self.port = self._server.add_secure_port(address, server_credentials(config))
            else:
                self.port = self._server.add_insecure_port(address)
        except (RuntimeError, OSError):
            raise ConfigError(
                f"picker: cannot listen on {address}: the address is in use or not of this machine"
            ) from None
        await self._server.start()
        self._resolving = asyncio.get_running_loop().create_task(self.endpoints.run())
        return f"{'grpcs' if config.tls_cert else 'grpc'}://{join_endpoint(config.host, self.port)}"

    async def _process(self, _messages: Any, context: Any) -> None:
        self.accepted += 1
        stream = PickerStream(self, context)
        self.connections.add(stream)
        await stream.run()

    def stream_ended(self, stream: PickerStream) -> None:
        self.connections.discard(stream)
        if self._empty is not None and not self.connections:
            self._empty.set()

    def close_idle(self) -> None:
        """Accept no more streams. Those that are open finish."""
        if self._server is not None and self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self._server.stop(STOP_S))

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
        if self._server is not None:
            await self._server.stop(None)
        if self._stopping is not None:
            await self._stopping

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
            if other.role == "prefill" or other.needs_partner:  # it cannot serve a whole request
                continue
            if endpoint := of(other):
                named.append(endpoint)
        return ",".join(named)

    def _api_key(self, node: Node) -> str:
        return self.proxy.pools.for_node(node).api_key if node.config.api_key_env else ""

    def credentials(self, node: Node) -> tuple[str, tuple[str, ...]]:
        """Return the node's Authorization header, and the headers with keys that are not for it."""
        key = self._api_key(node)
        if key:
            return f"Bearer {key}", ("x-api-key",)
        return "", () if self.proxy.passes_authorization else _CLIENT_KEYS

    def shows_responses(self, peer: str) -> None:
        """An Envoy showed the head of a response."""
        if len(self._peers) >= MAX_PEERS:
            self._peers.clear()
        self._peers[peer.rpartition(":")[0]] = 0

    def sees_heads_of(self, peer: str) -> bool:
        """Return whether an Envoy shows the heads of responses. Asked for a request that ended without one."""
        host = peer.rpartition(":")[0]
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


def server_credentials(config: Picker) -> Any:
    """Read the files anew for each connection, so that a new certificate counts at once. Raises ConfigError."""
    current = _read_credentials(config)

    def fetch() -> Any:
        try:
            return _read_credentials(config)
        except ConfigError as error:
            log.error("certificates_rejected", "The picker keeps the previous certificates.", reason=error)
            return None

    return grpc.dynamic_ssl_server_credentials(current, fetch, bool(config.tls_client_ca))


def _read_credentials(config: Picker) -> Any:
    try:
        chain = Path(config.tls_cert).read_bytes()
        key = Path(config.tls_key).read_bytes()
        authorities = Path(config.tls_client_ca).read_bytes() if config.tls_client_ca else None
    except OSError as error:
        raise ConfigError(f"picker.tls_cert, tls_key, tls_client_ca: cannot read {error.filename}: {error}") from None
    return grpc.ssl_server_certificate_configuration([(key, chain)], authorities)
