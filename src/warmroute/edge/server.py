"""What is served at a listening socket: its handler, and the connections that are open."""

from __future__ import annotations

import asyncio
from typing import Protocol

from warmroute.config import Limits
from warmroute.edge.client import Client, Exchange
from warmroute.edge.deadlines import Deadlines
from warmroute.edge.errors import Refusal
from warmroute.edge.head import RequestHead


class Handler(Protocol):
    """What a listener serves."""

    def admit(self, head: RequestHead) -> str:
        """Looks at a head before the body is read; returns whose request it is. Raises Refusal."""

    def serve(self, client: Client, head: RequestHead, body: bytes) -> Exchange | None:
        """Answers a request, now (None) or later (the exchange that will). Raises Refusal."""

    def new_request_id(self) -> bytes:
        """A name for a request that has none; empty where requests go unnamed."""

    def refused(self, refusal: Refusal, request_id: bytes) -> None:
        """Told of each request that was answered with an error of the router's own."""


class Listener:
    """What the connections of one listening socket share."""

    def __init__(self, handler: Handler, limits: Limits, deadlines: Deadlines) -> None:
        self.handler = handler
        self.limits = limits
        self.deadlines = deadlines
        self.connections: set[Client] = set()
        self.accepted = 0
        self.buffered_bytes = 0
        self.closing = False
        """Answers say `Connection: close`, and idle connections go."""
        self._empty: asyncio.Event | None = None

    def protocol(self) -> Client:
        return Client(self)

    def close_idle(self) -> None:
        """Ends connections that wait for a request; those at work end with their answer."""
        self.closing = True
        for client in list(self.connections):
            client.close_if_idle()

    async def until_empty(self) -> None:
        """Waits for the last connection to end."""
        self._empty = asyncio.Event()
        if self.connections:
            await self._empty.wait()

    def gone(self, client: Client) -> None:
        self.connections.discard(client)
        if self._empty is not None and not self.connections:
            self._empty.set()

    def abort_all(self) -> None:
        for client in list(self.connections):
            client.abort()

    @property
    def busy(self) -> int:
        return sum(1 for client in self.connections if client.busy)
