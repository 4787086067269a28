"""Simulated engines as processes, and subscribers to their KV events."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from warmroute.lab.demo.processes import Child, Children
from warmroute.lab.engine.blocks import EventBatch, KvEvent

BLOCK = 16


class FakeEngine:
    """One `warmroute engine` process: fast, and with a small cache."""

    def __init__(self, children: Children, *flags: str, speed: float = 20, blocks: int = 1000) -> None:
        self.child: Child = children.start(
            *("engine", "--port", "0", "--profile", "h200-1.5b", "--blocks", str(blocks), "--speed", str(speed)),
            *("--events-port", "0", "--replay-port", "0", *flags),
        )
        started = json.loads(self.child.first_line())
        self.url: str = started["url"]
        self.event_ports: list[int] = started["events"]
        self.replay_ports: list[int] = started["replay"]

    def request(
        self, path: str, body: Any = None, method: str | None = None, timeout: float = 10, **headers: str
    ) -> tuple[int, Any]:
        """Return the status and the body, decoded if it is JSON."""
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(self.url + path, data, fields, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                status, raw = response.status, response.read()
        except urllib.error.HTTPError as error:
            status, raw = error.code, error.read()
        try:
            return status, json.loads(raw)
        except ValueError:
            return status, raw.decode()

    def complete(self, prompt: Any, max_tokens: int = 1, **more: Any) -> dict[str, Any]:
        status, body = self.request("/v1/completions", {"prompt": prompt, "max_tokens": max_tokens, **more})
        assert status == 200, body
        completion: dict[str, Any] = body
        return completion

    def cached(self, prompt: Any, **more: Any) -> int:
        """Send a prompt and return its cached tokens, as the engine reports them."""
        tokens: int = self.complete(prompt, **more)["usage"]["prompt_tokens_details"]["cached_tokens"]
        return tokens

    def fail(self, mode: str, **more: Any) -> None:
        status, body = self.request("/_sim/fail", {"mode": mode, **more})
        assert status == 200, body

    def metric(self, name: str) -> float:
        _, page = self.request("/metrics")
        lines = [line for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        assert lines, name
        return sum(float(line.rpartition(" ")[2]) for line in lines)


class Subscriber:
    """A ZMQ SUB socket that receives one rank's KV events."""

    def __init__(self, port: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.rcvtimeo = 5000
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        time.sleep(0.2)  # events that the engine sends before the subscription arrives are lost

    def next_frames(self) -> list[bytes]:
        return self._socket.recv_multipart()

    def next(self) -> tuple[bytes, int, EventBatch]:
        topic, sequence, payload = self.next_frames()
        return topic, int.from_bytes(sequence, "big"), msgspec.msgpack.decode(payload, type=EventBatch)

    def events(self) -> list[KvEvent]:
        return self.next()[2].events

    def is_silent(self, ms: int = 200) -> bool:
        return not self._socket.poll(ms)

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


StartEngine = Callable[..., FakeEngine]
Subscribe = Callable[[int], Subscriber]


def replay_events(port: int, first: int) -> list[tuple[bytes, int, EventBatch]]:
    """Request the event batches from a sequence number on, as a router does after a gap."""
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


def wait_until(condition: Callable[[], bool], within_s: float = 5.0) -> float:
    """Poll until the condition holds, and return how long that took (s)."""
    started_s = time.monotonic()
    while not condition():
        assert time.monotonic() - started_s < within_s, "the condition did not become true"
        time.sleep(0.005)
    return time.monotonic() - started_s
