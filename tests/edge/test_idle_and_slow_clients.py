"""Thousands of idle or slow clients do not delay the others."""

from __future__ import annotations

import asyncio
import resource
import time
from typing import Any

from support.engine_scripts import DONE, SSE_HEAD, chunk, script
from support.polling import until
from support.raw_client import RawConnection, chat, get, post
from support.running_router import router
from support.scripted_engine import engines

from warmroute.edge.client_connection import LAST_REQUEST_S

IDLE_CONNECTIONS = 3000


async def test_an_idle_connection_is_closed_after_the_idle_timeout() -> None:
    async with engines() as [engine], router(engine, limits={"idle_timeout_s": 0.3}) as r:
        fresh, used = await r.connect(), await r.connect()
        used.write(post())
        await used.response()
        assert await fresh.is_closed() and await used.is_closed()


async def test_a_connection_without_a_request_is_closed_long_before_a_kept_one(encryption: dict[str, Any]) -> None:
    limits = {"first_request_timeout_s": 0.3, "idle_timeout_s": 30.0}
    async with engines() as [engine], router(engine, limits=limits, listen=encryption["listen"]) as r:
        used, fresh = [await r.connect(**encryption["connect"]) for _ in range(2)]
        used.write(post())
        await used.response()
        assert await fresh.is_closed(5.0)
        used.write(post())
        assert (await used.response()).status == 200


async def test_only_a_router_that_stops_hurries_the_first_request() -> None:
    async with engines() as [engine], router(engine, limits={"first_request_timeout_s": 20.0}) as r:
        patient = await r.connect()
        await asyncio.sleep(LAST_REQUEST_S + 0.4)
        patient.write(post())
        assert (await patient.response()).status == 200
        r.service.listener.close_idle()
        assert await (await r.connect()).is_closed(10.0)


async def test_at_the_limit_the_oldest_connection_without_a_request_goes(encryption: dict[str, Any]) -> None:
    async with engines() as [engine], router(engine, limits={"connections": 3}, listen=encryption["listen"]) as r:
        held: list[RawConnection] = []
        for count in range(1, 4):
            held.append(await r.connect(**encryption["connect"]))
            await until(lambda count=count: len(r.service.listener.connections) == count)
        half, silent, last = held
        half.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nX: ")
        await until(lambda: any(client._unparsed for client in r.service.listener.connections))
        for gone in (half, silent):
            peer = await r.connect(**encryption["connect"])
            peer.write(post())
            assert (await peer.response()).status == 200
            if gone is half:
                answer = await gone.response()
                assert answer.status == 503 and answer.error["code"] == "too_many_connections"
            assert await gone.is_closed()
            await until(lambda: len(r.service.listener.connections) == 2)
            held.append(await r.connect(**encryption["connect"]))
            await until(lambda: len(r.service.listener.connections) == 3)
        last.write(post())
        assert (await last.response()).status == 200


async def test_a_flood_of_silent_connections_takes_no_slot_of_others() -> None:
    async with engines() as [engine], router(engine, limits={"connections": 20}) as r:
        flood = [await r.connect() for _ in range(500)]
        for _ in range(5):
            assert (await r.request()).status == 200
        assert len(r.service.listener.connections) <= 20
        await until(lambda: sum(peer.reader.at_eof() for peer in flood) >= 480)


async def test_kept_connections_close_after_their_next_answer_while_the_limit_is_reached(
    encryption: dict[str, Any],
) -> None:
    async with engines() as [engine], router(engine, limits={"connections": 3}, listen=encryption["listen"]) as r:
        held = [await r.connect(**encryption["connect"]) for _ in range(2)]
        for peer in held:
            peer.write(post())
            assert (await peer.response()).get("connection") is None
        held.append(await r.connect(**encryption["connect"]))
        await until(lambda: len(r.service.listener.connections) == 3)
        own, streamed, whole = held
        own.write(get("/health"))
        assert (await own.response()).get("connection") == "close"
        assert await own.is_closed()
        for peer, behaviour in ((streamed, script(SSE_HEAD, chunk(b"data: {}\n\n"), DONE)), (whole, None)):
            held.append(await r.connect(**encryption["connect"]))
            await until(lambda: len(r.service.listener.connections) == 3)
            engine.behave = behaviour or engine.behave
            peer.write(post())
            response = await peer.response()
            assert response.complete and response.get("connection") == "close"
            assert await peer.is_closed()
        await until(lambda: len(r.service.listener.connections) == 2)
        for _ in range(2):
            held[-1].write(post())
            assert (await held[-1].response()).get("connection") is None, "below the limit, connections are kept"


