"""TLS connections of one event loop. The event loop speaks TLS; this module accepts the connections and looks at their
first byte, so that a client that speaks plain HTTP gets an answer instead of a closed connection.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from warmroute.edge import errors
from warmroute.edge.listener import Listener
from warmroute.edge.local_replies import render_final_error
from warmroute.edge.plain_sockets import ACCEPT_PAUSE_S
from warmroute.event_log import EventLog

log = EventLog("warmroute.edge")

TLS_SHUTDOWN_S: Final = 1.0
"""How long a closing TLS connection waits for the client's close_notify. Pooling clients never send it."""
ACCEPTED_AT_ONCE: Final = 64
PLAIN_LINGER_S: Final = 1.0
"""How long a client that spoke HTTP may take to read its answer."""
_DROPPED_AT_ONCE: Final = 65_536


class TlsServer:
    """Accepts connections until it is closed. Then it closes its sockets, too."""

    def __init__(
        self, listener: Listener, sockets: Sequence[socket.socket], tls: ssl.SSLContext, socket_file: str = ""
    ) -> None:  # fmt: skip
        """`socket_file`: is removed when the server closes."""
        self._listener = listener
        self.sockets = tuple(sockets)
        self._tls = tls
        self._socket_file = socket_file
        self._file_number = os.stat(socket_file).st_ino if socket_file else 0
        self._pause: asyncio.TimerHandle | None = None
        self._serving = True
        self._opening: set[asyncio.Task[None]] = set()
        for one in self.sockets:
            one.setblocking(False)
        self._resume()

    def _resume(self) -> None:
        self._pause = None
        for one in self.sockets:
            asyncio.get_running_loop().add_reader(one, self._accept, one)

    def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, _address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # for example too many open files: to try again at once would take all CPU time
                for one in self.sockets:
                    loop.remove_reader(one)
                if self._pause is None:
                    log.error(
                        "accept_failed",
                        f"The router accepts no connection for {ACCEPT_PAUSE_S:g} s; connected clients are served.",
                        reason=error.strerror or str(error),
                    )
                    self._pause = loop.call_later(ACCEPT_PAUSE_S, self._resume)
                return
            task = loop.create_task(open_tls(self._listener, connection, self._tls))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def is_serving(self) -> bool:
        return self._serving

    def remove_file(self) -> None:
        """Remove the socket's file: no further client finds it."""
        with suppress(OSError):
            if self._socket_file and os.stat(self._socket_file).st_ino == self._file_number:  # else it is another's
                os.unlink(self._socket_file)

    def close(self) -> None:
        if not self._serving:
            return
        self._serving = False
        if self._pause is not None:
            self._pause.cancel()
        for one in self.sockets:
            asyncio.get_running_loop().remove_reader(one)
        self.remove_file()
        for one in self.sockets:
            with suppress(OSError):
                one.close()


async def open_tls(listener: Listener, connection: socket.socket, tls: ssl.SSLContext) -> None:
    """Serve an accepted connection with TLS. A client that speaks HTTP gets an error in HTTP."""
    loop = asyncio.get_running_loop()
    timeout_s = listener.limits.header_timeout_s
    listener.handshakes += 1
    try:
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        async with asyncio.timeout(timeout_s):
            first = await _first_byte(connection)
        if not first:
            connection.close()
        elif first.isalpha():  # the beginning of a method; a TLS record begins with a control character
            await _answer_http(listener, connection)
        else:
            await loop.connect_accepted_socket(
                listener.protocol, connection, ssl=tls, ssl_handshake_timeout=timeout_s,
                ssl_shutdown_timeout=TLS_SHUTDOWN_S,
            )  # fmt: skip
    except (OSError, asyncio.CancelledError):  # the client left, sent nothing, or its TLS handshake failed
        connection.close()
    finally:
        listener.handshakes -= 1


async def _first_byte(connection: socket.socket) -> bytes:
    """Return the first byte, which stays unread; empty if the client has closed the connection. Raises OSError."""
    try:
        return connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        pass
    loop = asyncio.get_running_loop()
    readable = loop.create_future()
    loop.add_reader(connection, _set, readable)
    try:
        await readable
    finally:
        loop.remove_reader(connection)
    return connection.recv(1, socket.MSG_PEEK)


def _set(readable: asyncio.Future[None]) -> None:
    if not readable.done():
        readable.set_result(None)


async def _answer_http(listener: Listener, connection: socket.socket) -> None:
    """Answer, and read what the client still sends: closed with unread data, its kernel would drop the answer."""
    error, request_id = errors.http_on_tls_port(), listener.handler.new_request_id()
    peer = connection.getpeername()
    listener.handler.error_sent(error, request_id, peer[0].encode() if isinstance(peer, tuple) else b"", b"")
    loop = asyncio.get_running_loop()
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(PLAIN_LINGER_S):
            await loop.sock_sendall(connection, render_final_error(error, request_id, False))
            connection.shutdown(socket.SHUT_WR)
            while await loop.sock_recv(connection, _DROPPED_AT_ONCE):
                pass
    connection.close()
