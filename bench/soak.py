"""A soak test: real processes under constant load while nodes die, hang, come and go and the configuration changes.

    python bench/soak.py --minutes 60 --record soak

The router (`warmroute serve`) runs in front of simulated engines, each a process of its own. Clients of three tenants
send streams and whole requests, disconnect at random and read slowly. Meanwhile, one after the other and never on more
than two nodes at a time:

    kill      kill -9 of an engine, which starts again at the same address a few seconds later
    stop      SIGSTOP, and SIGCONT a few seconds later
    fail      an engine answers some requests with 500 or 503 for a few seconds
    lose      an engine loses a fifth of its KV events for a few seconds
    churn     a node is removed through the admin API and added again
    drain     a node is drained and undrained through the admin API
    reload    SIGHUP with a changed configuration

Three of the five nodes are always undisturbed. The test fails if a request was lost before its first byte (no response,
or a 5xx), if a broken stream looked complete, if a counter is not 0 at the end, if memory or open files grew, or if the
router logged an error or did not stop.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import uvloop
from record import Report, add_record_option, load_average
from soak_clients import Load

from warmroute import http_client
from warmroute.edge.arrival import hash_key
from warmroute.lab.demo.processes import HOST, Child, Children, RouterProcess, as_toml, free_port, start_router

NODES = 5
FIRST_PORT = 26_000
TENANTS = {"search": "key-search", "batch": "key-batch", "chat": "key-chat"}
SAMPLE_S = 2.0
WARM_UP_S = 360.0
"""Caches fill in this time, and memory may grow. A shorter run does not judge memory."""
MAX_GROWTH_SHARE = 0.03
MAX_GROWTH_MB = 4.0
"""Growth of memory after the warm-up, by linear regression, that counts as flat: the larger of the two."""
MAX_GROWTH_FILES = 8.0
MAX_OWN_DELAY_MS = 250.0
"""Delay of the event loop that the machine's other work does not explain."""
SETTLE_S = 60.0
START_S = 60.0
START_ATTEMPTS = 5
PROGRESS_S = 60.0


class Engine:
    """A simulated engine that can be killed and started again at the same address."""

    def __init__(self, children: Children, number: int) -> None:
        self._children = children
        self.name = f"node{number}"
        first = FIRST_PORT + 40 * number + os.getpid() % 20
        self.port = free_port(first)
        self._event_ports = free_port(first + 2000), free_port(first + 3000)
        self.url = f"http://{HOST}:{self.port}"
        self.child: Child
        self.start()

    def start(self) -> None:
        events, replay = self._event_ports
        self.child = self._children.start(
            *("engine", "--port", str(self.port), "--model", "m", "--profile", "h100-8b", "--speed", "4"),
            *("--blocks", "2000", "--events-port", str(events), "--replay-port", str(replay)),
        )

    async def restart(self) -> None:
        """Start it again. Its port may still be taken for a moment."""
        for left in reversed(range(START_ATTEMPTS)):
            self.start()
            try:
                await self.wait_until_up()
                return
            except RuntimeError:
                if not left:
                    raise
                await asyncio.sleep(2.0)

    def signal(self, number: signal.Signals) -> None:
        self.child.process.send_signal(number)

    async def wait_until_up(self) -> None:
        """Raises TimeoutError, or RuntimeError if its process has ended."""
        async with asyncio.timeout(START_S):
            while True:
                if self.child.has_ended():
                    raise RuntimeError(self.child.start_error())
                try:
                    if (await request("GET", f"{self.url}/health"))[0] == 200:
                        return
                except OSError:
                    pass
                await asyncio.sleep(0.1)

    async def fail(self, fault: dict[str, Any]) -> None:
        await request("POST", f"{self.url}/_sim/fail", fault)

    def table(self) -> dict[str, Any]:
        return {"url": self.url, "name": self.name}


async def request(method: str, url: str, body: Any = None) -> tuple[int, bytes]:
    data = b"" if body is None else json.dumps(body).encode()
    headers = [("Content-Type", "application/json")]
    return await http_client.request(method, url, data, headers, timeout_s=10.0, limit_bytes=8 << 20)


