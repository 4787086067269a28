"""Connections that the kernel reads and writes: the promises of asyncio's transports, and the relay of chunks."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import socket
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Any

import pytest
import uvloop
from support.polling import until

from warmroute._kernel import ChunkReader, SocketPoller, SocketTransport, UnreadBytes
from warmroute.edge import sockets
from warmroute.edge.sockets import PlainSockets


class Recorder:
    """A protocol that keeps what happens to it."""

    transport: SocketTransport

    def __init__(self) -> None:
        self.received = bytearray()
        self.events: list[str] = []
        self.lost: list[BaseException | None] = []
        self.keeps_open = False
        self.on_data: Callable[[bytes], object] = lambda data: None

    def connection_made(self, transport: SocketTransport) -> None:
        self.transport = transport
        self.events.append("made")

    def data_received(self, data: bytes) -> None:
        self.received += data
        self.on_data(data)

    def eof_received(self) -> bool:
        self.events.append("eof")
        return self.keeps_open

    def pause_writing(self) -> None:
        self.events.append("paused")

    def resume_writing(self) -> None:
        self.events.append("resumed")

    def connection_lost(self, error: BaseException | None) -> None:
        self.events.append("lost")
        self.lost.append(error)


def run(test: Callable[[PlainSockets], Awaitable[None]]) -> None:
    async def within() -> None:
        plain = PlainSockets()
        plain.start()
        try:
            await asyncio.wait_for(test(plain), 20)
        finally:
            plain.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(within())


def connected(plain: PlainSockets, protocol: Recorder | None = None) -> tuple[Recorder, socket.socket]:
    """Return a protocol of the poller, and the other side of its TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        other = socket.create_connection(listening.getsockname())
        served, _ = listening.accept()
    served.setblocking(False)
    other.setblocking(False)
    protocol = protocol or Recorder()
    plain.open(served, protocol)
    return protocol, other


async def read(other: socket.socket, count: int) -> bytes:
    got = bytearray()
    while len(got) < count:
        piece = await asyncio.get_running_loop().sock_recv(other, 65536)
        if not piece:
            break
        got += piece
    return bytes(got)


def test_bytes_pass_in_both_directions() -> None:
    async def test(plain: PlainSockets) -> None:
        one, other = connected(plain)
        other.send(b"hello")
        await until(lambda: one.received)
        assert one.received == b"hello"
        one.transport.write(b"a")
        one.transport.writelines([b"b", b"", b"c"])
        one.transport.write(b"")
        assert await read(other, 3) == b"abc"
        assert one.transport.get_extra_info("peername") == other.getsockname()
        assert one.transport.get_extra_info("sockname") == other.getpeername()
        assert one.transport.get_extra_info("ssl_object") is None
        assert one.transport.get_extra_info("ssl_object", 7) == 7
        other.close()

    run(test)


def test_what_is_written_while_events_are_handled_is_sent_in_order_after_them() -> None:
    async def test(plain: PlainSockets) -> None:
        one, other = connected(plain)
        sizes: list[int] = []

        def answer(data: bytes) -> None:
            for piece in (b"1", b"22", b"333"):
                one.transport.write(piece)
            sizes.append(one.transport.get_write_buffer_size())

        one.on_data = answer
        other.send(b"?")
        assert await read(other, 6) == b"122333"
        assert sizes == [6]
        assert one.transport.get_write_buffer_size() == 0
        other.close()

    run(test)


def test_a_reader_that_is_too_slow_pauses_the_protocol_and_loses_nothing() -> None:
    async def test(plain: PlainSockets) -> None:
        one, other = connected(plain)
        pieces = [bytes([at % 251]) * 70_001 for at in range(200)]
        for piece in pieces:
            one.transport.write(piece)
        assert one.events == ["made", "paused"]
        assert one.transport.get_write_buffer_size() > 1_000_000
        assert await read(other, 200 * 70_001) == b"".join(pieces)
        assert one.events == ["made", "paused", "resumed"]
        assert one.transport.get_write_buffer_size() == 0
        other.close()

    run(test)


