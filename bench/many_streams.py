"""Holds many streams open at once through the router, and accounts for every byte of them.

    python bench/many_streams.py --streams 5000 --seconds 60 --record many_streams

Two engines, each a process of its own, send every stream an event per second. What an event contains follows from the
numbers of the stream and of the event, so the client knows every byte that it must receive. The test fails if a stream
differs, if a counter of the router is not 0 at the end, or if connections or much memory are left.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import NamedTuple

import uvloop
from record import Report, add_record_option, load_average
from soak import left_over

from warmroute.demo.child_processes import Children, free_port
from warmroute.demo.router_process import HOST, RouterProcess, start_router
from warmroute.edge.connection_pool import MAX_IDLE_CONNECTIONS
from warmroute.edge.http1 import ChunkReader
from warmroute.edge.process_limits import raise_file_limit

ENGINES = 2
PACE_S = 1.0
"""Between two events of a stream."""
CONNECTS_AT_ONCE = 100
SETTLE_S = 20.0
PATIENCE_S = 60.0
MAX_KEPT_BYTES, MAX_KEPT_BYTES_PER_STREAM = 10_000_000, 2048
"""Memory that the router may still hold afterwards: pools of connections and of freed memory."""
STREAMS_OPENED_PER_S = 150
"""A stream lasts longer than the time for which all are held, by the time that it takes to open all at this rate."""
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(stream: int, number: int) -> bytes:
    """Return an event of a stream: from 60 to 1,000 bytes, of which no two are alike."""
    random = Random(stream << 20 | number)
    text = random.randbytes(random.randrange(10, 480)).hex()
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    data = {"id": f"s{stream}", "object": "chat.completion.chunk", "choices": [choice]}
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def fingerprint_of(stream: int, events: int) -> tuple[str, int]:
    """Return hash and size of a whole stream."""
    whole = hashlib.sha256()
    size = 0
    for number in range(events):
        data = event(stream, number)
        whole.update(data)
        size += len(data)
    whole.update(b"data: [DONE]\n\n")
    return whole.hexdigest(), size + len(b"data: [DONE]\n\n")


# The engine.


class EngineConnection(asyncio.Protocol):
    def __init__(self, engine: StreamingEngine) -> None:
        self._engine = engine
        self._received = b""
        self.transport: asyncio.Transport
        self.stream = -1
        self.sent = 0
        self.events = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def connection_lost(self, _error: Exception | None) -> None:
        self._engine.streams.discard(self)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        if not separator:
            return
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
        if len(body) < length:
            return
        self._received = b""
        if head.startswith(b"POST"):
            request = json.loads(body)
            self.stream, self.events, self.sent = request["seed"], request["max_tokens"], 0
            self.transport.write(HEAD)
            self._engine.streams.add(self)
            return
        cards = json.dumps({"object": "list", "data": [{"id": "m"}]}).encode()
        self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(cards), cards))

    def send_event(self) -> None:
        data = event(self.stream, self.sent)
        self.sent += 1
        chunk = b"%x\r\n%b\r\n" % (len(data), data)
        if self.sent == self.events:
            chunk += b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
            self._engine.streams.discard(self)
        self.transport.write(chunk)


class StreamingEngine:
    """Sends an event to every stream in each period, spread over the period."""

    def __init__(self) -> None:
        self.streams: set[EngineConnection] = set()

    async def run(self) -> None:
        raise_file_limit()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: EngineConnection(self), HOST, 0, backlog=4096)
        print(server.sockets[0].getsockname()[1], flush=True)
        next_s = loop.time()
        while True:
            due = list(self.streams)
            for at, stream in enumerate(due):
                stream.send_event()
                if at % 50 == 49:
                    await asyncio.sleep(max(0.0, next_s + PACE_S * (at + 1) / len(due) - loop.time()))
            next_s = max(next_s + PACE_S, loop.time() - PACE_S)
            await asyncio.sleep(max(0.01, next_s - loop.time()))


# The clients.


class ClientStream(asyncio.Protocol):
    """One stream: its bytes are hashed as they arrive."""

    def __init__(self, number: int, events: int) -> None:
        self._number = number
        self._events = events
        self._head = b""
        self._frames: ChunkReader | None = None
        self._content = hashlib.sha256()
        self.size = self.chunks = 0
        self.problem = ""
        self.ended_s = 0.0
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        request = {"model": "m", "messages": [{"role": "user", "content": f"stream {self._number}"}], "stream": True}
        body = json.dumps(request | {"seed": self._number, "max_tokens": self._events}).encode()
        transport.write(  # type: ignore[attr-defined]
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: router\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )

    def data_received(self, data: bytes) -> None:
        if self._frames is None:
            self._head += data
            head, separator, data = self._head.partition(b"\r\n\r\n")
            if not separator:
                return
            if not head.startswith(b"HTTP/1.1 200 ") or b"\r\nTransfer-Encoding: chunked" not in head:
                self._end(head.partition(b"\r\n")[0].decode("latin-1"))
                return
            self._frames = ChunkReader()
            self.started.set_result(None)
        pieces: list[bytes] = []
        end = self._frames.feed(data, pieces) if data else -1
        for piece in pieces:
            self._content.update(piece)
            self.size += len(piece)
        self.chunks += len(pieces)
        if end >= 0:
            expected = fingerprint_of(self._number, self._events)
            right = expected == (self._content.hexdigest(), self.size) and end == len(data)
            self._end("" if right else f"{self.size} bytes instead of {expected[1]}, or other ones")

    def connection_lost(self, _error: Exception | None) -> None:
        self._end("the connection closed before the end")

    def _end(self, problem: str) -> None:
        if not self.ended.done():
            self.problem, self.ended_s = problem, time.monotonic()
            self.ended.set_result(None)
        if not self.started.done():
            self.started.set_result(None)


# The run.


class Usage(NamedTuple):
    memory_bytes: int
    cpu_s: float
    files: int


def usage_of(router: RouterProcess) -> Usage:
    folder = Path(f"/proc/{router.child.process.pid}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
    stat = (folder / "stat").read_text().rpartition(")")[2].split()
    memory_bytes = int(status["VmRSS"].split()[0]) * 1024
    return Usage(memory_bytes, (int(stat[11]) + int(stat[12])) / 100, len(list((folder / "fd").iterdir())))


async def open_streams(port: int, count: int, events: int) -> tuple[list[ClientStream], list[asyncio.BaseTransport]]:
    """Open the streams, a few at a time, and wait until each has its first bytes."""
    loop = asyncio.get_running_loop()
    streams: list[ClientStream] = []
    transports: list[asyncio.BaseTransport] = []
    for first in range(0, count, CONNECTS_AT_ONCE):
        batch = [ClientStream(number, events) for number in range(first, min(first + CONNECTS_AT_ONCE, count))]
        connecting = [loop.create_connection(lambda one=one: one, HOST, port) for one in batch]  # type: ignore[misc]
        transports += [transport for transport, _ in await asyncio.gather(*connecting)]
        await asyncio.gather(*(one.started for one in batch))
        streams += batch
    return streams, transports


async def hold(options: argparse.Namespace, ports: list[int], folder: Path, report: Report) -> list[str]:
    """Return what failed."""
    count = options.streams
    lasts_s = options.seconds + count / STREAMS_OPENED_PER_S + 5 * PACE_S
    events = int(lasts_s / PACE_S)
    tables = {
        "nodes": [{"url": f"http://{HOST}:{port}", "name": f"node{port}"} for port in ports],
        "limits": {"connections": count + 1000},
        "health": {"interval_s": 5.0},
    }
    with Children() as children:
        router = await start_router(children, folder, free_port(27_000), tables)
        port = int(router.url.rpartition(":")[2])
        await warm_up(port)
        before = usage_of(router)
        streams, transports = await open_streams(port, count, events)
        all_open_s, chunks = time.monotonic(), sum(one.chunks for one in streams)
        during = usage_of(router)
        async with asyncio.timeout(lasts_s + PATIENCE_S):
            await asyncio.gather(*(one.ended for one in streams))
        whole = usage_of(router)
        for transport in transports:
            transport.abort()  # type: ignore[attr-defined]
        left = await settled(router)
        after = usage_of(router)
    held_s = min(one.ended_s for one in streams) - all_open_s
    chunks = sum(one.chunks for one in streams) - chunks
    report.value("streams", f"{count:,}")
    report.value("held_s", round(held_s))
    report.value("events", f"{count * events:,}")
    report.value("megabytes", round(sum(one.size for one in streams) / 1e6))
    report.value("wrong_streams", sum(1 for one in streams if one.problem))
    report.value("cpu_us_per_event", round((whole.cpu_s - during.cpu_s) * 1e6 / chunks))
    report.value("load", load_average())
    report.table("router", "", "before", "streams open", "afterwards")
    report.row("memory, MB", *(round(one.memory_bytes / 1e6) for one in (before, during, after)))
    report.row("open files", *(one.files for one in (before, during, after)))
    problems = Counter(one.problem for one in streams if one.problem)
    failed = [f"{problem} (× {number})" for problem, number in problems.items()]
    failed += [f"not 0 at the end: {name} is {value:g}" for name, value in left.items()]
    if held_s < options.seconds:
        failed.append(f"all streams were open at once for {held_s:.0f} s only")
    if after.files > before.files + MAX_IDLE_CONNECTIONS * ENGINES + 20:
        failed.append(f"{after.files - before.files} more files are open than before")
    if after.memory_bytes - before.memory_bytes > MAX_KEPT_BYTES + count * MAX_KEPT_BYTES_PER_STREAM:
        failed.append(f"{(after.memory_bytes - before.memory_bytes) / 1e6:.0f} MB more memory is in use than before")
    return failed


async def warm_up(port: int) -> None:
    """Send some streams, so that what the router allocates once does not count."""
    streams = [ClientStream(10_000_000 + number, 1) for number in range(50)]
    loop = asyncio.get_running_loop()
    for one in streams:
        transport, _ = await loop.create_connection(lambda one=one: one, HOST, port)  # type: ignore[misc]
        await one.ended
        assert not one.problem, one.problem
        transport.abort()


async def settled(router: RouterProcess) -> dict[str, float]:
    """Wait until every counter of the router is 0. Return those that are not."""
    left: dict[str, float] = {}
    for _ in range(int(SETTLE_S / 0.5)):
        left = await left_over(router)
        if not left:
            break
        await asyncio.sleep(0.5)
    return left


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=5000)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long all streams are held open (default: 60)")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    add_record_option(parser)
    options = parser.parse_args()
    if options.engine:
        uvloop.run(StreamingEngine().run())
        return 0
    raise_file_limit()
    report = Report()
    engines = [
        subprocess.Popen([sys.executable, __file__, "--engine"], stdout=subprocess.PIPE, text=True)
        for _ in range(ENGINES)
    ]
    try:
        ports = [int(engine.stdout.readline()) for engine in engines if engine.stdout is not None]
        with tempfile.TemporaryDirectory() as folder:
            failed = uvloop.run(hold(options, ports, Path(folder), report))
    finally:
        for engine in engines:
            engine.kill()
            engine.wait()
    print("\n" + ("\n".join(["FAILED", *failed]) if failed else "passed"), flush=True)
    report.value("verdict", "failed" if failed else "passed")
    report.record(options.record)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
