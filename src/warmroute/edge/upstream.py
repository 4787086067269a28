"""The node's side: one connection to a node, and the pool of those that wait for work.

A connection carries one request at a time. It reads the answer's head, follows its framing, and hands the bytes on as
they came. Engines send the head of a stream when they have taken the request, long before its first token: the head
alone is kept until a byte of the body comes, so that a node that fails in between has not answered.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import logging
import re
import socket
import ssl
from collections.abc import Callable
from typing import Final, Protocol, cast

from warmroute.config import Upstream as UpstreamConfig
from warmroute.edge.chunked import BadChunk, ChunkFrames
from warmroute.edge.deadlines import NEVER, Deadlines
from warmroute.edge.head import CHUNKED, UNTIL_CLOSE, BrokenResponse, ResponseHead, read_response_head

log = logging.getLogger("warmroute.edge")

IDLE, WAITING, HEAD_ONLY, SIZED_ANSWER, CHUNKED_ANSWER, ANSWER_UNTIL_CLOSE, DEAD = range(7)
_JOIN_BYTES: Final = 65_536
"""Up to this, head and body go out as one piece: a copy costs less than a second buffer."""


class ConnectFault(enum.Enum):
    """Why there is no connection."""

    REFUSED = "refused"  # nobody listens there, or it is not who it should be
    FAILED = "failed"  # slow, or broken on the way
    OURS = "ours"  # this machine lacks files, ports or memory


_NOBODY: Final = {errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN}
_OURS: Final = {errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM}


class ResponseHandler(Protocol):
    """Whoever waits for an answer from a node."""

    def connected(self, connection: Connection) -> bool:
        """A new connection is there; False if it is no longer wanted."""

    def connect_failed(self, fault: ConnectFault, reason: str) -> None: ...

    def answer_began(
        self, head: ResponseHead, first: bytes, whole: bool, now_s: float
    ) -> Callable[[bytes], object] | None:
        """The head, and what came with it of the body, perhaps all. Returns where the rest goes; None: not wanted."""

    def answer_ended(self, now_s: float) -> None: ...

    def answer_failed(self, reason: str, stale: bool) -> None:
        """No byte of an answer came. `stale`: the connection had been used before and was closed meanwhile."""

    def answer_broke(self, reason: str, frames: ChunkFrames | None) -> None:
        """The answer ended before its end. `frames`: where in a chunked answer that was, as far as it was handed on."""


class Connection(asyncio.Protocol):
    __slots__ = (
        "_asker",
        "_buffer",
        "_early",
        "_frames",
        "_held",
        "_keep_alive",
        "_left",
        "_mode",
        "_now",
        "_pool",
        "_silence_s",
        "_sink",
        "_used",
        "bucket",
        "deadline_s",
        "transport",
    )

    def __init__(self, pool: NodePool) -> None:
        # per connection
        self._pool = pool
        self._now = pool.deadlines.now
        self.transport: asyncio.Transport
        self.deadline_s = NEVER
        self.bucket = -1
        self._mode = IDLE
        self._used = False
        # per answer
        self._asker: ResponseHandler | None = None
        self._sink: Callable[[bytes], object]
        self._buffer = b""
        self._early: ResponseHead | None = None
        """A head whose body has yet to begin."""
        self._frames: ChunkFrames | None = None
        self._left = 0
        self._keep_alive = True
        self._held = False
        self._silence_s = 0.0

    # The request.

    def begin(self, asker: ResponseHandler, head: bytes, body: bytes) -> None:
        self._asker = asker
        self._mode = WAITING
        self._pool.busy.add(self)
        if len(body) <= _JOIN_BYTES:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))
        upstream = self._pool.config
        self._silence_s = upstream.between_chunks_timeout_s
        self._pool.deadlines.arm(self, self._now() + upstream.first_byte_timeout_s)

    def hold(self) -> None:
        """Reads no further for now: the client can't take more."""
        self.deadline_s = NEVER
        self._held = True
        self.transport.pause_reading()

    def go_on(self) -> None:
        self._pool.deadlines.arm(self, self._now() + self._silence_s)
        self._read_on()

    def _read_on(self) -> None:
        if self._held:
            self._held = False
            self.transport.resume_reading()

    def cancel(self) -> None:
        """Nobody wants the answer any more; closing tells the engine to stop."""
        self._asker = None
        self._die()

    # The answer.

    def data_received(self, data: bytes) -> None:
        mode, now_s = self._mode, self._now()
        if mode == CHUNKED_ANSWER:
            self.deadline_s = now_s + self._silence_s
            frames = self._frames
            assert frames is not None
            try:
                end = frames.feed(data)
            except BadChunk as bad:
                self._break_off(f"the node's framing is broken: {bad}")
                return
            if end < 0:
                self._sink(data)
                return
            if end != len(data):
                self._keep_alive = False
                data = data[:end]
            self._sink(data)
            self._complete(now_s)
        elif mode == WAITING:
            self._take_head(self._buffer + data if self._buffer else data, now_s)
        elif mode == SIZED_ANSWER:
            self.deadline_s = now_s + self._silence_s
            self._left -= len(data)
            if self._left > 0:
                self._sink(data)
                return
            if self._left < 0:
                self._keep_alive = False
                data = data[: self._left]
            self._sink(data)
            self._complete(now_s)
        elif mode == ANSWER_UNTIL_CLOSE:
            self.deadline_s = now_s + self._silence_s
            self._sink(data)
        elif mode == HEAD_ONLY:
            head, self._early = self._early, None
            assert head is not None
            self._begin_answer(head, data, now_s)
        elif mode == IDLE:
            self._pool.forget(self)
            self._die()  # nobody asked

    def _take_head(self, data: bytes, now_s: float) -> None:
        self._buffer = b""
        try:
            while True:
                end = data.find(b"\r\n\r\n")
                if (end if end >= 0 else len(data)) > self._pool.config.response_header_bytes:
                    raise BrokenResponse("its head is too large")
                if end < 0:
                    self._buffer = data
                    return
                head = read_response_head(data, end)
                if head.status >= 200:
                    break
                if head.status == 101:
                    raise BrokenResponse("an upgrade that nobody asked for")
                data = data[end + 4 :]
        except BrokenResponse as broken:
            self._break_off(f"the node's answer is not HTTP: {broken}")
            return
        first = data[end + 4 :]
        if first or not head.length or head.status >= 400:
            self._begin_answer(head, first, now_s)
        else:
            self._early = head
            self._mode = HEAD_ONLY

    def _begin_answer(self, head: ResponseHead, first: bytes, now_s: float) -> None:
        """The head, with what there is of the body."""
        length = head.length
        try:
            self._keep_alive = head.keep_alive
            if length >= 0:
                self._left = length - len(first)
                whole = self._left <= 0
                if self._left < 0:
                    self._keep_alive = False
                    first = first[:length]
                self._mode = SIZED_ANSWER
            elif length == CHUNKED:
                self._frames = frames = ChunkFrames()
                at = frames.feed(first) if first else -1
                whole = at >= 0
                if whole and at != len(first):
                    self._keep_alive = False
                    first = first[:at]
                self._mode = CHUNKED_ANSWER
            else:
                assert length == UNTIL_CLOSE
                whole = False
                self._mode = ANSWER_UNTIL_CLOSE
        except BadChunk as bad:
            self._mode = WAITING
            self._break_off(f"the node's framing is broken: {bad}")
            return
        asker = self._asker
        assert asker is not None
        if whole:
            sink = asker.answer_began(head, first, True, now_s)
            if sink is None:
                self._asker = None
            self._complete(now_s)
            return
        self._pool.deadlines.arm(self, now_s + self._silence_s)
        sink = asker.answer_began(head, first, False, now_s)
        if sink is None:
            self.cancel()
        else:
            self._sink = sink

    def _complete(self, now_s: float) -> None:
        asker, self._asker = self._asker, None
        self._frames = None
        # A node that answers before it has read the whole request leaves a connection that nobody can use.
        if self._keep_alive and self._mode != DEAD and not self.transport.get_write_buffer_size():
            self._mode = IDLE
            self._used = True
            if self._held:
                self._read_on()
            self._pool.busy.discard(self)
            self._pool.release(self, now_s)
        else:
            self._die()
        if asker is not None:
            asker.answer_ended(now_s)

    @property
    def heard_s(self) -> float:
        """When the last byte of an answer came; long ago where none has begun."""
        return self.deadline_s - self._silence_s if self._mode > HEAD_ONLY and self.deadline_s != NEVER else -NEVER

    # Ends.

    def _break_off(self, reason: str) -> None:
        """The answer can't be had from this connection."""
        asker, self._asker = self._asker, None
        mode, frames = self._mode, self._frames
        self._die()
        if asker is None:
            return
        if mode in (WAITING, HEAD_ONLY):
            asker.answer_failed(reason, stale=False)
        else:
            asker.answer_broke(reason, frames)

    def _die(self) -> None:
        self._mode = DEAD
        self._pool.busy.discard(self)
        self._pool.deadlines.disarm(self)
        self.transport.abort()

    def timed_out(self) -> None:
        if self._mode == IDLE:
            self._pool.forget(self)
            self._die()
        elif self._mode in (WAITING, HEAD_ONLY):
            self._break_off("the node did not answer in time")
        else:
            self._break_off("the node fell silent within its answer")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it

    def eof_received(self) -> None:
        if self._mode == HEAD_ONLY and self._early is not None and self._early.length == UNTIL_CLOSE:
            head, self._early = self._early, None
            self._begin_answer(head, b"", self._now())
        if self._mode == ANSWER_UNTIL_CLOSE:
            self._keep_alive = False
            self._complete(self._now())

    def connection_lost(self, exc: Exception | None) -> None:
        mode, self._mode = self._mode, DEAD
        self._pool.busy.discard(self)
        self._pool.deadlines.disarm(self)
        if mode == IDLE:
            self._pool.forget(self)
            return
        asker, self._asker = self._asker, None
        if asker is None:
            return
        if mode in (WAITING, HEAD_ONLY):
            stale = mode == WAITING and self._used and not self._buffer
            asker.answer_failed("the node closed the connection before its answer", stale)
        else:
            asker.answer_broke("the node closed the connection within its answer", self._frames)


