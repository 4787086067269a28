"""A slow client costs bounded memory and pauses its node. A client that stops reading is disconnected."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from support.engine_scripts import SSE_HEAD, Behaviour, chunk, hanging, huge, normal, script
from support.polling import until
from support.raw_client import ConnectionClosed, RawConnection, chat, get, post
from support.running_router import RunningRouter, router
from support.scripted_engine import ReceivedRequest, ScriptedEngine, engines
from support.serve_process import serve

from warmroute._kernel import RequestHead
from warmroute.config import Limits
from warmroute.edge.arrival import NO_RIGHTS, Rights
from warmroute.edge.client_connection import ClientConnection, Listener
from warmroute.edge.errors import HttpError
from warmroute.edge.sockets import PlainSockets
from warmroute.edge.timer_wheel import NEVER, TimerWheel

MB = 1_000_000
HELD_LIMIT = 2 * MB
"""The most that the router may buffer for one client: a socket's high-water mark and one read, with a margin."""


def rss_bytes(process: int | str = "self") -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * 4096


def held_bytes(r: RunningRouter) -> int:
    return sum(client.transport.get_write_buffer_size() for client in r.service.listener.connections)


async def settled(engine: ScriptedEngine) -> int:
    """Wait until the engine cannot write any more. Return how much it has written."""
    before, since_s = -1, time.monotonic()
    while time.monotonic() - since_s < 0.5:
        if engine.seen and engine.seen[-1].written != before:
            before, since_s = engine.seen[-1].written, time.monotonic()
        await asyncio.sleep(0.02)
    return before


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "chunked"])
async def test_a_client_that_does_not_read_pauses_its_node(sized: bool) -> None:
    async with engines() as [engine], router(engine) as r:
        total = 100 * MB
        engine.behave = huge(total, sized=sized)
        await r.request(get("/health"))
        before = rss_bytes()
        peer = await r.connect()
        peer.pause_reading()
        peer.write(post())
        written = await settled(engine)
        assert written < total // 2, "the node was not paused"
        assert held_bytes(r) < HELD_LIMIT
        assert rss_bytes() - before < 40 * MB
        peer.resume_reading()
        response = await peer.response()
        assert response.complete and len(response.body) == total


async def test_a_slow_reader_gets_the_whole_response_in_bounded_memory() -> None:
    async with engines() as [engine], router(engine) as r:
        total = 60 * MB
        engine.behave = huge(total, sized=False)
        peer = await r.connect()
        peer.reader._limit = 65_536  # type: ignore[attr-defined]
        peer.write(post())
        got = worst = 0
        while got < total:
            data = await asyncio.wait_for(peer.reader.read(MB), 10)
            assert data
            got += len(data)
            worst = max(worst, held_bytes(r))
            if got % 10 == 0:
                await asyncio.sleep(0.001)
        assert worst < HELD_LIMIT


async def test_twenty_clients_that_do_not_read_do_not_delay_others() -> None:
    async with engines(2) as [big, small], router(big, {"url": small.url, "models": ["small"]}) as r:
        big.behave = huge(100 * MB)
        stuck = [await r.connect() for _ in range(20)]
        for peer in stuck:
            peer.pause_reading()
            peer.write(post())
        await until(lambda: len(big.seen) == 20)
        await settled(big)
        assert held_bytes(r) < 20 * HELD_LIMIT
        for _ in range(20):
            started_s = time.monotonic()
            assert (await r.request(post(chat(model="small")))).status == 200
            assert time.monotonic() - started_s < 2
        for peer in stuck:
            peer.disconnect()


async def test_a_client_that_stops_reading_is_disconnected_and_its_node_freed() -> None:
    async with engines() as [engine], router(engine, limits={"stall_timeout_s": 0.5}) as r:
        engine.behave = huge(100 * MB)
        peer = await r.connect()
        peer.pause_reading()
        peer.write(post())
        await asyncio.wait_for(until(lambda: engine.seen), 5)
        await asyncio.wait_for(engine.seen[0].left.wait(), 10)
        await until(lambda: r.node(0).inflight == 0 and not r.service.listener.connections)
        assert r.service.counters.disconnects == 1


async def test_a_client_that_does_not_read_a_finished_response_is_disconnected() -> None:
    async with engines() as [engine], router(engine, limits={"stall_timeout_s": 0.5, "idle_timeout_s": 0.5}) as r:
        engine.behave = normal(b"x" * 300_000)
        for headers in ([], ["Connection: close"]):
            peer = await r.connect()
            peer.pause_reading()
            for _ in range(40):
                peer.write(post(headers=headers))
            await until(lambda: not r.service.listener.connections, patience_s=15)


async def test_a_client_that_resumes_reading_in_time_stays_connected() -> None:
    async with engines() as [engine], router(engine, limits={"stall_timeout_s": 5.0}) as r:
        engine.behave = huge(30 * MB)
        peer = await r.connect()
        peer.pause_reading()
        peer.write(post())
        await settled(engine)
        peer.resume_reading()
        assert (await peer.response()).complete


