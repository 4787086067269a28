"""An edge's link to its brain in another process: the core's door, `handle`, as frames.

What an edge tells in one turn of its event loop goes as one frame. Commands come as frames, too, so `handle` returns
none. The link notes what it takes to say it all again (Resync): when a link is lost, calls go on, those that wait wait
on, and a brain that takes over gets every open call. A link is up once Tables have come.

Without a brain for PATIENCE_S, the edge decides by itself (alone.py), until one is there again.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from secrets import randbits
from typing import Any, Final, Protocol

import msgspec

from warmroute.core.messages import (
    Arrive,
    Cancel,
    Charge,
    Command,
    Cut,
    Ended,
    Event,
    FirstToken,
    Reject,
    Resume,
    Send,
    Tables,
    Withdraw,
)
from warmroute.core.wire import (
    EDGE_BITS,
    MAX_UNSENT_BYTES,
    OLDEST,
    VERSION,
    Beat,
    Bye,
    EndedEarlyFrame,
    FrameReader,
    Hello,
    KeptFrame,
    Link,
    ModelCards,
    Report,
    Resync,
    Settings,
    TablesFrame,
    TraceFrame,
    Unreadable,
    Welcome,
    encode,
    hash_for,
    tables_of,
)
from warmroute.edge.alone import ALONE_MAX_S, Alone, Limits
from warmroute.edge.arrival import Kept
from warmroute.edge.proxy import Proxy
from warmroute.edge.sockets import PlainSockets
from warmroute.edge.trace_context import EdgeTrace, EndedEarly
from warmroute.event_log import EventLog

log = EventLog("warmroute.edge")

REPORT_S: Final = 0.5
SILENT_S: Final = 2.0
"""A brain that sends nothing for this long is lost."""
PATIENCE_S: Final = 1.0
"""How long calls wait for a brain before the edge decides by itself."""
CHECK_S: Final = 0.05
FORGET_S: Final = 1.0
CONNECT_S: Final = 0.5
FIRST_CONNECT_S: Final = 10.0
"""With the first configuration, the edge loads what it serves with."""

_COMMANDS: Final = (Send, Withdraw, Reject, Cut)


def machine_id() -> bytes:
    """Return what two processes on one machine, with one clock, have in common."""
    try:
        clock = os.stat("/proc/self/ns/time").st_ino  # a container may have a clock of its own
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip() + b" %d" % clock
    except OSError:
        return socket.gethostname().encode()


class EdgeProcess(Protocol):
    """The process that the link belongs to."""

    proxy: Proxy

    def settings_came(self, config: bytes) -> None: ...
    def cards_came(self, cards: ModelCards) -> None: ...
    def tables_came(self, tables: Tables, renumbered: bool) -> None: ...
    def report(self, tables: int) -> Report: ...
    def limits(self) -> dict[str, Limits]:
        """Return the rate limits of each tenant that has some."""


class OpenCall:
    """What the link remembers of a call, to tell another brain of it."""

    __slots__ = ("arrive", "charge", "first_token_s", "sent_s")

    def __init__(self) -> None:
        self.arrive: Arrive | None = None
        self.charge: Charge | None = None
        self.sent_s = self.first_token_s = 0.0


class Address(msgspec.Struct, frozen=True):
    """Where a brain listens."""

    path: str = ""
    """Of a Unix socket."""
    host: str = ""
    port: int = 0


class BrainLink:
    def __init__(
        self, name: str, number: int, addresses: Sequence[Address], process: EdgeProcess, sockets: PlainSockets,
        now: Callable[[], float] = time.monotonic, tls: ssl.SSLContext | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self._addresses = tuple(addresses)
        self._process = process
        self._sockets = sockets
        self._now = now
        self._tls = tls
        self.edge = randbits(14) << 8 | number
        """The number of this edge: its calls begin with it."""
        self.first_id = self.edge << EDGE_BITS
        self.fence = 0
        self.up = False
        self.tables = Tables()
        self._connection: _Connection | None = None
        self._out: list[Any] = []
        self._flushing = False
        self.open: dict[int, OpenCall] = {}
        self.lost_s = now()
        self.alone: Alone | None = None
        """Set while the edge decides by itself."""
        self.alone_since_s = inf
        self.times_alone = 0
        self._closing = False
        self.configured = asyncio.Event()
        """A brain has sent settings and tables."""

    # The core's door.

    def handle(self, event: Event, now_s: float) -> Sequence[Command]:
        kind, calls = type(event), self.open
        if kind is Arrive:
            self._note_arrival(event, now_s)  # type: ignore[arg-type]
        elif kind is Ended or kind is Cancel:
            calls.pop(event.id, None)  # type: ignore[union-attr]
        elif kind is FirstToken:
            call = calls.get(event.id)  # type: ignore[union-attr]
            if call is not None:
                call.first_token_s = now_s
        elif kind is Charge:
            call = calls[event.id] = OpenCall()  # type: ignore[union-attr]
            call.charge = event  # type: ignore[assignment]
        if self.up:
            self._out.append(event)
            if not self._flushing:
                self._flushing = True
                asyncio.get_running_loop().call_soon(self._flush)
            return ()
        return self.alone.handle(event, now_s) if self.alone is not None else ()

    def _note_arrival(self, arrive: Arrive, now_s: float) -> None:
        call = self.open.get(arrive.id)
        if call is None:
            call = self.open[arrive.id] = OpenCall()
        call.arrive = arrive
        if arrive.prompt is not None:
            hash_for(arrive.prompt, self.tables, arrive.request.model or self.tables.only_model)
        if arrive.kept is not None:
            arrive.kept = _kept_frame(arrive.kept)

    def _flush(self) -> None:
        self._flushing = False
        out, self._out = self._out, []
        if self._connection is not None and out:
            self._say(self._connection, out)

    def _say(self, connection: _Connection, messages: list[Any]) -> None:
        """Send messages. One that cannot be sent ends its call, and no other."""
        try:
            connection.send(messages)
        except (ValueError, TypeError, OverflowError, msgspec.MsgspecError):
            connection.send([one for one in messages if self._can_be_sent(one)])

    def _can_be_sent(self, message: Any) -> bool:
        if isinstance(message, Resync):
            message.calls = [one for one in message.calls if self._can_be_sent(one)]
            return True
        try:
            encode(0.0, [message])
        except Exception as error:
            self.open.pop(message.id, None)
            exchange = self._process.proxy.exchanges.get(message.id)
            if exchange is not None:
                self._process.proxy.fail(exchange, error)
            return False
        return True

    # The link.

    async def run(self) -> None:
        """Keep the link up."""
        loop = asyncio.get_running_loop()
        report_s = forget_s = 0.0
        while True:
            now_s = self._now()
            connection = self._connection
            try:
                if connection is None:
                    await self._connect()
                elif now_s > connection.heard_s + SILENT_S:
                    connection.close("it has sent nothing for 2 s")
                elif self.up and now_s >= report_s:
                    report_s = now_s + REPORT_S
                    self._send([self._process.report(self.tables.version), *self._ended_early()])
                waits = not self.up and self.alone is None and self.configured.is_set()
                if waits and now_s >= self.lost_s + PATIENCE_S:
                    self._decide_alone(now_s)
                if self.alone is not None and now_s > self.alone_since_s + ALONE_MAX_S:
                    self.tables.is_ready = False
                if now_s >= forget_s:
                    forget_s = now_s + FORGET_S
                    self._forget_ended()
            except Exception:
                log.exception("link_failed", "The edge tries again.")
            before_s = loop.time()
            await asyncio.sleep(CHECK_S)
            if loop.time() > before_s + SILENT_S / 2 and self._connection is not None:
                self._connection.heard_s = self._now()  # this process was held up, not the brain

    def _forget_ended(self) -> None:
        """Forget calls that ended without a word that says so: a response that broke off, or one of Envoy's own."""
        if self.configured.is_set():
            exchanges = self._process.proxy.exchanges
            for number in [number for number in self.open if number not in exchanges]:
                del self.open[number]

    def _send(self, messages: Sequence[Any]) -> None:
        self._out.extend(messages)
        self._flush()

    def _ended_early(self) -> list[EndedEarlyFrame]:
        return [_early_frame(one) for one in self._process.proxy.take_ended_early()]

    async def _connect(self) -> None:
        """Ask the brains, one after the other: the one that leads answers with Welcome and Tables."""
        for address in self._addresses:
            connection = _Connection(self, address)
            try:
                async with asyncio.timeout(CONNECT_S if self.configured.is_set() else FIRST_CONNECT_S):
                    await connection.open(self._sockets, self._tls)
                    self._hello(connection)
                    await connection.settled.wait()
            except (OSError, TimeoutError):
                if self._connection is not connection:
                    connection.close("")
                    continue
            if self._connection is connection:
                return

    def _hello(self, connection: _Connection) -> None:
        connection.send([Hello(VERSION, self.name, self.edge, machine_id(), os.getpid(), self.fence)])

    def received(self, connection: _Connection, messages: Sequence[Any]) -> None:
        connection.heard_s = self._now()
        commands: list[Command] = []
        calls, now_s = self.open, connection.heard_s
        for message in messages:
            kind = type(message)
            if kind in _COMMANDS:
                if connection is not self._connection:
                    continue  # an older brain's
                if kind is Send:
                    call = calls.get(message.id)
                    if call is not None:
                        call.sent_s = now_s
                elif kind is Reject:
                    calls.pop(message.id, None)
                commands.append(message)
                continue
            if commands:
                self._process.proxy.obey(commands)
                commands = []
            self._about_the_link(connection, message)
        if commands:
            self._process.proxy.obey(commands)

    def _about_the_link(self, connection: _Connection, message: Any) -> None:
        if isinstance(message, Welcome):
            if not message.version >= OLDEST or message.fence < self.fence:
                connection.close("it does not lead any more, or speaks another version")
                return
            connection.is_new_brain = message.fence != self.fence
            self.fence = message.fence
        elif isinstance(message, Settings):
            self._process.settings_came(message.config)
        elif isinstance(message, ModelCards):
            self._process.cards_came(message)
        elif isinstance(message, TablesFrame):
            self.tables = tables_of(message)
            self._process.tables_came(self.tables, connection.is_new_brain)
            connection.is_new_brain = False
            if not self.up:
                self._link_is_up(connection)
        elif isinstance(message, Beat) and message.fence < self.fence:
            connection.close("another brain leads")

    def _link_is_up(self, connection: _Connection) -> None:
        self._connection, self.up = connection, True
        connection.settled.set()
        self._out = []
        reading = [id for id, call in self.open.items() if call.arrive is None]
        self._say(connection, [Resync(self._open_calls(), reading)])
        connection.up_s = self._now()
        if self.alone is not None:
            log.info(
                "brain_found", "The edge asks it again.", alone_s=round(self._now() - self.alone_since_s, 1),
                calls=len(self.open),
            )  # fmt: skip
            self.alone, self.alone_since_s = None, inf
        self.configured.set()

    def lost(self, connection: _Connection, reason: str) -> None:
        if connection is not self._connection:
            return
        now_s, was_up = self._now(), self.up
        self._connection, self.up, self._out = None, False, []
        if not was_up or now_s > connection.up_s + PATIENCE_S:  # else it has not really been there
            self.lost_s = now_s
        if not self._closing:
            log.warning("brain_lost", "Responses go on; new requests wait for it.", reason=reason, calls=len(self.open))

    async def close(self) -> None:
        """Say what is left to say, and close the link."""
        self._closing = True
        if self.up:
            self._send([self._process.report(self.tables.version), *self._ended_early(), Bye()])
            await asyncio.sleep(0)
        if self._connection is not None:
            self._connection.close("")

    # Without a brain.

    def _decide_alone(self, now_s: float) -> None:
        self.alone_since_s, self.times_alone = now_s, self.times_alone + 1
        self.alone = alone = Alone(self.tables, self._process.limits(), now_s)
        log.error(
            "edge_alone",
            f"No brain for {PATIENCE_S:g} s. The edge chooses nodes by the prompts' first characters, within its share "
            "of the limits.",
            calls=len(self.open), nodes=len(self.tables.nodes),
        )  # fmt: skip
        self._process.proxy.release_requests()  # those that waited for the start
        for resume in self._open_calls():
            self._process.proxy.obey(alone.take_over(resume, now_s))

    # What a new brain has to know.

    def _open_calls(self) -> list[Resume]:
        found: list[Resume] = []
        exchanges = self._process.proxy.exchanges
        for number, call in self.open.items():
            arrive, exchange, charge = call.arrive, exchanges.get(number), call.charge
            if arrive is None or exchange is None:
                continue
            tries = exchange.open_tries()
            for one in tries:
                one.opened_s, one.first_token_s = call.sent_s, call.first_token_s if one.status else 0.0
            charged = (charge.body_bytes, charge.has_output) if charge is not None else (-1, False)
            found.append(Resume(arrive, tuple(tries), *charged))
        found.sort(key=lambda one: one.arrive.request.arrived_s)
        return found


