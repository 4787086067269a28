"""Connections to nodes that are kept alive, and the router's own GET and POST over them."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
import ssl
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

from warmroute._kernel import CHUNKED, BadChunk, ChunkReader, ResponseHead
from warmroute.config import ConfigError
from warmroute.config import Upstream as UpstreamConfig
from warmroute.core.messages import LOCAL, REFUSED, TRANSIENT, NodeRow
from warmroute.edge.node_connection import NodeConnection, ResponseHandler
from warmroute.edge.sockets import PlainSockets
from warmroute.edge.timer_wheel import NEVER, TICK_S, TimerWheel
from warmroute.event_log import EventLog, where_it_failed

# The pools of kept-alive connections to nodes, one pool for each node.

log = EventLog("warmroute.edge")

MAX_IDLE_CONNECTIONS: Final = 256
"""Unused connections that a pool keeps."""
_REFUSED: Final = {errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN}
_LOCAL: Final = {errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM}


class NodeAddress(Protocol):
    """A row of the edge's tables, or the core's own node."""

    @property
    def number(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def scheme(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def api_key_env(self) -> str: ...


class ConnectionPools:
    """The pools of all nodes. Each is created when it is first needed."""

    def __init__(self, config: UpstreamConfig, timers: TimerWheel, plain: PlainSockets | None = None) -> None:
        """`plain` serves connections without TLS; None, or not started: the event loop does."""
        self._timers = timers
        self._plain = plain
        self.by_number: dict[int, ConnectionPool] = {}
        """By the number of the node."""
        self._config = config
        self._tls = node_tls(config)

    def reconfigure(self, config: UpstreamConfig) -> None:
        """Raises ConfigError, and changes nothing, if the file of certificate authorities is unusable."""
        self._tls = node_tls(config)
        if config.ca_file != self._config.ca_file:
            self.close()
        for pool in self.by_number.values():
            pool.config = config
        self._config = config

    def reload_authorities(self) -> None:
        """Read the certificate authorities again, for new connections. Raises ConfigError if the file is unusable."""
        self._tls = node_tls(self._config)
        for pool in self.by_number.values():
            pool.use_tls(self._tls)

    def for_node(self, node: NodeAddress) -> ConnectionPool:
        pool = self.by_number.get(node.number)
        if pool is None:
            pool = ConnectionPool(node, self._config, self._timers, self._tls, self._plain)
            self.by_number[node.number] = pool
        return pool

    def renumber(self, nodes: Iterable[NodeRow]) -> None:
        """Another core has given the nodes other numbers: keep their connections."""
        before, self.by_number = self.by_number, {}
        known = {pool.address: pool for pool in before.values()}
        for node in nodes:
            pool = known.pop((node.scheme, node.host, node.port, node.api_key_env), None)
            if pool is not None:
                self.by_number[node.number] = pool
        for pool in known.values():
            pool.close()

    def drop_changed_keys(self, nodes: Iterable[NodeAddress]) -> None:
        """Remove the pools of those nodes whose API key has changed."""
        for node in nodes:
            pool = self.by_number.get(node.number)
            if pool is not None and pool.api_key != _api_key(node):
                self.remove(node)

    def remove(self, node: NodeAddress) -> None:
        self.remove_number(node.number)

    def remove_number(self, number: int) -> None:
        pool = self.by_number.pop(number, None)
        if pool is not None:
            pool.close()

    def close(self) -> None:
        pools, self.by_number = self.by_number, {}
        for pool in pools.values():
            pool.close()


class ConnectionPool:
    """The connections to one node. The idle connection that was used last is taken first."""

    def __init__(
        self, node: NodeAddress, config: UpstreamConfig, timers: TimerWheel, tls: ssl.SSLContext | None,
        plain: PlainSockets | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self._plain = plain if "%" not in node.host else None  # uvloop resolves no zones of link-local addresses
        self.timers = timers
        self._host, self._port = host, port = node.host, node.port
        self.name = node.name
        self.address = (node.scheme, host, port, node.api_key_env)
        self._uses_tls = node.scheme == "https"
        self.use_tls(tls)
        self.uses_tls = self._tls is not None
        self.idle: list[NodeConnection] = []
        """Connections without a request. The last one was used last."""
        self.busy: set[NodeConnection] = set()
        self.reading_errors: set[NodeConnection] = set()
        """Those of `busy` that wait for the rest of an error's body."""
        self._connecting: set[asyncio.Task[None]] = set()
        self._closed = False
        default_port = 443 if node.scheme == "https" else 80
        shown_host = f"[{host}]" if ":" in host else host
        self.host_line = f"Host: {shown_host}{'' if port == default_port else f':{port}'}\r\n".encode()
        self.own_address = re.compile(
            rb"(?im)^((?:content-)?location:[ \t]*)https?://" + re.escape(self.host_line[6:-2]) + rb"(?=[/?\s])"
        )
        """Matches a redirect to the node itself. The router removes the address, so that clients come back to it."""
        self.api_key = _api_key(node)
        self.authorization_line = f"Authorization: Bearer {self.api_key}\r\n".encode() if self.api_key else b""

    def use_tls(self, tls: ssl.SSLContext | None) -> None:
        self._tls = tls if self._uses_tls else None

    def take_idle(self) -> NodeConnection | None:
        while self.idle:
            connection = self.idle.pop()
            if not connection.transport.is_closing():
                return connection
        return None

    def connect(self, handler: ResponseHandler) -> None:
        """Open a connection, then call the handler's `connected` or `connect_failed`."""
        task = asyncio.get_running_loop().create_task(self._connect(handler))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, handler: ResponseHandler) -> None:
        try:
            await self._open_connection(handler)
        except Exception as error:  # the handler itself failed
            handler.internal_error(error, None)

    def _new_connection(self) -> NodeConnection:
        return NodeConnection(self)

    async def _open_connection(self, handler: ResponseHandler) -> None:
        loop = asyncio.get_running_loop()
        timeout_s = self.config.connect_timeout_s
        new_connection: Any = self._new_connection
        try:
            async with asyncio.timeout(timeout_s):
                if self._tls is None and self._plain is not None and self._plain.started:
                    connection = await self._plain.connect(self._host, self._port, self._new_connection)
                else:
                    _transport, connection = await loop.create_connection(
                        new_connection,
                        self._host,
                        self._port,
                        ssl=self._tls,
                        server_hostname=self._host if self._tls else None,
                    )
        except TimeoutError:
            handler.connect_failed(TRANSIENT, f"connecting to the node took longer than {timeout_s:g} s")
        except ssl.SSLError as error:
            handler.connect_failed(_tls_failure(error), f"TLS with the node failed: {error.reason or 'no handshake'}")
        except OSError as error:
            reason = f"cannot connect to the node: {error.strerror or type(error).__name__}"
            handler.connect_failed(_failure(error), reason)
        except Exception as error:  # such as UnicodeError for a host name with a label that is too long
            log.exception("connect_failed", "The router could not try to connect to a node.", host=self._host)
            handler.connect_failed(TRANSIENT, f"cannot connect to the node: {type(error).__name__}")
        else:
            try:
                if not handler.connected(connection):
                    self.release(connection, self.timers.now())
            except Exception:
                connection.cancel()
                raise

    def release(self, connection: NodeConnection, now_s: float) -> None:
        if self._closed or len(self.idle) >= MAX_IDLE_CONNECTIONS:
            connection.cancel()
            return
        self.idle.append(connection)
        deadline_s = now_s + self.config.idle_timeout_s
        if 0.0 <= connection.bucket * TICK_S <= deadline_s:  # as in `arm`, without a call
            connection.deadline_s = deadline_s
        else:
            self.timers.arm(connection, deadline_s)

    def remove_idle(self, connection: NodeConnection) -> None:
        if connection in self.idle:
            self.idle.remove(connection)

    def close(self) -> None:
        """Close the idle connections now, and those that only read an error. Close each busy one when its response has
        ended."""
        self._closed = True
        idle, self.idle = self.idle, []
        for connection in (*idle, *self.reading_errors):
            connection.cancel()
        self.reading_errors.clear()

    @property
    def last_byte_s(self) -> float:
        """When the node last sent a byte of a response that is still running."""
        return max((connection.last_byte_s for connection in self.busy), default=-NEVER)


