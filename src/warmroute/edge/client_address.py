"""The address that a client's request came from: the peer's, or the one that a trusted proxy reports.

A proxy appends the address of its own peer to `X-Forwarded-For`. So only the right-most addresses can be believed, as
far as trusted proxies (`listen.trusted_proxies`) wrote them: the source is the right-most one that is no trusted proxy.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from warmroute.config.clients import UNIX_PROXY

UNIX: Final = "unix socket"
MAX_HOPS: Final = 16
"""Addresses of X-Forwarded-For that are read, from the right."""
MAX_ADDRESS_BYTES: Final = 48
"""An IPv6 address in brackets with a port. Longer text is no address."""
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class ClientAddresses:
    def __init__(self, trusted_proxies: Sequence[str]) -> None:
        self._trusts_unix = UNIX_PROXY in trusted_proxies
        self._networks = tuple(ipaddress.ip_network(one) for one in trusted_proxies if one != UNIX_PROXY)

    def source(self, peer: bytes, forwarded_for: bytes) -> str:
        """Return the source's address, for logs and alerts. Of IPv6 it is the network of 64 bits: one client has all of
        these addresses.

        `peer`: the address of the connection; empty for a unix socket. `forwarded_for`: the values of the request's
        X-Forwarded-For fields; nothing of it is believed unless the peer is a trusted proxy.
        """
        if not forwarded_for:
            return _name(peer)
        address = _parse(peer)
        if not (self._trusts(address) if address is not None else self._trusts_unix):
            return _name(peer)
        for hop in reversed(forwarded_for.rsplit(b",", MAX_HOPS)[-MAX_HOPS:]):
            hop = hop.strip()
            named = _parse(hop) if len(hop) <= MAX_ADDRESS_BYTES else None  # the cache keeps what it is asked
            if named is None:  # a trusted proxy that writes no address: name the proxy
                break
            address = named
            if not self._trusts(address):
                break
        return _text(address)

    def _trusts(self, address: _Address) -> bool:
        return any(address in network for network in self._networks)


@lru_cache(maxsize=1024)
def _parse(text: bytes) -> _Address | None:
    """Return the address, which may have a port, or None. An IPv4 address that is written as one of IPv6 is IPv4."""
    if not text:
        return None
    host = text.decode("ascii", "replace").partition("%")[0]
    if host.startswith("["):
        host = host[1:].partition("]")[0]
    elif host.count(":") == 1:
        host = host.partition(":")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


@lru_cache(maxsize=1024)
def _name(peer: bytes) -> str:
    return _text(_parse(peer))


def _text(address: _Address | None) -> str:
    if address is None:
        return UNIX
    if address.version == 4 or address.is_loopback or address.is_link_local:
        return str(address)
    return str(ipaddress.ip_network((address, 64), strict=False))