def test_small_writes_to_a_full_socket_pause_the_protocol() -> None:
    async def test(plain: PlainSockets) -> None:
        one, other = connected(plain)
        while not one.transport.get_write_buffer_size():
            one.transport.write(b"x" * 10_000)
        assert one.events == ["made"]
        written = one.transport.get_write_buffer_size()
        while "paused" not in one.events:
            one.transport.write(b"x" * 1_000)
            written += 1_000
        assert written == one.transport.get_write_buffer_size() <= 70_000
        other.close()

    run(test)


@pytest.mark.parametrize("in_callback", [False, True])
def test_closing_sends_what_was_written(in_callback: bool) -> None:
    async def test(plain: PlainSockets) -> None:
        one, other = connected(plain)

        def end(_data: bytes = b"") -> None:
            one.transport.write(b"x" * 3_000_000)
            one.transport.close()
            one.transport.close()
            assert one.transport.is_closing()
            one.transport.write(b"too late")
            assert one.lost == []

        if in_callback:
            one.on_data = end
            other.send(b"?")
        else:
            end()
        assert await read(other, 3_000_001) == b"x" * 3_000_000
        await until(lambda: one.lost)
        assert one.lost == [None]
        other.close()

    run(test)


def test_an_aborted_connection_ends_at_once_and_is_lost_once() -> None:
    async def test(plain: PlainSockets) -> None:
        one, other = connected(plain)
        one.transport.write(b"x" * 10_000_000)
        one.transport.abort()
        one.transport.abort()
        assert one.lost == []
        await until(lambda: one.lost)
        await asyncio.sleep(0.01)
        assert one.lost == [None]
        assert one.transport.get_write_buffer_size() == 0
        one.transport.write(b"x")
        one.transport.resume_reading()
        assert one.transport.get_extra_info("peername") is None
        other.close()

    run(test)


def test_a_connection_that_is_aborted_by_another_ones_callback_gets_nothing_more() -> None:
    async def test(plain: PlainSockets) -> None:
        pairs = [connected(plain) for _ in range(20)]

        def abort_others(_data: bytes) -> None:
            for one, _other in pairs:
                if not one.received:
                    one.transport.abort()

        for one, _other in pairs:
            one.on_data = abort_others
        for _one, other in pairs:
            other.send(b"?")
        await until(lambda: sum(len(one.lost) for one, _ in pairs) == 19)
        assert sum(1 for one, _ in pairs if one.received) == 1
        for _one, other in pairs:
            other.close()

    run(test)


def test_the_end_of_what_the_other_side_sends() -> None:
    async def test(plain: PlainSockets) -> None:
        one, other = connected(plain)
        other.shutdown(socket.SHUT_WR)
        await until(lambda: one.lost)
        assert one.events == ["made", "eof", "lost"]
        other.close()
        half_open = Recorder()
        half_open.keeps_open = True
        two, other = connected(plain, half_open)
        other.shutdown(socket.SHUT_WR)
        await until(lambda: "eof" in two.events)
        two.transport.write(b"still here")
        assert await read(other, 10) == b"still here"
        two.transport.resume_reading()
        two.transport.pause_reading()
        two.transport.resume_reading()
        third, another = connected(plain)  # whose end comes after another one of the first would
        another.shutdown(socket.SHUT_WR)
        await until(lambda: "eof" in third.events)
        another.close()
        assert two.events.count("eof") == 1
        two.transport.close()
        await until(lambda: two.lost)
        other.close()

    run(test)


def test_write_eof_ends_the_sending_side_only() -> None:
    async def test(plain: PlainSockets) -> None:
        one, other = connected(plain)
        assert one.transport.can_write_eof()
        one.transport.write(b"x" * 2_000_000)
        one.transport.write_eof()
        one.transport.write(b"ignored")
        assert await read(other, 2_000_001) == b"x" * 2_000_000
        other.send(b"late")
        await until(lambda: one.received)
        assert one.lost == []
        other.close()
        await until(lambda: one.lost)

    run(test)


@pytest.mark.parametrize("paused", [False, True])
def test_a_reset_is_reported_also_after_reading_was_paused(paused: bool) -> None:
    async def test(plain: PlainSockets) -> None:
        one, other = connected(plain)
        if paused:
            one.transport.pause_reading()
        other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        other.close()
        await asyncio.sleep(0.02)
        if paused:
            assert one.lost == []
            one.transport.resume_reading()
        await until(lambda: one.lost)
        assert isinstance(one.lost[0], OSError)
        assert one.lost[0].errno == errno.ECONNRESET

    run(test)