def _failure(error: OSError) -> int:
    if error.errno in _REFUSED or (isinstance(error, socket.gaierror) and error.errno == socket.EAI_NONAME):
        return REFUSED
    return LOCAL if error.errno in _LOCAL else TRANSIENT


def _tls_failure(error: ssl.SSLError) -> int:
    """A wrong certificate and a port without TLS do not pass by themselves. Anything else may."""
    permanent = isinstance(error, ssl.SSLCertVerificationError) or error.reason in (
        "WRONG_VERSION_NUMBER",
        "HTTP_REQUEST",
    )
    return REFUSED if permanent else TRANSIENT


def node_tls(config: UpstreamConfig) -> ssl.SSLContext:
    """Raises ConfigError if the file of certificate authorities is unusable."""
    try:
        return ssl.create_default_context(cafile=config.ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"upstream.ca_file: cannot load {config.ca_file!r}: {error}") from None


def _api_key(node: NodeAddress) -> str:
    return os.environ.get(node.api_key_env, "").strip() if node.api_key_env else ""


# GET and POST requests of the router itself to nodes, over the nodes' connection pools: health checks, metrics, model
# lists, tokenization. Requests to other servers use warmroute/http_client.py.

MAX_GET_BYTES: Final = 8_388_608
MAX_POST_BYTES: Final = 33_554_432
"""The largest response that the router reads."""


