"""What tracing costs: CPU time of the router per request, with tracing off and at several sample ratios, in one run.

    python bench/tracing_cpu.py [--rounds 7] [--requests 4000]

Each setting is a router process of its own, with the policy `price` and two mock nodes; the collector is a mock, too.
All routers get the same requests in short turns, on 8 connections, so that a busy machine slows all of them alike.
Their CPU time (all threads, user and system) is read before and after a round, the second time once all traces are
sent. A figure is the median of the rounds, a ratio the median of the ratios within a round.

A second table has the parts: best of several runs in this process, in microseconds of CPU time. Their sum is steadier
than a difference between two routers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import urllib.request
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import uvloop
from live_page_cpu import WORDS, FakeNode
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from record import Report, add_record_option, load_average
from request_path import REQUEST, cost_us, fleet_of

from warmroute.app.otlp import OtlpSender
from warmroute.app.tracing import BATCH_TRACES, EndedTrace, trace_of_call
from warmroute.config import Admission, Index, Routing
from warmroute.config import Tracing as TracingConfig
from warmroute.core.admission import Admitter
from warmroute.core.brain import Brain
from warmroute.core.cache_view import CacheView
from warmroute.core.messages import Arrive, Ended, FirstToken, Lookup, RoutingRequest
from warmroute.core.router import Router
from warmroute.core.traffic import Counters
from warmroute.edge.arrival import Kept
from warmroute.edge.http1 import read_request_head
from warmroute.edge.trace_context import EdgeTrace, TraceSampling
from warmroute.lab.demo.processes import Children, free_port

CONNECTIONS = 8
BURST = 400
"""Requests of one router's turn."""
PROMPTS = 40
EXPORTED_S = 6.0
"""Time until all traces of a round are sent."""
SETTINGS = {
    "off": None,
    "on, 0 % of the requests": 0.0,
    "on, 1 % (the default)": 0.01,
    "on, 10 %": 0.1,
    "on, 100 %": 1.0,
}
"""Sample ratios by title."""
KEYS = ("off", "percent_0", "percent_1", "percent_10", "percent_100")


class RouterProcess:
    def __init__(self, children: Children, folder: Path, number: int, ratio: float | None, ports: list[int]) -> None:
        self.port, self.admin_port = free_port(23_000 + 100 * number), free_port(23_050 + 100 * number)
        config = folder / f"{number}.toml"
        tracing = f'[tracing]\nenabled = true\nendpoint = "http://127.0.0.1:{ports[0]}"\nsample_ratio = {ratio}\n'
        nodes = "".join(f'[[nodes]]\nurl = "http://127.0.0.1:{port}"\nmodels = ["m"]\n' for port in ports)
        config.write_text((tracing if ratio is not None else "") + nodes)
        arguments = ("--config", str(config), "--port", str(self.port), "--admin-port", str(self.admin_port))
        self.pid = children.start("serve", *arguments).process.pid

    def cpu_s(self) -> float:
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def is_ready(self) -> bool:
        try:
            return bool(urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}/ready", timeout=1).status == 200)
        except OSError:
            return False


def request(number: int) -> bytes:
    text = " ".join(WORDS[(number + at * (1 + number % 5)) % len(WORDS)] for at in range(170))  # about 1 KB
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": f"{number} {text}"}]}).encode()
    head = b"Host: r\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    return b"POST /v1/chat/completions HTTP/1.1\r\n" + head + body


