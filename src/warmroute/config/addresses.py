"""Addresses in the configuration: which mean this machine, and which are equal."""

from __future__ import annotations

import ipaddress
from typing import Final
from urllib.parse import urlsplit

_ALL_ADDRESSES: Final = ("", "0.0.0.0", "::")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def same_port(host: str, port: int, other_host: str, other_port: int) -> bool:
    """Return whether two listeners would need the same port of the same address. Port 0 is any free port."""
    if not port or port != other_port:
        return False
    first, second = _canonical_host(host), _canonical_host(other_host)
    return first == second or first in _ALL_ADDRESSES or second in _ALL_ADDRESSES


def canonical_address(url: str) -> tuple[str, int]:
    """Return host and port of a valid URL; equal for different spellings of the same address."""
    parts = urlsplit(url)
    return _canonical_host(parts.hostname or ""), parts.port or (443 if parts.scheme == "https" else 80)


def _canonical_host(host: str) -> str:
    host = host.lower().rstrip(".")
    if host == "localhost":
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host
