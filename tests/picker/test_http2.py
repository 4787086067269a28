"""The picker's HTTP/2 with clients that others wrote (h2; grpcio in the other files), slow ones and hostile ones."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest
from support.picker import RunningPicker, chat_body, headers_message, picker
from support.polling import until
from support.scripted_engine import engines

from warmroute.edge.envoy import ext_proc, http2
from warmroute.edge.envoy import http2 as frames
from warmroute.edge.envoy.grpc import Call
from warmroute.edge.envoy.server import PROCESS
from warmroute.edge.envoy.stream import PickerStream

FIELDS = [
    (":method", "POST"), (":scheme", "http"), (":path", PROCESS), (":authority", "picker"),
    ("content-type", "application/grpc"), ("te", "trailers"),
]  # fmt: skip


def grpc_message(data: bytes, compressed: int = 0) -> bytes:
    return struct.pack(">BI", compressed, len(data)) + data


def request_messages(body: bytes, mode: int = ext_proc.FULL_DUPLEX_STREAMED) -> bytes:
    """Return the messages by which Envoy describes a request."""
    head = headers_message(
        "request_headers",
        {":method": "POST", ":path": "/v1/chat/completions", "content-type": "application/json"},
        end=False,
    )
    head.protocol_config.request_body_mode = mode
    http = ext_proc.MESSAGES["HttpBody"](body=body, end_of_stream=True)
    data = ext_proc.ProcessingRequest(request_body=http)
    return grpc_message(head.SerializeToString()) + grpc_message(data.SerializeToString())


def read_messages(data: bytes) -> list[Any]:
    """Return the messages that are complete."""
    found, at = [], 0
    while at + 5 <= len(data) and at + 5 + (size := struct.unpack_from(">I", data, at + 1)[0]) <= len(data):
        found.append(ext_proc.ProcessingResponse.FromString(data[at + 5 : at + 5 + size]))
        at += 5 + size
    return found


def body_of(data: bytes) -> bytes:
    """Return the body that the picker sends back."""
    return b"".join(
        one.request_body.response.body_mutation.streamed_response.body
        for one in read_messages(data)
        if one.HasField("request_body")
    )


class H2Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, window: int) -> None:
        self._reader, self._writer = reader, writer
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self.h2.initiate_connection()
        if window:
            self.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window})
        self.data: dict[int, bytes] = {}
        self.trailers: dict[int, dict[bytes, bytes]] = {}
        self.resets: dict[int, int] = {}
        self.goaway: int | None = None
        self.updates: list[int | None] = []
        """Calls, or 0 for the connection, whose window the picker has opened again."""
        self.flush()

    def flush(self) -> None:
        self._writer.write(self.h2.data_to_send())

    async def send(self, number: int, data: bytes, end: bool = False, piece: int = 16_384) -> None:
        """Send data as flow control allows."""
        while data:
            room = min(self.h2.local_flow_control_window(number), piece, len(data))
            if room:
                self.h2.send_data(number, data[:room])
                data = data[room:]
                self.flush()
                await self._writer.drain()
            else:
                await self.step()
        if end:
            self.h2.end_stream(number)
            self.flush()

    async def step(self, acknowledge: bool = True) -> bool:
        """Handle what the picker sends next. Return False at the end of the connection."""
        data = await asyncio.wait_for(self._reader.read(65_536), 10.0)
        if not data:
            return False
        for event in self.h2.receive_data(data):
            if isinstance(event, h2.events.DataReceived):
                self.data[event.stream_id] = self.data.get(event.stream_id, b"") + event.data
                if acknowledge and event.flow_controlled_length:
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.TrailersReceived | h2.events.ResponseReceived):
                fields = {bytes(name): bytes(value) for name, value in event.headers}
                self.trailers.setdefault(event.stream_id, {}).update(fields)
            elif isinstance(event, h2.events.WindowUpdated):
                self.updates.append(event.stream_id)
            elif isinstance(event, h2.events.StreamReset):
                self.resets[event.stream_id] = event.error_code
            elif isinstance(event, h2.events.ConnectionTerminated):
                self.goaway = event.error_code
        self.flush()
        return True

    def call(self, fields: list[tuple[str, str]] = FIELDS) -> int:
        number: int = self.h2.get_next_available_stream_id()
        self.h2.send_headers(number, fields)
        self.flush()
        return number

    async def status(self, number: int) -> bytes:
        while b"grpc-status" not in self.trailers.get(number, {}):
            assert await self.step()
        return self.trailers[number][b"grpc-status"]


@asynccontextmanager
async def client(p: RunningPicker, window: int = 0) -> AsyncIterator[H2Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", p.service.port)
    try:
        yield H2Client(reader, writer, window)
    finally:
        writer.close()


async def raw(p: RunningPicker, data: bytes) -> bytes:
    """Send bytes, and return what comes until the picker closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", p.service.port)
    writer.write(data)
    try:
        return await asyncio.wait_for(reader.read(), 10.0)
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize("size", [5_000, 100_000])
async def test_a_client_with_small_windows_gets_the_whole_body_back(size: int) -> None:
    """Its answers fill a frame, or several."""
    body = chat_body("x" * size)
    async with engines(1) as nodes, picker(*nodes) as p, client(p, window=700) as c:
        number = c.call()
        await c.send(number, request_messages(body), piece=1_000)
        while body_of(c.data.get(number, b"")) != body:
            assert await c.step()
        c.h2.end_stream(number)
        c.flush()
        assert await c.status(number) == b"0"


