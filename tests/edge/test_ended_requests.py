"""What a request held is freed when it ends, however it ends, without a garbage collection: bodies may be large, and
the router counts only those of running requests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from support.engine_scripts import (
    RESET,
    SSE_HEAD,
    Behaviour,
    chunk,
    failing,
    hanging,
    normal,
    script,
    sse_event,
    stream,
)
from support.polling import until
from support.raw_client import chat, post
from support.running_router import RunningRouter, router
from support.scripted_engine import engines

from warmroute.edge.exchange import Exchange, ScanningExchange
from warmroute.edge.tries import NodeTry

SMALL, LARGE = chat("x"), chat("x" * (1 << 20))


@pytest.fixture(autouse=True)
def without_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def until_freed(r: RunningRouter) -> None:
    def left() -> list[str]:
        kinds = (Exchange, ScanningExchange, NodeTry)
        return [type(thing).__name__ for thing in gc.get_objects() if type(thing) in kinds]

    await until(lambda: r.inflight() == 0 and not left(), "everything that the request held is freed")


@pytest.mark.parametrize("body", [SMALL, LARGE], ids=["small", "large"])
async def test_a_request_whose_client_leaves_is_freed(body: bytes) -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = hanging
        peer = await r.connect()
        peer.write(post(body))
        await until(lambda: engine.seen)
        peer.writer.transport.abort()
        await until_freed(r)


@pytest.mark.parametrize(
    "behave",
    [
        normal(),
        stream(3),
        failing(500),
        failing(429),
        failing(400),
        script(RESET),
        script(SSE_HEAD, chunk(sse_event(0)), RESET),
    ],
)
@pytest.mark.parametrize("body", [SMALL, LARGE], ids=["small", "large"])
async def test_a_request_with_an_answer_is_freed(behave: Behaviour, body: bytes) -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = behave
        peer = await r.connect()
        peer.write(post(body))
        await until(lambda: engine.seen and r.inflight() == 0)
        await until_freed(r)


async def test_a_request_without_a_node_is_freed() -> None:
    async with engines() as [engine], router(engine) as r:
        for request in (post(chat("x", model="unknown")), post(b"{"), post(chat("x" * (1 << 20), model="unknown"))):
            assert (await r.request(request)).status in (400, 404)
        await until_freed(r)
