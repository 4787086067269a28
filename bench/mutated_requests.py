"""Sends mutated requests through the router to uvicorn, with httptools and with h11, and compares what the engines read
with what the router judged.

    python bench/mutated_requests.py --requests 1000000 --record mutated_requests
    python bench/mutated_requests.py --requests 1000000 --state FILE    # continues after an interruption

Every request that an engine receives must be one that the router judged: the same method, path, query and body, and
the same model, `stream`, `max_tokens` and `priority`, unless the engine refuses the body. No engine may receive a path
of its administration, a header that the router removes, or a negative priority of a key that does not allow it.

A request counts if the router read it: those that follow a rejected one on the same connection do not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import uvloop
from mutation_servers import UNREADABLE
from record import Report, add_record_option
from request_mutations import case

HERE = Path(__file__).resolve().parent
CONNECTIONS = 48
CASES_PER_BATCH = 5000
PATIENCE_S = 1.5
"""How long a client waits for the router to close its connection."""
STATUS_LINE = re.compile(rb"HTTP/1\.1 (\d\d\d) ")
LAST_RESPONSE = b'{"status":"alive"}'
"""The response to the request that ends each connection."""
ADMINISTRATION = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
MAX_SHOWN = 20


class Violation(Exception):
    """An engine read a request that the router did not judge."""


class Servers:
    """Two engines and the router."""

    def __init__(self, folder: Path) -> None:
        self._processes: list[subprocess.Popen[str]] = []
        self.judged = folder / "judged"
        self.seen = {http: folder / http for http in ("httptools", "h11")}
        ports = [self._start("engine", http, str(path)) for http, path in self.seen.items()]
        self.port = self._start("router", str(self.judged), *(f"http://127.0.0.1:{port}" for port in ports))

    def _start(self, *arguments: str) -> int:
        command = [sys.executable, str(HERE / "mutation_servers.py"), *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._processes.append(process)
        assert process.stdout is not None
        return int(process.stdout.readline())

    def check_alive(self) -> None:
        for process in self._processes:
            if process.poll() is not None:
                raise Violation(f"{process.args!r} ended with status {process.returncode}")

    def cpu_s(self) -> float:
        """CPU time of all three so far."""
        ticks = 0
        for process in self._processes:
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / 100

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


class Lines:
    """Lines that a process appends to a file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._rest = b""

    def read(self) -> list[Any]:
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        return [json.loads(line) for line in lines]