@pytest.mark.parametrize(("size", "updates"), [(400_000, 0), (700_000, 1), (1_300_000, 2)])
async def test_a_call_gets_a_new_window_each_time_half_of_it_is_used(size: int, updates: int) -> None:
    body = chat_body("x" * size)
    async with engines(1) as nodes, picker(*nodes) as p, client(p) as c:
        number = c.call()
        await c.send(number, request_messages(body))
        while body_of(c.data.get(number, b"")) != body:
            assert await c.step()
        assert c.updates.count(number) == updates


async def test_a_request_in_single_bytes_is_understood() -> None:
    async with engines(1) as nodes, picker(*nodes) as p, client(p) as c:
        number = c.call()
        await c.send(number, request_messages(chat_body()), piece=1)
        while not read_messages(c.data.get(number, b"")):
            assert await c.step()
        [first, *_] = read_messages(c.data[number])
        assert ext_proc.DESTINATION in first.dynamic_metadata["envoy.lb"]


async def test_a_bad_call_gets_a_status_and_the_connection_stays() -> None:
    async with engines(1) as nodes, picker(*nodes) as p, client(p) as c:
        unknown = c.call([*FIELDS[:2], (":path", "/x.Y/Z"), *FIELDS[3:]])
        await c.send(unknown, grpc_message(b""))
        assert await c.status(unknown) == b"12"
        compressed = c.call()
        await c.send(compressed, grpc_message(b"x", compressed=1))
        assert await c.status(compressed) == b"12"
        nonsense = c.call()
        await c.send(nonsense, grpc_message(b"\xff\xff"))
        assert await c.status(nonsense) == b"3"
        huge = c.call()
        await c.send(huge, struct.pack(">BI", 0, 1 << 31))
        assert await c.status(huge) == b"0"
        [answer] = read_messages(c.data[huge])
        assert answer.immediate_response.status.code == 413
        empty = c.call()
        c.h2.end_stream(empty)
        c.flush()
        assert await c.status(empty) == b"0"
        good = c.call()
        await c.send(good, request_messages(chat_body()))
        while not c.data.get(good):
            assert await c.step()
        c.h2.reset_stream(good)
        c.flush()


def _headers_frame(number: int, flags: int, prefix: bytes = b"", suffix: bytes = b"") -> bytes:
    block = h2.connection.H2Connection().encoder.encode(FIELDS)
    return frames.frame(frames.HEADERS, flags, number, prefix + block + suffix)


SETTINGS = frames.frame(frames.SETTINGS, 0, 0)
START = frames.PREFACE + SETTINGS
OPEN_BLOCK = frames.frame(frames.HEADERS, 0, 1, b"\x83")


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"GET / HTTP/1.1\r\nHost: picker\r\n\r\n", frames.PROTOCOL_ERROR),
        (START + frames.frame(frames.DATA, 0, 1, b"x"), frames.PROTOCOL_ERROR),
        (START + b"\xff\xff\xff" + bytes(6), frames.FRAME_SIZE_ERROR),
        (
            START + frames.frame(frames.HEADERS, frames.END_HEADERS, 1, b"\xff\xff\xff\xff\xff"),
            frames.COMPRESSION_ERROR,
        ),
        (START + OPEN_BLOCK + frames.frame(frames.PING, 0, 0, bytes(8)), frames.PROTOCOL_ERROR),
        (START + frames.frame(frames.CONTINUATION, 0, 1), frames.PROTOCOL_ERROR),
        (START + OPEN_BLOCK + frames.frame(frames.CONTINUATION, 0, 1, b"x" * 16_000) * 5, frames.ENHANCE_YOUR_CALM),
        (START + frames.frame(frames.PUSH_PROMISE, 0, 1), frames.PROTOCOL_ERROR),
        (START + frames.frame(frames.SETTINGS, 0, 0, b"xxx"), frames.FRAME_SIZE_ERROR),
        (START + frames.frame(frames.SETTINGS, 0, 0, b"\0\4\xff\xff\xff\xff"), frames.FLOW_CONTROL_ERROR),
        (START + frames.frame(frames.WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff"), frames.FLOW_CONTROL_ERROR),
        (START + frames.frame(frames.WINDOW_UPDATE, 0, 0, b"x"), frames.FRAME_SIZE_ERROR),
        (START + frames.frame(frames.HEADERS, frames.END_HEADERS | frames.PADDED, 1, b"\xff"), frames.PROTOCOL_ERROR),
        (START + _headers_frame(2, frames.END_HEADERS), frames.PROTOCOL_ERROR),
    ],
    ids=itertools.count(),
)
async def test_a_client_that_breaks_the_rules_is_disconnected_with_the_reason(data: bytes, code: int) -> None:
    async with engines(1) as nodes, picker(*nodes) as p:
        answer = await raw(p, data)
        assert not answer or answer[-8:] == b"\0\0\0" + answer[-5:-4] + b"\0\0\0" + bytes((code,))
        await p.until_idle()
        assert (await p.ask()).endpoints