class _Connection(asyncio.Protocol):
    """One connection to a brain. It is `BrainLink._connection` once Tables have come."""

    def __init__(self, link: BrainLink, address: Address) -> None:
        self._link = link
        self._address = address
        self._reader = FrameReader(of_edge=False)
        self._transport: Link | None = None
        self.heard_s = self.up_s = link._now()
        self.settled = asyncio.Event()
        """Tables have come, or the connection has ended."""
        self.is_new_brain = False

    async def open(self, sockets: PlainSockets, tls: ssl.SSLContext | None) -> None:
        """Raises OSError."""
        loop, address = asyncio.get_running_loop(), self._address
        if tls is not None:
            await loop.create_connection(
                lambda: self, address.host, address.port, ssl=tls, server_hostname=address.host
            )
        elif address.path:
            connecting = socket.socket(socket.AF_UNIX)
            connecting.setblocking(False)
            try:
                await loop.sock_connect(connecting, address.path)
                sockets.open(connecting, self)
            except BaseException:
                connecting.close()
                raise
        else:
            await sockets.connect(address.host, address.port, lambda: self)

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for _clock_s, messages in self._reader.feed(data):
                self._link.received(self, messages)
        except Unreadable as error:
            self.close(f"it sent what is no frame: {error}")

    def eof_received(self) -> None:
        return None

    def connection_lost(self, _error: Exception | None) -> None:
        self._transport = None
        self.settled.set()
        self._link.lost(self, "the connection has ended")

    def send(self, messages: Sequence[Any]) -> None:
        transport = self._transport
        if transport is None:
            return
        unsent_bytes = transport.get_write_buffer_size()
        transport.write(encode(self._link._now(), messages))
        if unsent_bytes > MAX_UNSENT_BYTES:
            self.close("it does not read")

    def close(self, reason: str) -> None:
        transport, self._transport = self._transport, None
        self.settled.set()
        if transport is not None:
            transport.abort()
        self._link.lost(self, reason)


def _kept_frame(kept: Kept) -> KeptFrame:
    """Return what others want of a call as data."""
    sample, path, body = kept.sample, b"", None
    if sample is not None:
        path, body = sample.path, sample.body
        sample.drop()
    trace = _trace_frame(kept.trace) if kept.trace is not None else None
    return KeptFrame(kept.body_bytes, kept.prompt, kept.tokens, path, body, trace)


def _trace_frame(trace: EdgeTrace) -> TraceFrame:
    context = trace.context
    return TraceFrame(
        context.trace_id, context.span_id, context.flags, trace.parent_id, trace.tracestate, trace.path,
        trace.started_s, trace.span_seed,
    )  # fmt: skip


def _early_frame(ended: EndedEarly) -> EndedEarlyFrame:
    return EndedEarlyFrame(
        _trace_frame(ended.trace) if ended.trace is not None else None,
        _kept_frame(ended.kept) if ended.kept is not None else None,
        ended.ended_s, ended.status, ended.error, ended.client_left, ended.request, ended.request_id,
    )  # fmt: skip