class Client(asyncio.Protocol):
    """Sends one case, in two pieces, and reads until the router closes."""

    def __init__(self, data: bytes, cut: int, statuses: Counter[str]) -> None:
        self._data = data
        self._cut = cut
        self._statuses = statuses
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport) or hasattr(transport, "write")
        transport.write(self._data[: self._cut])
        asyncio.get_running_loop().call_soon(transport.write, self._data[self._cut :])

    def data_received(self, data: bytes) -> None:
        for status in STATUS_LINE.findall(data):
            self._statuses[status.decode()] += 1
        if LAST_RESPONSE in data:
            self._statuses["200"] -= 1

    def connection_lost(self, _error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


async def send_cases(port: int, cases: list[bytes], statuses: Counter[str]) -> None:
    loop = asyncio.get_running_loop()
    waiting = iter(cases)

    async def worker() -> None:
        for data in waiting:
            make = partial(Client, data, len(data) * 2 // 3, statuses)
            transport, client = await loop.create_connection(make, "127.0.0.1", port)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await client.closed
            except TimeoutError:
                statuses["unanswered"] += 1
            transport.abort()

    await asyncio.gather(*(worker() for _ in range(CONNECTIONS)))


class Records(Protocol):
    def read(self) -> list[Any]:
        """Return the records since the last call."""


class Comparison:
    """Finds for each request of an engine the router's judgement."""

    def __init__(self, judged: Records, seen: Mapping[str, Records]) -> None:
        self._judged = judged
        self._seen = seen
        self.counts: Counter[str] = Counter()

    async def compare(self) -> list[str]:
        """Compare all requests so far. Call it when no client is connected."""
        judged: dict[str, list[Any]] = {}
        seen: list[tuple[str, Any]] = []
        quiet = 0
        while quiet < 3:  # an engine may still read a request whose client has left
            found = 0
            for http, lines in self._seen.items():
                new = lines.read()
                seen += [(http, one) for one in new]
                found += len(new)
            for one in self._judged.read():
                judged.setdefault(one[0], []).append(one)
                found += 1
            quiet = 0 if found else quiet + 1
            await asyncio.sleep(0.02)
        self.counts["judged"] += sum(map(len, judged.values()))
        return [problem for http, one in seen if (problem := self._problem(http, one, judged))]

    def _problem(self, http: str, seen: Any, judged: dict[str, list[Any]]) -> str:
        self.counts[http] += 1
        request_id, method, path, query, body, fields, unwanted = seen
        if fields == UNREADABLE:
            self.counts["refused by the engine"] += 1
        if unwanted:
            return f"{http} received {unwanted}: {seen}"
        if path in ADMINISTRATION or not (path.startswith("/v1/") or path in ("/tokenize", "/detokenize")):
            return f"{http} received the path {path!r}: {seen}"
        candidates = judged.get(request_id, [])
        for at, one in enumerate(candidates):
            if one[1:5] == [method, path, query, body] and self._same_fields(path, fields, one):
                del candidates[at]
                return ""
        return f"{http} read {seen}, and the router judged {candidates}"

    @staticmethod
    def _same_fields(path: str, fields: Any, judged: Any) -> bool:
        if fields == UNREADABLE:
            return True
        model, streams, limit, priority = judged[5]
        is_form, tenant = judged[6:]
        limit_read, priority_read = (number if number is None else cut(number) for number in fields[2:])
        if fields[0] != model or priority_read != priority or (priority < 0 and tenant != "high"):
            return False
        if is_form or path not in ("/v1/chat/completions", "/v1/completions", "/v1/messages"):
            return True  # the router reads no more of these
        if limit_read is None and limit == 16 and path == "/v1/completions":
            limit = None
        return bool(fields[1] == streams and limit_read == limit)


def cut(number: int) -> int:
    """The router cuts larger numbers."""
    return max(-(10**18), min(number, 10**18))


async def run(arguments: argparse.Namespace, report: Report) -> bool:
    state = {"seed": arguments.seed, "next": 0, "statuses": {}, "counts": {}, "seconds": 0.0, "cpu_s": 0.0}
    if arguments.state is not None and arguments.state.exists():
        state = json.loads(arguments.state.read_text())
    statuses = Counter(state["statuses"])
    with tempfile.TemporaryDirectory() as folder:
        servers = Servers(Path(folder))
        try:
            seen = {http: Lines(path) for http, path in servers.seen.items()}
            comparison = Comparison(Lines(servers.judged), seen)
            comparison.counts.update(state["counts"])
            started_s, cpu_s, own_s = time.monotonic(), servers.cpu_s(), time.process_time()
            saved = state
            while sum(statuses.values()) < arguments.requests:
                numbers = range(state["next"], state["next"] + CASES_PER_BATCH)
                await send_cases(servers.port, [case(state["seed"], number) for number in numbers], statuses)
                problems = await comparison.compare()
                servers.check_alive()
                if problems:
                    print(f"cases {numbers[0]} to {numbers[-1]} of seed {state['seed']}: {len(problems)} violations")
                    print("\n".join(problems[:MAX_SHOWN]), flush=True)
                    return False
                now_s = time.monotonic()
                state |= {"next": numbers[-1] + 1, "statuses": statuses, "counts": comparison.counts}
                used_s = servers.cpu_s() - cpu_s + time.process_time() - own_s
                saved = state | {
                    "seconds": state["seconds"] + now_s - started_s, "cpu_s": state["cpu_s"] + used_s
                }  # fmt: skip
                if arguments.state is not None:
                    arguments.state.write_text(json.dumps(saved))
                if arguments.progress:
                    print(f"{sum(statuses.values()):,} requests in {saved['seconds']:.0f} s", flush=True)
        finally:
            servers.close()
    show(report, saved, comparison.counts, statuses)
    return True


def show(report: Report, state: dict[str, Any], counts: Counter[str], statuses: Counter[str]) -> None:
    requests = sum(statuses.values())
    report.value("requests", f"{requests:,}")
    report.value("seed", state["seed"])
    report.value("requests_per_s", round(requests / state["seconds"]))
    report.value("cpu_us_per_request", round(state["cpu_s"] * 1e6 / requests))
    report.value("judged", f"{counts['judged']:,}")
    report.value("seen_by_httptools", f"{counts['httptools']:,}")
    report.value("seen_by_h11", f"{counts['h11']:,}")
    report.value("refused_by_engines", f"{counts['refused by the engine']:,}")
    report.value("violations", 0)
    report.table("responses", "status", "responses")
    for status, number in sorted(statuses.items()):
        report.row(status, f"{number:,}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--state", type=Path, metavar="FILE", help="save progress there, and continue from it")
    parser.add_argument("--progress", action="store_true")
    add_record_option(parser)
    arguments = parser.parse_args()
    report = Report()
    if not uvloop.run(run(arguments, report)):
        sys.exit(1)
    report.record(arguments.record)


if __name__ == "__main__":
    main()
