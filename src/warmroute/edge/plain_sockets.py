"""Plain TCP and unix connections of one event loop, which the kernel reads and writes (`_kernel/socket_poller.c`).

Connections with TLS are the event loop's own: it has the same methods for them.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol, TypeVar

from warmroute._kernel import SocketPoller, SocketTransport
from warmroute.event_log import EventLog

log = EventLog("warmroute.edge")

ACCEPT_PAUSE_S: Final = 1.0
"""How long a listening socket accepts nothing after this process had no file or memory for a connection."""
T = TypeVar("T")


class Server(Protocol):
    """What the service needs of an asyncio.Server and of a PlainServer."""

    @property
    def sockets(self) -> Sequence[Any]: ...

    def is_serving(self) -> bool: ...

    def close(self) -> None: ...


class PlainSockets:
    def __init__(self) -> None:
        self._poller: SocketPoller | None = None

    def start(self) -> None:
        """Serve sockets in the running event loop."""
        loop = asyncio.get_running_loop()
        self._poller = poller = SocketPoller(loop.call_soon)
        loop.add_reader(poller.fileno(), poller.poll)

    @property
    def started(self) -> bool:
        return self._poller is not None

    def close(self) -> None:
        """Close all connections. Their protocols are not called."""
        poller, self._poller = self._poller, None
        if poller is not None:
            asyncio.get_running_loop().remove_reader(poller.fileno())
            poller.close()

    def open(self, connected: socket.socket, protocol: Any) -> SocketTransport:
        """Serve a connected socket. Raises OSError; the socket is closed then."""
        poller, fd = self._poller, connected.detach()
        try:
            if poller is None:
                raise OSError("the router stops")
            return poller.open(fd, protocol)
        except BaseException:
            os.close(fd)
            raise

    async def connect(self, host: str, port: int, create_protocol: Callable[[], T]) -> T:
        """Connect to the first address of a host that accepts. Return the connection's protocol. Raises OSError."""
        loop = asyncio.get_running_loop()
        failure: OSError | None = None
        try:
            for family, kind, proto, _name, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                connecting: socket.socket | None = None
                try:
                    connecting = socket.socket(family, kind, proto)  # fails for IPv6 on a machine without it
                    connecting.setblocking(False)
                    await loop.sock_connect(connecting, address)
                    protocol = create_protocol()
                    self.open(connecting, protocol)
                    return protocol
                except BaseException as error:
                    if connecting is not None:
                        connecting.close()
                    if not isinstance(error, OSError):
                        raise
                    failure = failure or error
            raise failure or OSError(f"{host} has no address")
        finally:
            failure = None  # its traceback leads back to this frame

    def listen(
        self, create_protocol: Callable[[], Any], sockets: Sequence[socket.socket], socket_file: str = ""
    ) -> PlainServer:
        """Accept the connections of listening sockets. `socket_file`: is removed when the server closes."""
        assert self._poller is not None
        return PlainServer(self._poller, create_protocol, sockets, socket_file)


class PlainServer:
    """Accepts connections until it is closed. Then it closes its sockets, too."""

    def __init__(
        self, poller: SocketPoller, create_protocol: Callable[[], Any], sockets: Sequence[socket.socket],
        socket_file: str = "",
    ) -> None:  # fmt: skip
        self.sockets = tuple(sockets)
        self._socket_file = socket_file
        self._file_number = os.stat(socket_file).st_ino if socket_file else 0
        for one in self.sockets:
            one.setblocking(False)
        self._listening = [poller.listen(one, create_protocol, self._failed) for one in self.sockets]
        self._pause: asyncio.TimerHandle | None = None

    def _failed(self, number: int) -> None:
        """This process could not accept a connection. To try again at once would take all of its time."""
        for one in self._listening:
            one.pause()
        if self._pause is None:
            log.error(
                "accept_failed",
                f"The router accepts no connection for {ACCEPT_PAUSE_S:g} s; connected clients are served.",
                reason=os.strerror(number),
            )
            self._pause = asyncio.get_running_loop().call_later(ACCEPT_PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._pause = None
        try:
            for one in self._listening:
                one.resume()
        except OSError as error:
            self._failed(error.errno or errno.ENOMEM)

    def is_serving(self) -> bool:
        return bool(self._listening)

    def remove_file(self) -> None:
        """Remove the socket's file: no further client finds it."""
        with suppress(OSError):
            if self._socket_file and os.stat(self._socket_file).st_ino == self._file_number:  # else it is another's
                os.unlink(self._socket_file)

    def close(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
        listening, self._listening = self._listening, []
        for one in listening:
            one.close()
        self.remove_file()
        for listening_socket in self.sockets:
            with suppress(OSError):
                listening_socket.close()
