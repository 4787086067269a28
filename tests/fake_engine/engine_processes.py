"""Simulated engines as processes, for tests: start one, talk to it, and it is gone at the end."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from warmroute.demo.child_processes import Child, Children
from warmroute.fake_engine.core import EventBatch, KvEvent

SHARED = Path(os.environ.get("WARMROUTE_SHARED", Path(__file__).parents[3] / "shared"))
CAPTURES = SHARED / "data" / "vllm-0.32"
BLOCK = 16


class Engine:
    """One `warmroute engine`: fast, and small enough to fill."""

    def __init__(self, children: Children, *flags: str, speed: float = 20, blocks: int = 1000) -> None:
        self.child: Child = children.start(
            *("engine", "--port", "0", "--profile", "h200-1.5b", "--blocks", str(blocks), "--speed", str(speed)),
            *("--events-port", "0", "--replay-port", "0", *flags),
        )
        told = json.loads(self.child.first_line())
        self.url: str = told["url"]
        self.event_ports: list[int] = told["events"]
        self.replay_ports: list[int] = told["replay"]

    def ask(
        self, path: str, body: Any = None, method: str | None = None, timeout: float = 10, **headers: str
    ) -> tuple[int, Any]:
        """Status and body, read as JSON where it is."""
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(self.url + path, data, fields, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                status, raw = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, raw = error.code, error.read()
        try:
            return status, json.loads(raw)
        except ValueError:
            return status, raw.decode()

    def complete(self, prompt: Any, max_tokens: int = 1, **more: Any) -> dict[str, Any]:
        status, answer = self.ask("/v1/completions", {"prompt": prompt, "max_tokens": max_tokens, **more})
        assert status == 200, answer
        found: dict[str, Any] = answer
        return found

    def cached(self, prompt: Any, **more: Any) -> int:
        """Tokens of a prompt that it says it had."""
        found: int = self.complete(prompt, **more)["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    def fail(self, mode: str, **more: Any) -> None:
        status, answer = self.ask("/_sim/fail", {"mode": mode, **more})
        assert status == 200, answer

    def metric(self, name: str) -> float:
        _, page = self.ask("/metrics")
        lines = [line for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        assert lines, name
        return sum(float(line.rpartition(" ")[2]) for line in lines)


class Subscriber:
    """A real ZMQ SUB on one rank's events."""

    def __init__(self, port: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.rcvtimeo = 5000
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        time.sleep(0.2)  # a subscription takes a moment to arrive, and what was said before it is lost

    def raw(self) -> list[bytes]:
        return self._socket.recv_multipart()

    def next(self) -> tuple[bytes, int, EventBatch]:
        topic, sequence, payload = self.raw()
        return topic, int.from_bytes(sequence, "big"), msgspec.msgpack.decode(payload, type=EventBatch)

    def events(self) -> list[KvEvent]:
        return self.next()[2].events

    def is_silent(self, ms: int = 200) -> bool:
        return not self._socket.poll(ms)

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


StartEngine = Callable[..., Engine]
Subscribe = Callable[[int], Subscriber]


def replay(port: int, first: int) -> list[tuple[bytes, int, EventBatch]]:
    """All batches that a rank still holds from a sequence number on, as a DEALER asks for them."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.rcvtimeo = 5000
        socket.connect(f"tcp://127.0.0.1:{port}")
        socket.send_multipart((b"", first.to_bytes(8, "big")))
        batches: list[tuple[bytes, int, EventBatch]] = []
        while True:
            delimiter, topic, sequence, payload = socket.recv_multipart()
            assert delimiter == b""
            if sequence == b"\xff" * 8:
                assert (topic, payload) == (b"", b"")
                return batches
            decoded = msgspec.msgpack.decode(payload, type=EventBatch)
            batches.append((topic, int.from_bytes(sequence, "big"), decoded))


def until(happens: Callable[[], bool], within_s: float = 5.0) -> float:
    """Waits for it; how long it took (s)."""
    began = time.monotonic()
    while not happens():
        assert time.monotonic() - began < within_s, "it did not happen"
        time.sleep(0.005)
    return time.monotonic() - began
