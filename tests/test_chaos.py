"""Three engines under constant load while everything goes wrong in turn: no request is lost that had not begun to
stream, every break is visible, and every counter is back at zero at the end.

The engines are processes of their own (`warmroute engine`), so that kill -9 is kill -9.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from random import Random

import pytest
from harness import Gone, Router, chat, post, router, until

from warmroute.sim.children import free_port

CLIENTS = 24
PHASE_S = 1.5


class EngineProcess:
    def __init__(self, port: int) -> None:
        self.port = port
        self.process: asyncio.subprocess.Process

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "warmroute.cli.main", "engine", "--port", str(self.port), "--model", "m",
            "--profile", "h100-8b", "--speed", "5", "--blocks", "4000",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
        await self.process.wait()

    async def fail(self, mode: str, **more: object) -> None:
        body = json.dumps({"mode": mode, **more}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(post(body, "/_sim/fail", ["Connection: close"]))
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200"), answer


class Load:
    """Clients that ask again and again, stream or not, and leave at random."""

    def __init__(self, running: Router) -> None:
        self.running = running
        self.going = True
        self.ends: Counter[str] = Counter()
        self.lost: list[str] = []

    async def client(self, number: int) -> None:
        random = Random(number)
        while self.going:
            try:
                await self._one(random, number)
            except Gone:
                self.lost.append("the router closed without an answer")
            except TimeoutError:
                self.lost.append("no answer came in time")

    async def _one(self, random: Random, number: int) -> None:
        peer = await self.running.connect()
        streams = random.random() < 0.6
        body = chat(f"conversation {number} " * 40, stream=streams, max_tokens=random.randrange(5, 60))
        peer.write(post(body))
        if random.random() < 0.15:
            await asyncio.sleep(random.random() * 0.3)
            peer.leave()
            self.ends["left"] += 1
            return
        found = await peer.answer(patience_s=30)
        if found.status != 200:
            self.lost.append(f"{found.status} {found.body[:200]!r}")
        elif found.complete:
            self.ends["whole"] += 1
            assert b"error" not in found.body
        else:
            self.ends["broken off"] += 1
            assert streams, "an answer that was not streamed broke off"
            assert b'"code":"upstream_broken"' in found.chunks[-1], "a stream broke off without a word"
        peer.close()

    async def slow_reader(self) -> None:
        peer = await self.running.connect()
        peer.write(post(chat("slow", stream=True, max_tokens=2000, ignore_eos=True)))
        while self.going:
            if not await peer.reader.read(512):
                break
            await asyncio.sleep(0.05)
        peer.leave()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("policy", ["least_loaded", "price"])
async def test_nothing_is_lost_while_engines_die_hang_and_fail(policy: str) -> None:
    engines = [EngineProcess(free_port(21_000 + 100 * number + os.getpid() % 90)) for number in range(3)]
    try:
        for engine in engines:
            await engine.start()
        await _under_chaos(engines, policy)
    finally:
        for engine in engines:
            await engine.kill()


async def _under_chaos(engines: list[EngineProcess], policy: str) -> None:
    times = {"connect_timeout_s": 2.0, "first_byte_timeout_s": 2.0, "between_chunks_timeout_s": 1.0, "attempts": 3}
    nodes = [{"url": f"http://127.0.0.1:{engine.port}"} for engine in engines]
    health = {"interval_s": 0.1, "timeout_s": 0.5, "open_s": 0.1, "open_limit_s": 1.0, "slow_start_s": 0.5}
    async with router(*nodes, upstream=times, health=health, routing={"policy": policy}) as running:
        load = Load(running)
        clients = [asyncio.create_task(load.client(number)) for number in range(CLIENTS)]
        clients.append(asyncio.create_task(load.slow_reader()))
        first, second, third = engines

        await asyncio.sleep(PHASE_S)
        await first.kill()
        await asyncio.sleep(PHASE_S)
        await first.start()
        await _all_up(running)

        await second.fail("hang")
        await asyncio.sleep(PHASE_S * 2)
        await second.fail("none")
        await _all_up(running)

        await third.fail("error500")
        await asyncio.sleep(PHASE_S)
        await third.fail("busy503")
        await asyncio.sleep(PHASE_S)
        await third.fail("none")
        await _all_up(running)

        await first.fail("restart")
        await asyncio.sleep(PHASE_S)

        load.going = False
        await asyncio.gather(*clients)
        print(dict(load.ends), f"retries {running.service.counters.retries}")
        assert load.lost == []
        assert load.ends["whole"] > 100
        assert load.ends["left"] > 0
        assert running.service.counters.retries > 0
        for number in range(3):
            assert running.node(number).outcomes[0] > 0


async def _all_up(running: Router) -> None:
    await until(lambda: all(node.health.standing.value == "up" for node in running.service.fleet), "all nodes up", 30)
