"""What the live page costs the router: its share of the router's CPU time at 64 nodes and 1,000 requests/s.

    python bench/live_page_cpu.py

The router runs in this process, the nodes and the clients in another one. CPU time of the page is measured directly,
around the code that samples history (always), and that renders and sends updates (with a viewer): a difference between
two runs would be smaller than their noise. The share is that of the process's whole CPU time in the same interval.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import uvloop
from record import Report, add_record_option, load_average

from warmroute.app import service as service_module
from warmroute.app.service import Service
from warmroute.config import from_table

NODES = 64
RATE = 1000.0
CONNECTIONS = 64
SECONDS = 8.0
PROMPTS = 40
WORDS = ("the", "router", "sends", "each", "request", "where", "it", "costs", "the", "least", "new", "GPU", "work")


# The other process: nodes and clients.


class FakeNode(asyncio.Protocol):
    """Answers everything at once."""

    MODELS = b'{"object":"list","data":[{"id":"m","object":"model"}]}'
    CHAT = b'{"choices":[{"message":{"content":"ok"}}],"usage":{"prompt_tokens":700,"completion_tokens":2}}'

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._data = b""

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, end, rest = self._data.partition(b"\r\n\r\n")
        if not end:
            return
        at = head.lower().find(b"content-length:")
        length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if len(rest) < length:
            return
        self._data = rest[length:]
        body = self.MODELS if b" /v1/models" in head[:40] else self.CHAT if head.startswith(b"POST") else b"{}"
        status = b"404 Not Found" if head.startswith(b"GET /metrics") else b"200 OK"
        self._transport.write(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))


def other_process(ports: Any, router_port: Any) -> None:
    uvloop.install()
    asyncio.run(_serve_and_send(ports, router_port))


async def _serve_and_send(ports: Any, router_port: Any) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(FakeNode, "127.0.0.1", 0) for _ in range(NODES)]
    ports.put([server.sockets[0].getsockname()[1] for server in servers])
    port = await asyncio.to_thread(router_port.get)
    requests = [_request(number) for number in range(PROMPTS)]
    await asyncio.gather(*(_client(port, requests, number) for number in range(CONNECTIONS)))


def _request(number: int) -> bytes:
    text = " ".join(WORDS[(number + at * (1 + number % 5)) % len(WORDS)] for at in range(700))
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": f"{number} {text}"}]}).encode()
    return b"POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


async def _client(port: int, requests: Sequence[bytes], number: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    interval_s = CONNECTIONS / RATE
    due_s = time.monotonic() + interval_s * number / CONNECTIONS
    while True:
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        due_s = max(due_s + interval_s, time.monotonic() - 1.0)
        writer.write(requests[number % len(requests)])
        head = await reader.readuntil(b"\r\n\r\n")
        at = head.lower().find(b"content-length:")
        await reader.readexactly(int(head[at + 15 :].split(b"\r\n", 1)[0]))
        number += 7


# The router.


class Meter:
    """CPU time of the calling thread inside some functions."""

    def __init__(self) -> None:
        self.cpu_s = 0.0
        self.calls = 0

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any) -> Any:
            started_s = time.thread_time()
            try:
                return call(*args)
            finally:
                self.cpu_s += time.thread_time() - started_s
                self.calls += 1

        return measured


async def measure() -> list[dict[str, float]]:
    context = multiprocessing.get_context("spawn")
    ports, router_port = context.Queue(), context.Queue()
    other = context.Process(target=other_process, args=(ports, router_port), daemon=True)
    other.start()
    node_ports = await asyncio.to_thread(ports.get)
    table = {
        "listen": {"port": 0},
        "admin": {"port": 0},
        "nodes": [
            {"url": f"http://127.0.0.1:{port}", "name": f"gpu-{number}", "models": ["m"], "island": f"i{number % 4}"}
            for number, port in enumerate(node_ports)
        ],
    }
    config = from_table(table)
    service = Service(lambda: config)
    counting, nothing, always, with_viewers = Meter(), Meter(), Meter(), Meter()
    count, count_nothing = counting.wrap(service.traffic.record), nothing.wrap(lambda *_: None)

    def record(*args: Any) -> None:
        count(*args)
        count_nothing(*args)  # reading the clock takes about as long as counting: it is subtracted

    service.traffic.record = record  # type: ignore[method-assign,assignment]
    history, feed = service.history, service.live_feed
    history.sample = always.wrap(history.sample)  # type: ignore[method-assign]
    service.alerts.update = always.wrap(service.alerts.update)  # type: ignore[method-assign]
    snapshot = feed._snapshot
    snapshot.read_on_loop = with_viewers.wrap(snapshot.read_on_loop)  # type: ignore[method-assign]
    snapshot.ended_since = with_viewers.wrap(snapshot.ended_since)  # type: ignore[method-assign]
    feed._render_update = with_viewers.wrap(feed._render_update)  # type: ignore[method-assign]
    sending = feed._viewers
    sending.send = with_viewers.wrap(sending.send)  # type: ignore[method-assign]
    await service.start()
    while not all(node.health.state.value == "up" for node in service.fleet):  # noqa: ASYNC110 (no event says so)
        await asyncio.sleep(0.05)
    router_port.put(service.port)
    await asyncio.sleep(2.0)
    rows = []
    try:
        for viewers in (0, 1):
            reading = [asyncio.create_task(_view(service.admin_port)) for _ in range(viewers)]
            await asyncio.sleep(1.5)
            before = (time.monotonic(), time.process_time(), service.traffic.total.requests)
            started = (always.cpu_s, with_viewers.cpu_s, with_viewers.calls, counting.cpu_s - nothing.cpu_s)
            await asyncio.sleep(SECONDS)
            wall_s, cpu_s = time.monotonic() - before[0], time.process_time() - before[1]
            rows.append(
                {
                    "viewers": viewers,
                    "requests_per_s": (service.traffic.total.requests - before[2]) / wall_s,
                    "cpu_share": cpu_s / wall_s,
                    "counting_share": (counting.cpu_s - nothing.cpu_s - started[3]) / cpu_s,
                    "history_share": (always.cpu_s - started[0]) / cpu_s,
                    "feed_share": (with_viewers.cpu_s - started[1]) / cpu_s,
                    "feed_ms_per_s": (with_viewers.cpu_s - started[1]) / wall_s * 1000.0,
                    "feed_calls": with_viewers.calls - started[2],
                }
            )
            for task in reading:
                task.cancel()
    finally:
        other.terminate()
        other.join()
        service.stop_now()
        await service.stop()
    return rows


async def _view(port: int) -> None:
    """Read the feed in this process: reading costs CPU time of the router's process, but not of the measured code."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /admin/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    while await reader.read(65536):
        pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_record_option(parser)
    args = parser.parse_args()
    sys.setswitchinterval(service_module.SWITCH_INTERVAL_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rows = runner.run(measure())
    report = Report()
    report.table(
        "shares", "viewers", "requests/s", "the router, of a core", "counting requests", "history and alerts",
        "live feed", "live feed, ms/s",
    )  # fmt: skip
    for row in rows:
        report.row(
            f"{row['viewers']:.0f}", f"{row['requests_per_s']:,.0f}", f"{row['cpu_share']:.0%}",
            f"{row['counting_share']:.2%}", f"{row['history_share']:.2%}", f"{row['feed_share']:.2%}",
            f"{row['feed_ms_per_s']:.2f}",
        )  # fmt: skip
    report.value("feed_percent", f"{100 * rows[1]['feed_share']:.2f}")
    report.value("history_percent", f"{100 * rows[0]['history_share']:.2f}")
    report.value("load", load_average())
    report.record(args.record)
    assert not rows[0]["feed_calls"], "without viewers nothing is rendered"
    return 0


if __name__ == "__main__":
    sys.exit(main())
