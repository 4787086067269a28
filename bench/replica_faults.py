"""Three replicas over a real Redis server, under load, while things fail:

    python bench/replica_faults.py [--seconds 6] [--rate 60] [--only faults limit drain scaler rolling] [--record NAME]

faults    one replica killed; Redis killed and restarted, paused, flushed, read-only, full; a replica cut off from Redis
limit     a tenant with 600 requests/min sends as many as it can to all replicas, for a minute
drain     a node is drained through one replica, again and again: the last request that others send there
scaler    the leader is suspended for longer than its lease, and goes on: who leads when, and what it asks the cloud for
rolling   all replicas are restarted, one after the other: the hit rate of conversations, on engines without KV events

A client sends each request to the next replica. If it gets no byte of a response, it tries another one, as a load
balancer does. A request is lost if three attempts fail.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import time
from collections.abc import Awaitable, Callable
from hashlib import sha256
from random import Random
from statistics import median, quantiles
from typing import Any

from quick_engine import QuickEngine
from record import Report, add_record_option, load_average
from replica_cluster import Cluster, Replica, free_port
from replica_rolling import measure_rolling
from replica_scaler import measure_scaler

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello " * 50}]}).encode()
ENGINE_S = 0.02
KEY = "key-of-a-tenant"
LIMIT = f'[[keys]]\nsha256 = "{sha256(KEY.encode()).hexdigest()}"\ntenant = "acme"\nrequests_per_min = 600\n'
HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\n"
    b"Authorization: Bearer %b\r\nContent-Length: %d\r\n\r\n"
)


class Failed(Exception):
    """No byte of a response arrived."""


class Client:
    """One connection to each replica. One request at a time."""

    def __init__(self, replicas: list[Replica]) -> None:
        self._replicas = replicas
        self._connections: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}

    async def send(self, at: int) -> int:
        """Return the status. Raises Failed, and ConnectionError if the response breaks off."""
        replica = self._replicas[at]
        try:
            if at not in self._connections:
                async with asyncio.timeout(2.0):
                    self._connections[at] = await asyncio.open_connection(replica.host, replica.port)
            reader, writer = self._connections[at]
            writer.write(HEAD % (KEY.encode(), len(BODY)) + BODY)
            async with asyncio.timeout(20.0):
                head = await reader.readuntil(b"\r\n\r\n")
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            self._close(at)
            raise Failed(str(error)) from None
        found = head.lower().find(b"content-length:")
        await reader.readexactly(int(head[found + 15 :].split(b"\r\n")[0]))
        if b"connection: close" in head.lower():
            self._close(at)
        return int(head.split(b" ", 2)[1])

    def _close(self, at: int) -> None:
        connection = self._connections.pop(at, None)
        if connection is not None:
            connection[1].close()


class Load:
    """Sends requests at a rate, and counts how they end."""

    def __init__(self, replicas: list[Replica], rate: float, clients: int = 32) -> None:
        self._replicas = replicas
        self._rate = rate
        self._clients = [Client(replicas) for _ in range(clients)]
        self._next = 0
        self.reset()
        self._task = asyncio.create_task(self._run())
        self._sending: set[asyncio.Task[None]] = set()

    def reset(self) -> None:
        self.sent = self.retried = self.lost = self.rejected = 0
        self.times_ms: list[float] = []

    async def _run(self) -> None:
        free = asyncio.Queue[Client]()
        for client in self._clients:
            free.put_nowait(client)
        at_s = time.monotonic()
        while True:
            client = await free.get()
            task = asyncio.create_task(self._send(client, free))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
            at_s = max(at_s + 1.0 / self._rate, time.monotonic() - 0.1)
            await asyncio.sleep(max(0.0, at_s - time.monotonic()))

    async def _send(self, client: Client, free: asyncio.Queue[Client]) -> None:
        self.sent += 1
        self._next += 1
        first, began_s = self._next, time.monotonic()
        try:
            for attempt in range(3):
                try:
                    status = await client.send((first + attempt) % len(self._replicas))
                except (Failed, OSError, asyncio.IncompleteReadError):
                    self.retried += 1
                    continue
                if status != 200:
                    self.rejected += 1
                self.times_ms.append(1000.0 * (time.monotonic() - began_s))
                return
            self.lost += 1
        finally:
            free.put_nowait(client)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)


async def start_engines(count: int) -> tuple[list[int], list[list[float]], list[asyncio.Server]]:
    arrivals: list[list[float]] = [[] for _ in range(count)]
    servers = [
        await asyncio.get_running_loop().create_server(lambda one=one: QuickEngine(ENGINE_S, one), "0.0.0.0", 0)  # type: ignore[misc]
        for one in arrivals
    ]
    return [server.sockets[0].getsockname()[1] for server in servers], arrivals, servers


async def measure_faults(report: Report, seconds: float, rate: float) -> None:
    ports, _, _ = await start_engines(3)
    report.table(
        "faults", "event", "requests", "lost", "rejected", "tried again", "p50 ms", "p99 ms", "hears all again after s"
    )
    async with Cluster(ports) as cluster:
        replicas, redis = cluster.replicas, cluster.redis
        load = Load(replicas, rate)
        await asyncio.sleep(2.0)

        async def kill_replica() -> None:
            await replicas[2].kill()
            await asyncio.sleep(seconds / 2)
            await replicas[2].start()
            await replicas[2].ready()

        async def restart_redis() -> None:
            redis.kill()
            await asyncio.sleep(seconds / 2)
            redis.start()

        async def pause_redis() -> None:
            redis.signal(signal.SIGSTOP)
            await asyncio.sleep(seconds / 2)
            redis.signal(signal.SIGCONT)

        async def change_redis(*words: str, back: tuple[str, ...] = ()) -> None:
            redis.command(*words)
            await asyncio.sleep(seconds / 2)
            if back:
                redis.command(*back)

        async def cut() -> None:
            cluster.network.cut(1)
            await asyncio.sleep(seconds / 2)
            cluster.network.mend(1)

        events: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            ("nothing", lambda: asyncio.sleep(seconds / 2)),
            ("a replica is killed and started again", kill_replica),
            ("Redis is killed and started again", restart_redis),
            ("Redis is suspended", pause_redis),
            ("Redis is flushed", lambda: change_redis("FLUSHALL")),
            (
                "Redis is read-only",
                lambda: change_redis("REPLICAOF", "127.0.0.1", "1", back=("REPLICAOF", "NO", "ONE")),
            ),
            (
                "Redis is full",
                lambda: change_redis("CONFIG", "SET", "maxmemory", "1", back=("CONFIG", "SET", "maxmemory", "0")),
            ),
        ]
        if cluster.network.namespaces:
            events.append(("a replica is cut off from Redis", cut))
        for name, event in events:
            load.reset()
            await event()
            ended_s = time.monotonic()
            for replica in replicas:
                await replica.until_heard(len(replicas) - 1)
            heard_s = time.monotonic() - ended_s
            await asyncio.sleep(max(0.0, seconds / 2 - heard_s))
            steps = quantiles(load.times_ms, n=100)
            report.row(
                name, load.sent, load.lost, load.rejected, load.retried, f"{steps[49]:.0f}", f"{steps[98]:.0f}",
                f"{heard_s:.1f}",
            )  # fmt: skip
        await load.stop()
        report.value("partitions_by_namespaces", str(cluster.network.namespaces))


async def measure_limit(report: Report) -> None:
    ports, _, _ = await start_engines(3)
    report.table("limit", "traffic", "allowed", "admitted", "of the limit")
    async with Cluster(ports, LIMIT) as cluster:
        for name, replicas in (("all replicas", cluster.replicas), ("one replica", cluster.replicas[:1])):
            await _flood(replicas, 15.0)  # empties the bucket
            passed, took_s = await _flood(replicas, 60.0)
            allowed = 600.0 * took_s / 60.0
            report.row(name, f"{allowed:.0f}", passed, f"{passed / allowed:.3f}")
        await asyncio.sleep(62.0)  # the bucket is full again
        began_s = time.monotonic()
        passed, _ = await _flood(cluster.replicas, 3.0, clients=64, pause_s=0.01)
        allowed = 600.0 + 10.0 * (time.monotonic() - began_s)
        report.row("a burst at all replicas", f"{allowed:.0f}", passed, f"{passed / allowed:.3f}")


async def _flood(
    replicas: list[Replica], seconds: float, clients: int = 12, pause_s: float = 0.05
) -> tuple[int, float]:
    """Return how many requests passed, and the time."""
    passed, began_s = 0, time.monotonic()

    async def run(number: int) -> None:
        nonlocal passed
        client, random = Client(replicas), Random(number)
        while time.monotonic() - began_s < seconds:
            status = await client.send(random.randrange(len(replicas)))
            passed += status == 200
            await asyncio.sleep(pause_s if status != 200 else 0.0)

    await asyncio.gather(*(run(number) for number in range(clients)))
    return passed, time.monotonic() - began_s


async def measure_drain(report: Report, rate: float, rounds: int = 30) -> None:
    """The time from the call and from its reply until the drained node has got its last request from any replica, and
    the longest time for which the machine held up this process meanwhile."""
    ports, arrivals, _ = await start_engines(3)
    after_call_ms: list[float] = []
    after_reply_ms: list[float] = []
    stall_ms = 0.0

    async def watch() -> None:
        nonlocal stall_ms
        while True:
            began_s = time.monotonic()
            await asyncio.sleep(0.002)
            stall_ms = max(stall_ms, 1000.0 * (time.monotonic() - began_s) - 2.0)

    async with Cluster(ports) as cluster:
        load = Load(cluster.replicas, max(rate, 150.0))
        await asyncio.sleep(2.0)
        watcher = asyncio.create_task(watch())
        for number in range(rounds):
            called_s = time.monotonic()
            found = await cluster.replicas[number % 3].admin("POST", "/admin/nodes/n0/drain")
            replied_s = time.monotonic()
            assert found["replicas"]["confirmed"] == 2, found["replicas"]
            await asyncio.sleep(0.5)
            last_s = max((at_s for at_s in arrivals[0]), default=0.0)
            after_call_ms.append(max(0.0, 1000.0 * (last_s - called_s)))
            after_reply_ms.append(max(0.0, 1000.0 * (last_s - replied_s)))
            before = len(arrivals[0])
            await cluster.replicas[(number + 1) % 3].admin("POST", "/admin/nodes/n0/undrain")
            await asyncio.sleep(0.4)
            assert len(arrivals[0]) > before, "the node gets requests again"
        watcher.cancel()
        await load.stop()
    report.table(
        "drain", "drains", "last request after the call, median ms", "longest ms", "after the reply, longest ms",
        "this process was held up, longest ms",
    )  # fmt: skip
    report.row(
        rounds, f"{median(after_call_ms):.0f}", f"{max(after_call_ms):.0f}", f"{max(after_reply_ms):.0f}",
        f"{stall_ms:.0f}",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("faults", "limit", "drain", "scaler", "rolling")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--seconds", type=float, default=6.0, help="time of each event (6)")
    parser.add_argument("--rate", type=float, default=60.0, help="requests per second (60)")
    add_record_option(parser)
    args = parser.parse_args()
    report = Report()
    runs: dict[str, Callable[[], Any]] = {
        "faults": lambda: measure_faults(report, args.seconds, args.rate),
        "limit": lambda: measure_limit(report),
        "drain": lambda: measure_drain(report, args.rate),
        "scaler": lambda: measure_scaler(report),
        "rolling": lambda: measure_rolling(report, free_port),
    }
    for part in args.only:
        asyncio.run(runs[part]())
    report.value("load_average", load_average())
    report.record(args.record)


if __name__ == "__main__":
    main()
