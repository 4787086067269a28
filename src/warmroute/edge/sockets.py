"""Listening sockets, TLS, and plain sockets that the kernel module reads and writes."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import select
import socket
import ssl
import stat
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol, TypeVar

from warmroute._kernel import SocketPoller, SocketTransport
from warmroute.config import ConfigError, Limits
from warmroute.edge import errors
from warmroute.edge.client_connection import Listener
from warmroute.edge.client_connection import Listener as ClientListener
from warmroute.edge.errors import render_final_error
from warmroute.event_log import EventLog

# Plain TCP and unix connections of one event loop, which the kernel reads and writes (`_kernel/socket_poller.c`).
#
# Connections with TLS are the event loop's own: it has the same methods for them.

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

    def pause_accepting(self) -> None:
        """Let other processes accept the connections of the same sockets."""
        for one in self._listening:
            one.pause()

    def resume_accepting(self) -> None:
        if self._pause is None:
            self._resume()

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


# TLS connections of one event loop. The event loop speaks TLS; this module accepts the connections and looks at their
# first byte, so that a client that speaks plain HTTP gets an answer instead of a closed connection.

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
        self._serving = self._accepts = True
        self._opening: set[asyncio.Task[None]] = set()
        for one in self.sockets:
            one.setblocking(False)
        self._resume()

    def _resume(self) -> None:
        self._pause, self._accepts = None, True
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
            if not self._accepts:
                return

    def pause_accepting(self) -> None:
        """Let other processes accept the connections of the same sockets."""
        self._accepts = False
        for one in self.sockets:
            asyncio.get_running_loop().remove_reader(one)

    def resume_accepting(self) -> None:
        if self._serving and self._pause is None:
            self._resume()

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


# Listening sockets: TCP over IPv4 and IPv6, and unix sockets, with or without TLS.

BACKLOG: Final = 4096
"""Connections that the kernel holds until the router accepts them."""
LAST_CONNECTIONS_S: Final = 1.0
"""Longest time for accepting what waits in the kernel before a listening socket is closed."""
HANDSHAKE_S: Final = 0.2
"""How long clients on other machines may take to complete the handshake that they have begun."""
_TURN_S: Final = 0.001
_SO_ATTACH_FILTER: Final = 26
_NO_SYN: Final = ((0x30, 0, 0, 13), (0x45, 0, 1, 0x02), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF))
"""A socket filter: load the TCP flags; if SYN is set, drop the packet, else take all of it."""


class ListeningSocket(Protocol):
    limits: Limits

    def protocol(self) -> asyncio.Protocol:
        """Serve a new connection."""


def server_tls(cert: str, key: str) -> ssl.SSLContext | None:
    """Return None if no certificate is configured. Raises ConfigError if the files are unusable."""
    if not cert:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"listen.tls_cert and listen.tls_key: cannot load the files: {error}") from None
    return context


async def listen_tcp(
    listener: ListeningSocket,
    host: str,
    port: int,
    tls: ssl.SSLContext | None = None,
    plain: PlainSockets | None = None,
) -> Server:
    """`plain` serves connections without TLS; None: the event loop does. Raises ConfigError if the address is
    unusable."""
    loop = asyncio.get_running_loop()
    options = _options(listener, tls)
    try:
        if tls is not None and isinstance(listener, ClientListener):
            return TlsServer(listener, _bind(host, port), tls)
        if plain is not None and tls is None:
            return plain.listen(listener.protocol, _bind(host, port))
        if host == "::":  # one socket for IPv4 and IPv6, which asyncio does not create by itself
            return await loop.create_server(listener.protocol, sock=_dual_stack(port), **options)
        return await loop.create_server(listener.protocol, host, port, **options)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {_advice(error, host)}") from None


async def listen_inherited(
    listener: ListeningSocket,
    inherited: socket.socket,
    tls: ssl.SSLContext | None = None,
    plain: PlainSockets | None = None,
) -> Server:
    """Accept connections of a socket that another process listens on, too: systemd."""
    inherited.setblocking(False)
    if plain is not None and tls is None:
        return plain.listen(listener.protocol, [inherited])
    if tls is not None and isinstance(listener, ClientListener):
        return TlsServer(listener, [inherited], tls)
    options = _options(listener, tls)
    loop = asyncio.get_running_loop()
    if inherited.family == socket.AF_UNIX:
        return await loop.create_unix_server(listener.protocol, sock=inherited, **options)
    return await loop.create_server(listener.protocol, sock=inherited, **options)


def _bind(host: str, port: int) -> list[socket.socket]:
    """Listen on every address of a host; empty: of this machine. Raises OSError."""
    if host == "::":
        return [_dual_stack(port)]
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    addresses = dict.fromkeys((family, address) for family, _kind, _proto, _name, address in found)
    sockets: list[socket.socket] = []
    for family, address in addresses:
        try:
            sockets.append(socket.create_server(address, family=family, backlog=BACKLOG))
        except OSError as error:
            # A name may have an IPv6 address on a machine that has no IPv6.
            if error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL) and len(addresses) > 1:
                continue
            for one in sockets:
                one.close()
            raise
    if not sockets:
        raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    return sockets


def _dual_stack(port: int) -> socket.socket:
    return socket.create_server(
        ("::", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=socket.has_dualstack_ipv6()
    )


def _options(listener: ListeningSocket, tls: ssl.SSLContext | None) -> dict[str, Any]:
    options: dict[str, Any] = {"ssl": tls, "backlog": BACKLOG}
    if tls is not None:
        timeout_s = listener.limits.header_timeout_s
        options |= {"ssl_handshake_timeout": timeout_s, "ssl_shutdown_timeout": TLS_SHUTDOWN_S}
    return options


def open_tcp_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket that other processes can serve. Raises ConfigError if the address is unusable."""
    try:
        if host == "::":
            return _dual_stack(port)
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {_advice(error, host)}") from None


