"""The HTTP calls that this room makes to nodes. The service provides them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from warmroute.fleet.node import Node

Get = Callable[[Node, str, float], Awaitable[tuple[int, bytes]]]
"""GET a path of a node within a timeout in seconds. Return status and body. Raises TimeoutError for a slow response,
ConnectionRefusedError if nothing listens, ConnectionError for a broken response, and another OSError if this machine
lacks a resource."""

Post = Callable[[Node, str, bytes, float], Awaitable[tuple[int, bytes]]]
"""POST a JSON body (`Content-Type: application/json`) to a path of a node. Otherwise like Get."""