async def test_a_connection_that_waits_for_its_response_is_not_idle() -> None:
    from support.engine_scripts import http_response, script

    async with (
        engines() as [engine],
        router(engine, limits={"idle_timeout_s": 0.2, "header_timeout_s": 0.2, "body_timeout_s": 0.2}) as r,
    ):
        engine.behave = script(1.0, http_response())
        assert (await r.request()).status == 200


async def test_the_idle_timeout_applies_after_a_slow_body() -> None:
    limits = {"idle_timeout_s": 0.4, "body_timeout_s": 8.0}
    async with engines() as [engine], router(engine, limits=limits) as r:
        peer = await r.connect()
        request = post(chat("x" * 100))
        await peer.send(request[:-10])
        await asyncio.sleep(1.0)
        await peer.send(request[-10:])
        assert (await peer.response()).status == 200
        assert await peer.is_closed(3.0)


async def test_hundreds_of_slow_senders_time_out_while_others_are_served() -> None:
    """Slowloris: heads and bodies that arrive a byte now and then."""
    limits = {"header_timeout_s": 1.0, "body_timeout_s": 1.0}
    async with engines() as [engine], router(engine, limits=limits) as r:
        slow = [await r.connect() for _ in range(300)]
        for number, peer in enumerate(slow):
            if number % 2:
                peer.write(b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nX: ")
            else:
                peer.write(b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 1000\r\n\r\n")
        timeouts = asyncio.gather(*(peer.response() for peer in slow))

        async def drip() -> None:
            while True:
                for peer in slow:
                    if not peer.writer.is_closing():
                        peer.write(b"x")
                await asyncio.sleep(0.1)

        dripping = asyncio.ensure_future(drip())
        try:
            worst_s = 0.0
            while not timeouts.done():
                started_s = time.monotonic()
                assert (await r.request()).status == 200
                worst_s = max(worst_s, time.monotonic() - started_s)
                await asyncio.sleep(0.02)
            assert {response.status for response in await timeouts} == {408}
        finally:
            dripping.cancel()
        print(f"slowest response meanwhile: {worst_s * 1000:.0f} ms")
        assert worst_s < 3
        await until(lambda: len(r.service.listener.connections) <= 1)


async def test_thousands_of_idle_connections_do_not_delay_others_and_are_closed() -> None:
    """Fewer where the limit of open files is low. Both ends of a connection are in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = IDLE_CONNECTIONS if hard == resource.RLIM_INFINITY else min(IDLE_CONNECTIONS, (hard - 500) // 2)
    assert count >= 200, f"only {hard} files may be open"
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * count + 500), hard))
    try:
        async with engines() as [engine], router(engine, limits={"idle_timeout_s": 5.0}) as r:
            idle: list[RawConnection] = []
            for _ in range(count // 100):
                idle += await asyncio.gather(*(r.connect() for _ in range(100)))
            await until(lambda: r.service.listener.accepted >= len(idle))
            opened_s = time.monotonic()
            worst_s = 0.0
            for _ in range(50):
                started_s = time.monotonic()
                assert (await r.request()).status == 200
                worst_s = max(worst_s, time.monotonic() - started_s)
            print(f"slowest response with {len(idle)} idle connections: {worst_s * 1000:.0f} ms")
            assert worst_s < 2
            await until(lambda: not r.service.listener.connections, patience_s=25)
            print(f"all closed after {time.monotonic() - opened_s:.1f} s")
            assert all([await peer.is_closed() for peer in idle[::100]])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_head_that_arrives_byte_by_byte_in_time_is_served() -> None:
    async with engines() as [engine], router(engine) as r:
        peer = await r.connect()
        for byte in get("/health"):
            await peer.send(bytes([byte]))
        assert (await peer.response()).status == 200