async def test_a_client_that_sends_requests_and_never_reads_costs_bounded_memory() -> None:
    async with engines(1, *(f"model-{number}" for number in range(300))) as [engine], router(engine) as r:
        peer = await r.connect()
        peer.pause_reading()
        for _ in range(30):
            try:
                async with asyncio.timeout(1):
                    await peer.send(get("/v1/models") * 100)
            except TimeoutError:
                break  # the router has stopped reading: good
        worst, since_s = 0, time.monotonic()
        while time.monotonic() - since_s < 1 and worst < HELD_LIMIT:
            if (held := held_bytes(r)) > worst:
                worst, since_s = held, time.monotonic()
            await asyncio.sleep(0.02)
        peer.disconnect()
        assert worst < HELD_LIMIT


async def test_a_second_response_to_a_client_that_does_not_read_is_paused() -> None:
    async with engines() as [engine], router(engine) as r:

        async def fill_up(engine: ScriptedEngine, seen: object, writer: asyncio.StreamWriter) -> None:
            """End the response when the client has just fallen behind."""
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            while (held := held_bytes(r)) < 45_000:
                writer.write(b"%x\r\n%b\r\n" % ((size := 8_000 if held else 30_000), b"x" * size))
                await writer.drain()
                await asyncio.sleep(0.002)
            engine.behave = huge(60 * MB)
            writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (30_000, b"x" * 30_000))

        engine.behave = fill_up
        peer = await r.connect()
        peer.pause_reading()
        peer.write(post())
        await until(lambda: engine.seen and engine.seen[0].ended)
        await until(lambda: r.node(0).inflight == 0)
        engine.drop_connections()  # so that the second response uses another connection
        await asyncio.sleep(0.1)
        peer.write(post())
        await asyncio.sleep(1)
        held = held_bytes(r)
        peer.disconnect()
        assert held < HELD_LIMIT


# Clients that read nothing, many at once.


async def unread_requests(port: int, count: int, **connect: Any) -> list[RawConnection]:
    """Clients that send a request each, and do not read."""
    peers = []
    for _ in range(count):
        peer = RawConnection(*await asyncio.open_connection("127.0.0.1", port, **connect))
        peer.pause_reading()
        peer.write(post())
        peers.append(peer)
    return peers


