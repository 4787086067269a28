"""An engine that responds only when a test lets it, so that requests queue in the router.

The router's estimate of the engine's speed is the default (0.05 ms for each token), and it matches prompts as text
(four bytes for each token). So it estimates 460 ms for LONG (8,000 tokens). That is more than the default backlog of a
node (250 ms, admission.max_node_backlog_ms). After the first response it estimates less; with ONE_BY_ONE the engine
still gets one request at a time. Requests stream: of others the router does not see when their prefill ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from support.engine_scripts import http_response, script
from support.polling import until
from support.raw_client import RawConnection, chat, post
from support.running_router import RunningRouter, router
from support.scripted_engine import ScriptedEngine, engines

LONG = "abcdefgh" * 4000
PRICE = {"policy": "price", "seed": 7}
ONE_BY_ONE = {"max_node_backlog_ms": 0.01}


def long_prompt(number: int) -> bytes:
    """Return a request whose prompt shares no prefix with the others."""
    return post(chat(f"{number:08d}{LONG}", stream=True))


class ResponseGate:
    """Makes an engine wait for `release` before each response."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._responses = asyncio.Semaphore(0)
        self.engine = engine
        engine.behave = self._play

    async def _play(self, engine: ScriptedEngine, seen: Any, writer: asyncio.StreamWriter) -> None:
        await self._responses.acquire()
        await script(http_response())(engine, seen, writer)

    def release(self, count: int = 1) -> None:
        for _ in range(count):
            self._responses.release()


@asynccontextmanager
async def busy_engine(**tables: Any) -> AsyncIterator[tuple[RunningRouter, ResponseGate]]:
    """A router over one engine that prefills a long prompt until the gate releases it."""
    async with engines() as [engine], router(engine, routing=PRICE, **tables) as r:
        gate = ResponseGate(engine)
        await send_long_prompt(r, 0)
        await until(lambda: engine.seen)
        yield r, gate
        gate.release(1000)
        for peer in r.peers:
            peer.disconnect()
        await until(lambda: r.service.admission.queue.waiting == 0)


async def send_long_prompt(r: RunningRouter, number: int) -> RawConnection:
    peer = await r.connect()
    peer.write(long_prompt(number))
    return peer


async def until_queued(r: RunningRouter, count: int) -> None:
    await until(lambda: r.service.admission.queue.waiting == count, f"{count} requests are queued")
