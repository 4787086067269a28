"""What observability costs: CPU time of the router per request with everything on, against everything off.

    python bench/observability_cpu.py [--rounds 7] [--seconds 10] [--rate 1000] [--parts]

"On" is what an operator would have: `/metrics` scraped every 5 s (compressed, as Prometheus does), one viewer of the
live page, a capture, the prompt doctor, traces at their default share, history and alerts. "Off" has none of them, not
even the history and the alerts, which no setting turns off. `--parts` measures a router with each part alone, too.

Each setting is a router process of its own, with the policy `price` and eight mock nodes that answer at once. All
routers get the same requests of 1 KB at the same time and rate. Their CPU time (all threads, user and system) is read
from the kernel before and after a round. A figure is the median of the rounds, a ratio the median of the ratios within
a round.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import uvloop
from live_page_cpu import FakeNode
from record import Report, add_record_option, load_average
from tracing_cpu import PROMPTS, request

from warmroute.lab.demo.processes import free_port

NODES = 8
CONNECTIONS = 16
SCRAPE_S = 5.0
SETTLE_S = 6.0
"""Time until all traces of a round are sent."""
PARTS = ("metrics", "viewer", "capture", "prompt_doctor", "tracing", "alerts")


class Node(FakeNode):
    """A node that reports cached tokens."""

    CHAT = (
        b'{"choices":[{"message":{"content":"ok"}}],"usage":{"prompt_tokens":230,"completion_tokens":2,'
        b'"prompt_tokens_details":{"cached_tokens":208}}}'
    )


class RouterProcess:
    def __init__(self, folder: Path, number: int, parts: Sequence[str], ports: Sequence[int]) -> None:
        self.parts = parts
        self.port, self.admin_port = free_port(24_000 + 100 * number), free_port(24_050 + 100 * number)
        lines = [f"[prompt_doctor]\nenabled = {str('prompt_doctor' in parts).lower()}"]
        if "capture" in parts:
            lines.append(f'[capture]\ndirectory = "{folder / f"capture-{number}"}"')
        if "tracing" in parts:
            lines.append(f'[tracing]\nenabled = true\nendpoint = "http://127.0.0.1:{ports[0]}"')
        lines += [f'[[nodes]]\nurl = "http://127.0.0.1:{port}"\nmodels = ["m"]' for port in ports]
        config = folder / f"{number}.toml"
        config.write_text("\n".join(lines) + "\n")
        command = [sys.executable, __file__, "--router", "with_alerts" if "alerts" in parts else "without_alerts"]
        command += ["--config", str(config), "--port", str(self.port), "--admin-port", str(self.admin_port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def cpu_s(self) -> float:
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    async def ready(self) -> None:
        while True:
            try:
                await asyncio.to_thread(urllib.request.urlopen, f"http://127.0.0.1:{self.admin_port}/ready", None, 1)
                return
            except OSError:
                await asyncio.sleep(0.1)

    async def watch(self) -> None:
        """Scrape the metrics, and read the live feed."""
        async with asyncio.TaskGroup() as tasks:
            if "metrics" in self.parts:
                tasks.create_task(self._scrape())
            if "viewer" in self.parts:
                tasks.create_task(self._view())

    async def _scrape(self) -> None:
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.admin_port)
            fields = b"Host: 127.0.0.1\r\nAccept-Encoding: gzip\r\nConnection: close\r\n"
            writer.write(b"GET /metrics HTTP/1.1\r\n" + fields + b"\r\n")
            assert (await reader.read(-1)).startswith(b"HTTP/1.1 200")
            writer.close()
            await asyncio.sleep(SCRAPE_S)

    async def _view(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.admin_port)
        writer.write(b"GET /admin/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
        while await reader.read(65536):
            pass


def run_router(setting: str, arguments: list[str]) -> None:
    """Be a router, without history and alerts if the setting says so."""
    from warmroute.app import service
    from warmroute.app.main import main as warmroute

    async def nothing(*_given: object) -> None:
        pass

    if setting == "without_alerts":
        service.run_history = nothing  # type: ignore[attr-defined,assignment]
    sys.argv = ["warmroute", "serve", *arguments]
    sys.exit(warmroute())


async def send(port: int, rate: float, seconds: float) -> int:
    """Send requests at this rate, and return how many were answered."""
    started_s = time.monotonic()
    interval_s = CONNECTIONS / rate

    async def client(number: int) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        due_s, answered = started_s + interval_s * number / CONNECTIONS, 0
        while due_s < started_s + seconds:
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            due_s = max(due_s + interval_s, time.monotonic() - 0.1)
            writer.write(request(number % PROMPTS))
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            at = head.lower().find(b"content-length:")
            await reader.readexactly(int(head[at + 15 :].split(b"\r\n", 1)[0]))
            answered, number = answered + 1, number + 7
        writer.close()
        return answered

    return sum(await asyncio.gather(*(client(number) for number in range(CONNECTIONS))))


async def measure(
    settings: dict[str, Sequence[str]], rounds: int, seconds: float, rate: float
) -> tuple[dict[str, list[float]], float]:
    """Return the CPU time per request of each setting in each round, in microseconds; and the mean rate."""
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Node, "127.0.0.1", 0) for _ in range(NODES)]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    found: dict[str, list[float]] = {title: [] for title in settings}
    answered = 0
    with tempfile.TemporaryDirectory() as folder:
        routers = [RouterProcess(Path(folder), number, parts, ports) for number, parts in enumerate(settings.values())]
        try:
            for router in routers:
                await router.ready()
            watching = [asyncio.create_task(router.watch()) for router in routers]
            await asyncio.gather(*(send(router.port, rate, 5.0) for router in routers))
            await asyncio.sleep(SETTLE_S)
            for _ in range(rounds):
                before_s = [router.cpu_s() for router in routers]
                counts = await asyncio.gather(*(send(router.port, rate, seconds) for router in routers))
                for figures, router, started_s, count in zip(found.values(), routers, before_s, counts, strict=True):
                    figures.append((router.cpu_s() - started_s) / count * 1e6)
                answered += sum(counts)
            for task in watching:
                task.cancel()
        finally:
            for router in routers:
                router.process.terminate()
            for router in routers:
                router.process.wait()
    return found, answered / rounds / seconds / len(settings)


def main() -> int:
    if sys.argv[1:2] == ["--router"]:
        run_router(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a round (default: 10)")
    parser.add_argument("--rate", type=float, default=1000.0, help="requests per second to each router")
    parser.add_argument("--parts", action="store_true", help="measure each part alone, too")
    add_record_option(parser)
    args = parser.parse_args()
    settings: dict[str, Sequence[str]] = {"everything off": (), "everything on": PARTS}
    if args.parts:
        settings |= {f"only {part.replace('_', ' ')}": (part,) for part in PARTS}
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found, rate = runner.run(measure(settings, args.rounds, args.seconds, args.rate))
    report = Report()
    report.table("cpu", "observability", "µs of CPU per request", "of everything off")
    off = found["everything off"]
    for title, figures in found.items():
        ratios = sorted(one / without for one, without in zip(figures, off, strict=True))
        ratio = statistics.median(ratios)
        report.row(title, f"{statistics.median(figures):.0f}", f"{ratio:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
        report.value(f"ratio {title}", f"{ratio:.2f}")
    report.value("requests_per_s", f"{rate:,.0f}")
    report.value("load", load_average())
    report.record(args.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
