"""How a scripted engine responds: bytes, pauses, and ways to fail."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from support.scripted_engine import ReceivedRequest, ScriptedEngine

CLOSE, RESET, HANG = "close", "reset", "hang"
Step = bytes | float | asyncio.Event | str
Behaviour = Callable[["ScriptedEngine", "ReceivedRequest", asyncio.StreamWriter], Awaitable[None]]

SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


def http_response(
    body: bytes = b'{"ok":true}', status: int = 200, content_type: bytes = b"application/json", headers: bytes = b""
) -> bytes:
    """Return a whole response with a Content-Length."""
    return b"HTTP/1.1 %d Status\r\nContent-Type: %b\r\nContent-Length: %d\r\n%b\r\n%b" % (
        status, content_type, len(body), headers, body,
    )  # fmt: skip


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


DONE = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def sse_event(number: int) -> bytes:
    return b'data: {"n":%d}\n\n' % number


def script(*steps: Step) -> Behaviour:
    """Write bytes, pause for numbers (seconds), wait for events. CLOSE, RESET and HANG end the script."""

    async def play(engine: ScriptedEngine, received: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        for step in steps:
            if isinstance(step, bytes):
                writer.write(step)
                await writer.drain()
            elif isinstance(step, float):
                await asyncio.sleep(step)
            elif isinstance(step, asyncio.Event):
                await step.wait()
            elif step == CLOSE:
                writer.close()
                return
            elif step == RESET:
                reset(writer)
                return
            elif step == HANG:
                await asyncio.Event().wait()

    return play


def repeated(count: int, *steps: Step) -> list[Step]:
    return [*steps] * count


def normal(body: bytes = b'{"ok":true}', headers: bytes = b"") -> Behaviour:
    return script(http_response(body, headers=headers))


def failing(status: int, headers: bytes = b"") -> Behaviour:
    return script(http_response(b'{"error":"no"}', status, headers=headers))


def stream(count: int, pace_s: float = 0.0) -> Behaviour:
    steps: list[Step] = [SSE_HEAD]
    for number in range(count):
        steps.append(chunk(sse_event(number)))
        if pace_s:
            steps.append(pace_s)
    return script(*steps, DONE)


def huge(total_bytes: int, piece: int = 262_144, sized: bool = True) -> Behaviour:
    """Send this many bytes as fast as the router reads them."""

    async def play(engine: ScriptedEngine, received: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        framing = b"Content-Length: %d" % total_bytes if sized else b"Transfer-Encoding: chunked"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\n%b\r\n\r\n" % framing)
        left = total_bytes
        data = b"x" * piece
        while left:
            part = data[:left]
            writer.write(part if sized else chunk(part))
            await writer.drain()
            left -= len(part)
            received.written = total_bytes - left
        if not sized:
            writer.write(b"0\r\n\r\n")

    return play


hanging = script(HANG)


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with a TCP reset."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def vllm_metrics(running: int = 0, waiting: int = 0, kv_usage: float = 0.0, started_s: float = 1.7e9) -> bytes:
    return (
        "# HELP vllm:num_requests_running Number of requests in model execution batches.\n"
        "# TYPE vllm:num_requests_running gauge\n"
        f'vllm:num_requests_running{{engine="0",model_name="m"}} {float(running)}\n'
        "# TYPE vllm:num_requests_waiting gauge\n"
        f'vllm:num_requests_waiting{{engine="0",model_name="m"}} {float(waiting)}\n'
        f'vllm:num_requests_waiting_by_reason{{engine="0",reason="capacity"}} 1000.0\n'
        "# TYPE vllm:kv_cache_usage_perc gauge\n"
        f'vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} {kv_usage}\n'
        f"process_start_time_seconds {started_s}\n"
    ).encode()
