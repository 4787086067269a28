"""What metrics cost: counting a response, and how long a scrape of a large page delays the event loop.

    python bench/metrics_page.py

The page is that of 64 nodes, 16 models, 4 routes and 100 tenants. The router runs in this process, Prometheus' part in
another one. A timer of the event loop is due every millisecond: its delay is measured without scrapes, and while one
scrape follows the other. Time in which the main thread was ready but had no core is subtracted; time in which the
thread that renders the page had none is not, though the event loop may wait for it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import uvloop
from record import Report, add_record_option, load_average

from warmroute.app import service as service_module
from warmroute.app.service import Service
from warmroute.config import from_table
from warmroute.core.node import Ticket

NODES, MODELS, ROUTES, TENANTS = 64, 16, 4, 100
SECONDS = 6.0
TIMER_S = 0.001
COUNTED = 200_000


def fill(service: Service) -> None:
    """Count responses for every combination that the page has."""
    traffic = service.traffic
    nodes = list(service.fleet)
    tickets = [Ticket(node, 0.0) for node in nodes]
    for ticket in tickets:
        ticket.first_token(0.3)
    for number in range(max(NODES, TENANTS, ROUTES) * MODELS):
        node = number % NODES
        recorder = traffic._recorder(
            f"organisation/model-{number // max(NODES, TENANTS, ROUTES)}", f"route-{number % ROUTES}",
            f"tenant-{number % TENANTS}", nodes[node],
        )  # fmt: skip
        for _ in range(3):
            recorder.record(tickets[node], 0.0, 0.01, 2.0, True, 4000, 3000, 200, 3100, None, None)


def counting_us(service: Service) -> float:
    """Return the CPU time of counting one response, without what calls it."""
    [node, *_] = list(service.fleet)
    ticket = Ticket(node, 0.0)
    ticket.first_token(0.3)
    traffic = service.traffic
    traffic._recorder("m", "r", "t", node)
    recorders = traffic._recorders
    started_s = time.process_time()
    for _ in range(COUNTED):
        recorders["m", "r", "t", node.name].record(ticket, 0.0, 0.01, 2.0, True, 4000, 3000, 200, 3100, None, None)
    return (time.process_time() - started_s) / COUNTED * 1e6


def scrape_forever(port: int, encoding: str, done: Any) -> None:
    """Scrape again and again; put the size and the time of each page."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept-Encoding": encoding})
    while True:
        started_s = time.monotonic()
        with urllib.request.urlopen(request) as response:
            size = len(response.read())
        done.put((size, time.monotonic() - started_s))


def waited_s() -> float:
    """Return how long this thread was ready to run and had no core."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


async def delays_s(seconds: float) -> list[float]:
    """Return the delays of a timer, in order of length."""
    delays = []
    until_s = time.monotonic() + seconds
    while (started_s := time.monotonic()) < until_s:
        had_waited_s = waited_s()
        await asyncio.sleep(TIMER_S)
        delays.append(time.monotonic() - started_s - TIMER_S - (waited_s() - had_waited_s))
    return sorted(delays)


async def measure(report: Report) -> None:
    config = from_table(
        {
            "listen": {"port": 0}, "admin": {"port": 0}, "startup": {"max_wait_s": 0.0},
            "health": {"interval_s": 3600.0}, "polling": {"interval_s": 3600.0},
            "nodes": [{"url": f"http://127.0.0.1:{number + 2}", "name": f"gpu-{number}"} for number in range(NODES)],
        }, experiment=True,
    )  # fmt: skip
    service = Service(lambda: config)
    await service.start()
    await asyncio.sleep(1.0)
    report.value("counting_us", f"{counting_us(service):.2f}")
    fill(service)
    gc.collect()  # as `warmroute serve` does
    gc.freeze()
    gc.set_threshold(service_module.GC_THRESHOLD)
    report.table("delays", "scrapes", "page", "time for a scrape", "delay p50", "delay p99", "longest delay")
    try:
        _row(report, "none", "–", "–", await delays_s(SECONDS))
        for encoding in ("gzip", "identity"):
            context = multiprocessing.get_context("spawn")
            done = context.Queue()
            client = context.Process(target=scrape_forever, args=(service.admin_port, encoding, done), daemon=True)
            client.start()
            await asyncio.to_thread(done.get)
            delays = await delays_s(SECONDS)
            client.terminate()
            scrapes = [done.get() for _ in range(done.qsize())]
            size, took_s = max(scrapes)[0], sorted(took for _, took in scrapes)[len(scrapes) // 2]
            _row(report, encoding, f"{size / 1e6:.2f} MB", f"{1000 * took_s:.0f} ms", delays)
    finally:
        service.stop_now()
        await service.stop()


def _row(report: Report, what: str, size: str, took: str, delays: list[float]) -> None:
    def ms(share: float) -> str:
        return f"{1000 * delays[min(len(delays) - 1, int(share * len(delays)))]:.2f} ms"

    report.row(what, size, took, ms(0.5), ms(0.99), ms(1.0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_record_option(parser)
    args = parser.parse_args()
    sys.setswitchinterval(service_module.SWITCH_INTERVAL_S)
    report = Report()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(measure(report))
    report.value("load", load_average())
    report.record(args.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