async def send(ports: Sequence[int], count: int) -> None:
    """Send this many requests to each port, BURST of them to one port after the other."""

    async def client(port: int, number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(BURST // CONNECTIONS):
            writer.write(request(number % PROMPTS))
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            at = head.lower().find(b"content-length:")
            await reader.readexactly(int(head[at + 15 :].split(b"\r\n", 1)[0]))
            number += 7
        writer.close()

    for _ in range(count // BURST):
        for port in ports:
            await asyncio.gather(*(client(port, number) for number in range(CONNECTIONS)))


async def measure(rounds: int, requests: int) -> dict[str, list[float]]:
    """Return the CPU time per request of each setting in each round, in microseconds."""
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(FakeNode, "127.0.0.1", 0) for _ in range(2)]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    found: dict[str, list[float]] = {title: [] for title in SETTINGS}
    with Children() as children, tempfile.TemporaryDirectory() as folder:
        routers = [
            RouterProcess(children, Path(folder), number, ratio, ports)
            for number, ratio in enumerate(SETTINGS.values())
        ]
        for router in routers:
            while not await asyncio.to_thread(router.is_ready):  # noqa: ASYNC110 (no event says so)
                await asyncio.sleep(0.1)
        listening = [router.port for router in routers]
        await send(listening, BURST)
        await asyncio.sleep(EXPORTED_S)
        for _ in range(rounds):
            before_s = [router.cpu_s() for router in routers]
            await send(listening, requests)
            await asyncio.sleep(EXPORTED_S)
            for figures, router, started_s in zip(found.values(), routers, before_s, strict=True):
                figures.append((router.cpu_s() - started_s) / requests * 1e6)
    return found


# The parts.


def ended_trace(tracing: TraceSampling, head: bytes, brain: Brain, lookup: Lookup) -> EndedTrace:
    """Do for a recorded request what the event loop does."""
    trace = tracing.begin(head, b"/v1/chat/completions", 0.9)
    assert isinstance(trace, EdgeTrace)
    request = RoutingRequest("m", arrived_s=1.0)
    kept = Kept()
    kept.trace = trace
    brain.handle(Arrive(1, b"wr-0123456789ab-1", request, lookup, kept=kept), 1.0)
    trace.forwarded_fields(1)
    brain.handle(FirstToken(1, 1, 200), 1.1)
    brain.handle(Ended(1, 1, 200, 1.1, (800, 640, 20)), 1.2)
    call = brain.ended.pop()
    return trace_of_call(trace, call, True, 0.0)


def untraced(brain: Brain, lookup: Lookup) -> None:
    """Do for a request that is not recorded what the core does."""
    brain.handle(Arrive(1, b"wr-0123456789ab-1", RoutingRequest("m", arrived_s=1.0), lookup), 1.0)
    brain.handle(FirstToken(1, 1, 200), 1.1)
    brain.handle(Ended(1, 1, 200, 1.1, (800, 640, 20)), 1.2)


def measure_parts(report: Report) -> None:
    fleet, tokens, counters = fleet_of(2), array("I", range(800)), Counters()
    router = Router(fleet, CacheView(Index()), Routing(policy="price"))
    brain = Brain(fleet, router, Admitter(router, Admission()), counters)
    lookup = Lookup(tokens.tobytes(), len(tokens), len(tokens))
    fields = read_request_head(REQUEST, REQUEST.index(b"\r\n\r\n")).forwarded_fields
    unrecorded, recorded = (TraceSampling(TracingConfig(sample_ratio=ratio)) for ratio in (0.0, 1.0))
    report.table("parts", "part", "µs of CPU")

    def part(name: str, key: str, work: Callable[[], object], count: int = 1) -> None:
        took_us = cost_us(work) / count
        report.row(name, f"{took_us:.1f}")
        report.value(key, f"{took_us:.1f}")

    part(
        "a request that is not recorded",
        "unrecorded_us",
        lambda: unrecorded.begin(fields, b"/v1/chat/completions", 0.9),
    )
    untraced_us = cost_us(lambda: untraced(brain, lookup))
    traced_us = cost_us(lambda: ended_trace(recorded, fields, brain, lookup))
    report.row("a recorded request, on the event loop", f"{traced_us - untraced_us:.1f}")
    report.value("loop_us", f"{traced_us - untraced_us:.1f}")
    ended = [ended_trace(recorded, fields, brain, lookup) for _ in range(BATCH_TRACES)]
    sender = OtlpSender(TracingConfig(), Random().getrandbits)
    sender._exporter.export = lambda spans: len(encode_spans(spans).SerializeToString())  # type: ignore[assignment,return-value]
    part("its spans, built and encoded in the thread", "thread_us", lambda: sender.send(ended), BATCH_TRACES)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=4000, help="in each round, to each router")
    add_record_option(parser)
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(measure(args.rounds, args.requests))
    report = Report()
    report.table("cpu", "tracing", "µs of CPU per request", "of tracing off")
    for key, (title, figures) in zip(KEYS, found.items(), strict=True):
        ratios = sorted(one / off for one, off in zip(figures, found["off"], strict=True))
        ratio = statistics.median(ratios)
        report.row(title, f"{statistics.median(figures):.0f}", f"{ratio:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
        report.value(f"ratio_{key}", f"{ratio:.2f}")
    measure_parts(report)
    report.value("load", load_average())
    report.record(args.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