def test_reset_on_close_sends_a_reset() -> None:
    async def test(plain: PlainSockets) -> None:
        one, other = connected(plain)
        one.transport.reset_on_close()
        one.transport.close()
        with pytest.raises(ConnectionResetError):
            await read(other, 1)
        other.close()

    run(test)


def test_nothing_is_read_while_reading_is_paused() -> None:
    async def test(plain: PlainSockets) -> None:
        one, other = connected(plain)
        one.transport.pause_reading()
        one.transport.pause_reading()
        other.send(b"?")
        await asyncio.sleep(0.02)
        assert not one.received
        one.transport.resume_reading()
        await until(lambda: one.received)
        other.close()

    run(test)


def test_a_protocol_that_raises_loses_its_connection_and_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    async def test(plain: PlainSockets) -> None:
        bad, its_other = connected(plain)
        good, other = connected(plain)

        def fail(_data: bytes) -> None:
            raise ValueError("broken protocol")

        bad.on_data = fail
        raised: list[Any] = []
        hook, sys.unraisablehook = sys.unraisablehook, raised.append
        its_other.send(b"?")
        await until(lambda: bad.lost)
        sys.unraisablehook = hook
        assert isinstance(raised[0].exc_value, ValueError)
        raised.clear()
        other.send(b"?")
        await until(lambda: good.received)
        its_other.close()
        other.close()

    run(test)


# The relay.


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@asynccontextmanager
async def relaying(
    plain: PlainSockets,
) -> AsyncIterator[tuple[Recorder, socket.socket, Recorder, socket.socket, list[bytes]]]:
    node, engine = connected(plain)
    client, reader = connected(plain)
    kept: list[bytes] = []
    node.transport.relay(client.transport, ChunkReader(), kept.append)
    yield node, engine, client, reader, kept
    engine.close()
    reader.close()


def test_chunks_pass_to_the_other_connection_until_the_message_ends() -> None:
    async def test(plain: PlainSockets) -> None:
        async with relaying(plain) as (node, engine, _client, reader, kept):
            for at in range(50):
                piece = chunk(b"data: %d\n\n" % at)
                engine.send(piece[:5])
                assert await read(reader, 5) == piece[:5]
                engine.send(piece[5:])
                assert await read(reader, len(piece) - 5) == piece[5:]
            assert not node.received
            assert len(kept) == 100
            assert node.transport.last_read_s > 0
            engine.send(chunk(b"end") + b"0\r\n\r\n")
            await until(lambda: node.received)
            assert node.received == chunk(b"end") + b"0\r\n\r\n"  # whole: its protocol passes it on
            engine.send(b"more")  # the relay is over
            await until(lambda: node.received.endswith(b"more"))

    run(test)


@pytest.mark.parametrize("broken", [b"zz\r\n", b"3\r\nabcd", b"0\r\n\r\nrest"])
def test_a_malformed_chunk_goes_to_the_protocol(broken: bytes) -> None:
    async def test(plain: PlainSockets) -> None:
        async with relaying(plain) as (node, engine, _client, _reader, kept):
            engine.send(broken)
            await until(lambda: node.received)
            assert node.received == broken
            assert kept == []

    run(test)


def test_the_protocol_hears_of_the_end_of_a_relayed_connection() -> None:
    async def test(plain: PlainSockets) -> None:
        async with relaying(plain) as (node, engine, _client, reader, _kept):
            engine.send(chunk(b"one"))
            assert await read(reader, 8) == chunk(b"one")
            engine.close()
            await until(lambda: node.lost)
            assert node.events == ["made", "eof", "lost"]

    run(test)