def _fault(error: OSError) -> ConnectFault:
    if error.errno in _NOBODY or (isinstance(error, socket.gaierror) and error.errno == socket.EAI_NONAME):
        return ConnectFault.REFUSED
    return ConnectFault.OURS if error.errno in _OURS else ConnectFault.FAILED


def _tls_fault(error: ssl.SSLError) -> ConnectFault:
    """Not who it should be, or no TLS at all, is for certain; anything else may pass."""
    certain = isinstance(error, ssl.SSLCertVerificationError) or error.reason in (
        "WRONG_VERSION_NUMBER",
        "HTTP_REQUEST",
    )
    return ConnectFault.REFUSED if certain else ConnectFault.FAILED


class NodePool:
    """Connections to one node: those without work wait here, the one used last is taken first."""

    def __init__(
        self,
        scheme: str,
        host: str,
        port: int,
        config: UpstreamConfig,
        deadlines: Deadlines,
        tls: ssl.SSLContext | None,
        api_key: str = "",
    ) -> None:
        self.config = config
        self.deadlines = deadlines
        self._host, self._port = host, port
        self._tls = tls if scheme == "https" else None
        self._idle: list[Connection] = []
        self.busy: set[Connection] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._closed = False
        default = 443 if scheme == "https" else 80
        shown = f"[{host}]" if ":" in host else host
        self.host_line = f"Host: {shown}{'' if port == default else f':{port}'}\r\n".encode()
        self.own_origin = re.compile(
            rb"(?im)^((?:content-)?location:[ \t]*)https?://" + re.escape(self.host_line[6:-2]) + rb"(?=[/?\s])"
        )
        """The node's address in a redirect, which is to lead back here and not around the router."""
        self.api_key = api_key
        self.key_line = f"Authorization: Bearer {api_key}\r\n".encode() if api_key else b""

    def take(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.transport.is_closing():
                return connection
        return None

    def open(self, asker: ResponseHandler) -> None:
        """Connects; tells the asker when it has, or could not."""
        task = asyncio.get_running_loop().create_task(self._open(asker))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, asker: ResponseHandler) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.config.connect_timeout_s):
                _transport, connection = await loop.create_connection(
                    lambda: Connection(self),
                    self._host,
                    self._port,
                    ssl=self._tls,
                    server_hostname=self._host if self._tls else None,
                )
        except TimeoutError:
            asker.connect_failed(ConnectFault.FAILED, "connecting to the node timed out")
        except ssl.SSLError as error:
            asker.connect_failed(_tls_fault(error), f"the node's TLS fails: {error.reason or 'handshake failed'}")
        except OSError as error:
            asker.connect_failed(_fault(error), f"the node can't be reached: {error.strerror or type(error).__name__}")
        except Exception as error:  # a host name that is none, say
            log.exception("connecting to a node failed")
            asker.connect_failed(ConnectFault.FAILED, f"the node can't be reached: {type(error).__name__}")
        else:
            if not asker.connected(connection):
                self.release(connection, self.deadlines.now())

    def release(self, connection: Connection, now_s: float) -> None:
        if self._closed or len(self._idle) >= self.config.idle_connections:
            connection.cancel()
            return
        self._idle.append(connection)
        self.deadlines.arm(connection, now_s + self.config.idle_timeout_s)

    def forget(self, connection: Connection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)

    def drop_idle(self) -> None:
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.cancel()

    def close(self) -> None:
        """Takes no connection back any more; those at work finish."""
        self._closed = True
        self.drop_idle()

    @property
    def heard_s(self) -> float:
        """When the node last sent a byte of an answer that is still running."""
        return max((connection.heard_s for connection in self.busy), default=-NEVER)
