"""A node that follows a script and keeps what it received."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from support.engine_scripts import Behaviour, failing, http_response, normal, script, vllm_metrics

_DISCONNECTED = (ConnectionError, RuntimeError)
"""What writing raises after the other side has closed; uvloop's closed transports raise the latter."""


@dataclass(eq=False)
class ReceivedRequest:
    """One request as the engine received it, byte for byte."""

    connection: int
    head: bytes
    body: bytes
    at_s: float
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set if the router disconnected before the response was complete."""
    left_s: float = 0.0
    """When the engine noticed that."""
    ended: bool = False
    written: int = 0
    """Bytes of the response that the engine wrote to its socket so far (`huge` only)."""

    @property
    def line(self) -> bytes:
        return self.head.partition(b"\r\n")[0]

    @property
    def target(self) -> bytes:
        return self.line.split(b" ")[1]

    @property
    def fields(self) -> list[tuple[bytes, bytes]]:
        lines = self.head.split(b"\r\n")[1:-2]
        return [(name.lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines)]

    def get(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.fields if key == name.lower()]


class ScriptedEngine:
    """Its behaviours can be changed while it runs."""

    def __init__(self, *models: str, tls: Any = None, host: str = "127.0.0.1", port: int = 0) -> None:
        self.models = models or ("m",)
        self.host = host
        self.behave: Behaviour = normal()
        self.health: Behaviour = script(http_response(b""))
        self.list_models: Behaviour | None = None
        self.tokenize: Behaviour = failing(404)
        self.metrics: Behaviour = script(http_response(vllm_metrics(), content_type=b"text/plain"))
        self.own_paths: dict[bytes, Behaviour] = {
            path: failing(404)
            for path in (b"/kv_event_sources", b"/server_info", b"/prometheus/metrics", b"/kv_cache_events")
        }
        """Further requests of the router itself."""
        self.seen: list[ReceivedRequest] = []
        """Requests of clients: no health checks, model lists or metrics."""
        self.checks: list[ReceivedRequest] = []
        self.port = port
        self.connections = 0
        """Open now."""
        self.accepted = 0
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://{self.host}:{self.port}"

    async def listen(self) -> None:
        self._server = await asyncio.start_server(
            self._connected, self.host, self.port, ssl=self._tls, limit=1 << 20, backlog=1024
        )
        self.port = self._server.sockets[0].getsockname()[1]

    def stop_listening(self) -> None:
        """Refuse new connections. The open ones stay."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def refuse(self) -> None:
        """Stop listening, and abort the open connections."""
        self.stop_listening()
        self.drop_connections()
        await asyncio.sleep(0)

    def drop_connections(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def close(self) -> None:
        await self.refuse()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        self.connections += 1
        self.accepted += 1
        try:
            await self._serve(reader, writer, self.accepted)
        except (*_DISCONNECTED, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:
            pass
        finally:
            self.connections -= 1
            self._writers.discard(writer)
            self._tasks.discard(task)
            writer.transport.abort() if task.cancelling() else writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        next_byte = asyncio.ensure_future(reader.read(1))
        try:
            while True:
                first = await next_byte
                if not first:
                    return
                head = first + await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
                body = await reader.readexactly(int(length[1])) if length else b""
                received = ReceivedRequest(number, head, body, time.monotonic())
                behave = self._behaviour(received)
                next_byte = asyncio.ensure_future(reader.read(1))
                playing = asyncio.ensure_future(behave(self, received, writer))
                try:
                    await asyncio.wait({next_byte, playing}, return_when=asyncio.FIRST_COMPLETED)
                    if not playing.done() or isinstance(playing.exception(), _DISCONNECTED):
                        received.left_s = time.monotonic()
                        received.left.set()
                        return
                    playing.result()
                    received.ended = True
                    if writer.is_closing():
                        return
                finally:
                    playing.cancel()
        finally:
            next_byte.cancel()

    def _behaviour(self, received: ReceivedRequest) -> Behaviour:
        path = received.target.partition(b"?")[0]
        if path == b"/health":
            self.checks.append(received)
            return self.health
        if path == b"/metrics":
            return self.metrics
        if path == b"/v1/models" and received.line.startswith(b"GET"):
            cards = [{"id": model, "object": "model", "owned_by": "fake"} for model in self.models]
            return self.list_models or script(http_response(json.dumps({"object": "list", "data": cards}).encode()))
        if path in self.own_paths:
            return self.own_paths[path]
        if path == b"/tokenize" and b"\r\nx-request-id:" not in received.head.lower():
            return self.tokenize  # a request of the router itself
        self.seen.append(received)
        return self.behave


@asynccontextmanager
async def engines(count: int = 1, *models: str) -> AsyncIterator[list[ScriptedEngine]]:
    started = [ScriptedEngine(*models) for _ in range(count)]
    try:
        for engine in started:
            await engine.listen()
        yield started
    finally:
        for engine in started:
            await engine.close()


class BlackHole:
    """A port whose accept queue is full: connecting to it hangs."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen(0)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._fillers: list[socket.socket] = []
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", self.port))
            self._fillers.append(filler)

    def close(self) -> None:
        for each in (*self._fillers, self._socket):
            each.close()
