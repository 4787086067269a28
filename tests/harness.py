"""What the tests stand on: a scripted engine, a raw HTTP client, and a router whose books are checked at the end.

Everything is real: sockets on loopback, the whole `Service`, uvloop. Nothing sleeps for long; what must come about is
polled for with a generous deadline.
"""

from __future__ import annotations

import asyncio
import gc
import json
import re
import signal
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from warmroute.config import Config, from_table
from warmroute.edge.exchange import ProxyExchange
from warmroute.fleet.node import Node
from warmroute.service import Service

PATIENCE_S = 10.0
"""How long is waited for what must come about, on a slow machine."""


async def until(condition: Callable[[], Any], what: str = "", patience_s: float = PATIENCE_S) -> Any:
    """Polls until the condition holds, and returns what it said."""
    deadline_s = time.monotonic() + patience_s
    while True:
        said = condition()
        if said:
            return said
        assert time.monotonic() < deadline_s, f"waited {patience_s:g} s in vain: {what or condition}"
        await asyncio.sleep(0.005)


# ---- The engine ----

CLOSE, RESET, HANG = "close", "reset", "hang"
Step = bytes | float | asyncio.Event | str
Behaviour = Callable[["Engine", "Seen", asyncio.StreamWriter], Awaitable[None]]


@dataclass(eq=False)
class Seen:
    """One request as the engine saw it, byte for byte."""

    connection: int
    head: bytes
    body: bytes
    at_s: float
    left: asyncio.Event = field(default_factory=asyncio.Event)
    left_s: float = 0.0
    """When the engine noticed that whoever asked had gone, before the answer was complete."""
    ended: bool = False
    written: int = 0
    """Bytes of the answer that the engine could hand to its socket so far (huge answers only)."""

    @property
    def line(self) -> bytes:
        return self.head.partition(b"\r\n")[0]

    @property
    def target(self) -> bytes:
        return self.line.split(b" ")[1]

    @property
    def fields(self) -> list[tuple[bytes, bytes]]:
        lines = self.head.split(b"\r\n")[1:-2]
        return [(name.lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines)]

    def get(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.fields if key == name.lower()]


def answer(
    body: bytes = b'{"ok":true}', status: int = 200, content_type: bytes = b"application/json", headers: bytes = b""
) -> bytes:
    """A whole answer with a length."""
    return b"HTTP/1.1 %d Status\r\nContent-Type: %b\r\nContent-Length: %d\r\n%b\r\n%b" % (
        status, content_type, len(body), headers, body,
    )  # fmt: skip


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def event(number: int) -> bytes:
    return b'data: {"n":%d}\n\n' % number


