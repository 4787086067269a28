"""Three engines under constant load while they fail in every way: no request is lost before it streams, every broken
response is visible to its client, and every counter returns to zero at the end.

The engines are separate processes (`warmroute engine`), so that SIGKILL ends them at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.polling import until
from support.raw_client import ConnectionClosed, chat, post
from support.running_router import RunningRouter, quick_table, router

from warmroute.config import Config, from_table
from warmroute.core.rate_limits import RequestCharge, TenantLimits
from warmroute.edge.arrival import hash_key
from warmroute.lab.demo.processes import free_port

CLIENTS = 24
PHASE_S = 1.5


class EngineProcess:
    def __init__(self, port: int) -> None:
        self.port = port
        self.process: asyncio.subprocess.Process

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "warmroute", "engine", "--port", str(self.port), "--model", "m",
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
    """Clients that send one request after the other, with or without streaming, and disconnect at random."""

    def __init__(self, running: RunningRouter) -> None:
        self.running = running
        self.active = True
        self.outcomes: Counter[str] = Counter()
        self.lost: list[str] = []

    async def client(self, number: int) -> None:
        random = Random(number)
        while self.active:
            try:
                await self._send_one(random, number)
            except ConnectionClosed:
                self.lost.append("the router closed without a response")
            except TimeoutError:
                self.lost.append("no response in time")

    async def _send_one(self, random: Random, number: int) -> None:
        peer = await self.running.connect()
        streams = random.random() < 0.6
        body = chat(f"conversation {number} " * 40, stream=streams, max_tokens=random.randrange(5, 60))
        peer.write(post(body))
        if random.random() < 0.15:
            await asyncio.sleep(random.random() * 0.3)
            peer.disconnect()
            self.outcomes["left"] += 1
            return
        found = await peer.response(patience_s=30)
        if found.status != 200:
            self.lost.append(f"{found.status} {found.body[:200]!r}")
        elif found.complete:
            self.outcomes["whole"] += 1
            assert b"error" not in found.body
        else:
            self.outcomes["broken off"] += 1
            assert streams, "a response without streaming broke off"
            assert b'"code":"upstream_broken"' in found.chunks[-1], "a stream broke off without an error event"
        peer.close()

    async def slow_reader(self) -> None:
        peer = await self.running.connect()
        peer.write(post(chat("slow", stream=True, max_tokens=2000, ignore_eos=True)))
        while self.active:
            if not await peer.reader.read(512):
                break
            await asyncio.sleep(0.05)
        peer.disconnect()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("policy", ["least_loaded", "price"])
async def test_no_request_is_lost_while_engines_die_hang_and_fail(policy: str) -> None:
    engines = [EngineProcess(free_port(21_000 + 100 * number + os.getpid() % 90)) for number in range(3)]
    try:
        for engine in engines:
            await engine.start()
        await _under_chaos(engines, policy)
    finally:
        for engine in engines:
            await engine.kill()


async def _under_chaos(engines: list[EngineProcess], policy: str) -> None:
    times = {"connect_timeout_s": 2.0, "first_byte_timeout_s": 2.0, "between_chunks_timeout_s": 1.0, "max_attempts": 3}
    nodes = [{"url": f"http://127.0.0.1:{engine.port}"} for engine in engines]
    health = {
        "interval_s": 0.1,
        "timeout_s": 0.5,
        "breaker_open_s": 0.1,
        "breaker_open_max_s": 1.0,
        "slow_start_s": 0.5,
    }
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

        load.active = False
        await asyncio.gather(*clients)
        print(dict(load.outcomes), f"retries {running.service.counters.retries}")
        assert load.lost == []
        assert load.outcomes["whole"] > 100
        assert load.outcomes["left"] > 0
        assert running.service.counters.retries > 0
        for number in range(3):
            assert running.node(number).outcomes[0] > 0


async def _all_up(running: RunningRouter) -> None:
    await until(lambda: all(node.health.state.value == "up" for node in running.service.fleet), "all nodes up", 30)


# All features at once: priorities, deadlines, rate limits, X-Queue, routes, islands, the journal, reloads.

KEYS = {"calm": "key-of-calm", "eager": "key-of-eager"}
REJECTED = {
    "overloaded", "would_queue", "queue_timeout", "deadline_unreachable", "rate_limit_exceeded", "no_node_available",
    "upstream_failed",
}  # fmt: skip


def all_features(engines: list[EngineProcess], journal: Path, *, hold: bool = True, rate: int = 120) -> Config:
    places = ("near", "near", "far")
    table = quick_table(
        [
            {"url": f"http://127.0.0.1:{engine.port}", "island": place}
            for engine, place in zip(engines, places, strict=True)
        ],
        upstream={
            "connect_timeout_s": 2.0,
            "first_byte_timeout_s": 2.0,
            "between_chunks_timeout_s": 1.0,
            "max_attempts": 3,
        },
        health={
            "interval_s": 0.1,
            "timeout_s": 0.5,
            "breaker_open_s": 0.1,
            "breaker_open_max_s": 1.0,
            "slow_start_s": 0.5,
        },
        routing={"policy": "price"},
        index={"min_prompt_tokens": 32},
        admission={
            "queue_at_router": hold,
            "max_node_backlog_ms": 0.05,
            "max_waiting": 8,
            "max_wait_s": 3.0,
            "queue_threshold": 16,
        },
        islands=[{"name": "far", "round_trip_ms": 2.0, "egress_usd_per_gb": 0.09}],
        island_affinity={"max_delay_ms": 5.0},
        journal={
            "max_decisions": 50,
            "file": str(journal),
            "response_headers": "on_request",
            "file_max_bytes": 200_000,
        },
        keys=[
            {"sha256": hash_key(KEYS["calm"]), "tenant": "calm"},
            {
                "sha256": hash_key(KEYS["eager"]),
                "tenant": "eager",
                "max_priority": "normal",
                "requests_per_min": rate,
                "tokens_per_min": 60_000,
            },
        ],
        routes=[
            {"name": "batch", "header": "x-kind=batch", "priority": "low", "max_wait_s": 1.0, "cache_weight": 0.5},
            {"name": "blind", "header": "x-kind=blind", "policy": "least_loaded", "queue_threshold": 2},
            {
                "name": "quick",
                "header": "x-kind=quick",
                "ttft_deadline_ms": 400.0,
                "total_deadline_ms": 20_000.0,
                "queue_at_router": not hold,
            },
        ],
    )
    return from_table(table, experiment=True)


class HeaderLoad(Load):
    """Clients that send routing headers in random combinations."""

    def __init__(self, running: RunningRouter) -> None:
        super().__init__(running)
        self.rejected: Counter[str] = Counter()

    async def _send_one(self, random: Random, number: int) -> None:
        tenant = random.choice(list(KEYS))
        headers = [f"Authorization: Bearer {KEYS[tenant]}"]
        for header, chance in (
            (f"X-Priority: {random.choice(('high', 'normal', 'low'))}", 0.5),
            ("X-Queue: no", 0.15),
            (f"X-Deadline-Ttft-Ms: {random.choice((1, 50, 5000))}", 0.2),
            (f"X-Deadline-Ms: {random.choice((5, 500, 30_000))}", 0.2),
            (f"X-Kind: {random.choice(('batch', 'blind', 'quick', 'other'))}", 0.6),
            (f"X-Session-Id: {number % 5}", 0.3),
            ("X-Warmroute-Explain: 1", 0.5),
        ):
            if random.random() < chance:
                headers.append(header)
        peer = await self.running.connect()
        streams = random.random() < 0.6
        more: dict[str, Any] = {"stream_options": {"include_usage": True}} if streams else {}
        words = f"conversation {number % 7} " * random.choice((2, 60, 400))
        peer.write(post(chat(words, stream=streams, max_tokens=random.randrange(5, 40), **more), headers=headers))
        if random.random() < 0.25:
            await asyncio.sleep(random.random() * 0.1)
            peer.disconnect()
            self.outcomes["left"] += 1
            return
        found = await peer.response(patience_s=30)
        if found.status != 200:
            code = found.error["code"]
            self.rejected[code] += 1
            if found.status not in (429, 502, 503, 504) or code not in REJECTED:
                self.lost.append(f"{found.status} {found.body[:200]!r}")
            await asyncio.sleep(random.random() * 0.02)
        elif found.complete:
            self.outcomes["whole"] += 1
        else:
            self.outcomes["broken off"] += 1
            assert b'"code":"upstream_broken"' in found.chunks[-1], "a stream broke off without an error event"
        peer.close()


@pytest.mark.timeout(180)
async def test_every_counter_returns_to_zero_with_all_features_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    charges: list[RequestCharge] = []
    begin = TenantLimits.begin

    def noted(self: TenantLimits, *given: Any) -> RequestCharge:
        charges.append(begin(self, *given))
        return charges[-1]

    monkeypatch.setattr(TenantLimits, "begin", noted)
    engines = [EngineProcess(free_port(22_000 + 100 * number + os.getpid() % 90)) for number in range(3)]
    try:
        for engine in engines:
            await engine.start()
        await _all_features(engines, tmp_path / "journal", charges)
    finally:
        for engine in engines:
            await engine.kill()


async def _all_features(engines: list[EngineProcess], journal: Path, charges: list[RequestCharge]) -> None:
    config = all_features(engines, journal)
    async with router(config=config, wait=3) as running:
        service = running.service
        service.admission.without_node.first_node_wait_s = 2.0  # as with scaling
        load = HeaderLoad(running)
        clients = [asyncio.create_task(load.client(number)) for number in range(CLIENTS)]
        first, second, third = engines

        def reload(**changed: Any) -> None:
            config = all_features(engines, journal, **changed)
            service.config_reload.read_config = lambda: config
            assert service.reload() is None

        await asyncio.sleep(PHASE_S)
        await first.kill()
        await asyncio.sleep(PHASE_S)
        await first.start()
        reload(hold=False, rate=60)  # while requests are queued
        await asyncio.sleep(PHASE_S / 2)
        reload(rate=240)
        await _all_up(running)
        await second.fail("hang")
        await third.fail("error500")
        await asyncio.sleep(PHASE_S)
        await second.fail("none")
        await third.fail("none")
        await _all_up(running)
        for node in list(service.fleet):  # no node accepts requests: all wait for a first node, and some clients leave
            service.fleet.drain(node.name)
        await asyncio.sleep(PHASE_S / 2)
        waiting_for_first_node = len(service.admission.queue.waiting_for_first_node)
        for node in list(service.fleet):
            service.fleet.drain(node.name, False)
        await asyncio.sleep(PHASE_S)

        load.active = False
        await asyncio.gather(*clients)
        print(
            dict(load.outcomes),
            dict(load.rejected),
            f"held {service.admission.queue.queued_total}, waiting_for_first_node {waiting_for_first_node}",
        )
        assert load.lost == []
        assert load.outcomes["whole"] > 50 and load.outcomes["left"] > 10 and waiting_for_first_node > 0
        assert {"would_queue", "deadline_unreachable", "rate_limit_exceeded"} <= load.rejected.keys()
        try:
            await until(lambda: _held(running) == [], "nothing is held any more", 30.0)
        except AssertionError:
            raise AssertionError(f"still held: {_held(running)}") from None
        unsettled = sum(not charge._settled for charge in charges)
        assert charges and unsettled <= service.counters.disconnects + service.counters.interrupted
        await until(lambda: not service.last_decisions.pending, "the journal is written")
    assert len(service.last_decisions) == 50 and service.counters.journal_written > 50


def _held(running: RunningRouter) -> list[str]:
    service = running.service
    held = [
        f"{name}: {left}"
        for name in ("waiting", "waiting_for_first_node", "tenants", "past_work_ms")
        if (left := getattr(service.admission.queue, name))
    ]
    for node in service.fleet:
        for name in ("inflight", "context_tokens", "kv_new", "pending_work", "unstarted"):
            left = getattr(node, name)
            held += [f"{name} of {node.name}: {left}"] if left else []
    for group in service.fleet.groups:
        held += [f"{name} of a group" for name in ("waiting", "inflight") if getattr(group, name)]
    held += [f"queue to {island.name}" for island in service.fleet.islands if island.queue_ms]
    return held