def test_a_client_that_reads_too_slowly_pauses_its_protocol() -> None:
    async def test(plain: PlainSockets) -> None:
        async with relaying(plain) as (node, engine, client, reader, kept):
            kept_size = 0
            engine.setblocking(False)
            piece, sent = chunk(b"x" * 60_000), 0
            client.transport.set_write_buffer_limits(high=100_000)
            while "paused" not in client.events:
                try:
                    sent += engine.send(piece[sent % len(piece) :])
                except BlockingIOError:
                    await asyncio.sleep(0.001)
            node.transport.pause_reading()
            kept_size = sum(map(len, kept))
            await read(reader, kept_size)
            await until(lambda: "resumed" in client.events)
            node.transport.resume_reading()
            rest = -sent % len(piece)
            if rest:
                await asyncio.get_running_loop().sock_sendall(engine, piece[-rest:])
            await read(reader, sent + rest - kept_size)
            assert sum(map(len, kept)) == sent + rest
            assert b"".join(kept) == piece * ((sent + rest) // len(piece))

    run(test)


def test_a_relay_to_a_closed_connection_drops_the_bytes() -> None:
    async def test(plain: PlainSockets) -> None:
        async with relaying(plain) as (node, engine, client, _reader, kept):
            client.transport.abort()
            await until(lambda: client.lost)
            engine.send(chunk(b"one"))
            await until(lambda: kept)
            assert node.lost == []
            node.transport.abort()
            await until(lambda: node.lost)

    run(test)


@pytest.mark.parametrize("end", ["abort", "close", "stop_relay"])
def test_what_keeps_the_chunks_may_end_the_relay(end: str) -> None:
    async def test(plain: PlainSockets) -> None:
        node, engine = connected(plain)
        client, reader = connected(plain)
        node.transport.relay(client.transport, ChunkReader(), lambda data: getattr(node.transport, end)())
        engine.send(chunk(b"one"))
        assert await read(reader, 8) == chunk(b"one")
        engine.close()
        reader.close()

    run(test)


# Listening and connecting.


def test_connections_are_accepted_and_opened() -> None:
    async def test(plain: PlainSockets) -> None:
        protocols: list[Recorder] = []

        def create() -> Recorder:
            protocols.append(Recorder())
            return protocols[-1]

        server = plain.listen(create, [socket.create_server(("127.0.0.1", 0))])
        port = server.sockets[0].getsockname()[1]
        clients = [await plain.connect("localhost", port, Recorder) for _ in range(100)]
        for client in clients:
            client.transport.write(b"hello")
        await until(lambda: sum(len(one.received) for one in protocols) == 500)
        server.close()
        with pytest.raises(ConnectionRefusedError):
            await plain.connect("127.0.0.1", port, Recorder)
        protocols[0].transport.write(b"still served")
        await until(lambda: any(one.received for one in clients))

    run(test)


def test_unix_sockets() -> None:
    async def test(plain: PlainSockets) -> None:
        one, other = socket.socketpair()
        one.setblocking(False)
        other.setblocking(False)
        protocol = Recorder()
        plain.open(one, protocol)
        protocol.transport.write(b"hello")
        assert await read(other, 5) == b"hello"
        assert protocol.transport.get_extra_info("peername") == ""
        other.close()

    run(test)


def test_a_process_without_free_files_accepts_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "ACCEPT_PAUSE_S", 0.05)

    async def test(plain: PlainSockets) -> None:
        import resource

        accepted: list[Recorder] = []

        def create() -> Recorder:
            accepted.append(Recorder())
            return accepted[-1]

        server = plain.listen(create, [socket.create_server(("127.0.0.1", 0))])
        client = socket.socket()
        client.setblocking(False)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))  # no new descriptor
        try:
            await asyncio.get_running_loop().sock_connect(client, server.sockets[0].getsockname())
            await asyncio.sleep(0.02)
            assert accepted == []
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await until(lambda: accepted)
        client.close()
        server.close()

    run(test)


