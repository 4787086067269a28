"""The picker decides as the proxy does: the same requests at the same moments lead to the same journal.

A clock of the test's own moves from event to event: a request arrives, its first token comes, its response ends. The
proxy sends the request to scripted engines; of the picker's requests the test is Envoy and engine.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

import pytest
from support.engine_scripts import SSE_HEAD, chunk, http_response
from support.picker import FakeEnvoy, RunningPicker, picker
from support.polling import until
from support.raw_client import RawConnection, post
from support.running_router import RunningRouter, router
from support.scripted_engine import ReceivedRequest, ScriptedEngine, engines

from warmroute.app.journal import describe
from warmroute.app.service import Service
from warmroute.core.messages import QUEUE, Due

NODES = 3
QUIET: dict[str, Any] = {
    "health": {"interval_s": 3600.0},
    "polling": {"interval_s": 3600.0},
    "routing": {"policy": "price", "seed": 7},
    "hedging": {"max_ratio": 0.0},
    "index": {"assumed_cache_tokens": 40_000},
}
BLOCK = 64
"""Characters that an engine caches or computes together."""


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Request:
    number: int
    arrives_s: float
    text: str
    stream: bool
    node: int = -1
    cached: int = 0

    @property
    def tokens(self) -> int:
        return len(self.text) // 4

    def body(self) -> bytes:
        messages = [{"role": "user", "content": self.text}]
        more = {"stream_options": {"include_usage": True}} if self.stream else {}
        return json.dumps({"model": "m", "messages": messages, "stream": self.stream, **more}).encode()

    def first(self) -> bytes:
        return b'data: {"choices":[{"delta":{"content":"yes"}}]}\n\n'

    def rest(self) -> bytes:
        """The end of the response with its usage; the whole of a response that is not streamed."""
        details = {"cached_tokens": self.cached}
        counts = {"prompt_tokens": self.tokens, "completion_tokens": 20, "prompt_tokens_details": details}
        if not self.stream:
            return json.dumps({"choices": [{"message": {"content": "yes"}}], "usage": counts}).encode()
        return b"data: %b\n\ndata: [DONE]\n\n" % json.dumps({"choices": [], "usage": counts}).encode()


def conversations(count: int, turns: int, seed: int) -> list[Request]:
    """Return the requests of conversations that share three system prompts and overlap in time."""
    draw = random.Random(seed)

    def words(many: int) -> str:
        return " ".join(f"word{draw.randrange(10_000)}" for _ in range(many))

    systems = [words(300) for _ in range(3)]
    found = []
    for one in range(count):
        text, at_s = f"{systems[one % 3]} {words(60)}", draw.random() * 2.0
        for _ in range(turns):
            found.append((at_s, text))
            text = f"{text} {words(draw.randrange(20, 200))}"
            at_s += 0.15 + draw.random()
    found.sort()
    return [Request(number, at_s, text, draw.random() < 0.7) for number, (at_s, text) in enumerate(found)]


class Side(Protocol):
    service: Service

    async def send(self, request: Request) -> int:
        """Send a request. Return the number of its node."""

    async def first_token(self, request: Request) -> None: ...

    async def end(self, request: Request) -> None: ...


@dataclass
class Caches:
    """What each engine has cached: the blocks of the prompts that it served."""

    by_node: list[set[str]] = field(default_factory=lambda: [set() for _ in range(NODES)])

    def serve(self, request: Request) -> None:
        """Count the cached tokens of a prompt, and cache all of it."""
        held, text = self.by_node[request.node], request.text
        prefixes = [text[:end] for end in range(BLOCK, len(text) + 1, BLOCK)]
        hits = next((at for at, one in enumerate(prefixes) if one not in held), len(prefixes))
        request.cached = hits * BLOCK // 4
        held.update(prefixes)


async def play(side: Side, clock: Clock, requests: list[Request]) -> list[dict[str, Any]]:
    """Run requests, event by event. Return the decisions in the order of arrival."""
    caches, service, started_s = Caches(), side.service, clock.now_s
    events = [(started_s + one.arrives_s, one.number, "arrives") for one in requests]
    heapq.heapify(events)
    while events:
        clock.now_s, number, what = heapq.heappop(events)
        service.proxy.tell(Due(QUEUE), clock.now_s)  # what happens every few ms happens now on both sides
        service.cache_view.tidy(clock.now_s)
        request = requests[number]
        if what == "arrives":
            request.node = await side.send(request)
            caches.serve(request)
            first_s = clock.now_s + 0.005 + (request.tokens - request.cached) * 0.0002
            if request.stream:
                heapq.heappush(events, (first_s, number, "first token"))
            heapq.heappush(events, (first_s + 0.2, number, "ends"))
        elif what == "first token":
            await side.first_token(request)
        else:
            await side.end(request)
    calls = [service.last_decisions.find(b"request-%d" % one.number) for one in requests]
    described = [describe(call, 0.0) for call in calls if call is not None]
    assert len(described) == len(requests)
    for one in described:
        del one["time"]
    return described


class ProxySide:
    def __init__(self, running: RunningRouter, nodes: list[ScriptedEngine]) -> None:
        self.service = running.service
        self._running, self._nodes = running, nodes
        self._clients: dict[int, RawConnection] = {}
        self._writers: dict[int, tuple[asyncio.StreamWriter, asyncio.Event]] = {}
        for node in nodes:
            node.behave = self._hold

    async def _hold(self, engine: ScriptedEngine, seen: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        """Let the test write the response."""
        ended = asyncio.Event()
        self._writers[int(seen.get(b"x-request-id")[0].rpartition(b"-")[2])] = writer, ended
        await ended.wait()

    async def send(self, request: Request) -> int:
        client = self._clients[request.number] = await self._running.connect()
        client.write(post(request.body(), headers=[f"X-Request-Id: request-{request.number}"]))
        await until(lambda: request.number in self._writers, "a node has the request")
        port = self._writers[request.number][0].get_extra_info("sockname")[1]
        return [node.port for node in self._nodes].index(port)

    async def first_token(self, request: Request) -> None:
        self._writers[request.number][0].write(SSE_HEAD + chunk(request.first()))
        await self._clients[request.number].reader.readuntil(b"yes")

    async def end(self, request: Request) -> None:
        writer, ended = self._writers[request.number]
        client = self._clients[request.number]
        if request.stream:
            writer.write(chunk(request.rest()) + b"0\r\n\r\n")
            await client.reader.readuntil(b"0\r\n\r\n")
        else:
            writer.write(http_response(request.rest()))
            assert (await client.response()).complete
        ended.set()
        client.close()


class PickerSide:
    def __init__(self, running: RunningPicker, nodes: list[ScriptedEngine], mode: str, responses: str) -> None:
        self.service = running.service
        self._running, self._nodes, self._mode, self._responses = running, nodes, mode, responses
        self._streams: dict[int, FakeEnvoy] = {}

    async def send(self, request: Request) -> int:
        envoy = self._streams[request.number] = self._running.stream(self._mode, self._responses)
        await envoy.send_request(request.body(), x_request_id=f"request-{request.number}")
        answer = await envoy.decision()
        if self._mode == "duplex":
            await envoy.body_back()
        elif self._mode == "streamed":
            await envoy.read()
        return [f"127.0.0.1:{node.port}" for node in self._nodes].index(answer.endpoints[0])

    def _served(self, request: Request) -> str:
        return f"127.0.0.1:{self._nodes[request.node].port}"

    async def first_token(self, request: Request) -> None:
        envoy = self._streams[request.number]
        await envoy.respond(request.first(), served=self._served(request), end=False)

    async def end(self, request: Request) -> None:
        envoy = self._streams[request.number]
        if request.stream:
            await envoy.show(request.rest())
        else:
            await envoy.respond(request.rest(), served=self._served(request), content_type="application/json")
        await envoy.finish()


@asynccontextmanager
async def proxy_side() -> AsyncIterator[Side]:
    async with engines(NODES) as nodes, router(*nodes, **QUIET) as running:
        yield ProxySide(running, nodes)


@asynccontextmanager
async def picker_side(mode: str, responses: str) -> AsyncIterator[Side]:
    async with engines(NODES) as nodes, picker(*nodes, **QUIET) as running:
        yield PickerSide(running, nodes, mode, responses)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("warmroute.app.service.time", SimpleNamespace(monotonic=found, time=time.time))
    periodic = SimpleNamespace(monotonic=found, thread_time=time.thread_time)
    monkeypatch.setattr("warmroute.app.process.time", periodic)
    return found


@pytest.mark.parametrize(
    ("mode", "responses"), [("buffered", "streamed"), ("streamed", "streamed"), ("duplex", "duplex")]
)
async def test_the_picker_takes_the_same_decisions_as_the_proxy(mode: str, responses: str, clock: Clock) -> None:
    async with proxy_side() as side:
        expected = await play(side, clock, conversations(24, 5, seed=3))
    clock.now_s = 1000.0
    async with picker_side(mode, responses) as side:
        found = await play(side, clock, conversations(24, 5, seed=3))
    assert {one["node"] for one in expected} == {f"node{number}" for number in range(NODES)}
    hits = sum(one["reported"]["cached_tokens"] for one in expected) / sum(one["prompt_tokens"] for one in expected)
    assert 0.5 < hits < 1.0
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours == theirs, number
