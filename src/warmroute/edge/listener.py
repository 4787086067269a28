"""The handler behind a listening socket, and the client connections that are open on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, Protocol

from warmroute._kernel import UnreadBytes
from warmroute.config import Limits
from warmroute.edge.api_keys import Rights
from warmroute.edge.body_reader import BodyMemory
from warmroute.edge.client_connection import LAST_REQUEST_S, ClientConnection
from warmroute.edge.errors import HttpError
from warmroute.edge.http1 import RequestHead
from warmroute.edge.timer_wheel import NEVER, TimerWheel
from warmroute.event_log import EventLog
from warmroute.telemetry import metric_definitions as metrics
from warmroute.telemetry.exposition import Page

log = EventLog("warmroute.edge")

LOG_PAUSE_S: Final = 10.0
"""Shortest time between two log records of clients that were too slow."""


class Exchange(Protocol):
    """Answers the current request. The connection tells it what its client does."""

    def client_left(self) -> None:
        """The client disconnected."""

    def pause_response(self) -> None:
        """The client reads more slowly than the router writes: write no more until `resume_response`."""

    def resume_response(self) -> None: ...

    def internal_error(self, error: Exception) -> None:
        """The router itself failed while this request was served: answer with an error, or break off the response."""

    def cut_off(self) -> None:
        """The router stops: answer with an error, or break off the response."""


class Handler(Protocol):
    def admit(self, head: RequestHead) -> Rights:
        """Check a request's head before its body is read. Return what the request may do. Raises HttpError."""

    def serve(self, client: ClientConnection, head: RequestHead, body: bytes) -> Exchange | None:
        """Answer a request now and return None, or return the exchange that answers it later. Raises HttpError."""

    def new_request_id(self) -> bytes:
        """Return an id for a request that has none; empty if this listener gives no ids."""

    def error_sent(self, error: HttpError, request_id: bytes, peer: bytes, forwarded_for: bytes) -> None:
        """The router answered a request with this error. `peer`: the address of the connection. `forwarded_for`: the
        request's X-Forwarded-For."""

    def internal_error(self, error: Exception, request_id: bytes = b"") -> HttpError:
        """The router itself failed at a request: log that, and return the client's error."""


class Listener:
    """State that the connections of one listening socket share."""

    def __init__(
        self, handler: Handler, limits: Limits, timers: TimerWheel, wrong_key_delay_s: float = 0.0
    ) -> None:  # fmt: skip
        """`wrong_key_delay_s`: how long clients with a wrong key wait for their 401, at most MAX_HELD at a time."""
        self.handler = handler
        self.wrong_key_delay_s = wrong_key_delay_s
        self.held = 0
        """Connections whose client waits for its 401."""
        self.limits = limits
        self.timers = timers
        self.unread = UnreadBytes(limits.unread_bytes, self.unread_limit_reached)
        """What clients have not read of their responses."""
        self.stalled: dict[ClientConnection, int] = {}
        """Clients that do not read and whose bytes the event loop holds, not the kernel: those with TLS. The one that
        stopped reading first is the first; how much it has not read."""
        self.too_slow = 0
        """Clients that were disconnected because of `limits.unread_bytes`."""
        self._too_slow_logged = 0
        self._log_again_s = -NEVER
        self.connections: set[ClientConnection] = set()
        self.without_request: dict[ClientConnection, None] = {}
        """Connections that have not sent the head of a request yet, the oldest first."""
        self.accepted = 0
        self.handshakes = 0
        """Accepted connections whose TLS handshake has not ended."""
        self.bodies = BodyMemory()
        self.closing = False
        """The router stops: idle connections are closed."""
        self.closes_after_response = False
        """Responses carry `Connection: close`: the router stops, or `limits.connections` is reached."""
        self.on_closed: Callable[[], object] | None = None
        """Is called after a connection was closed."""
        self._empty: asyncio.Event | None = None

    def protocol(self) -> Any:
        """Return the protocol of a new connection. It has asyncio.Protocol's methods and does not inherit from it."""
        return ClientConnection(self)

    def close_idle(self) -> None:
        """Close the connections that wait for a request now, and the others after their response. Those that have not
        sent any request yet have a moment for it."""
        self.closing = self.closes_after_response = True
        for client in list(self.connections):
            client.close_if_idle()

    async def until_empty(self) -> None:
        self._empty = asyncio.Event()
        handshakes_end_s = self.timers.now() + LAST_REQUEST_S
        while self.connections or (self.handshakes and self.timers.now() < handshakes_end_s):
            if self.connections:
                await self._empty.wait()
                self._empty.clear()
            else:
                await asyncio.sleep(0.01)

    def connection_made(self, client: ClientConnection) -> bool:
        """Count a new connection. Return False if there are too many."""
        self.accepted += 1
        connections = self.connections
        connections.add(client)
        if len(connections) > self.limits.connections:
            oldest = next(iter(self.without_request), None)
            if oldest is None:
                return False
            del self.without_request[oldest]
            connections.discard(oldest)
            oldest.make_place()
        self.without_request[client] = None
        self._count_changed()
        return True

    def _count_changed(self) -> None:
        self.closes_after_response = self.closing or len(self.connections) >= self.limits.connections

    def connection_closed(self, client: ClientConnection) -> None:
        self.connections.discard(client)
        self.without_request.pop(client, None)
        if self.stalled:
            self.read_again(client)
        self._count_changed()
        if self._empty is not None and not self.connections:
            self._empty.set()
        if self.on_closed is not None:
            self.on_closed()

    def add_metrics(self, page: Page) -> None:
        page[metrics.REQUEST_BODIES].add(self.bodies.total_bytes)
        page[metrics.CLIENT_UNREAD].add(self.unread.bytes)
        page[metrics.CLIENTS_TOO_SLOW].add(self.too_slow)

    @property
    def buffered_bytes(self) -> int:
        """Bytes of requests in memory, of all connections."""
        return self.bodies.total_bytes

    # Clients that do not read.

    def stall(self, client: ClientConnection, unread_bytes: int) -> None:
        """Count what a client has not read, where the kernel does not."""
        self.read_again(client)
        self.stalled[client] = unread_bytes
        self.unread.add(unread_bytes)
        if self.unread.bytes > self.unread.limit:
            self.unread_limit_reached()

    def read_again(self, client: ClientConnection) -> None:
        """A client has read what `stall` counted, or has left."""
        self.unread.add(-self.stalled.pop(client, 0))

    def unread_limit_reached(self) -> None:
        """Disconnect the slowest clients until the others have left no more than `limits.unread_bytes` unread."""
        unread = self.unread
        while unread.bytes > unread.limit:
            client: ClientConnection | None = unread.slowest() or next(iter(self.stalled), None)
            if client is None:
                break
            self.too_slow += 1
            client.too_slow()
            self.read_again(client)
        now_s = self.timers.now()
        if self.too_slow > self._too_slow_logged and now_s >= self._log_again_s:
            log.warning(
                "slow_clients_disconnected",
                "Clients have left more than limits.unread_bytes of their responses unread. The slowest ones go first.",
                clients=self.too_slow - self._too_slow_logged,
                limit_bytes=unread.limit,
            )
            self._too_slow_logged, self._log_again_s = self.too_slow, now_s + LOG_PAUSE_S

    def cut_off_all(self) -> None:
        """End all requests with an error: the router stops."""
        for client in list(self.connections):
            client.cut_off()

    def abort_all(self) -> None:
        for client in list(self.connections):
            client.abort()

    @property
    def busy(self) -> int:
        return sum(1 for client in self.connections if client.busy)
