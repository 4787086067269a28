"""Simulated engines, a picker and an Envoy as processes, and clients that load them."""

from __future__ import annotations

import asyncio
import json
import random
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Sequence
from typing import Any

from envoy_process import any_port
from support.engine_processes import FakeEngine

from warmroute.lab.demo.processes import Child, Children

GAUGES = ("warmroute_node_requests_in_flight", "warmroute_requests_waiting", "warmroute_client_connections")
WORDS = [f"word{number}" for number in range(500)]


class PickerProcess:
    """`warmroute picker` or `serve`, which can be killed and started again on its ports."""

    def __init__(self, children: Children, urls: Sequence[str], *flags: str, command: str = "picker") -> None:
        self._children = children
        self.port, self.admin_port = any_port(), any_port()
        nodes = [word for url in urls for word in ("--node", url)]
        self._arguments = (command, "--port", str(self.port), "--admin-port", str(self.admin_port), *nodes, *flags)
        self.child: Child
        self.start()

    def start(self) -> None:
        self.child = self._children.start(*self._arguments)
        until_s = time.monotonic() + 30.0
        while time.monotonic() < until_s and not self.child.has_ended():
            try:
                if self.admin("/ready"):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        raise AssertionError(self.child.stderr_text())

    def kill(self) -> None:
        self.child.process.kill()
        self.child.process.wait()

    def admin(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}{path}", timeout=10.0) as answer:
            body: bytes = answer.read()
            return body

    def metrics(self, name: str) -> dict[str, float]:
        lines = self.admin("/metrics").decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if line.startswith((f"{name}{{", f"{name} ")))
        return {label.removeprefix(name): float(value) for label, _, value in pairs}

    def is_idle(self) -> bool:
        return not any(sum(self.metrics(name).values()) for name in GAUGES)

    def until_idle(self, patience_s: float = 20.0) -> None:
        until_s = time.monotonic() + patience_s
        while not self.is_idle():
            assert time.monotonic() < until_s, {name: self.metrics(name) for name in GAUGES}
            time.sleep(0.05)


def fast_engines(children: Children, count: int, *flags: str) -> list[FakeEngine]:
    flags = ("--max-model-len", "1000000", "--answer-tokens", "4", *flags)
    return [FakeEngine(children, *flags, speed=2000, blocks=60_000) for _ in range(count)]


def port_of(engine: FakeEngine) -> int:
    return int(engine.url.rpartition(":")[2])


def request_body(text: str, stream: bool, **more: Any) -> bytes:
    messages = [{"role": "user", "content": text}]
    return json.dumps({"model": "sim", "messages": messages, "stream": stream, "max_tokens": 4, **more}).encode()


class Load:
    """Clients that send requests of many sizes, and abort some."""

    def __init__(self, port: int, seed: int = 1, abort_share: float = 0.05, largest: int = 1_000_000) -> None:
        self._port = port
        self._random = random.Random(seed)
        self._abort_share = abort_share
        self._largest = largest
        self._texts = [
            f"conversation {one} " + " ".join(WORDS[(one + at) % 500] for at in range(largest // 7))
            for one in range(40)
        ]
        self.statuses: Counter[str] = Counter()
        self.errors: Counter[bytes] = Counter()
        """The ends of error responses, with the bytes of their requests."""
        self.slowest_s = 0.0

    async def run(self, requests: int, clients: int = 12) -> None:
        left = iter(range(requests))

        async def client() -> None:
            for number in left:
                started_s = time.monotonic()
                try:
                    async with asyncio.timeout(60.0):
                        outcome = await self._one(number)
                except (ConnectionError, asyncio.IncompleteReadError):
                    outcome = "disconnected"
                except TimeoutError:
                    outcome = "HUNG"
                self.statuses[outcome] += 1
                self.slowest_s = max(self.slowest_s, time.monotonic() - started_s)

        await asyncio.gather(*(client() for _ in range(clients)))

    def _body(self, number: int) -> bytes:
        draw = self._random
        size = int(1_000 * (self._largest / 1_000) ** (draw.random() ** 2))  # most are small, as in real traffic
        return request_body(draw.choice(self._texts)[:size], stream=bool(number % 2))

    async def _one(self, number: int) -> str:
        body = self._body(number)
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 22)
        try:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: e\r\nContent-Length: {len(body)}\r\n"
            head += "Content-Type: application/json\r\nConnection: close\r\n\r\n"
            aborts = self._random.random() < self._abort_share
            if aborts and number % 3 == 0:  # in the middle of the body
                writer.write(head.encode() + body[: len(body) // 2])
                await writer.drain()
                writer.transport.abort()
                return "aborted"
            writer.write(head.encode() + body)
            await writer.drain()
            if aborts:
                await asyncio.sleep(self._random.random() * 0.02)
                writer.transport.abort()
                return "aborted"
            answer = await reader.read(-1)
            status = answer[9:12].decode()
            if status == "200" and (b"[DONE]" if number % 2 else b'"usage"') not in answer:
                return "LOOKS COMPLETE" if _has_its_end(answer) else "broken off"
            if status != "200":
                self.errors[answer[-200:]] += len(body)
            return status
        finally:
            writer.close()


def _has_its_end(answer: bytes) -> bool:
    """Return whether a client would take the response for complete: by its length, or by its last chunk."""
    head, _, body = answer.partition(b"\r\n\r\n")
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    if b"content-length" in fields:
        return len(body) >= int(fields[b"content-length"])
    return body.endswith(b"0\r\n\r\n") if b"transfer-encoding" in fields else True
