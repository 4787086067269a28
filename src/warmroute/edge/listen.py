"""Listening sockets: TCP on IPv4 and IPv6, unix, with or without TLS."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import stat
from typing import Final

from warmroute.config import ConfigError
from warmroute.edge.server import Listener

TLS_GOODBYE_S: Final = 1.0
"""How long a closing TLS connection waits for the other side's goodbye: clients that pool connections never say it."""


def server_tls(cert: str, key: str) -> ssl.SSLContext | None:
    """Raises ConfigError where the files are no use."""
    if not cert:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"listen.tls_cert and listen.tls_key can't be used: {error}") from None
    return context


async def listen_tcp(
    listener: Listener, host: str, port: int, backlog: int, tls: ssl.SSLContext | None = None
) -> asyncio.Server:
    """Raises ConfigError where the address can't be had."""
    loop = asyncio.get_running_loop()
    handshake_s = listener.limits.header_timeout_s if tls else None
    goodbye_s = TLS_GOODBYE_S if tls else None
    try:
        if host == "::":  # both families on one socket, which asyncio by itself would not do
            both = socket.create_server(
                ("::", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=socket.has_dualstack_ipv6()
            )
            return await loop.create_server(
                listener.protocol,
                sock=both,
                ssl=tls,
                backlog=backlog,
                ssl_handshake_timeout=handshake_s,
                ssl_shutdown_timeout=goodbye_s,
            )
        return await loop.create_server(
            listener.protocol,
            host,
            port,
            ssl=tls,
            backlog=backlog,
            ssl_handshake_timeout=handshake_s,
            ssl_shutdown_timeout=goodbye_s,
        )
    except OSError as error:
        raise ConfigError(f"can't listen on {host}:{port}: {_why(error, host)}") from None


def _why(error: OSError, host: str) -> str:
    if isinstance(error, socket.gaierror):
        return f"nobody knows the name {host}: give an address of this machine"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"this machine has no address {host}; 127.0.0.1 is for itself alone, 0.0.0.0 or :: for all that it has"
    if error.errno == errno.EACCES:
        return "this user may not have that port: choose one above 1023"
    return f"{error.strerror or error}; is another process there? choose another port"


async def listen_unix(listener: Listener, path: str, backlog: int, tls: ssl.SSLContext | None = None) -> asyncio.Server:
    """Takes over the path of a socket that nobody listens on any more. Raises ConfigError."""
    loop = asyncio.get_running_loop()
    _clear_dead_socket(path)
    try:
        return await loop.create_unix_server(
            listener.protocol, path, backlog=backlog, ssl=tls, ssl_shutdown_timeout=TLS_GOODBYE_S if tls else None
        )
    except OSError as error:
        raise ConfigError(f"can't listen on {path}: {error.strerror or error}") from None


def _clear_dead_socket(path: str) -> None:
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise ConfigError(f"can't listen on {path}: a file that is no socket stands there")
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
    raise ConfigError(f"can't listen on {path}: another process does")
