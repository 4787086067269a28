"""The brain's side of its links: edges in other processes tell it what happens, and obey what it commands.

Everything that has come by one turn of the event loop is handled as one batch, in the order of arrival; each edge gets
its commands as one frame. No edge can hold the brain up: one that does not read is cut off, and its calls are closed.

An edge that has lost its link has RESYNC_S to come back, and says which calls it still has. Then they end: its clients
have no process any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

import msgspec

from warmroute.config import Config, ConfigError
from warmroute.core import snapshot
from warmroute.core.calls import LEAVING, READING, STARTED
from warmroute.core.messages import (
    DUE,
    UNKNOWN,
    Arrive,
    Cancel,
    Command,
    Ended,
    Event,
    Failed,
    FirstToken,
    Left,
    Resume,
    RoutingRequest,
    Started,
    Withdraw,
)
from warmroute.core.wire import (
    COUNTS,
    EDGE_BITS,
    GAUGES,
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
    TraceFrame,
    Unreadable,
    Welcome,
    encode,
    tables_frame,
)
from warmroute.edge.arrival import Kept
from warmroute.edge.link import machine_id
from warmroute.edge.sockets import Server, open_unix_socket
from warmroute.edge.trace_context import EdgeTrace, EndedEarly, TraceContext
from warmroute.event_log import EventLog, where_it_failed
from warmroute.prompt.prompt import Prompt

if TYPE_CHECKING:
    from warmroute.app.service import Service
    from warmroute.core.calls import Call

log = EventLog("warmroute.brain")

BEAT_S: Final = 0.5
SILENT_S: Final = 2.0
"""An edge that sends nothing for this long gets no commands: its link is closed."""
RESYNC_S: Final = 2.0
"""How long the calls of an edge without a link are kept."""
CHECK_S: Final = 0.1
SNAPSHOT_S: Final = 5.0
MAX_REPORTS: Final = 1000


class KeptConfig:
    """The last configuration that could be used: a brain that starts again must not depend on a file that is being
    edited."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "configuration"
        self._first: Config | None = None

    def first(self, read: Callable[[], Config]) -> Config:
        """Return the configuration to start with. Raises ConfigError if there was never one that could be read."""
        try:
            self._first = read()
            self._keep(self._first)
        except ConfigError as error:
            if not self._file.exists():
                raise
            log.error("config_rejected", "The brain starts with the previous configuration.", reason=error)
            self._first = msgspec.json.decode(self._file.read_bytes(), type=Config)
        return self._first

    def read(self, read: Callable[[], Config]) -> Config:
        """Return the configuration: that of `first` once, then that of the file. Raises ConfigError."""
        config, self._first = self._first, None
        if config is None:
            config = read()
            self._keep(config)
        return config

    def _keep(self, config: Config) -> None:
        part = self._file.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(config))
        part.replace(self._file)


class LearnedFile:
    """What this brain has learned, in a file for the one that comes after it (core/snapshot.py)."""

    def __init__(self, service: Service, folder: Path) -> None:
        self._service = service
        self._file = folder / "learned"

    async def run(self) -> None:
        """Take over what the brain before this one has learned, then write down what this one learns."""
        service, waiting = self._service, self._restore()
        while True:
            await asyncio.sleep(SNAPSHOT_S if waiting is None else CHECK_S)
            try:
                now_s = time.monotonic()
                if waiting is not None:
                    waiting = waiting if waiting.apply_to_nodes(service.fleet, now_s) else None
                    continue
                data = snapshot.take(service.fleet, service.router, service.rate_limits, now_s)
                await asyncio.get_running_loop().run_in_executor(None, self._write, data)
            except Exception as error:
                log.error("learned_not_written", "The brain tries again.", reason=where_it_failed(error))

    def _restore(self) -> snapshot.Restored | None:
        try:
            restored = snapshot.Restored(self._file.read_bytes(), time.monotonic())
        except FileNotFoundError:  # this is the first one
            return None
        except (OSError, ValueError) as error:
            log.error("learned_not_read", "The brain learns anew.", reason=error)
            return None
        restored.apply(self._service.router, self._service.rate_limits, time.monotonic())
        return restored

    def _write(self, data: bytes) -> None:
        part = self._file.with_suffix(".part")
        part.write_bytes(data)
        part.replace(self._file)