class NodeClient:
    """Its methods return a response's status and body.

    They raise ConnectionRefusedError if no process listens, ConnectionError if the response is broken or too large,
    TimeoutError if the node is slow, and another OSError if this machine is out of files, ports or memory.
    """

    def __init__(self, pools: ConnectionPools) -> None:
        self._pools = pools

    async def get(self, node: NodeAddress, path: str, timeout_s: float) -> tuple[int, bytes]:
        pool = self._pools.for_node(node)
        head = b"GET %b HTTP/1.1\r\n%b%bAccept: */*\r\n\r\n" % (path.encode(), pool.host_line, pool.authorization_line)
        return await _fetch(pool, head, b"", timeout_s, MAX_GET_BYTES)

    async def post(self, node: NodeAddress, path: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        """The body is JSON."""
        pool = self._pools.for_node(node)
        head = (
            b"POST %b HTTP/1.1\r\n%b%bAccept: */*\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            % (path.encode(), pool.host_line, pool.authorization_line, len(body))
        )
        return await _fetch(pool, head, body, timeout_s, MAX_POST_BYTES)


async def _fetch(
    pool: ConnectionPool, head: bytes, body: bytes, timeout_s: float, limit_bytes: int
) -> tuple[int, bytes]:
    fetch = _Fetch(pool, head, body, limit_bytes)
    connection = pool.take_idle()
    if connection is not None:
        fetch.send_on(connection)
    else:
        pool.connect(fetch)
    try:
        async with asyncio.timeout(timeout_s):
            return await fetch.done
    finally:
        fetch.cancel()
        fetch.done.cancel()


class _Fetch:
    """One request. Implements node_connection.ResponseHandler."""

    def __init__(self, pool: ConnectionPool, head: bytes, body: bytes, limit_bytes: int) -> None:
        self._pool = pool
        self._head = head
        self._body = body
        self._retried_stale = False
        self._limit_bytes = limit_bytes
        self._pieces: list[bytes] = []
        self._size = 0
        self._frames: ChunkReader | None = None
        self._status = 0
        self._connection: NodeConnection | None = None
        self.done: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()

    def connected(self, connection: NodeConnection) -> bool:
        if self.done.done():
            return False
        self.send_on(connection)
        return True

    def send_on(self, connection: NodeConnection) -> None:
        self._connection = connection
        connection.send_request(self, self._head, self._body)

    def connect_failed(self, sign: int, reason: str) -> None:
        errors = {REFUSED: ConnectionRefusedError, LOCAL: OSError}
        self._fail(errors.get(sign, ConnectionError)(reason))

    def response_started(
        self, head: ResponseHead, first: bytes, whole: bool, now_s: float
    ) -> Callable[[bytes], object] | None:
        self._status = head.status
        if head.length == CHUNKED:
            self._frames = ChunkReader()
        self._collect(first)
        return self._collect

    def _collect(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._limit_bytes:
            self.cancel()
            self._fail(ConnectionError(f"the response is larger than {self._limit_bytes:,} bytes"))
        elif self._frames is None:
            self._pieces.append(data)
        elif data:
            try:
                self._frames.feed(data, self._pieces)
            except BadChunk:
                self._fail(ConnectionError("the response's chunked encoding is malformed"))

    def response_ended(self, now_s: float) -> None:
        self._connection = None
        if not self.done.done():
            self.done.set_result((self._status, b"".join(self._pieces)))

    def response_failed(self, sign: int, reason: str, stale: bool) -> None:
        self._connection = None
        if stale and not self._retried_stale and not self.done.done():
            self._retried_stale = True
            self._pool.connect(self)
        else:
            self._fail(ConnectionError(reason))

    def response_broke(self, sign: int, reason: str, frames: ChunkReader | None) -> None:
        self._fail(ConnectionError(reason))

    def internal_error(self, error: Exception, frames: ChunkReader | None) -> None:
        self._fail(ConnectionError(where_it_failed(error)))

    def _fail(self, error: OSError) -> None:
        self._connection = None
        if not self.done.done():
            self.done.set_exception(error)

    def cancel(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.cancel()
