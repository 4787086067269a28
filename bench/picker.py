"""What the picker costs: CPU time per request and added latency, beside Envoy alone and beside our own proxy.

    python bench/picker.py [--requests 600] [--record picker]

Two mock nodes. All paths get the same requests in turns, so that a busy machine slows all of them alike:

    direct              the mock node
    Envoy               round robin, without a picker
    proxy               `warmroute serve`
    Envoy, MODE         Envoy asks `warmroute picker`; MODE: how bodies go to it, and what it sees of responses

Whole responses: one request after the other on one connection, answered at once; `added` is the median latency less the
direct one. CPU time (of all threads, user and system) of the router's process and of Envoy, each divided by the
requests; median of the rounds.

Streamed responses: 8 clients, prompts of about 200 tokens, 100 events with 2 ms between them. CPU time as above, less
what the process uses when idle.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import uvloop
from envoy_process import Envoy, any_port, running_envoy
from live_page_cpu import WORDS, FakeNode
from record import Report, add_record_option, load_average

from warmroute.lab.demo.processes import Children

MODES = (("buffered", "skipped"), ("buffered", "headers"), ("buffered", "streamed"), ("duplex", "duplex"))
SIZES = (1, 16, 128)
PROMPTS = 20
EVENTS, EVENT_S, CLIENTS = 100, 0.002, 8


def request(number: int, kilobytes: int, stream: bool = False) -> bytes:
    text = " ".join(WORDS[(number + at * (1 + number % 5)) % len(WORDS)] for at in range(kilobytes * 170))
    messages = [{"role": "user", "content": f"{number} {text}"}]
    body = json.dumps({"model": "m", "messages": messages, "stream": stream}).encode()
    head = b"Host: r\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    return b"POST /v1/chat/completions HTTP/1.1\r\n" + head + body


def cpu_s(pid: int) -> float:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


class MockNode(asyncio.Protocol):
    """Answers at once, or streams if the request says so. FULL_DUPLEX_STREAMED bodies come in chunks."""

    HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    EVENT = b'data: {"choices":[{"index":0,"delta":{"content":" word"}}]}\n\n'
    LAST = b'data: {"choices":[],"usage":{"prompt_tokens":200,"completion_tokens":100}}\n\ndata: [DONE]\n\n'

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._data = b""
        self._left = 0

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, end, body = self._data.partition(b"\r\n\r\n")
        fields = head.lower()
        at = fields.find(b"content-length:")
        length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if not end or len(body) < length or (b"chunked" in fields and not body.endswith(b"\r\n0\r\n\r\n")):
            return
        self._data = b""
        if b'"stream": true' in body:
            self._left = EVENTS
            self._transport.write(self.HEAD)
            self._next_event()
            return
        answer = FakeNode.MODELS if b" /v1/models" in head[:40] else FakeNode.CHAT if body else b"{}"
        status = b"404 Not Found" if head.startswith(b"GET /metrics") else b"200 OK"
        self._transport.write(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(answer), answer))

    def _next_event(self) -> None:
        if not self._left:
            self._transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(self.LAST), self.LAST))
            return
        self._left -= 1
        self._transport.write(b"%x\r\n%b\r\n" % (len(self.EVENT), self.EVENT))
        asyncio.get_running_loop().call_later(EVENT_S, self._next_event)


class Route:
    """One way to the nodes."""

    def __init__(self, title: str, port: int, router: int = 0, envoy: int = 0) -> None:
        self.title, self.port, self.router, self.envoy = title, port, router, envoy
        self.latencies_ms: list[float] = []
        self.router_us: list[float] = []
        self.envoy_us: list[float] = []

    def _cpu_s(self) -> list[float]:
        return [cpu_s(pid) if pid else 0.0 for pid in (self.router, self.envoy)]

    async def turn(self, count: int, kilobytes: int) -> None:
        before = self._cpu_s()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        for number in range(count):
            data = request(number % PROMPTS, kilobytes)
            started_s = time.perf_counter()
            writer.write(data)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            at = head.lower().find(b"content-length:")
            if at >= 0:
                await reader.readexactly(int(head[at + 15 :].split(b"\r\n", 1)[0]))
            else:  # Envoy sends a body that the picker has seen in chunks
                await reader.readuntil(b"0\r\n\r\n")
            self.latencies_ms.append((time.perf_counter() - started_s) * 1000.0)
        writer.close()
        self._add_cpu(before, self._cpu_s(), count, [0.0, 0.0])

    async def streamed_turn(self, count: int) -> None:
        idle_before = self._cpu_s()
        await asyncio.sleep(0.5)
        before, started_s = self._cpu_s(), time.perf_counter()
        await asyncio.gather(*(self._stream(range(one, count, CLIENTS)) for one in range(CLIENTS)))
        half_seconds = (time.perf_counter() - started_s) / 0.5
        idle = [(now - then) * half_seconds for now, then in zip(before, idle_before, strict=True)]
        self._add_cpu(before, self._cpu_s(), count, idle)

    async def _stream(self, numbers: range) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        for number in numbers:
            writer.write(request(number % PROMPTS, 1, stream=True))
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            await reader.readuntil(b"[DONE]\n\n")
            await reader.readuntil(b"0\r\n\r\n")
        writer.close()

    def _add_cpu(self, before: list[float], after: list[float], count: int, idle: list[float]) -> None:
        router, envoy = ((after[at] - before[at] - idle[at]) / count * 1e6 for at in (0, 1))
        self.router_us.append(router)
        self.envoy_us.append(envoy)


def wait_ready(admin_port: int) -> None:
    until_s = time.monotonic() + 30.0
    while time.monotonic() < until_s:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{admin_port}/ready", timeout=1.0):
                return
        except OSError:
            time.sleep(0.05)
    raise SystemExit("a router is not ready")


async def measure(report: Report, rounds: int, requests: int) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(MockNode, "127.0.0.1", 0) for _ in range(2)]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    nodes = [word for port in ports for word in ("--node", f"http://127.0.0.1:{port}")]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        children = stack.enter_context(Children())
        listening: dict[str, tuple[int, int]] = {}
        for command in ("serve", "picker"):
            port, admin_port = any_port(), any_port()
            child = children.start(command, "--port", str(port), "--admin-port", str(admin_port), *nodes)
            await asyncio.to_thread(wait_ready, admin_port)
            listening[command] = port, child.process.pid
        picker_port, picker_pid = listening["picker"]

        async def envoy(**options: str) -> Envoy:
            running = running_envoy(folder, picker_port, ports, **options)
            found: Envoy = await asyncio.to_thread(stack.enter_context, running)
            return found

        async def paths() -> list[Route]:
            alone = await envoy(request_mode="off", responses="skipped")
            found = [
                Route("direct", ports[0]),
                Route("Envoy", alone.port, envoy=alone.pid),
                Route("proxy", listening["serve"][0], listening["serve"][1]),
            ]
            for request_mode, responses in MODES:
                one = await envoy(request_mode=request_mode, responses=responses)
                found.append(Route(f"Envoy, {request_mode}, responses {responses}", one.port, picker_pid, one.pid))
            return found

        for kilobytes in SIZES:
            await measure_whole(report, await paths(), kilobytes, rounds, requests)
        await measure_streamed(report, await paths(), rounds, requests // 5)
    for server in servers:
        server.close()


async def measure_whole(report: Report, paths: list[Route], kilobytes: int, rounds: int, requests: int) -> None:
    for _ in range(rounds + 1):
        for path in paths:
            await path.turn(requests // rounds, kilobytes)
    for path in paths:  # the first round warms up
        path.latencies_ms = path.latencies_ms[requests // rounds :]
        path.router_us, path.envoy_us = path.router_us[1:], path.envoy_us[1:]
    direct_ms = statistics.median(paths[0].latencies_ms)
    report.table(
        f"whole_{kilobytes}kb", "path", "p50, ms", "p99, ms", "added, ms", "router or picker, µs CPU", "Envoy, µs CPU"
    )
    for path in paths:
        p50, p99 = (statistics.quantiles(path.latencies_ms, n=100)[at] for at in (49, 98))
        report.row(path.title, f"{p50:.2f}", f"{p99:.2f}", f"{p50 - direct_ms:.2f}", *cpu_cells(path))


async def measure_streamed(report: Report, paths: list[Route], rounds: int, requests: int) -> None:
    for _ in range(rounds + 1):
        for path in paths[1:]:
            await path.streamed_turn(requests // rounds)
    report.table("streamed", "path", "router or picker, µs CPU", "Envoy, µs CPU")
    for path in paths[1:]:
        path.router_us, path.envoy_us = path.router_us[1:], path.envoy_us[1:]
        report.row(path.title, *cpu_cells(path))


def cpu_cells(path: Route) -> list[str]:
    return [
        f"{statistics.median(path.router_us):.0f}" if path.router else "–",
        f"{statistics.median(path.envoy_us):.0f}" if path.envoy else "–",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=600, help="for each path and size")
    add_record_option(parser)
    args = parser.parse_args()
    report = Report()
    report.value("load_average", load_average())
    uvloop.run(measure(report, args.rounds, args.requests))
    report.record(args.record)


if __name__ == "__main__":
    main()
