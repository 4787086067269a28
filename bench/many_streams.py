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
import re
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

from warmroute._kernel import ChunkReader
from warmroute.app.process import KEPT_BYTES, raise_file_limit
from warmroute.edge.connection_pool import MAX_IDLE_CONNECTIONS
from warmroute.lab.demo.processes import HOST, Children, RouterProcess, free_port, send_request, start_router

ENGINES = 2
PACE_S = 1.0
"""Between two events of a stream."""
CONNECTS_AT_ONCE = 100
SETTLE_S = 20.0
WARM_UP_STREAMS = 10_000_000
"""Streams from this number on have only their last event."""
PATIENCE_S = 60.0
LAST_EVENT = re.compile(rb'data: {"sent":(\d+)}\n\ndata: \[DONE\]\n\n\Z')
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(stream: int, number: int) -> bytes:
    """Return an event of a stream: from 60 to 1,000 bytes, of which no two are alike."""
    random = Random(stream << 20 | number)
    text = random.randbytes(random.randrange(10, 480)).hex()
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    data = {"id": f"s{stream}", "object": "chat.completion.chunk", "choices": [choice]}
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def last_event(events: int) -> bytes:
    """Return the end of a stream, which says how many events were before it."""
    return b'data: {"sent":%d}\n\ndata: [DONE]\n\n' % events


def fingerprint_of(stream: int, events: int) -> bytes:
    """Return the hash of a whole stream."""
    whole = hashlib.sha256()
    for number in range(events):
        whole.update(event(stream, number))
    whole.update(last_event(events))
    return whole.digest()


MEAN_EVENT_BYTES = sum(len(event(0, number)) for number in range(500)) / 500

# The engine.


class EngineConnection(asyncio.Protocol):
    def __init__(self, engine: StreamingEngine) -> None:
        self._engine = engine
        self._received = b""
        self.transport: asyncio.Transport
        self.stream = -1
        self.sent = 0

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
            self.stream, self.sent = json.loads(body)["seed"], 0
            self.transport.write(HEAD)
            self._engine.streams.add(self)
            self.send_event()
            return
        if head.startswith(b"GET /release "):
            self._engine.released = True
        cards = json.dumps({"object": "list", "data": [{"id": "m"}]}).encode()
        self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(cards), cards))

    def send_event(self) -> None:
        is_last = self._engine.released or self.stream >= WARM_UP_STREAMS
        data = last_event(self.sent) if is_last else event(self.stream, self.sent)
        self.sent += 1
        chunk = b"%x\r\n%b\r\n" % (len(data), data)
        if is_last:
            chunk += b"0\r\n\r\n"
            self._engine.streams.discard(self)
        self.transport.write(chunk)


class StreamingEngine:
    """Sends an event to every stream in each period, spread over the period."""

    def __init__(self) -> None:
        self.streams: set[EngineConnection] = set()
        self.released = False
        """Whether the next event of each stream is its last."""

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

    def __init__(self, number: int) -> None:
        self._number = number
        self._head = self._tail = b""
        self._frames: ChunkReader | None = None
        self._content = hashlib.sha256()
        self.size = self.events = 0
        self.problem = ""
        self.ended_s = 0.0
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        request = {"model": "m", "messages": [{"role": "user", "content": f"stream {self._number}"}], "stream": True}
        body = json.dumps(request | {"seed": self._number}).encode()
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
            self._tail = (self._tail + piece)[-100:]
        if end >= 0:
            last = LAST_EVENT.search(self._tail)
            self.events = int(last[1]) if last else 0
            right = last and fingerprint_of(self._number, self.events) == self._content.digest() and end == len(data)
            self._end("" if right else "other bytes than the engine sent")

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


async def open_streams(port: int, count: int) -> tuple[list[ClientStream], list[asyncio.BaseTransport]]:
    """Open the streams, a few at a time, and wait until each has its first bytes."""
    loop = asyncio.get_running_loop()
    streams: list[ClientStream] = []
    transports: list[asyncio.BaseTransport] = []
    for first in range(0, count, CONNECTS_AT_ONCE):
        batch = [ClientStream(number) for number in range(first, min(first + CONNECTS_AT_ONCE, count))]
        connecting = [loop.create_connection(lambda one=one: one, HOST, port) for one in batch]  # type: ignore[misc]
        transports += [transport for transport, _ in await asyncio.gather(*connecting)]
        await asyncio.gather(*(one.started for one in batch))
        streams += batch
    return streams, transports


async def hold(options: argparse.Namespace, ports: list[int], folder: Path, report: Report) -> list[str]:
    """Return what failed."""
    count = options.streams
    urls = [f"http://{HOST}:{port}" for port in ports]
    tables = {
        "nodes": [{"url": url, "name": f"node{number}"} for number, url in enumerate(urls)],
        "limits": {"connections": count + 1000},
        "health": {"interval_s": 5.0},
    }
    with Children() as children:
        router = await start_router(children, folder, free_port(27_000), tables)
        port = int(router.url.rpartition(":")[2])
        await warm_up(port)
        before = usage_of(router)
        streams, transports = await open_streams(port, count)
        held_from_s, during, size = time.monotonic(), usage_of(router), sum(one.size for one in streams)
        await asyncio.sleep(options.seconds)
        held_s = min([time.monotonic(), *(one.ended_s for one in streams if one.ended_s)]) - held_from_s
        events = (sum(one.size for one in streams) - size) / MEAN_EVENT_BYTES
        cpu_us_per_event = (usage_of(router).cpu_s - during.cpu_s) * 1e6 / max(1, events)
        for url in urls:
            await send_request("GET", f"{url}/release")
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(one.ended for one in streams))
        for transport in transports:
            transport.abort()  # type: ignore[attr-defined]
        left = await settled(router)
        after = usage_of(router)
    report.value("streams", f"{count:,}")
    report.value("held_s", round(held_s))
    report.value("events", f"{sum(one.events for one in streams):,}")
    report.value("megabytes", round(sum(one.size for one in streams) / 1e6))
    report.value("wrong_streams", sum(1 for one in streams if one.problem))
    report.value("cpu_us_per_event", round(cpu_us_per_event))
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
    if after.memory_bytes - before.memory_bytes > KEPT_BYTES:  # the router keeps so much freed memory
        failed.append(f"{(after.memory_bytes - before.memory_bytes) / 1e6:.0f} MB more memory is in use than before")
    return failed


async def warm_up(port: int) -> None:
    """Send some streams, so that what the router allocates once does not count."""
    streams = [ClientStream(WARM_UP_STREAMS + number) for number in range(50)]
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