def tables(engines: list[Engine], variant: int = 0) -> dict[str, Any]:
    """Return the configuration. Each variant differs from the previous one."""
    return {
        "health": {"interval_s": 0.5, "timeout_s": 1.0, "breaker_open_s": 0.5, "breaker_open_max_s": 4.0},
        "upstream": {"connect_timeout_s": 2.0, "first_byte_timeout_s": 15.0, "between_chunks_timeout_s": 8.0},
        "routing": {"policy": ("price", "price", "least_loaded")[variant % 3]},
        "index": {"min_prompt_tokens": 32, "memory_bytes": 4 << 20},  # so that it fills up during the warm-up
        "admission": {"queue_at_router": variant % 2 == 0, "max_wait_s": 20.0},
        "journal": {"max_decisions": 200 + 50 * (variant % 4)},
        "shutdown": {"deadline_s": 10.0},
        "keys": [
            {"sha256": hash_key(key), "tenant": tenant, "requests_per_min": 100_000 + variant}
            for tenant, key in TENANTS.items()
        ],
        "nodes": [engine.table() for engine in engines],
    }


class Chaos:
    def __init__(self, engines: list[Engine], router: RouterProcess, config_file: Path, listen: dict[str, Any]) -> None:
        self._engines, self._router, self._file, self._listen = engines, router, config_file, listen
        self._random = Random(11)
        self._disturbed: set[str] = set()
        self._variant = 0
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self._running: set[asyncio.Task[None]] = set()

    async def run(self, until_s: float) -> None:
        on_node = (self._kill, self._stop, self._fail, self._lose, self._churn, self._drain)
        while time.monotonic() < until_s:
            await asyncio.sleep(self._random.uniform(1.0, 4.0))
            if self._random.random() < 0.15:
                await self._reload()
            elif len(self._disturbed) < 2:
                engine = self._random.choice([one for one in self._engines if one.name not in self._disturbed])
                self._start(engine, self._random.choice(on_node))
        await asyncio.gather(*self._running)

    def _start(self, engine: Engine, disturb: Callable[[Engine], Awaitable[None]]) -> None:
        async def disturbed() -> None:
            self._disturbed.add(engine.name)
            try:
                self.counts[disturb.__name__.removeprefix("_")] += 1
                await disturb(engine)
                await self._until_up(engine)
            except Exception as error:
                self.problems.append(f"{disturb.__name__} {engine.name}: {type(error).__name__} {error}")
            finally:
                self._disturbed.discard(engine.name)

        task = asyncio.create_task(disturbed())
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _until_up(self, engine: Engine) -> None:
        """Wait until the router uses the node again."""
        async with asyncio.timeout(60):
            while True:
                found = await self._router.admin_get("/admin/nodes")
                node = next((one for one in found["nodes"] if one["name"] == engine.name), None)
                if node is not None and node["state"] == "up":
                    return
                await asyncio.sleep(0.2)

    async def _pause(self) -> None:
        await asyncio.sleep(self._random.uniform(1.0, 5.0))

    async def _kill(self, engine: Engine) -> None:
        engine.signal(signal.SIGKILL)
        await asyncio.to_thread(engine.child.process.wait)
        await self._pause()
        await engine.restart()

    async def _stop(self, engine: Engine) -> None:
        engine.signal(signal.SIGSTOP)
        await self._pause()
        engine.signal(signal.SIGCONT)

    async def _fail(self, engine: Engine) -> None:
        await engine.fail(
            {"mode": self._random.choice(("error500", "busy503")), "share": self._random.choice((0.3, 1))}
        )
        await self._pause()
        await engine.fail({"mode": "none"})

    async def _lose(self, engine: Engine) -> None:
        await engine.fail({"mode": "drop_events", "share": 0.2})
        await self._pause()
        await engine.fail({"mode": "none"})

    async def _churn(self, engine: Engine) -> None:
        await self._admin("DELETE", f"/admin/nodes/{engine.name}", 200)
        await self._pause()
        await self._admin("POST", "/admin/nodes", 201, engine.table())

    async def _drain(self, engine: Engine) -> None:
        await self._admin("POST", f"/admin/nodes/{engine.name}/drain", 200)
        await self._pause()
        await self._admin("POST", f"/admin/nodes/{engine.name}/undrain", 200)

    async def _admin(self, method: str, path: str, expected: int, body: Any = None) -> None:
        status, answer = await request(method, self._router.admin_url + path, body)
        if status not in (expected, 404, 409):  # a reload has added or removed the node meanwhile
            self.problems.append(f"{method} {path} returned {status}: {answer[:200]!r}")

    async def _reload(self) -> None:
        self.counts["reload"] += 1
        self._variant += 1
        self._file.write_text(as_toml({**self._listen, **tables(self._engines, self._variant)}))
        self._router.child.process.send_signal(signal.SIGHUP)