def events(total_bytes: int) -> Behaviour:
    """An event stream whose first event has content."""
    rest = huge(total_bytes, sized=False)

    async def play(engine: ScriptedEngine, received: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + chunk(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'))
        await asyncio.sleep(0.05)
        writer = NoHead(writer)  # type: ignore[assignment]
        await rest(engine, received, writer)

    return play


class NoHead:
    """A writer without the head of the response."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.drain = writer.drain

    def write(self, data: bytes) -> None:
        if not data.startswith(b"HTTP/1.1"):
            self._writer.write(data)


@pytest.mark.parametrize("kind", ["sized", "chunked", "events"])
async def test_a_client_that_does_not_read_takes_little_memory(
    kind: str, encryption: dict[str, Any], tmp_path: Path
) -> None:
    """In a process of its own, whose memory is measured."""
    count = 100
    async with engines() as [engine]:
        engine.behave = {
            "sized": huge(100 * MB), "chunked": huge(100 * MB, sized=False), "events": events(100 * MB),
        }[kind]  # fmt: skip
        file = tmp_path / "router.toml"
        listen = "".join(f'{name} = "{value}"\n' for name, value in encryption["listen"].items())
        file.write_text(f'[listen]\nport = 0\n{listen}[admin]\nport = 0\n[[nodes]]\nurl = "{engine.url}"\n')
        async with serve("--config", file) as router_process:
            peers = await unread_requests(router_process.port, 1, **encryption["connect"])
            await until(lambda: len(engine.seen) == 1)
            before = rss_bytes(router_process.process.pid)
            peers += await unread_requests(router_process.port, count, **encryption["connect"])
            await until(lambda: len(engine.seen) == count + 1)
            written, quiet_s = -1, time.monotonic()
            while time.monotonic() - quiet_s < 1:
                if (total := sum(seen.written for seen in engine.seen)) != written:
                    written, quiet_s = total, time.monotonic()
                await asyncio.sleep(0.05)
            assert written < count * 50 * MB, "the node was not paused"
            grown = rss_bytes(router_process.process.pid) - before
            for peer in peers:
                peer.disconnect()
        print(f"{grown / count / 1000:.0f} KB for each client")
        assert grown < count * (MB if encryption["connect"] else MB // 2)


async def test_the_slowest_clients_go_when_too_much_is_unread(
    encryption: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    limit = 2 * MB
    async with engines() as [engine], router(engine, limits={"unread_bytes": limit}, listen=encryption["listen"]) as r:
        listener = r.service.listener
        engine.behave = huge(40 * MB, sized=False)
        reader = await r.connect(**encryption["connect"])
        reader.write(post())
        reading = asyncio.ensure_future(reader.response())
        peers: list[RawConnection] = []
        for number in range(40):
            peers += await unread_requests(r.port, 1, **encryption["connect"])
            await until(lambda number=number: len(engine.seen) == number + 2)
            assert listener.unread.bytes <= limit
        assert (await reading).complete, "a client that reads stays"
        await until(lambda: listener.too_slow >= 10)
        await settled(engine)
        assert 0 < listener.unread.bytes <= limit
        page = b"".join(r.service.scrapes._render(False))
        assert b"warmroute_clients_too_slow_total %d\n" % listener.too_slow in page
        assert b"warmroute_client_unread_bytes %d\n" % listener.unread.bytes in page
        [record] = [record for record in caplog.records if getattr(record, "event", "") == "slow_clients_disconnected"]
        assert record.fields["limit_bytes"] == limit and record.fields["clients"] >= 1  # type: ignore[attr-defined]
        assert r.service.counters.disconnects == listener.too_slow
        gone, listener.unread.limit = listener.too_slow, 1 << 40
        for peer in peers:
            peer.resume_reading()

        async def gets_all(peer: RawConnection) -> bool:
            try:
                return (await peer.response()).complete
            except ConnectionClosed:
                return False

        ended = await asyncio.gather(*map(gets_all, peers))
        assert ended.count(False) == gone == listener.too_slow
        assert not any(ended[: gone - 5]) and all(ended[gone + 5 :]), "those that stopped reading first went first"
        assert listener.unread.bytes == 0
        for peer in peers:
            peer.close()


class LargeReplies:
    """A handler that answers each request with 9 MB at once."""

    def __init__(self) -> None:
        self.served = 0

    def check_head(self, _head: RequestHead) -> Rights:
        return NO_RIGHTS

    def serve(self, client: ClientConnection, _head: RequestHead, _body: bytes) -> None:
        self.served += 1
        client.reply(200, b"x" * 9 * MB)

    def new_request_id(self) -> bytes:
        return b""

    def error_sent(self, error: HttpError, request_id: bytes, peer: bytes, forwarded_for: bytes) -> None: ...

    def internal_error(self, error: Exception, request_id: bytes = b"") -> HttpError:
        raise error


async def test_a_request_after_an_unread_response_waits_until_the_client_reads() -> None:
    handler, plain = LargeReplies(), PlainSockets()
    listener = Listener(handler, Limits(), TimerWheel(time.monotonic))
    plain.start()
    server = plain.listen(listener.protocol, [socket.create_server(("127.0.0.1", 0))])
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname(), limit=1000)
    writer.write(get("/"))
    await until(lambda: handler.served)
    await asyncio.sleep(0.05)
    writer.write(get("/") * 2)
    await asyncio.sleep(0.2)
    [client] = listener.connections
    assert handler.served == 1
    assert 0 < client.deadline_s < NEVER
    for _ in range(3):
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(9 * MB)
    assert handler.served == 3
    writer.close()
    server.close()
    await until(lambda: not listener.connections)
    plain.close()


async def test_a_node_that_reads_slowly_does_not_delay_others() -> None:
    """The node does not read a large request: others are served, and its body stays counted until the client leaves."""
    async with engines(2) as [slow, quick], router({"url": slow.url, "models": ["slow"]}, quick) as r:
        slow.behave = hanging
        body = chat("x" * 20 * MB, model="slow")
        peer = await r.connect()
        peer.write(post(body))
        await until(lambda: r.node(0).inflight == 1)
        assert r.service.listener.buffered_bytes == len(body)
        for _ in range(5):
            assert (await r.request()).status == 200
        peer.disconnect()
        await until(lambda: r.service.listener.buffered_bytes == 0)


async def test_a_body_in_tiny_chunks_takes_little_more_memory_than_is_counted() -> None:
    async with engines() as [engine], router(engine) as r:
        peer = await r.connect()
        await peer.send(b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n")
        piece = b"2\r\nxx\r\n" * 20_000
        before = rss_bytes()
        for _ in range(75):
            await peer.send(piece)
        await until(lambda: r.service.listener.buffered_bytes == 75 * 40_000)
        grown = rss_bytes() - before
        print(f"{grown / MB:.0f} MB for 3 MB")
        peer.disconnect()
        assert grown < 30 * MB


async def test_the_request_body_is_released_when_the_response_starts() -> None:
    async with engines() as [engine], router(engine) as r:
        gate = asyncio.Event()
        engine.behave = script(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\no", gate, b"k")
        peer = await r.connect()
        peer.write(post(chat("x" * MB)))
        await peer.head()
        assert r.service.listener.buffered_bytes == 0
        gate.set()
        assert await peer.reader.readexactly(2) == b"ok"
