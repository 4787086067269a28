"""Listening sockets: TCP over IPv4 and IPv6, and unix sockets, with or without TLS."""

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
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

from warmroute.config import ConfigError, Limits
from warmroute.edge.listener import Listener as ClientListener
from warmroute.edge.plain_sockets import PlainSockets, Server
from warmroute.edge.tls_sockets import TLS_SHUTDOWN_S, TlsServer

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


class Listener(Protocol):
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
    listener: Listener, host: str, port: int, tls: ssl.SSLContext | None = None, plain: PlainSockets | None = None
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
    listener: Listener, inherited: socket.socket, tls: ssl.SSLContext | None = None, plain: PlainSockets | None = None
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


def _options(listener: Listener, tls: ssl.SSLContext | None) -> dict[str, Any]:
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
    listener: Listener, path: str, tls: ssl.SSLContext | None = None, plain: PlainSockets | None = None
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


async def accept_the_last(sockets: Sequence[Any]) -> None:
    """Let listening sockets, which are still served, accept what waits in the kernel, and nothing more.

    When a listening socket is closed, the kernel resets the connections that it has set up and nobody has accepted,
    whatever their clients have sent already. So no handshake may begin any more, and those that have begun may end.
    A client whose SYN is dropped sends it again, and is refused then.
    """
    waiting, remote = select.poll(), False
    for one in sockets:
        waiting.register(one.fileno(), select.POLLIN)
        if one.family != socket.AF_UNIX:
            _drop_handshakes(one.fileno())
            remote = remote or not one.getsockname()[0].startswith(("127.", "::1"))
    if remote:
        await asyncio.sleep(HANDSHAKE_S)
    for _ in range(round(LAST_CONNECTIONS_S / _TURN_S)):
        if not waiting.poll(0):
            break
        await asyncio.sleep(_TURN_S)


def _drop_handshakes(fd: int) -> None:
    """Make the kernel ignore clients that begin to connect. Where it cannot, a client may be reset."""
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in _NO_SYN))
    with suppress(OSError), socket.socket(fileno=os.dup(fd)) as same:
        same.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", len(_NO_SYN), ctypes.addressof(code)))