async def test_padding_priorities_continuations_and_unknown_frames_are_understood() -> None:
    async with engines(1) as nodes, picker(*nodes) as p:
        block = h2.connection.H2Connection().encoder.encode(FIELDS)
        padded = frames.PADDED | frames.HAS_PRIORITY
        data = request_messages(chat_body())
        sent = (
            START,
            frames.frame(frames.PRIORITY, 0, 1, bytes(5)),
            frames.frame(0x20, 0xFF, 7, b"unknown"),
            frames.frame(frames.HEADERS, padded, 1, b"\x03" + bytes(5) + block[:4] + bytes(3)),
            frames.frame(frames.CONTINUATION, 0, 1, block[4:9]),
            frames.frame(frames.CONTINUATION, frames.END_HEADERS, 1, block[9:]),
            frames.frame(frames.DATA, frames.PADDED, 1, b"\x02" + data[:7] + bytes(2)),
            frames.frame(frames.DATA, 0, 1, data[7:]),
            frames.frame(frames.PING, 0, 0, b"12345678"),
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", p.service.port)
        writer.write(b"".join(sent))
        answer = b""
        while frames.frame(frames.PING, frames.ACK, 0, b"12345678") not in answer or b"127.0.0.1:" not in answer:
            answer += await asyncio.wait_for(reader.read(65_536), 10.0)
        assert frames.frame(frames.SETTINGS, frames.ACK, 0) in answer
        assert sum(p.inflight()) == 1
        writer.write(frames.frame(frames.RST_STREAM, 0, 1, bytes(4)))
        await until(lambda: not sum(p.inflight()))
        writer.close()


async def test_mutated_bytes_leave_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    draw = random.Random(11)
    sent = START + _headers_frame(1, frames.END_HEADERS)
    sent += frames.frame(frames.DATA, 0, 1, request_messages(chat_body())) + _headers_frame(3, frames.END_HEADERS)
    sent += frames.frame(frames.DATA, frames.END_STREAM, 3, request_messages(chat_body(), ext_proc.BUFFERED))
    async with engines(1) as nodes, picker(*nodes) as p:
        for _ in range(600):
            data = bytearray(sent)
            for _ in range(draw.randrange(1, 8)):
                at = draw.randrange(24, len(data))
                if draw.random() < 0.5:
                    data[at] = draw.randrange(256)
                else:
                    del data[at : at + draw.randrange(1, 20)]
            reader, writer = await asyncio.open_connection("127.0.0.1", p.service.port)
            writer.write(bytes(data))
            writer.write_eof()
            try:
                await asyncio.wait_for(reader.read(), 10.0)
            except ConnectionError:
                pass
            writer.close()
        await p.until_idle()
        await until(lambda: not p.server.http2_connections and not p.server.partial_bytes)
        assert (await p.ask()).endpoints
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_stopping_picker_refuses_new_calls_and_closes_after_the_last_one() -> None:
    async with engines(1) as nodes, picker(*nodes) as p:
        reader, writer = await asyncio.open_connection("127.0.0.1", p.service.port)
        writer.write(START + _headers_frame(1, frames.END_HEADERS))
        writer.write(frames.frame(frames.DATA, 0, 1, request_messages(chat_body())))
        await until(lambda: sum(p.inflight()) == 1)
        p.server.close_idle()
        writer.write(_headers_frame(3, frames.END_HEADERS) + frames.frame(frames.DATA, frames.END_STREAM, 3, b"x"))
        writer.write(frames.frame(frames.DATA, frames.END_STREAM, 1))
        answer = await asyncio.wait_for(reader.read(), 10.0)
        assert frames.frame(frames.GOAWAY, 0, 0, b"\0\0\0\1" + bytes(4)) in answer
        assert frames.frame(frames.RST_STREAM, 0, 3, b"\0\0\0\7") in answer
        assert answer.endswith(b"grpc-status\x010")
        writer.close()


async def test_ended_calls_leave_nothing_in_memory() -> None:
    """Python's garbage collection comes rarely."""
    async with engines(1) as nodes, picker(*nodes) as p:
        gc.collect()
        gc.disable()
        try:
            for mode in ("buffered", "duplex"):
                envoy = p.stream(mode)
                await envoy.send_request(chat_body())
                await envoy.decision()
                if mode == "duplex":
                    await envoy.body_back()
                await envoy.respond(b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n')
                await envoy.finish()
                await p.ask(mode=mode)  # and cancel it
                await p.ask(b"{", mode=mode)
            await p.until_idle()
            left = [
                one for one in gc.get_objects() if isinstance(one, PickerStream | Call | ext_proc.ProcessingRequest)
            ]
            assert not left
        finally:
            gc.enable()


async def test_a_connection_that_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2, "PREFACE_S", 0.05)
    async with engines(1) as nodes, picker(*nodes) as p:
        assert len(await raw(p, b"PRI * HTTP/2.0")) < 60  # its settings
