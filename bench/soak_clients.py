"""The clients of the soak test (soak.py): what they send, and how each request ended."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from random import Random
from typing import Any

HOST = "127.0.0.1"
CONVERSATIONS = 200
"""Different first messages. A conversation grows for some turns and starts again: caches fill up, and then stay."""
MAX_TURNS = 6
PATIENCE_S = 90.0
WORDS = "the router sends each request to a node that holds a long prefix of its prompt".split()  # noqa: SIM905


class Load:
    def __init__(self, port: int, keys: list[str], clients: int) -> None:
        self._port, self._keys, self._clients = port, keys, clients
        self._active = True
        self.outcomes: Counter[str] = Counter()
        self.lost: list[str] = []

    async def run(self) -> None:
        await asyncio.gather(*(self._client(number) for number in range(self._clients)))

    def stop(self) -> None:
        self._active = False

    async def _client(self, number: int) -> None:
        random = Random(number)
        messages: list[dict[str, str]] = []
        while self._active:
            if len(messages) >= 2 * MAX_TURNS or not messages or random.random() < 0.1:
                first = random.randrange(CONVERSATIONS)
                messages = [{"role": "user", "content": f"{first} " + text(Random(first), 150)}]
            else:
                messages.append({"role": "assistant", "content": text(random, 20)})
                messages.append({"role": "user", "content": text(random, 40)})
            try:
                async with asyncio.timeout(PATIENCE_S):
                    outcome = await self._send(random, messages)
            except TimeoutError:
                outcome = self._lose(f"no end within {PATIENCE_S:g} s")
            except (OSError, asyncio.IncompleteReadError) as error:
                outcome = self._lose(f"the connection closed without a response ({type(error).__name__})")
            self.outcomes[outcome] += 1
            await asyncio.sleep(random.random() * 0.2)

    def _lose(self, what: str) -> str:
        self.lost.append(what)
        return "lost"

    async def _send(self, random: Random, messages: list[dict[str, str]]) -> str:
        streams = random.random() < 0.6
        body: dict[str, Any] = {"model": "m", "messages": messages, "max_tokens": random.randrange(5, 80)}
        if streams:
            body |= {"stream": True, "stream_options": {"include_usage": random.random() < 0.5}}
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection(HOST, self._port, limit=1 << 22)
        try:
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: router\r\nConnection: close\r\n"
                b"Content-Type: application/json\r\nAuthorization: Bearer %b\r\nContent-Length: %d\r\n\r\n"
                % (random.choice(self._keys).encode(), len(data))
                + data
            )
            if random.random() < 0.08:
                await asyncio.sleep(random.random() * 0.5)
                return "client left"
            head = await reader.readuntil(b"\r\n\r\n")
            status = int(head.split(b" ", 2)[1])
            if status != 200:
                rest = await reader.read(2000)
                if status == 429:
                    await asyncio.sleep(0.5)
                    return "rejected with 429"
                return self._lose(f"status {status}: {rest[:160]!r}")
            slowly = streams and random.random() < 0.05
            if streams and random.random() < 0.05:
                await reader.read(200)
                return "client left during the stream"
            return await self._read_body(reader, head, slowly, streams)
        finally:
            writer.transport.abort()

    async def _read_body(self, reader: asyncio.StreamReader, head: bytes, slowly: bool, streams: bool) -> str:
        if b"transfer-encoding: chunked" not in head.lower():
            length = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"content-length" in line)
            try:
                await reader.readexactly(length)
            except (asyncio.IncompleteReadError, ConnectionError):
                return "broken off, visible by its length"
            return "complete"
        received = bytearray()
        try:
            while piece := await reader.read(128 if slowly else 65_536):
                received += piece
                if slowly:
                    await asyncio.sleep(0.05)
        except ConnectionError:
            pass
        if received.endswith(b"0\r\n\r\n"):
            if streams and b"data: [DONE]" not in received:
                return self._lose("a broken stream looked complete")
            return "complete, read slowly" if slowly else "complete"
        if b"event: error" not in received:
            return self._lose("a stream broke off without an error event")
        return "broken off with an error event"


def text(random: Random, words: int) -> str:
    return " ".join(random.choice(WORDS) for _ in range(words))
