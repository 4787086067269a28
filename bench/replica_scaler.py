"""Three replicas that scale one fleet in turn, for bench/replica_faults.py. This process is the cloud: a webhook that
creates machines, and keeps who asked for what."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from typing import Any

from quick_engine import QuickEngine
from record import Report
from replica_cluster import Cluster, free_port

os.environ["WARMROUTE_EXPERIMENT"] = "1"  # the routers' files set what is no key

LEASE_S = 2.0


class Cloud(asyncio.Protocol):
    """A webhook provisioner. The machines and calls are those of the class's owner."""

    def __init__(self, machines: dict[str, dict[str, Any]], calls: list[tuple[float, str, str]], engine: str) -> None:
        self._machines = machines
        self._calls = calls
        self._engine = engine
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, separator, body = self._buffer.partition(b"\r\n\r\n")
        at = head.lower().find(b"content-length:")
        if not separator or len(body) < int(head[at + 15 :].split(b"\r\n")[0]):
            return
        self._buffer = b""
        reply = json.dumps(self._answer(json.loads(body))).encode()
        self._transport.write(  # type: ignore[attr-defined]
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(reply) + reply
        )

    def _answer(self, call: dict[str, Any]) -> dict[str, Any]:
        name = call["call"]
        if name == "offers":
            return {"offers": [{"name": "small", "gpu": "L4", "usd_per_hour": 1.0, "island": "here"}]}
        if name == "provision":
            token = call["token"]
            self._calls.append((time.monotonic(), name, token))
            port = self._engine
            self._machines.setdefault(
                token, {"id": f"m-{token}", "token": token, "offer": "small", "state": "running", "url": port}
            )
        elif name == "terminate":
            self._calls.append((time.monotonic(), name, call["machine"]["token"]))
            self._machines.pop(call["machine"]["token"], None)
        return {"machines": list(self._machines.values())}


async def measure_scaler(report: Report, rounds: int = 5) -> None:
    loop = asyncio.get_running_loop()
    machines: dict[str, dict[str, Any]] = {}
    calls: list[tuple[float, str, str]] = []
    engine, cloud = free_port(), free_port()
    await loop.create_server(QuickEngine, "0.0.0.0", engine)
    cluster = Cluster(
        [],
        f"lease_s = {LEASE_S}\n[scaling]\nenabled = true\nmin_nodes = 1\nmax_nodes = 3\ninterval_s = 1.0\n"
        f'[[provisioners]]\nname = "cloud"\nkind = "webhook"\nurl = "http://HOST:{cloud}/"\n',
    )
    for at, replica in enumerate(cluster.replicas):
        text = replica._file.read_text().replace("HOST", cluster.network.engines_host(at))
        replica._file.write_text(text)
    # Every replica reaches the engine by the address of the first one: all of them route through this machine.
    url = f"http://{cluster.network.engines_host(0)}:{engine}"
    await loop.create_server(lambda: Cloud(machines, calls, url), "0.0.0.0", cloud)
    two_leaders, gaps_s, watching = 0, [0.0], True
    async with cluster:
        replicas = cluster.replicas
        stopped: set[int] = set()
        gap_since_s: float | None = None

        async def leads(at: int) -> bool:
            if at in stopped:
                return False
            return bool((await replicas[at].admin("GET", "/admin/scaling"))["leading"])

        async def watch() -> None:
            nonlocal two_leaders, gap_since_s
            while watching:
                leading = sum([await leads(at) for at in range(3)])
                two_leaders += leading > 1
                if leading:
                    if gap_since_s is not None:
                        gaps_s.append(time.monotonic() - gap_since_s)
                    gap_since_s = None
                elif gap_since_s is None:
                    gap_since_s = time.monotonic()
                await asyncio.sleep(0.02)

        async def leader() -> int:
            while True:
                for at in range(3):
                    if await leads(at):
                        return at
                await asyncio.sleep(0.02)

        await leader()
        for _ in range(100):
            if machines:
                break
            await asyncio.sleep(0.1)
        watcher = asyncio.create_task(watch())
        for _ in range(rounds):
            at = await leader()
            stopped.add(at)
            replicas[at].signal(signal.SIGSTOP)
            await asyncio.sleep(2.0 * LEASE_S + 1.0)
            replicas[at].signal(signal.SIGCONT)
            stopped.discard(at)
            await asyncio.sleep(2.0)
        cluster.redis.command("FLUSHALL")
        await asyncio.sleep(LEASE_S + 2.0)
        watching = False
        await watcher
    provisions = {token for _, name, token in calls if name == "provision"}
    report.table(
        "scaler", "leaders suspended", "moments with two leaders", "longest time without one, s", "lease, s",
        "machines requested", "machines terminated",
    )  # fmt: skip
    terminated = sum(name == "terminate" for _, name, _ in calls)
    report.row(rounds, two_leaders, f"{max(gaps_s):.1f}", f"{LEASE_S:.0f}", len(provisions), terminated)