class Edge:
    """What the brain knows of one edge process."""

    def __init__(self, number: int, name: str, pid: int) -> None:
        self.number = number
        self.name = name
        self.pid = pid
        self.connection: _Connection | None = None
        self.lost_s = inf
        """When its link was lost; it is up till then."""
        self.report: Report | None = None
        self.tables = 0
        self.silent: dict[int, float] = {}
        """Nodes with running responses of this edge, and when the last of them had a byte."""

    def gauge(self, name: str) -> int:
        return self.report.gauges[GAUGES.index(name)] if self.report is not None else 0

    def count(self, name: str) -> int:
        return self.report.counts[COUNTS.index(name)] if self.report is not None else 0


class BrainServer:
    def __init__(self, service: Service, path: Path, fence: int, now: Callable[[], float] = time.monotonic) -> None:
        """`path`: of the Unix socket for edges on this machine."""
        self._service = service
        self._brain = service.brain
        self._path = path
        self.fence = fence
        self._now = now
        self._machine = machine_id()
        self.edges: dict[int, Edge] = {}
        self._connections: set[_Connection] = set()
        self._inbox: list[tuple[_Connection, float, list[Any]]] = []
        self._turn_comes = False
        self._out: dict[int, list[Any]] = {}
        """What the edges get at the end of this turn, by their numbers."""
        self._cards: dict[str, tuple[dict[str, Any], ...]] = {}
        self._tables_version = 0
        self._reports: dict[int, Report | None] = {}
        """The last ones of edges that have ended, which may come back."""
        self._gone: dict[str, int] = {}
        """Totals of the counters of edges that have ended."""
        self._server: Server | None = None

    def listen(self) -> None:
        """Raises ConfigError."""
        sockets = self._service.plain_sockets
        self._server = sockets.listen(lambda: _Connection(self), [open_unix_socket(str(self._path))], str(self._path))

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.close()

    # From and to the core.

    def tell(self, event: Event) -> None:
        """Tell the core something that no edge has told, and pass on what follows."""
        self._keep(self._brain.handle(event, self._now()))
        self._flush()

    def _keep(self, commands: Sequence[Command]) -> None:
        out = self._out
        for command in commands:
            number = command.id >> EDGE_BITS
            waiting = out.get(number)
            if waiting is None:
                out[number] = [command]
            else:
                waiting.append(command)

    def _flush(self) -> None:
        """Send each edge its commands. Tables go before commands that need them."""
        self._update_tables()
        if not self._out:
            return
        out, self._out = self._out, {}
        for number, commands in out.items():
            edge = self.edges.get(number)
            if edge is not None and edge.connection is not None:
                edge.connection.send(commands)

    def arrived(self, connection: _Connection, clock_s: float, messages: list[Any]) -> None:
        self._inbox.append((connection, clock_s, messages))
        if not self._turn_comes:
            self._turn_comes = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        """Handle what all edges have told since the last turn."""
        self._turn_comes = False
        inbox, self._inbox = self._inbox, []
        handle, keep, now = self._brain.handle, self._keep, self._now
        for connection, clock_s, messages in inbox:
            now_s = now()
            connection.heard_s = now_s
            shift_s = connection.shift(clock_s, now_s)
            edge = connection.edge
            for message in messages:
                try:
                    if isinstance(message, _LINK):
                        self._about_the_link(connection, message, now_s, shift_s)
                        edge = connection.edge
                        continue
                    if edge is None or message.id >> EDGE_BITS != edge.number:
                        raise Unreadable("a call of another edge")
                    if shift_s:
                        _shift(message, shift_s)
                    if type(message) is Arrive and message.kept is not None:
                        message.kept = self._kept(message.kept, message.request)
                    commands = handle(message, now_s)
                    if commands:
                        keep(commands)
                except Unreadable as error:
                    log.error("edge_sent_garbage", "Its link is closed.", edge=connection.name, reason=error)
                    connection.close()
                    break
                except Exception as error:  # a bug at one message must not cost the others
                    log.error("brain_link_failed", "The brain goes on.", reason=where_it_failed(error))
        if self._brain.due_now:
            asyncio.get_running_loop().call_soon(self.tell, DUE)
        self._flush()

    def _kept(self, data: Any, request: RoutingRequest) -> Kept | None:
        """Return what others want of a call. Raises Unreadable."""
        try:
            frame = data if isinstance(data, KeptFrame) else msgspec.convert(data, KeptFrame)
            prompt = msgspec.convert(frame.prompt, Prompt) if frame.prompt is not None else None
        except msgspec.ValidationError as error:
            raise Unreadable(str(error)) from None
        sample = None
        if frame.sample is not None:
            sample = self._service.prompt_doctor.samples.offer(request, frame.path, frame.sample)
        kept = Kept(frame.body_bytes, prompt, sample)
        kept.tokens = frame.tokens
        kept.trace = _trace(frame.trace) if frame.trace is not None else None
        return kept

    # About the links.

    def _about_the_link(self, connection: _Connection, message: Any, now_s: float, shift_s: float) -> None:
        if isinstance(message, Hello):
            self._greet(connection, message)
            return
        edge = connection.edge
        if edge is None:
            raise Unreadable("the first message is not Hello")
        if isinstance(message, Report):
            self._reported(edge, message, now_s)
        elif isinstance(message, Resync):
            self._resync(edge, message, now_s, shift_s)
        elif isinstance(message, EndedEarlyFrame):
            self._ended_early(message, shift_s)
        elif isinstance(message, Bye):
            self._left(edge)

    def _greet(self, connection: _Connection, hello: Hello) -> None:
        if hello.version < OLDEST or hello.fence > self.fence:
            connection.close()
            return
        connection.same_clock = hello.machine == self._machine
        edge = self.edges.get(hello.edge)
        if edge is None:
            edge = self.edges[hello.edge] = Edge(hello.edge, hello.name, hello.pid)
            edge.report = self._reports.pop(hello.edge, None)
            log.info("edge_joined", edge=edge.name, pid=edge.pid)
        elif edge.connection is not None:
            edge.connection.close()
        edge.connection, edge.lost_s, connection.edge = connection, inf, edge
        service = self._service
        service.tables.edges = max(1, self.connected)
        frames: list[Any] = [Welcome(min(VERSION, hello.version), self.fence)]
        frames.append(Settings(msgspec.json.encode(service.config)))
        frames += [ModelCards(name, list(cards)) for name, cards in self._cards.items()]
        frames.append(tables_frame(service.tables.current()))
        connection.send(frames)

    def _update_tables(self) -> None:
        self._service.tables.captures = self._service.capture.on
        tables = self._service.tables.current()
        if tables.version != self._tables_version:
            self._tables_version = tables.version
            self._to_all([tables_frame(tables)])

    def _to_all(self, messages: Sequence[Any]) -> None:
        for edge in self.edges.values():
            if edge.connection is not None:
                edge.connection.send(messages)

    def settings_changed(self) -> None:
        """The configuration was reloaded."""
        self._to_all([Settings(msgspec.json.encode(self._service.config))])

    def cards_changed(self, node: str, cards: Sequence[dict[str, Any]]) -> None:
        """A node says something new of its models. Empty: it has left."""
        if cards:
            self._cards[node] = tuple(cards)
        elif self._cards.pop(node, None) is None:
            return
        self._to_all([ModelCards(node, list(cards))])

    async def run(self) -> None:
        """Send signs of life, and notice edges that give none."""
        beat_s = 0.0
        while True:
            before_s = self._now()
            await asyncio.sleep(CHECK_S)
            now_s = self._now()
            held_up_s = now_s - before_s - CHECK_S
            try:
                if now_s >= beat_s:
                    beat_s = now_s + BEAT_S
                    self._to_all([Beat(self.fence)])
                for connection in list(self._connections):
                    connection.heard_s += max(0.0, held_up_s)  # this process was held up, not the edge
                    if now_s > connection.heard_s + SILENT_S:
                        log.error("edge_silent", "Its link is closed.", edge=connection.name, silent_s=SILENT_S)
                        connection.close()
                for edge in [one for one in self.edges.values() if now_s > one.lost_s + RESYNC_S]:
                    self._end(edge)
                self._flush()
            except Exception:
                log.exception("brain_link_failed", "The brain goes on.")

    def lost(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        edge = connection.edge
        if edge is not None and edge.connection is connection:
            edge.connection, edge.lost_s = None, self._now()

    def _left(self, edge: Edge) -> None:
        """An edge has ended in order."""
        connection, edge.connection = edge.connection, None
        if connection is not None:
            connection.edge = None
        self._reports[edge.number] = edge.report
        del self.edges[edge.number]
        self._service.tables.edges = max(1, len(self.edges))
        for id in self._ids_of(edge):
            self._keep(self._brain.handle(Cancel(id, Left.LOST), self._now()))
        log.info("edge_left", edge=edge.name)

    def _end(self, edge: Edge) -> None:
        """An edge has ended: its clients have lost their connections."""
        del self.edges[edge.number]
        self._reports[edge.number] = edge.report
        while len(self._reports) > MAX_REPORTS:
            del self._reports[next(iter(self._reports))]
        self._gone["ended"] = self._gone.get("ended", 0) + 1
        self._service.tables.edges = max(1, len(self.edges))
        ids = self._ids_of(edge)
        for id in ids:
            self._keep(self._brain.handle(Cancel(id, Left.LEFT), self._now()))
        log.error("edge_ended", "Its clients have lost their connections.", edge=edge.name, requests=len(ids))

    def _ids_of(self, edge: Edge) -> list[int]:
        return [id for id in self._brain.open if id >> EDGE_BITS == edge.number]

    # What an edge still has.

    def _resync(self, edge: Edge, resync: Resync, now_s: float, shift_s: float) -> None:
        """Bring the calls of an edge to what it says of them."""
        listed = {resume.id for resume in resync.calls} | set(resync.reading)
        if any(id >> EDGE_BITS != edge.number for id in listed):
            raise Unreadable("a call of another edge")
        handle, keep, open_calls = self._brain.handle, self._keep, self._brain.open
        for id in self._ids_of(edge):
            if id not in listed:
                keep(handle(Cancel(id, Left.LOST), now_s))
        for resume in resync.calls:
            if shift_s:
                _shift(resume, shift_s)
            arrive = resume.arrive
            if arrive.kept is not None:
                arrive.kept = self._kept(arrive.kept, arrive.request)
            call = open_calls.get(resume.id)
            if call is None:
                keep(handle(resume, now_s))
            elif call.state == READING:  # its Arrive was lost
                keep(handle(arrive, now_s))
            elif _has_others(call, resume):
                keep(handle(Cancel(call.id, Left.LOST), now_s))
                keep(handle(resume, now_s))
            else:
                for event in _differences(call, resume):
                    keep(handle(event, now_s))
                keep([Withdraw(call.id, one.number) for one in call.open_tries() if one.state == LEAVING])
        if resync.calls:
            log.info("edge_resynced", edge=edge.name, calls=len(resync.calls))

    # What an edge reports.

    def _reported(self, edge: Edge, report: Report, now_s: float) -> None:
        service, before = self._service, edge.report
        counters = service.counters
        if len(report.counts) < len(COUNTS) or len(report.gauges) < len(GAUGES):
            raise Unreadable("a report without all of its numbers")
        old_errors = {(status, code): count for status, code, count in before.errors} if before is not None else {}
        for status, code, count in report.errors:
            counters.errors[status, code] += max(0, count - old_errors.get((status, code), 0))
        old_prompts = {(model, how): count for model, how, count in before.prompts} if before is not None else {}
        for model, how, count in report.prompts:
            counters.prompts[model, how] += max(0, count - old_prompts.get((model, how), 0))
        old_routes = before.route_requests if before is not None else {}
        for route, count in report.route_requests.items():
            counters.route_requests[route] += max(0, count - old_routes.get(route, 0))
        old_counts = before.counts if before is not None else (0,) * len(COUNTS)
        for name, count, old in zip(COUNTS, report.counts, old_counts, strict=False):
            more = max(0, count - old)
            if hasattr(counters, name):
                setattr(counters, name, getattr(counters, name) + more)
            else:
                self._gone[name] = self._gone.get(name, 0) + more
        for one in report.client_errors:
            service.proxy.client_errors.count(one.status, one.code, one.source, one.key, one.count)
        edge.report, edge.tables = report, report.tables
        edge.silent = {number: now_s - max(0.0, silent_s) for number, silent_s in report.silent}

    def total(self, name: str) -> int:
        """Return a counter of all edges, those included that have ended."""
        return self._gone.get(name, 0)

    @property
    def connected(self) -> int:
        return len([edge for edge in self.edges.values() if edge.connection is not None])

    def gauge(self, name: str) -> int:
        return sum([edge.gauge(name) for edge in self.edges.values()])

    def last_byte_s(self, node: int) -> float:
        """When a running response of this node last had a byte, over all edges."""
        return max([edge.silent.get(node, -inf) for edge in self.edges.values()], default=-inf)

    def _ended_early(self, frame: EndedEarlyFrame, shift_s: float) -> None:
        request = frame.request
        if request is not None and shift_s:
            request.arrived_s += shift_s
        kept = self._kept(frame.kept, request) if frame.kept is not None and request is not None else None
        trace = _trace(frame.trace) if frame.trace is not None else None
        ended = EndedEarly(
            trace, kept, frame.ended_s + shift_s, frame.status, frame.error, frame.client_left, request,
            frame.request_id,
        )  # fmt: skip
        self._service.ended_calls.write([], [ended], self._now())


class _Connection(asyncio.Protocol):
    """One connection of an edge."""

    def __init__(self, server: BrainServer) -> None:
        self._server = server
        self._reader = FrameReader(of_edge=True)
        self._transport: Link | None = None
        self.edge: Edge | None = None
        self.heard_s = server._now()
        self.same_clock = True
        self._shift_s = inf

    @property
    def name(self) -> str:
        return self.edge.name if self.edge is not None else "unknown"

    def shift(self, clock_s: float, now_s: float) -> float:
        """Return what turns a time of the edge's clock into one of the brain's: the frame that was under way for the
        shortest time tells it best."""
        if self.same_clock:
            return 0.0
        self._shift_s = min(self._shift_s, now_s - clock_s)
        return self._shift_s

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._server._connections.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            for clock_s, messages in self._reader.feed(data):
                self._server.arrived(self, clock_s, messages)
        except Unreadable as error:
            log.error("edge_sent_garbage", "Its link is closed.", edge=self.name, reason=error)
            self.close()

    def eof_received(self) -> None:
        return None

    def connection_lost(self, _error: Exception | None) -> None:
        self._transport = None
        self._server.lost(self)

    def send(self, messages: Sequence[Any]) -> None:
        transport = self._transport
        if transport is None:
            return
        unsent_bytes = transport.get_write_buffer_size()
        transport.write(encode(self._server._now(), messages))
        if unsent_bytes > MAX_UNSENT_BYTES:
            log.error("edge_does_not_read", "Its link is closed.", edge=self.name)
            self.close()

    def close(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            with suppress(OSError):
                transport.abort()
        self._server.lost(self)


_LINK: Final = (Hello, Resync, Report, EndedEarlyFrame, Bye)
"""Messages about the link. The others are of calls."""


def _shift(message: Any, shift_s: float) -> None:
    """Turn times of the edge's clock into times of this one."""
    if isinstance(message, Resume):
        for one in message.tries:
            one.opened_s += shift_s
            one.first_token_s += shift_s if one.first_token_s else 0.0
        message = message.arrive
    if isinstance(message, Ended):
        message.first_s += shift_s if message.first_s else 0.0
        return
    request = getattr(message, "request", None)
    if isinstance(request, RoutingRequest):
        request.arrived_s += shift_s
        request.deadline_s += shift_s if request.deadline_s else 0.0
        request.total_deadline_s += shift_s if request.total_deadline_s else 0.0


def _trace(frame: TraceFrame) -> EdgeTrace:
    context = TraceContext(frame.trace_id, frame.span_id, frame.flags)
    trace = EdgeTrace(
        Random().getrandbits, context, frame.parent_id, frame.tracestate, b"", frame.path, frame.started_s
    )
    trace.span_seed = frame.span_seed
    return trace


def _has_others(call: Call, resume: Resume) -> bool:
    """Return whether none of the tries that the edge has, or none that the brain has, is known to the other: commands
    were lost, or the edge has decided alone."""
    here, there = {one.number for one in call.open_tries()}, {one.try_ for one in resume.tries}
    return bool(there - here) or bool(here and not there)


def _differences(call: Call, resume: Resume) -> Iterable[Any]:
    """What the edge would have told of a call that the brain has, too, had the link not been lost."""
    listed = {one.try_: one for one in resume.tries}
    for try_ in call.open_tries():
        one = listed.pop(try_.number, None)
        if one is None:
            yield Failed(call.id, try_.number, UNKNOWN, "the edge's link was lost")
        elif one.first_token_s and try_.state <= STARTED:
            yield FirstToken(call.id, try_.number, one.status)
        elif one.status and try_.state < STARTED:
            yield Started(call.id, try_.number, one.status)
