"""Client connections that the parent accepts and passes to workers.

The parent gives each connection to the worker with the fewest open ones, so a few long-lived connections spread evenly.
While no worker serves, connections wait in the kernel's backlog; none is refused because a worker restarts.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, Protocol

from warmroute.edge.client_connection import Listener
from warmroute.edge.sockets import PlainSockets, accept_the_last, open_tls
from warmroute.event_log import EventLog

log = EventLog("warmroute.service")

ACCEPTED_AT_ONCE: Final = 64
RETRY_S: Final = 0.01
"""How long the parent waits if no worker can take a connection, or the process has no file descriptor left."""
_RECEIVED_AT_ONCE: Final = 16


class Taker(Protocol):
    """A worker that serves."""

    @property
    def open_connections(self) -> int: ...

    def give(self, connection: socket.socket) -> bool:
        """Pass a connection, which is the worker's then. Return False if the worker does not take it now."""


class ConnectionPassing:
    """The parent's part."""

    def __init__(
        self, sockets: Sequence[socket.socket], takers: Callable[[], Sequence[Taker]], inherited: bool = False
    ) -> None:
        """`inherited`: the sockets are systemd's. What waits in them stays there for the next process."""
        self._sockets = list(sockets)
        self._inherited = inherited
        self._takers = takers
        self._turn = 0
        self._held: list[socket.socket] = []
        """Accepted connections that no worker has taken yet."""
        self._retry: asyncio.TimerHandle | None = None
        self.accepted = 0
        self._closed = False

    def start(self) -> None:
        for listening in self._sockets:
            listening.setblocking(False)
        self.resume()

    def resume(self) -> None:
        """Accept connections: a worker serves."""
        loop = asyncio.get_running_loop()
        for listening in self._sockets:
            loop.add_reader(listening, self._accept, listening)

    def _pause(self) -> None:
        loop = asyncio.get_running_loop()
        for listening in self._sockets:
            loop.remove_reader(listening)
        if self._retry is None:
            self._retry = loop.call_later(RETRY_S, self._try_again)

    def _try_again(self) -> None:
        self._retry = None
        while self._held:
            if not self._give(self._held[-1]):
                self._pause()
                return
            self._held.pop()
        if self._sockets:
            self.resume()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            if not self._takers():
                self._pause()
                return
            try:
                connection, _address = listening.accept()
            except BlockingIOError:
                return
            except OSError as error:  # for example too many open files
                log.error("accept_failed", "The router tries again.", reason=error.strerror or str(error))
                self._pause()
                return
            self.accepted += 1
            if not self._give(connection):
                self._held.append(connection)
                self._pause()
                return

    def _give(self, connection: socket.socket) -> bool:
        takers = self._takers()
        self._turn += 1
        first = self._turn % len(takers) if takers else 0
        order = sorted((*takers[first:], *takers[:first]), key=lambda taker: taker.open_connections)
        return any(taker.give(connection) for taker in order)

    def give_again(self, connections: Sequence[socket.socket]) -> None:
        """Pass connections that a worker did not receive before it ended."""
        if self._closed:
            for connection in connections:
                connection.close()
        elif connections:
            self._held += connections
            self._pause()

    async def finish(self) -> None:
        """Accept what waits in the kernel, pass it to workers, and close."""
        sockets = self._sockets
        if not self._inherited:
            await accept_the_last(sockets)
            for _ in range(10):
                if not self._held:
                    break
                await asyncio.sleep(RETRY_S)
        self.close()

    def close(self) -> None:
        """Accept no more connections."""
        self._closed = True
        if self._retry is not None:
            self._retry.cancel()
        loop = asyncio.get_running_loop()
        for listening in self._sockets:
            loop.remove_reader(listening)
            listening.close()
        self._sockets = []
        for connection in self._held:
            connection.close()
        self._held.clear()


class PassedConnections:
    """The worker's part."""

    def __init__(
        self,
        passing_fd: int,
        listener: Listener,
        tls: ssl.SSLContext | None,
        on_received: Callable[[], object],
        on_count_changed: Callable[[], object],
        plain: PlainSockets | None = None,
    ) -> None:
        """`on_received` is called after connections were received, `on_count_changed` when `open` may be another.
        `plain` serves connections without TLS; None: the event loop does."""
        self._on_received = on_received
        self._on_count_changed = listener.on_closed = on_count_changed
        self._passing = socket.socket(fileno=passing_fd)
        self._passing.setblocking(False)
        self._listener = listener
        self._plain = plain if tls is None else None
        self._tls = tls
        self._opening: set[asyncio.Task[None]] = set()
        self.received = 0
        self.ended = asyncio.Event()
        """The parent passes no more connections."""
        asyncio.get_running_loop().add_reader(self._passing, self._receive)

    @property
    def open(self) -> int:
        return len(self._listener.connections) + len(self._opening)

    def _receive(self) -> None:
        before = self.received
        self._receive_some()
        if self.received != before:
            self._on_received()

    def _receive_some(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(_RECEIVED_AT_ONCE):
            try:
                data, fds, _flags, _address = socket.recv_fds(self._passing, 1, 1)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                loop.remove_reader(self._passing)
                self.ended.set()
                return
            self.received += len(fds)
            for fd in fds:
                if self._plain is not None:
                    self._serve(self._plain, socket.socket(fileno=fd))
                    continue
                task = loop.create_task(self._open(socket.socket(fileno=fd)))
                self._opening.add(task)
                task.add_done_callback(self._opened)

    def _serve(self, plain: PlainSockets, connection: socket.socket) -> None:
        try:
            connection.setblocking(False)
            plain.open(connection, self._listener.protocol())
        except OSError:
            connection.close()

    async def _open(self, connection: socket.socket) -> None:
        """Serve a connection with TLS, or where the event loop serves all connections."""
        if self._tls is not None:
            await open_tls(self._listener, connection, self._tls)
            return
        try:
            connection.setblocking(False)
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().connect_accepted_socket(self._listener.protocol, connection)
        except (OSError, asyncio.CancelledError):  # the client left
            connection.close()

    def _opened(self, task: asyncio.Task[None]) -> None:
        self._opening.discard(task)
        self._on_count_changed()

    def close(self) -> None:
        """Take no more connections."""
        with suppress(OSError, ValueError):
            asyncio.get_running_loop().remove_reader(self._passing)
        self._receive_rest()

    def _receive_rest(self) -> None:
        """Serve what the parent has passed before it knew that this worker stops."""
        before = -1
        while before != self.received:
            before = self.received
            self._receive()
        with suppress(OSError):
            os.close(self._passing.detach())
