"""A TCP connection to a ZMQ socket, which is opened again when it breaks, as ZMQ's own sockets do.

Reading stops while received messages wait, so that a fast publisher fills its own queue and not the router's memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Final, cast

from warmroute.engines.byte_budget import ByteBudget
from warmroute.engines.zmtp import GREETING, ZmtpDecoder, ZmtpError

READ_AHEAD_BYTES: Final = 1 << 18
"""Received bytes beyond which reading stops until all complete messages among them are taken."""
FIRST_RETRY_S: Final = 0.1
LAST_RETRY_S: Final = 5.0
"""Time before a lost connection is opened again, which doubles up to the last while that fails."""
CONNECT_TIMEOUT_S: Final = 5.0
MAX_UNSENT_BYTES: Final = 1 << 16

SUB: Final = b"SUB"
DEALER: Final = b"DEALER"
_random: Final = Random()


class ZmtpConnection:
    """Call `receive` until it returns None whenever `on_readable` was called."""

    def __init__(
        self,
        host: str,
        port: int,
        socket_type: bytes,
        first_message: bytes,
        budget: ByteBudget,
        on_readable: Callable[[], object],
        on_ready: Callable[[], object] = lambda: None,
        on_error: Callable[[str], object] = lambda _reason: None,
    ) -> None:
        """`first_message` is sent on each connection as soon as the handshake is complete; then `on_ready` is called.
        Received bytes count in the `budget`, and a connection that exceeds it is closed. `on_error` receives the reason
        if the peer does not follow the protocol."""
        self._address = (host, port)
        self._socket_type = socket_type
        self._first_message = first_message
        self.budget = budget
        self._on_readable = on_readable
        self._on_ready = on_ready
        self._on_error = on_error
        self._link: _Link | None = None
        self.closed = False
        self._task: asyncio.Task[None] | None = asyncio.get_running_loop().create_task(self._keep_connected())

    async def _keep_connected(self) -> None:
        loop = asyncio.get_running_loop()
        pause_s = FIRST_RETRY_S
        while True:
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    _, link = await loop.create_connection(lambda: _Link(self), *self._address)
            except (OSError, ValueError):  # no such host, refused, timed out; a host name that cannot be encoded
                pass
            else:
                await link.lost.wait()
                if link.decoder.ready and not link.failed:
                    pause_s = FIRST_RETRY_S
            await asyncio.sleep(pause_s * (0.8 + 0.4 * _random.random()))
            pause_s = min(2 * pause_s, LAST_RETRY_S)

    def receive(self) -> list[bytes] | None:
        """Return the next message; None if there is none yet."""
        link = self._link
        return link.receive() if link is not None else None

    def close(self) -> None:
        if self._task is not None:
            self.closed = True
            self._task.cancel()
            self._task = None  # it refers to this connection: otherwise both would wait for a garbage collection
            if self._link is not None:
                self._link.abort()

    # Called by the link.

    def attached(self, link: _Link) -> None:
        self._link = link
        if self.closed:
            link.abort()

    def detached(self, link: _Link) -> None:
        if self._link is link:
            self._link = None

    def readable(self) -> None:
        if not self.closed:
            self._on_readable()

    def ready(self, link: _Link) -> None:
        link.write(self._first_message)
        if not self.closed:
            self._on_ready()

    def failed(self, reason: str) -> None:
        if not self.closed:
            self._on_error(reason)


class _Link(asyncio.Protocol):
    """One TCP connection."""

    def __init__(self, connection: ZmtpConnection) -> None:
        self._connection = connection
        self._transport: asyncio.Transport | None = None
        self.decoder = ZmtpDecoder(connection._socket_type)
        self._paused = False
        self._counted_bytes = 0
        self.failed = False
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(GREETING)
        self._connection.attached(self)

    def data_received(self, data: bytes) -> None:
        self.decoder.feed(data)
        self._count_bytes()
        if self._connection.budget.exceeded:
            self._fail("its KV events take too much memory")
            return
        if self.decoder.buffered_bytes >= READ_AHEAD_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._connection.readable()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self.decoder.discard()
        self._count_bytes()
        self._connection.detached(self)
        self.lost.set()

    def _count_bytes(self) -> None:
        before, self._counted_bytes = self._counted_bytes, self.decoder.buffered_bytes
        self._connection.budget.used_bytes += self._counted_bytes - before

    def receive(self) -> list[bytes] | None:
        if self.failed:
            return None
        decoder = self.decoder
        was_ready = decoder.ready
        try:
            message = decoder.next_message()
        except ZmtpError as error:
            self._fail(str(error))
            return None
        self._count_bytes()
        if decoder.reply:
            self.write(bytes(decoder.reply))
            decoder.reply.clear()
        if decoder.ready and not was_ready:
            self._connection.ready(self)
        if message is None and self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return message

    def _fail(self, reason: str) -> None:
        self.failed = True
        self._connection.failed(reason)
        self.abort()

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)
            if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
                self._fail("it does not read")

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