class Samples:
    """The router's memory, open files and event loop delay over time."""

    def __init__(self, router: RouterProcess) -> None:
        self._router = router
        self._pid = router_pid(router.child.process.pid)
        self.rows: list[tuple[float, float, float, float, float]] = []
        """Time [s], memory [MB], open files, longest delay [ms], time without a core [ms]."""

    async def run(self) -> None:
        started_s, waited_ms, longest_ms = time.monotonic(), self.waited_ms(), 0.0
        while True:
            page = await metrics(self._router)
            before_ms, longest_ms = longest_ms, 1000.0 * value(page, "warmroute_event_loop_delay_max_seconds")
            delay_ms = longest_ms if longest_ms > before_ms else 0.0  # the metric keeps the longest of a minute
            before_ms, waited_ms = waited_ms, self.waited_ms()
            row = (time.monotonic() - started_s, self.memory_mb(), self.open_files(), delay_ms, waited_ms - before_ms)
            self.rows.append(row)
            await asyncio.sleep(SAMPLE_S)

    def waited_ms(self) -> float:
        """Return how long the router's main thread was ready to run and had no core, since its start."""
        return int(Path(f"/proc/{self._pid}/schedstat").read_text().split()[1]) / 1e6

    def memory_mb(self) -> float:
        return int(Path(f"/proc/{self._pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

    def open_files(self) -> float:
        return float(len(os.listdir(f"/proc/{self._pid}/fd")))

    def growth(self, column: int) -> float:
        """Return how much a column grew after the warm-up, by linear regression."""
        rows = [row for row in self.rows if row[0] >= min(WARM_UP_S, 0.5 * self.rows[-1][0])]
        mean_s = sum(row[0] for row in rows) / len(rows)
        mean = sum(row[column] for row in rows) / len(rows)
        variance = sum((row[0] - mean_s) ** 2 for row in rows)
        slope = sum((row[0] - mean_s) * (row[column] - mean) for row in rows) / variance if variance else 0.0
        return slope * (rows[-1][0] - rows[0][0])

    def percentile(self, column: int, share: float) -> float:
        found = sorted(row[column] for row in self.rows)
        return found[min(len(found) - 1, int(share * len(found)))]


async def show_progress(load: Load, chaos: Chaos, samples: Samples) -> None:
    for minute in itertools.count(1):
        await asyncio.sleep(PROGRESS_S)
        requests, disturbances = sum(load.outcomes.values()), sum(chaos.counts.values())
        done = f"{requests:,} requests, {len(load.lost)} lost, {disturbances} disturbances"
        print(f"minute {minute}: {done}, {samples.rows[-1][1]:.0f} MB", file=sys.stderr, flush=True)


def router_pid(parent: int) -> int:
    """Return the process that serves: `die_with_parent` replaces itself or starts it."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return int(children[0]) if children else parent


async def metrics(router: RouterProcess) -> str:
    return (await request("GET", f"{router.admin_url}/metrics"))[1].decode()


def value(page: str, name: str) -> float:
    """Return the sum of a metric over its labels."""
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if re.match(rf"{name}[ {{]", line))


async def left_over(router: RouterProcess) -> dict[str, float]:
    """Return the counters that are not 0."""
    page = await metrics(router)
    names = ("requests_waiting", "node_requests_in_flight", "client_connections")
    return {name: found for name in names if (found := value(page, f"warmroute_{name}"))}


async def soak(minutes: float, clients: int, children: Children, folder: Path, report: Report) -> list[str]:
    """Return what failed."""
    engines = [Engine(children, number) for number in range(NODES)]
    await asyncio.gather(*(engine.wait_until_up() for engine in engines))
    port = free_port(FIRST_PORT + 1000)
    router = await start_router(children, folder, port, tables(engines))
    file = folder / f"router-{port}.toml"
    admin_port = int(router.admin_url.rpartition(":")[2])
    listen = {"listen": {"host": HOST, "port": port}, "admin": {"port": admin_port}}
    load = Load(port, list(TENANTS.values()), clients)
    chaos, samples = Chaos(engines, router, file, listen), Samples(router)
    sampling = asyncio.create_task(samples.run())
    loading = asyncio.create_task(load.run())
    progress = asyncio.create_task(show_progress(load, chaos, samples))
    until_s = time.monotonic() + 60.0 * minutes
    await chaos.run(until_s)
    load.stop()
    await loading
    progress.cancel()
    left: dict[str, float] = {}
    for _ in range(int(SETTLE_S / 0.5)):
        left = await left_over(router)
        if not left:
            break
        await asyncio.sleep(0.5)
    sampling.cancel()
    stderr = router.child.stderr_text()
    router.child.process.send_signal(signal.SIGTERM)
    try:
        status = await asyncio.wait_for(asyncio.to_thread(router.child.process.wait), 40.0)
    except TimeoutError:
        status = -1
    return judge(report, minutes, load, chaos, samples, left, stderr, status)


def judge(
    report: Report, minutes: float, load: Load, chaos: Chaos, samples: Samples, left: dict[str, float], stderr: str,
    status: int,
) -> list[str]:  # fmt: skip
    outcomes = load.outcomes
    growth_mb, growth_files = samples.growth(1), samples.growth(2)
    memory_mb = samples.percentile(1, 0.5)
    report.value("minutes", f"{minutes:g}")
    report.value("requests", f"{sum(outcomes.values()):,}")
    report.value("lost", len(load.lost))
    report.value("memory_mb", f"{memory_mb:.0f}")
    report.value("memory_growth_mb", f"{growth_mb:+.1f}")
    report.value("load", load_average())
    report.table("outcomes", "outcome", "requests")
    for name, count in outcomes.most_common():
        report.row(name, f"{count:,}")
    report.table("disturbances", "disturbance", "times")
    for name, count in chaos.counts.most_common():
        report.row(name, count)
    report.table("router", "", "p50", "p99", "max", "growth after the warm-up")
    for column, name, shown in ((1, "memory, MB", growth_mb), (2, "open files", growth_files)):
        cells = [f"{samples.percentile(column, share):.0f}" for share in (0.5, 0.99, 1.0)]
        report.row(name, *cells, f"{shown:+.1f}")
    for column, name in ((3, "longest delay of the event loop"), (4, "ready to run without a core")):
        delays = [f"{samples.percentile(column, share):.0f}" for share in (0.5, 0.99, 1.0)]
        report.row(f"{name} in {SAMPLE_S:g} s, ms", *delays, "")
    own_ms = max(row[3] - row[4] for row in samples.rows)
    report.value("own_delay_ms", f"{own_ms:.0f}")
    failed = [f"lost: {what} (× {count})" for what, count in Counter(load.lost).most_common(20)]
    failed += [f"not 0 at the end: {name} is {found:g}" for name, found in left.items()]
    failed += chaos.problems
    if 60.0 * minutes > 1.5 * WARM_UP_S and growth_mb > max(MAX_GROWTH_MB, MAX_GROWTH_SHARE * memory_mb):
        failed.append(f"memory grew by {growth_mb:.1f} MB after the warm-up")
    if own_ms > MAX_OWN_DELAY_MS:
        failed.append(f"the event loop was blocked for {own_ms:.0f} ms, beside the time without a core")
    if growth_files > MAX_GROWTH_FILES:
        failed.append(f"open files grew by {growth_files:.1f} after the warm-up")
    if "Traceback" in stderr:
        failed.append("the router logged a traceback:\n" + stderr[stderr.index("Traceback") - 300 :][:3000])
    if status != 0:
        failed.append(f"the router ended with status {status}")
    errors = Counter(re.findall(r" ERROR \S+ (\w+)", stderr))
    if errors:
        failed.append(f"the router logged errors: {dict(errors)}")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="length of the run (default: 60)")
    parser.add_argument("--clients", type=int, default=16, help="concurrent clients (default: 16)")
    add_record_option(parser)
    options = parser.parse_args()
    report = Report()
    with (
        tempfile.TemporaryDirectory() as folder,
        Children() as children,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        failed = runner.run(soak(options.minutes, options.clients, children, Path(folder), report))
    print("\n" + ("\n".join(["FAILED", *failed]) if failed else "passed"), flush=True)
    report.value("verdict", "failed" if failed else "passed")
    report.record(options.record)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
