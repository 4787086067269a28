"""When a client disconnects, the router closes its connection to the node within 100 ms and frees everything it held.

The tests allow more time, for noisy machines, and print what they measured (pytest -s).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time

import pytest
from support.engine_scripts import (
    HANG,
    SSE_HEAD,
    Behaviour,
    chunk,
    hanging,
    http_response,
    huge,
    script,
    sse_event,
    stream,
)
from support.polling import until
from support.raw_client import RawConnection, chat, post
from support.running_router import router
from support.scripted_engine import BlackHole, ScriptedEngine, engines

BOUND_S = 0.5


def leaves_by_close(peer: RawConnection) -> None:
    peer.writer.transport.abort()


def leaves_by_reset(peer: RawConnection) -> None:
    peer.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.writer.transport.abort()


def leaves_by_half_close(peer: RawConnection) -> None:
    peer.writer.write_eof()


WAYS = [leaves_by_close, leaves_by_reset, leaves_by_half_close]
MOMENTS: dict[str, tuple[Behaviour, bytes]] = {
    "waiting for the head": (hanging, b""),
    "inside the head": (script(b"HTTP/1.1 200 OK\r\nContent-", HANG), b""),
    "after the node's head": (script(SSE_HEAD, HANG), b""),
    "inside a stream": (stream(10_000, 0.01), sse_event(3)),
    "inside a silent stream": (script(SSE_HEAD, chunk(sse_event(0)), HANG), sse_event(0)),
    "inside a chunk": (script(SSE_HEAD, b"ff\r\nabc", HANG), b"abc"),
    "inside a sized response": (script(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nabc", HANG), b"abc"),
    "inside a response until close": (script(b"HTTP/1.1 200 OK\r\n\r\nabc", HANG), b"abc"),
}


@pytest.mark.parametrize("leave", WAYS)
@pytest.mark.parametrize(("behave", "sees"), MOMENTS.values(), ids=MOMENTS)
async def test_a_client_that_leaves_frees_the_node(behave: Behaviour, sees: bytes, leave: object) -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = behave
        peer = await r.connect()
        peer.write(post())
        await until(lambda: engine.seen)
        if sees:
            await asyncio.wait_for(peer.reader.readuntil(sees), 10)
        assert r.node(0).inflight == 1
        left_s = time.monotonic()
        leave(peer)  # type: ignore[operator]
        await asyncio.wait_for(engine.seen[0].left.wait(), 5)
        took_s = engine.seen[0].left_s - left_s
        print(f"closed upstream after {took_s * 1000:.1f} ms")
        assert took_s < BOUND_S
        await until(lambda: r.node(0).inflight == 0)
        assert r.service.counters.disconnects == 1 and r.node(0).outcomes[5] == 1
        assert r.node(0).health.state.value == "up", "a disconnected client is not the node's failure"
        engine.behave = script(http_response())
        assert (await r.request()).status == 200


async def test_a_client_that_leaves_while_the_router_connects_frees_the_node() -> None:
    hole = BlackHole()
    try:
        async with router(
            hole, wait=0, upstream={"connect_timeout_s": 3.0}, health={"timeout_s": 0.1, "consecutive_timeouts": 1}
        ) as r:
            await until(lambda: r.service.fleet.can_serve)
            peer = await r.connect()
            peer.write(post())
            await until(lambda: r.node(0).inflight == 1)
            left_s = time.monotonic()
            peer.disconnect()
            await until(lambda: r.node(0).inflight == 0)
            assert time.monotonic() - left_s < BOUND_S
            assert r.service.listener.buffered_bytes == 0
    finally:
        hole.close()


async def test_no_node_is_retried_for_a_client_that_left() -> None:
    async with engines(2) as [first, second], router(first, second, upstream={"first_byte_timeout_s": 0.5}) as r:
        first.behave = hanging
        peer = await r.connect()
        peer.write(post())
        await until(lambda: first.seen)
        peer.disconnect()
        await asyncio.wait_for(first.seen[0].left.wait(), 5)
        await asyncio.sleep(0.8)
        assert second.seen == []


async def test_a_client_that_leaves_in_the_middle_of_its_body_leaves_no_memory_behind() -> None:
    async with engines() as [engine], router(engine) as r:
        for head in ("Content-Length: 1000", "Transfer-Encoding: chunked"):
            peer = await r.connect()
            await peer.send(f"POST /v1/completions HTTP/1.1\r\nHost: r\r\n{head}\r\n\r\n3e8\r\nabc".encode())
            await until(lambda: r.service.listener.buffered_bytes)
            peer.disconnect()
            await until(lambda: r.service.listener.buffered_bytes == 0)
        assert engine.seen == []


async def test_many_clients_that_leave_at_once_leave_nothing_behind() -> None:
    async with engines(3) as three, router(*three) as r:
        for engine, behave in zip(three, (hanging, stream(1000, 0.01), huge(100_000_000)), strict=True):
            engine.behave = behave
        peers = [await r.connect() for _ in range(60)]
        for peer in peers:
            peer.write(post())
        await until(lambda: r.inflight() == 60)
        for peer in peers:
            peer.disconnect()
        await until(lambda: r.inflight() == 0)
        await until(lambda: all(seen.left.is_set() or seen.ended for engine in three for seen in engine.seen))


async def test_a_client_that_leaves_a_paused_response_frees_the_node() -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = huge(200_000_000)
        peer = await r.connect()
        peer.pause_reading()
        peer.write(post())
        await until(lambda: engine.seen and is_paused(engine))
        await asyncio.sleep(0.2)
        left_s = time.monotonic()
        peer.disconnect()
        await asyncio.wait_for(engine.seen[0].left.wait(), 5)
        assert engine.seen[0].left_s - left_s < BOUND_S


def is_paused(engine: ScriptedEngine) -> bool:
    return engine.seen[0].written > 1_000_000


async def test_a_client_that_pipelined_requests_and_leaves_frees_the_node() -> None:
    """The router buffers the pipelined requests while it reads on."""
    async with engines() as [engine], router(engine) as r:
        engine.behave = hanging
        peer = await r.connect()
        peer.write(post())
        await until(lambda: engine.seen)
        for _ in range(5):
            await peer.send(post(chat("x" * 8_000)))
            await asyncio.sleep(0.02)
        left_s = time.monotonic()
        peer.disconnect()
        await asyncio.wait_for(engine.seen[0].left.wait(), 5)
        assert engine.seen[0].left_s - left_s < BOUND_S


@pytest.mark.parametrize("count", [3, 100])
async def test_a_client_that_pipelined_too_much_and_leaves_frees_the_node(count: int) -> None:
    """More than the kernel's buffers hold: the router must read on to see that the client closed."""
    async with engines() as [engine], router(engine) as r:
        engine.behave = hanging
        peer = await r.connect()
        peer.write(post())
        await until(lambda: engine.seen)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                for _ in range(count):
                    await peer.send(post(chat("x" * 100_000)))
        await asyncio.sleep(0.1)
        peer.disconnect()
        try:
            await asyncio.wait_for(engine.seen[0].left.wait(), 2)
        finally:
            engine.drop_connections()


async def test_a_client_that_half_closes_with_an_unread_response_is_disconnected() -> None:
    async with engines() as [engine], router(engine, limits={"stall_timeout_s": 0.3}) as r:
        engine.behave = huge(30_000_000, sized=False)
        peer = await r.connect()
        peer.pause_reading()
        peer.write(post())
        await until(lambda: engine.seen and engine.seen[0].written > 1_000_000)
        peer.writer.write_eof()
        await until(lambda: not r.service.listener.connections, "the connection is closed")