def open_unix_socket(path: str) -> socket.socket:
    """Return a listening socket that other processes can serve. Raises ConfigError if the path is unusable."""
    _remove_stale_socket(path)
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(path)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise ConfigError(f"cannot listen on {path}: {error.strerror or error}") from None
    return listening


def _advice(error: OSError, host: str) -> str:
    if isinstance(error, socket.gaierror):
        return f"the name {host} cannot be resolved; use an address of this machine"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"this machine has no address {host}; use 127.0.0.1 for local clients, 0.0.0.0 or :: for all addresses"
    if error.errno == errno.EACCES:
        return "this user has no permission for that port; use a port above 1023"
    if error.errno == errno.EADDRINUSE:
        return (
            "another process uses the port; choose another one (`listen.port` or --port, `admin.port` or --admin-port)"
        )
    return error.strerror or str(error)


async def listen_unix(
    listener: ListeningSocket, path: str, tls: ssl.SSLContext | None = None, plain: PlainSockets | None = None
) -> Server:
    """Replaces a socket file that no process listens on any more. Raises ConfigError if the path is unusable."""
    if plain is not None and tls is None:
        return plain.listen(listener.protocol, [open_unix_socket(path)], path)
    if tls is not None and isinstance(listener, ClientListener):
        return TlsServer(listener, [open_unix_socket(path)], tls, path)
    loop = asyncio.get_running_loop()
    _remove_stale_socket(path)
    try:
        return await loop.create_unix_server(
            listener.protocol, path, backlog=BACKLOG, ssl=tls, ssl_shutdown_timeout=TLS_SHUTDOWN_S if tls else None
        )
    except OSError as error:
        raise ConfigError(f"cannot listen on {path}: {error.strerror or error}") from None


def _remove_stale_socket(path: str) -> None:
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise ConfigError(f"cannot listen on {path}: the file exists and is not a socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except OSError:
            return
    raise ConfigError(f"cannot listen on {path}: another process listens there")


async def accept_the_last(sockets: Sequence[Any], alone: bool = True) -> None:
    """Let listening sockets, which are still served, accept what waits in the kernel, and nothing more.

    When a listening socket is closed, the kernel resets the connections that it has set up and nobody has accepted,
    whatever their clients have sent already. So no handshake may begin any more, and those that have begun may end.
    A client whose SYN is dropped sends it again, and is refused then. `alone`: no other process serves these sockets.
    """
    waiting, remote = select.poll(), False
    for one in sockets:
        waiting.register(one.fileno(), select.POLLIN)
        if one.family != socket.AF_UNIX and alone:
            drop_handshakes(one.fileno())
        if one.family != socket.AF_UNIX:
            remote = remote or not one.getsockname()[0].startswith(("127.", "::1"))
    if remote:
        await asyncio.sleep(HANDSHAKE_S)
    for _ in range(round(LAST_CONNECTIONS_S / _TURN_S)):
        if not waiting.poll(0):
            break
        await asyncio.sleep(_TURN_S)


def drop_handshakes(fd: int) -> None:
    """Make the kernel ignore clients that begin to connect. Where it cannot, a client may be reset."""
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in _NO_SYN))
    with suppress(OSError), socket.socket(fileno=os.dup(fd)) as same:
        same.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", len(_NO_SYN), ctypes.addressof(code)))
