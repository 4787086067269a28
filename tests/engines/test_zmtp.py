"""ZMTP, the protocol of ZMQ sockets: what peers send in small pieces, in excess, or in another protocol."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.polling import until

from warmroute.engines import zmtp
from warmroute.engines.kv_events import ByteBudget
from warmroute.engines.zmtp import (
    GREETING,
    MAX_MESSAGE_BYTES,
    SUB,
    ZmtpConnection,
    ZmtpDecoder,
    ZmtpError,
    encode,
    ready_command,
)

HANDSHAKE = GREETING + ready_command(b"PUB")


def decoded(*pieces: bytes) -> list[list[bytes]]:
    decoder = ZmtpDecoder(SUB)
    messages = []
    for piece in pieces:
        decoder.feed(piece)
        while (message := decoder.next_message()) is not None:
            messages.append(message)
    return messages


@given(
    st.lists(st.lists(st.binary(max_size=600), min_size=1, max_size=4), max_size=5),
    st.lists(st.integers(1, 400), min_size=1, max_size=20),
)
def test_messages_are_the_same_in_whatever_pieces_they_arrive(messages: list[list[bytes]], sizes: list[int]) -> None:
    data = HANDSHAKE + b"".join(encode(*message) for message in messages)
    pieces: list[bytes] = []
    at = 0
    while at < len(data):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(data[at : at + size])
        at += size
    assert decoded(*pieces) == decoded(data) == messages


@given(st.binary(max_size=300), st.booleans())
def test_no_bytes_raise_anything_but_a_protocol_error(data: bytes, after_handshake: bool) -> None:
    try:
        decoded(HANDSHAKE + data if after_handshake else data)
    except ZmtpError:
        pass


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", "not a ZMQ socket"),
        (b"\xff" + b"\0" * 8 + b"\x7f\x01", "version"),
        (GREETING.replace(b"NULL\0", b"CURVE"), "authentication"),
        (GREETING + encode(b"early"), "before the handshake"),
        (GREETING + b"\x04\x06\x05ERROR", "refused"),
        (HANDSHAKE + b"\x02" + (MAX_MESSAGE_BYTES + 1).to_bytes(8, "big"), "bytes"),
        (HANDSHAKE + b"\x02" + b"\xff" * 8, "bytes"),
        (HANDSHAKE + b"\x01\x01x" * 20, "frames"),
        (HANDSHAKE + b"\xf0\x01x", "unknown"),
        (HANDSHAKE + b"\x04\x07\x04PING\0\0" * 100, "flood"),
    ],
)
def test_what_is_not_zmtp_or_exceeds_a_limit_is_refused(sent: bytes, reason: str) -> None:
    with pytest.raises(ZmtpError, match=reason):
        decoded(sent)


def test_frames_of_one_message_share_its_limit() -> None:
    half = MAX_MESSAGE_BYTES // 2 + 1
    first = b"\x03" + half.to_bytes(8, "big") + b"x" * half
    with pytest.raises(ZmtpError, match="bytes"):
        decoded(HANDSHAKE, first, b"\x02" + half.to_bytes(8, "big"))


def test_a_ping_is_answered_with_its_context() -> None:
    decoder = ZmtpDecoder(SUB)
    decoder.feed(HANDSHAKE + b"\x04\x0b\x04PING\0\x05here")
    assert decoder.next_message() is None and decoder.ready
    assert decoder.reply.endswith(b"\x04\x09\x04PONGhere")


class HostilePublisher:
    """Completes the handshake, and sends the same bytes for ever."""

    def __init__(self, sends: bytes) -> None:
        self._sends = sends
        self.accepted = 0
        self.sent_bytes = 0
        self._server: asyncio.Server

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        try:
            writer.write(HANDSHAKE)
            while True:
                writer.write(self._sends)
                self.sent_bytes += len(self._sends)
                await writer.drain()
        except (ConnectionError, RuntimeError):
            pass
        finally:
            writer.close()

    def stop(self) -> None:
        self._server.close()


async def test_an_endless_message_ends_the_connection_not_the_memory() -> None:
    """libzmq has no limit for the frames of a message."""
    publisher = HostilePublisher(b"\x03" + (1 << 20).to_bytes(8, "big") + b"x" * (1 << 20))
    budget, reasons = ByteBudget(), list[str]()
    most_bytes = 0

    def read() -> None:
        nonlocal most_bytes
        most_bytes = max(most_bytes, budget.used_bytes)
        while connection.receive() is not None:
            pass

    port = await publisher.start()
    connection = ZmtpConnection("127.0.0.1", port, SUB, encode(b"\x01"), budget, read, on_error=reasons.append)
    await until(lambda: publisher.accepted >= 3, "it is connected again")
    connection.close()
    publisher.stop()
    await until(lambda: budget.used_bytes == 0, "nothing is buffered any more")
    assert most_bytes <= MAX_MESSAGE_BYTES + (1 << 20) and set(reasons) <= {
        f"a message of more than {MAX_MESSAGE_BYTES:,} bytes", f"a message of more than {zmtp.MAX_FRAMES} frames",
    }  # fmt: skip
    assert reasons


async def test_messages_that_nobody_reads_stay_with_their_publisher() -> None:
    publisher = HostilePublisher(encode(b"topic", b"\0" * 8, b"x" * (1 << 20)))
    budget = ByteBudget()
    connection = ZmtpConnection(
        "127.0.0.1", await publisher.start(), SUB, encode(b"\x01"), budget, lambda: None, lambda: None
    )
    await until(lambda: budget.used_bytes > 0)
    connection.receive()
    sent_bytes = -1
    while sent_bytes != publisher.sent_bytes:
        sent_bytes = publisher.sent_bytes
        await asyncio.sleep(0.1)
    assert budget.used_bytes < 1 << 21, "reading stopped after the read-ahead"
    connection.close()
    publisher.stop()


async def test_a_closed_connection_frees_what_it_received_without_a_garbage_collection() -> None:
    publisher = HostilePublisher(encode(b"x" * 1000) * 1000)
    port = await publisher.start()
    budget = ByteBudget()
    connection = ZmtpConnection("127.0.0.1", port, SUB, encode(b"\x01"), budget, lambda: None)
    await until(lambda: budget.used_bytes > 1 << 18, "the buffer is full")
    connection.close()
    await until(lambda: budget.used_bytes == 0, "the buffer is free")
    freed = weakref.ref(connection)
    gc.disable()
    try:
        del connection
        await until(lambda: freed() is None, "nothing refers to the connection")
    finally:
        gc.enable()
    publisher.stop()


async def test_a_node_whose_ranks_exceed_its_budget_loses_connections() -> None:
    publisher = HostilePublisher(b"\x02" + (MAX_MESSAGE_BYTES).to_bytes(8, "big") + b"x" * (1 << 20))
    budget, reasons = ByteBudget(limit_bytes=4 << 20), list[str]()
    port = await publisher.start()
    connections: list[ZmtpConnection] = []

    def read() -> None:
        for connection in connections:
            connection.receive()

    connections += [
        ZmtpConnection("127.0.0.1", port, SUB, encode(b"\x01"), budget, read, on_error=reasons.append) for _ in range(4)
    ]
    await until(lambda: "memory" in " ".join(reasons))
    assert budget.used_bytes <= (4 << 20) + (1 << 20)
    for connection in connections:
        connection.close()
    publisher.stop()
    await until(lambda: budget.used_bytes == 0)
