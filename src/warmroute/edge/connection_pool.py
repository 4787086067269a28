"""The pools of kept-alive connections to nodes, one pool for each node."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
import ssl
from typing import Any, Final

from warmroute.config import ConfigError
from warmroute.config import Upstream as UpstreamConfig
from warmroute.edge.node_connection import ConnectFailure, NodeConnection, ResponseHandler
from warmroute.edge.plain_sockets import PlainSockets
from warmroute.edge.timer_wheel import NEVER, TimerWheel
from warmroute.event_log import EventLog
from warmroute.fleet.node import Node

log = EventLog("warmroute.edge")

MAX_IDLE_CONNECTIONS: Final = 256
"""Unused connections that a pool keeps."""
_REFUSED: Final = {errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN}
_LOCAL: Final = {errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM}


class ConnectionPools:
    """The pools of all nodes. Each is created when it is first needed."""

    def __init__(self, config: UpstreamConfig, timers: TimerWheel, plain: PlainSockets | None = None) -> None:
        """`plain` serves connections without TLS; None, or not started: the event loop does."""
        self._timers = timers
        self._plain = plain
        self._pools: dict[Node, ConnectionPool] = {}
        self._config = config
        self._tls = node_tls(config)

    def reconfigure(self, config: UpstreamConfig) -> None:
        """Raises ConfigError, and changes nothing, if the file of certificate authorities is unusable."""
        self._tls = node_tls(config)
        for node, pool in list(self._pools.items()):
            if config.ca_file != self._config.ca_file:
                self.remove(node)
            else:
                pool.config = config
        self._config = config

    def reload_authorities(self) -> None:
        """Read the certificate authorities again, for new connections. Raises ConfigError if the file is unusable."""
        self._tls = node_tls(self._config)
        for pool in self._pools.values():
            pool.use_tls(self._tls)

    def for_node(self, node: Node) -> ConnectionPool:
        pool = self._pools.get(node)
        if pool is None:
            pool = self._pools[node] = ConnectionPool(node, self._config, self._timers, self._tls, self._plain)
        return pool

    def drop_changed_keys(self) -> None:
        """Remove the pools of nodes whose API key has changed."""
        for node, pool in list(self._pools.items()):
            if pool.api_key != _api_key(node):
                self.remove(node)

    def remove(self, node: Node) -> None:
        pool = self._pools.pop(node, None)
        if pool is not None:
            pool.close()

    def close(self) -> None:
        for node in list(self._pools):
            self.remove(node)


class ConnectionPool:
    """The connections to one node. The idle connection that was used last is taken first."""

    def __init__(
        self, node: Node, config: UpstreamConfig, timers: TimerWheel, tls: ssl.SSLContext | None,
        plain: PlainSockets | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self._plain = plain if "%" not in node.host else None  # uvloop resolves no zones of link-local addresses
        self.timers = timers
        self._host, self._port = host, port = node.host, node.port
        self._uses_tls = node.scheme == "https"
        self.use_tls(tls)
        self.uses_tls = self._tls is not None
        self._idle: list[NodeConnection] = []
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
        while self._idle:
            connection = self._idle.pop()
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
            handler.connect_failed(ConnectFailure.TRANSIENT, f"connecting to the node took longer than {timeout_s:g} s")
        except ssl.SSLError as error:
            handler.connect_failed(_tls_failure(error), f"TLS with the node failed: {error.reason or 'no handshake'}")
        except OSError as error:
            reason = f"cannot connect to the node: {error.strerror or type(error).__name__}"
            handler.connect_failed(_failure(error), reason)
        except Exception as error:  # such as UnicodeError for a host name with a label that is too long
            log.exception("connect_failed", "The router could not try to connect to a node.", host=self._host)
            handler.connect_failed(ConnectFailure.TRANSIENT, f"cannot connect to the node: {type(error).__name__}")
        else:
            try:
                if not handler.connected(connection):
                    self.release(connection, self.timers.now())
            except Exception:
                connection.cancel()
                raise

    def release(self, connection: NodeConnection, now_s: float) -> None:
        if self._closed or len(self._idle) >= MAX_IDLE_CONNECTIONS:
            connection.cancel()
            return
        self._idle.append(connection)
        self.timers.arm(connection, now_s + self.config.idle_timeout_s)

    def remove_idle(self, connection: NodeConnection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        """Close the idle connections now, and those that only read an error. Close each busy one when its response has
        ended."""
        self._closed = True
        idle, self._idle = self._idle, []
        for connection in (*idle, *self.reading_errors):
            connection.cancel()
        self.reading_errors.clear()

    @property
    def last_byte_s(self) -> float:
        """When the node last sent a byte of a response that is still running."""
        return max((connection.last_byte_s for connection in self.busy), default=-NEVER)


def _failure(error: OSError) -> ConnectFailure:
    if error.errno in _REFUSED or (isinstance(error, socket.gaierror) and error.errno == socket.EAI_NONAME):
        return ConnectFailure.REFUSED
    return ConnectFailure.LOCAL if error.errno in _LOCAL else ConnectFailure.TRANSIENT


def _tls_failure(error: ssl.SSLError) -> ConnectFailure:
    """A wrong certificate and a port without TLS do not pass by themselves. Anything else may."""
    permanent = isinstance(error, ssl.SSLCertVerificationError) or error.reason in (
        "WRONG_VERSION_NUMBER",
        "HTTP_REQUEST",
    )
    return ConnectFailure.REFUSED if permanent else ConnectFailure.TRANSIENT


def node_tls(config: UpstreamConfig) -> ssl.SSLContext:
    """Raises ConfigError if the file of certificate authorities is unusable."""
    try:
        return ssl.create_default_context(cafile=config.ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"upstream.ca_file: cannot load {config.ca_file!r}: {error}") from None


def _api_key(node: Node) -> str:
    return os.environ.get(node.api_key_env, "").strip() if node.api_key_env else ""
