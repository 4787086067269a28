"""A rolling restart of three replicas under load, for bench/replica_faults.py: the hit rate of conversations before,
during and after it, on simulated engines that send no KV events."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from random import Random
from typing import Any

from record import Report
from replica_cluster import Cluster, Replica

TURNS = 6
WORDS = 300
CONVERSATIONS = 60
BLOCKS = 8_000
"""KV blocks of each engine: room for its third of the conversations, not for all of them."""


class Conversations:
    """Clients that send turn after turn, each to the next replica."""

    def __init__(self, replicas: list[Replica]) -> None:
        self._replicas = replicas
        self.prompt_tokens = self.cached_tokens = self.requests = self.lost = 0
        self._next = 0
        self._tasks = [asyncio.create_task(self._run(number)) for number in range(CONVERSATIONS)]

    def reset(self) -> None:
        self.prompt_tokens = self.cached_tokens = self.requests = self.lost = 0

    async def _run(self, number: int) -> None:
        random = Random(number)
        turns = random.randrange(1, TURNS + 1)  # so that not all conversations begin at the same time
        await asyncio.sleep(3.0 * random.random())
        while True:
            messages: list[dict[str, str]] = []
            for _ in range(turns):
                words = " ".join(f"w{random.randrange(10_000)}" for _ in range(WORDS))
                messages.append({"role": "user", "content": words})
                body = json.dumps({"model": "sim", "messages": messages, "max_tokens": 8}).encode()
                answer = await self._send(body)
                if answer is None:
                    self.lost += 1
                    break
                self.requests += 1
                usage = answer["usage"]
                self.prompt_tokens += usage["prompt_tokens"]
                self.cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
                messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
                await asyncio.sleep(1.0 + random.random())
            turns = TURNS

    async def _send(self, body: bytes) -> dict[str, Any] | None:
        self._next += 1
        first = self._next
        for attempt in range(3):
            replica = self._replicas[(first + attempt) % len(self._replicas)]
            try:
                return await post(replica.host, replica.port, body)
            except (OSError, TimeoutError, EOFError, ValueError):
                continue
        return None

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def post(host: str, port: int, body: bytes) -> dict[str, Any]:
    """Raises OSError, TimeoutError, EOFError, or ValueError if the status is not 200."""
    async with asyncio.timeout(30.0):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\n"
            writer.write(head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            start, _, content = (await reader.read(-1)).partition(b"\r\n\r\n")
        finally:
            writer.close()
    if not start.startswith(b"HTTP/1.1 200"):
        raise ValueError(start[:100])
    found: dict[str, Any] = json.loads(content)
    return found


async def measure_rolling(report: Report, free_port: Callable[[], int], phase_s: float = 45.0) -> None:
    ports = [free_port() for _ in range(3)]
    engines = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-m", "warmroute", "engine", "--host", "0.0.0.0", "--port", str(port),
            "--blocks", str(BLOCKS), "--speed", "20",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )
        for port in ports
    ]  # fmt: skip
    report.table("rolling", "phase", "requests", "lost", "hit rate")
    try:
        await asyncio.sleep(3.0)
        async with Cluster(ports) as cluster:
            load = Conversations(cluster.replicas)
            await asyncio.sleep(30.0)

            async def measure(phase: str, work: Callable[[], Any]) -> None:
                load.reset()
                began_s = time.monotonic()
                await work()
                await asyncio.sleep(max(0.0, phase_s - (time.monotonic() - began_s)))
                rate = load.cached_tokens / max(1, load.prompt_tokens)
                report.row(phase, load.requests, load.lost, f"{rate:.3f}")

            async def restart() -> None:
                for replica in cluster.replicas:
                    await replica.stop()
                    await replica.start()
                    await replica.ready()
                    await asyncio.sleep(3.0)

            await measure("before", lambda: asyncio.sleep(0.0))
            await measure("all replicas restarted, one after the other", restart)
            await measure("after", lambda: asyncio.sleep(0.0))
            await load.stop()
    finally:
        for engine in engines:
            engine.terminate()
            await engine.wait()