def script(*steps: Step) -> Behaviour:
    """Bytes are written, numbers are seconds of silence, events are waited for; CLOSE, RESET and HANG end it."""

    async def play(engine: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        for step in steps:
            if isinstance(step, bytes):
                writer.write(step)
                await writer.drain()
            elif isinstance(step, float):
                await asyncio.sleep(step)
            elif isinstance(step, asyncio.Event):
                await step.wait()
            elif step == CLOSE:
                writer.close()
                return
            elif step == RESET:
                reset(writer)
                return
            elif step == HANG:
                await asyncio.Event().wait()

    return play


def normal(body: bytes = b'{"ok":true}', headers: bytes = b"") -> Behaviour:
    return script(answer(body, headers=headers))


def failing(status: int, headers: bytes = b"") -> Behaviour:
    return script(answer(b'{"error":"no"}', status, headers=headers))


def stream(count: int, pace_s: float = 0.0) -> Behaviour:
    steps: list[Step] = [SSE_HEAD]
    for number in range(count):
        steps.append(chunk(event(number)))
        if pace_s:
            steps.append(pace_s)
    return script(*steps, DONE)


def huge(total_bytes: int, piece: int = 262_144, sized: bool = True) -> Behaviour:
    """As much as is asked for, as fast as it is taken."""

    async def play(engine: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        framing = b"Content-Length: %d" % total_bytes if sized else b"Transfer-Encoding: chunked"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\n%b\r\n\r\n" % framing)
        left = total_bytes
        data = b"x" * piece
        while left:
            part = data[:left]
            writer.write(part if sized else chunk(part))
            await writer.drain()
            left -= len(part)
            seen.written = total_bytes - left
        if not sized:
            writer.write(b"0\r\n\r\n")

    return play


hanging = script(HANG)
_GONE = (ConnectionError, RuntimeError)
"""What writing raises when the other side has gone; uvloop's closed transports raise the latter."""


def reset(writer: asyncio.StreamWriter) -> None:
    """Closes by RST."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def vllm_metrics(running: int = 0, waiting: int = 0, kv_usage: float = 0.0, started_s: float = 1.7e9) -> bytes:
    return (
        "# HELP vllm:num_requests_running Number of requests in model execution batches.\n"
        "# TYPE vllm:num_requests_running gauge\n"
        f'vllm:num_requests_running{{engine="0",model_name="m"}} {float(running)}\n'
        "# TYPE vllm:num_requests_waiting gauge\n"
        f'vllm:num_requests_waiting{{engine="0",model_name="m"}} {float(waiting)}\n'
        f'vllm:num_requests_waiting_by_reason{{engine="0",reason="capacity"}} 1000.0\n'
        "# TYPE vllm:kv_cache_usage_perc gauge\n"
        f'vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} {kv_usage}\n'
        f"process_start_time_seconds {started_s}\n"
    ).encode()


class Engine:
    """A node that does as it is told, and remembers what it was sent. Change its behaviours while it runs."""

    def __init__(self, *models: str, tls: Any = None) -> None:
        self.models = models or ("m",)
        self.behave: Behaviour = normal()
        self.health: Behaviour = script(answer(b""))
        self.list_models: Behaviour | None = None
        self.metrics: Behaviour = script(answer(vllm_metrics(), content_type=b"text/plain"))
        self.seen: list[Seen] = []
        """Requests, without checks, model lists and metrics."""
        self.checks: list[Seen] = []
        self.port = 0
        self.connections = 0
        """Open now."""
        self.accepted = 0
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    async def listen(self) -> None:
        self._server = await asyncio.start_server(
            self._connected, "127.0.0.1", self.port, ssl=self._tls, limit=1 << 20, backlog=1024
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def refuse(self) -> None:
        """Nobody listens any more, and open connections go."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.drop_connections()
        await asyncio.sleep(0)

    def drop_connections(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def close(self) -> None:
        await self.refuse()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        self.connections += 1
        self.accepted += 1
        try:
            await self._serve(reader, writer, self.accepted)
        except (*_GONE, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:
            pass
        finally:
            self.connections -= 1
            self._writers.discard(writer)
            self._tasks.discard(task)
            writer.transport.abort() if task.cancelling() else writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        ahead = asyncio.ensure_future(reader.read(1))
        try:
            while True:
                first = await ahead
                if not first:
                    return
                head = first + await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
                body = await reader.readexactly(int(length[1])) if length else b""
                seen = Seen(number, head, body, time.monotonic())
                behave = self._behaviour(seen)
                ahead = asyncio.ensure_future(reader.read(1))
                playing = asyncio.ensure_future(behave(self, seen, writer))
                try:
                    await asyncio.wait({ahead, playing}, return_when=asyncio.FIRST_COMPLETED)
                    if not playing.done() or isinstance(playing.exception(), _GONE):
                        seen.left_s = time.monotonic()
                        seen.left.set()
                        return
                    playing.result()
                    seen.ended = True
                    if writer.is_closing():
                        return
                finally:
                    playing.cancel()
        finally:
            ahead.cancel()

    def _behaviour(self, seen: Seen) -> Behaviour:
        path = seen.target.partition(b"?")[0]
        if path == b"/health":
            self.checks.append(seen)
            return self.health
        if path == b"/metrics":
            return self.metrics
        if path == b"/v1/models" and seen.line.startswith(b"GET"):
            cards = [{"id": model, "object": "model", "owned_by": "fake"} for model in self.models]
            return self.list_models or script(answer(json.dumps({"object": "list", "data": cards}).encode()))
        if path in (b"/kv_event_sources", b"/server_info"):
            return failing(404)
        self.seen.append(seen)
        return self.behave


@asynccontextmanager
async def engines(count: int = 1, *models: str) -> AsyncIterator[list[Engine]]:
    made = [Engine(*models) for _ in range(count)]
    try:
        for engine in made:
            await engine.listen()
        yield made
    finally:
        for engine in made:
            await engine.close()


class BlackHole:
    """A port that takes connections only as far as the kernel's queue goes: connecting to it hangs."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen(0)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._fillers: list[socket.socket] = []
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", self.port))
            self._fillers.append(filler)

    def close(self) -> None:
        for each in (*self._fillers, self._socket):
            each.close()


# ---- The client ----


@dataclass
class Answer:
    status: int
    fields: list[tuple[str, str]]
    body: bytes
    complete: bool
    """Whether the framing says that this was all of it."""
    chunks: list[bytes]
    head: bytes

    def get(self, name: str) -> str | None:
        return next((value for key, value in self.fields if key == name.lower()), None)

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.fields if key == name.lower()]

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The OpenAI-style error; fails where it is not one."""
        assert self.get("content-type") == "application/json"
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str) and error["message"]
        assert isinstance(error["type"], str) and isinstance(error["code"], str)
        return error


class Gone(Exception):
    """The other side closed where an answer was due."""


class Peer:
    """One client connection, raw."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def write(self, data: bytes) -> None:
        self.writer.write(data)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, without_body: bool = False, patience_s: float = PATIENCE_S * 2) -> Answer:
        async with asyncio.timeout(patience_s):
            while True:
                found = await self._answer(without_body)
                if found.status >= 200:
                    return found

    async def head(self, patience_s: float = PATIENCE_S * 2) -> Answer:
        async with asyncio.timeout(patience_s):
            try:
                head = await self.reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                raise Gone(getattr(error, "partial", b"")) from None
            lines = head.decode("latin-1").split("\r\n")
            assert lines[0].startswith("HTTP/1.1 "), head
            fields = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines[1:-2])]
            return Answer(int(lines[0].split(" ")[1]), fields, b"", False, [], head)

    async def _answer(self, without_body: bool) -> Answer:
        found = await self.head()
        if without_body or found.status in (100, 204, 304):
            found.complete = True
            return found
        try:
            length = found.get("content-length")
            if length is not None:
                assert found.get("transfer-encoding") is None
                found.body = await self.reader.readexactly(int(length))
                found.complete = True
            elif found.get("transfer-encoding") == "chunked":
                await self._chunks(found)
            else:
                found.body = await self.reader.read()
                found.complete = True
        except asyncio.IncompleteReadError as short:
            found.body = short.partial if found.get("content-length") is not None else b""
        except ConnectionError:
            pass
        if found.chunks:
            found.body = b"".join(found.chunks)
        return found

    async def _chunks(self, found: Answer) -> None:
        while True:
            line = await self.reader.readuntil(b"\r\n")
            size = int(line[:-2].partition(b";")[0], 16)
            if size == 0:
                while await self.reader.readuntil(b"\r\n") != b"\r\n":
                    pass
                found.complete = True
                return
            data = await self.reader.readexactly(size)
            assert await self.reader.readexactly(2) == b"\r\n"
            found.chunks.append(data)

    async def rest(self, patience_s: float = PATIENCE_S) -> bytes:
        """What else comes until the other side closes."""
        async with asyncio.timeout(patience_s):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""

    async def is_closed(self, patience_s: float = PATIENCE_S) -> bool:
        """Waits for the other side to close, with nothing more said."""
        try:
            return await self.rest(patience_s) == b""
        except TimeoutError:
            return False

    def leave(self) -> None:
        self.writer.transport.abort()

    def close(self) -> None:
        self.writer.close()


CHAT = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'


def post(
    body: bytes = CHAT,
    path: str = "/v1/chat/completions",
    headers: Iterable[str] = (),
    content_type: str = "application/json",
) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: router",
        f"Content-Length: {len(body)}",
        f"Content-Type: {content_type}",
        *headers,
    ]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def get(path: str, *headers: str, method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: router", *headers]).encode("latin-1") + b"\r\n\r\n"


def chat(content: str = "hi", model: str = "m", **more: Any) -> bytes:
    return json.dumps({"model": model, "messages": [{"role": "user", "content": content}], **more}).encode()


# ---- The router ----

QUICK: dict[str, dict[str, Any]] = {
    "listen": {"port": 0},
    "admin": {"port": 0},
    "limits": {},
    "upstream": {"connect_timeout_s": 1.0, "first_byte_timeout_s": 20.0, "between_chunks_timeout_s": 20.0},
    "health": {"interval_s": 0.05, "timeout_s": 1.0, "open_s": 0.05, "slow_start_s": 0.0},
    "metrics": {"interval_s": 0.1, "timeout_s": 1.0},
    "routing": {"policy": "round_robin", "seed": 7},
    "shutdown": {"deadline_s": 2.0},
}


def quick_table(nodes: Iterable[Engine | BlackHole | dict[str, Any]] = (), **tables: Any) -> dict[str, Any]:
    """A configuration with short times; node0, node1… in the order given."""
    table: dict[str, Any] = {name: {**values, **tables.pop(name, {})} for name, values in QUICK.items()}
    listed = []
    for number, node in enumerate(nodes):
        entry = node if isinstance(node, dict) else {"url": node.url}
        if isinstance(node, BlackHole):
            entry["models"] = ["m"]
        listed.append({"name": f"node{number}", **entry})
    return {**table, "nodes": listed, **tables}


class Router:
    """A running service, and a way to talk to it."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.peers: list[Peer] = []
        self.troubles: list[str] = []

    @property
    def port(self) -> int:
        return self.service.port

    def node(self, number: int) -> Node:
        return self.service.fleet.node(f"node{number}")

    async def connect(self, port: int | None = None, host: str = "127.0.0.1", **more: Any) -> Peer:
        peer = Peer(*await asyncio.open_connection(host, port or self.port, limit=1 << 24, **more))
        self.peers.append(peer)
        return peer

    async def ask(self, request: bytes | None = None, without_body: bool = False) -> Answer:
        """One request on a connection of its own."""
        peer = await self.connect()
        peer.write(post() if request is None else request)
        found = await peer.answer(without_body)
        peer.close()
        return found

    async def admin(self, method: str, path: str, body: bytes = b"", *headers: str) -> Answer:
        peer = await self.connect(self.service.admin_port)
        lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(body)}", *headers]
        peer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        found = await peer.answer(method == "HEAD")
        peer.close()
        return found

    def inflight(self) -> int:
        return sum(node.inflight for node in self.service.fleet)


@asynccontextmanager
async def router(
    *nodes: Engine | BlackHole | dict[str, Any],
    wait: bool | int = True,
    config: Config | None = None,
    checked: bool = True,
    checks_hang: bool = False,
    **tables: Any,
) -> AsyncIterator[Router]:
    """A router over these nodes. `wait`: how many nodes must be up (True: all). At the end its books must be empty.

    `checks_hang`: some node does not answer its health checks, so that their connections may outlive the router.
    """
    config = config or from_table(quick_table(nodes, **tables))
    running = Router(Service(lambda: config))
    service = running.service
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: running.troubles.append(f"{context.get('message')}: {context!r}"))
    await service.start()
    try:
        wanted = len(nodes) if wait is True else int(wait)
        await until(lambda: count_up(service) >= wanted, f"{wanted} nodes up")
        yield running
        for peer in running.peers:
            peer.close()
        if checked:
            await check_books(service)
    finally:
        for peer in running.peers:
            peer.leave()
        await asyncio.sleep(0)
        await service.stop()
        loop.set_exception_handler(None)
    if checked:
        assert not service.listener.connections, "connections of clients are left"
        for node in nodes:
            if isinstance(node, Engine) and not checks_hang:
                await until(lambda node=node: node.connections == 0, "connections to a node are left", 5)
        await nothing_left(service)
        assert not running.troubles, running.troubles


def count_up(service: Service) -> int:
    return sum(1 for node in service.fleet if node.health.standing.value == "up" and node.models is not None)


async def check_books(service: Service) -> None:
    """Every counter is back at zero, and nobody is left."""
    listener, fleet = service.listener, service.fleet

    def settled() -> bool:
        groups = [group for name in fleet.models if (group := fleet.group(name)) is not None]
        return (
            all(node.inflight == 0 for node in fleet)
            and all(group.inflight == 0 for group in groups)
            and service.admission.waiting == 0
            and not any(group.waiting for group in service.fleet.groups)
            and listener.buffered_bytes == 0
            and not listener.connections
        )

    try:
        await until(settled, patience_s=5)
    except AssertionError:
        raise AssertionError(
            f"the books are not empty: in flight {[(node.name, node.inflight) for node in fleet]}, "
            f"buffered {listener.buffered_bytes}, connections {len(listener.connections)}"
        ) from None


async def nothing_left(service: Service) -> None:
    """No exchange of this router is alive."""
    for attempt in range(30):
        if attempt:
            gc.collect()
            await asyncio.sleep(0.1)
        exchanges = [thing for thing in gc.get_objects() if type(thing) is ProxyExchange]
        if not any(exchange._proxy is service.proxy for exchange in exchanges):
            return
        del exchanges
    raise AssertionError("an exchange is left over")


# ---- The command ----


class Command:
    """`warmroute serve` as a process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []
        self.port = 0
        self.admin_port = 0

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def said(self, text: str) -> bool:
        return any(text in line for line in self.lines)

    async def connect(self, port: int | None = None) -> Peer:
        return Peer(*await asyncio.open_connection("127.0.0.1", port or self.port, limit=1 << 24))

    async def ask(self, request: bytes | None = None, port: int | None = None) -> Answer:
        peer = await self.connect(port)
        peer.write(post() if request is None else request)
        found = await peer.answer()
        peer.close()
        return found

    async def ready(self) -> None:
        deadline_s = time.monotonic() + 20
        while (await self.ask(get("/ready"))).status != 200:
            assert time.monotonic() < deadline_s, self.lines
            await asyncio.sleep(0.02)


@asynccontextmanager
async def serve(*arguments: str | Path) -> AsyncIterator[Command]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "warmroute.cli.main", "serve", *map(str, arguments),
        stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    command = Command(process)

    async def read() -> None:
        assert process.stderr is not None
        async for line in process.stderr:
            command.lines.append(line.decode().rstrip())

    reading = asyncio.ensure_future(read())
    try:
        started = await until(
            lambda: (
                process.returncode is not None
                or next(
                    (
                        m
                        for line in command.lines
                        if (m := re.search(r"listens on \S+?(?::(\d+))?(?:, admin on http://\S+:(\d+))?; ", line))
                    ),
                    None,
                )
            ),
            "the command listens",
            20,
        )
        if isinstance(started, re.Match):
            command.port, command.admin_port = int(started[1] or 0), int(started[2] or 0)
        yield command
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await reading