def test_a_machine_without_ipv6_connects_to_the_other_address(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.socket

    def without_ipv6(family: int = -1, *more: Any, **named: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return real(family, *more, **named)

    async def test(plain: PlainSockets) -> None:
        server = plain.listen(Recorder, [socket.create_server(("127.0.0.1", 0))])
        port = server.sockets[0].getsockname()[1]

        async def both(*_args: Any, **_named: Any) -> list[Any]:
            v6 = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port, 0, 0))
            return [v6, (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

        loop = asyncio.get_running_loop()
        with monkeypatch.context() as patched:
            patched.setattr("asyncio.get_running_loop", lambda: Loop(loop, both))
            patched.setattr("socket.socket", without_ipv6)
            client = await plain.connect("name", port, Recorder)
        assert client.events == ["made"]
        server.close()

    run(test)


class Loop:
    """An event loop with another resolver."""

    def __init__(self, loop: asyncio.AbstractEventLoop, getaddrinfo: Any) -> None:
        self.getaddrinfo = getaddrinfo
        self.sock_connect = loop.sock_connect


def test_a_poller_that_nobody_uses_closes_its_connections() -> None:
    one, other = socket.socketpair()
    one.setblocking(False)
    poller = SocketPoller(lambda act: None)
    protocol = Recorder()
    poller.open(one.detach(), protocol)
    del poller
    protocol.transport = None  # type: ignore[assignment]
    del protocol
    gc.collect()
    other.settimeout(5)
    assert other.recv(1) == b""
    other.close()


def test_arguments_are_checked() -> None:
    poller = SocketPoller(lambda act: None)
    with pytest.raises((TypeError, ValueError)):
        poller.open("x", Recorder())  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        poller.open(0, object())
    read_end, write_end = os.pipe()
    os.close(read_end)
    os.close(write_end)
    with pytest.raises(OSError, match="file descriptor"):
        poller.open(read_end, Recorder())
    with pytest.raises(TypeError):
        SocketTransport()
    poller.close()
    poller.close()
    with pytest.raises(RuntimeError):
        poller.open(0, Recorder())


# Everything at once.


class Restless(Recorder):
    """Does something at random whenever it is called: writes, pauses, closes, also other connections."""

    def __init__(self, random: Random, all_of_them: list[Restless]) -> None:
        super().__init__()
        self._random = random
        self._all = all_of_them
        self.written = bytearray()
        self.on_data = self.act

    def act(self, _data: bytes = b"") -> None:
        one = self._random.choice(self._all) if self._random.random() < 0.5 else self
        transport, dice = one.transport, self._random.random()
        if dice < 0.6:
            data = self._random.randbytes(self._random.choice((0, 1, 100, 5_000, 300_000)))
            one.note(data)
            transport.write(data)
        elif dice < 0.7:
            transport.pause_reading()
        elif dice < 0.8:
            transport.resume_reading()
        elif dice < 0.85:
            transport.close()
        elif dice < 0.88:
            transport.abort()
        elif dice < 0.91:
            to = self._random.choice(self._all)
            transport.relay(to.transport, ChunkReader(), to.note)
        elif dice < 0.94:
            transport.stop_relay()
        else:
            transport.get_write_buffer_size()

    def note(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.written += data

    def pause_writing(self) -> None:
        super().pause_writing()
        self.act()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.act()

    def connection_lost(self, error: BaseException | None) -> None:
        super().connection_lost(error)
        self.act()


@pytest.mark.parametrize("seed", range(12))
def test_connections_that_do_anything_whenever_they_are_called(seed: int) -> None:
    """Each is lost once, and what a reader gets is the beginning of what was written."""
    random = Random(seed)

    async def test(plain: PlainSockets) -> None:
        protocols: list[Restless] = []
        others: list[tuple[socket.socket, bytearray]] = []
        for _ in range(25):
            one, other = connected(plain, Restless(random, protocols))
            assert isinstance(one, Restless)
            protocols.append(one)
            others.append((other, bytearray()))
        for _ in range(600):
            other, got = random.choice(others)
            with suppress(OSError):
                if random.random() < 0.5:
                    other.send(random.choice((b"?", b"5\r\nhello\r\n", b"0\r\n\r\n", random.randbytes(70_000))))
                elif random.random() < 0.9:
                    got += other.recv(random.choice((10, 1_000_000)))
                else:
                    other.shutdown(socket.SHUT_WR)
            if random.random() < 0.3:
                await asyncio.sleep(0)
            if random.random() < 0.1:
                random.choice(protocols).act()
        for one in protocols:
            one.transport.abort()
        await until(lambda: all(one.lost for one in protocols))
        await asyncio.sleep(0.01)
        for one, (other, got) in zip(protocols, others, strict=True):
            assert len(one.lost) == 1
            assert one.transport.get_write_buffer_size() == 0
            assert one.written.startswith(got)
            other.close()

    run(test)


# What clients have not read.


def test_unread_bytes_are_the_memory_of_what_waits_and_return_to_zero() -> None:
    async def test(plain: PlainSockets) -> None:
        unread = UnreadBytes(1 << 40, lambda: None)
        random = Random(5)
        served = [connected(plain) for _ in range(4)]
        for protocol, _ in served:
            protocol.transport.count_unread(unread)
        for _ in range(300):
            protocol, other = random.choice(served)
            if random.random() < 0.7:
                protocol.transport.write(b"x" * random.choice([1, 300, 20_000, 400_000]))
            with suppress(BlockingIOError):
                other.recv(random.choice([100, 100_000, 1_000_000]))
            await asyncio.sleep(0)
            unsent = sum(protocol.transport.get_write_buffer_size() for protocol, _ in served)
            assert unsent <= unread.bytes <= 2 * unsent + len(served) * 16_384
        (gone, _), (left, other), *_ = served
        gone.transport.abort()
        while left.transport.get_write_buffer_size():
            await read(other, 1)
        for protocol, other in served[2:]:
            other.close()
            await until(lambda protocol=protocol: protocol.lost)
        assert unread.bytes == 0 and unread.slowest() is None

    run(test)


def test_the_slowest_client_is_the_one_that_read_64_kb_the_longest_time_ago() -> None:
    async def test(plain: PlainSockets) -> None:
        unread = UnreadBytes(1 << 40, lambda: None)
        served = [connected(plain) for _ in range(3)]
        for protocol, _ in served:
            protocol.transport.count_unread(unread)
            protocol.transport.write(b"x" * 20_000_000)
        (first, reads_much), (second, reads_little), (third, _) = served
        assert unread.slowest() is first

        async def read_until_sent(protocol: Recorder, other: socket.socket, count: int) -> None:
            before = protocol.transport.get_write_buffer_size()
            while before - protocol.transport.get_write_buffer_size() < count:
                await read(other, 1)

        await read_until_sent(first, reads_much, 65_536)
        assert unread.slowest() is second
        reads_little.recv(1000)
        await asyncio.sleep(0.05)
        assert unread.slowest() is second, "a byte now and then is not reading"
        second.transport.abort()
        assert unread.slowest() is third
        third.transport.close()
        assert unread.slowest() is third, "closed, but not all of it is sent"
        third.transport.abort()
        assert unread.slowest() is first
        while first.transport.get_write_buffer_size():
            await read(reads_much, 1)
        assert unread.slowest() is None and unread.bytes == 0

    run(test)


def test_too_much_unread_is_reported_and_whoever_is_told_may_abort_any_transport() -> None:
    async def test(plain: PlainSockets) -> None:
        served: list[tuple[Recorder, socket.socket]] = []

        def end_slowest() -> None:
            while unread.bytes > unread.limit:
                unread.slowest().transport.abort()

        unread = UnreadBytes(30_000_000, end_slowest)
        for _ in range(10):
            served.append(connected(plain))
            served[-1][0].transport.count_unread(unread)
            served[-1][0].transport.write(b"x" * 16_000_000)
            assert unread.bytes <= unread.limit
        await asyncio.sleep(0.01)
        lost = [bool(protocol.lost) for protocol, _ in served]
        assert 0 < lost.count(False) <= 3 and lost == sorted(lost, reverse=True), "the first ones went first"
        unread.limit = 1000
        served[-1][0].transport.write(b"x" * 1_000_000)
        await asyncio.sleep(0.01)
        assert all(protocol.lost for protocol, _ in served) and unread.bytes == 0

    run(test)


def test_a_listener_may_raise_when_it_is_told_of_unread_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda hook: raised.append(hook.exc_value))

    async def test(plain: PlainSockets) -> None:
        unread = UnreadBytes(0, lambda: 1 / 0)
        protocol, other = connected(plain)
        protocol.transport.count_unread(unread)
        with pytest.raises(RuntimeError):
            protocol.transport.count_unread(unread)
        protocol.transport.write(b"x" * 20_000_000)
        assert raised and not protocol.lost
        assert len(await read(other, 100_000)) >= 100_000

    run(test)
