"""An engine for benchmarks of the router: it answers every request with the same bytes, at once or after a delay."""

from __future__ import annotations

import asyncio
import json
import time

ANSWER = json.dumps(
    {
        "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 300, "completion_tokens": 2, "total_tokens": 302},
    }
).encode()  # fmt: skip
MODELS = b'{"object":"list","data":[{"id":"m","object":"model"}]}'
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


class QuickEngine(asyncio.Protocol):
    """One connection. Answers each request once its body has arrived, after `delay_s`."""

    def __init__(self, delay_s: float = 0.0, arrivals: list[float] | None = None) -> None:
        """`arrivals` gets the times at which chat requests arrive."""
        self._delay_s = delay_s
        self._arrivals = arrivals
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n")[0]) if at >= 0 else 0
            if len(self._buffer) < end + 4 + length:
                return
            self._buffer = self._buffer[end + 4 + length :]
            if b"/chat/completions" not in head:
                self._reply(MODELS if b"/v1/models" in head else b"{}")
                continue
            if self._arrivals is not None:
                self._arrivals.append(time.monotonic())
            if self._delay_s:
                asyncio.get_running_loop().call_later(self._delay_s, self._reply, ANSWER)
            else:
                self._reply(ANSWER)

    def _reply(self, body: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(HEAD % len(body) + body)  # type: ignore[attr-defined]
