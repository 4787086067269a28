"""A plain way to serve a path: an async function that answers. For the admin API and the simulated engine, where an
answer's own cost is far above that of a task; the proxy's requests go the fast way (edge.proxy).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from warmroute.edge.client import Client
from warmroute.edge.errors import REASONS, Refusal
from warmroute.edge.head import RequestHead

log = logging.getLogger("warmroute.edge")


class Request:
    __slots__ = ("body", "head", "method", "path", "query")

    def __init__(self, head: RequestHead, body: bytes) -> None:
        self.head = head
        self.body = body
        self.method = head.method.decode("ascii")
        path, _, query = head.target.decode("ascii").partition("?")
        self.path = path
        self.query = query


class Responder:
    """Where an answer goes: once whole with `reply`, or piece by piece with `begin`, `send`, `end`."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._room = asyncio.Event()
        self._room.set()
        self._task: asyncio.Task[None] | None = None
        self.begun = False
        self.ended = False
        self._chunked = True

    def reply(
        self,
        status: int,
        body: bytes,
        content_type: str = "application/json",
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self.begun = self.ended = True
        self._client.reply(status, body, headers, content_type)

    def begin(self, status: int, content_type: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
        self.begun = True
        self._chunked = self._client.speaks_chunked
        keep_alive = self._client.keeps_alive and self._chunked
        lines = [
            b"HTTP/1.1 %d %b\r\nContent-Type: %b\r\n" % (status, REASONS.get(status, b"Status"), content_type.encode())
        ]
        lines += [f"{name}: {value}\r\n".encode() for name, value in headers]
        lines.append(b"Transfer-Encoding: chunked\r\n" if self._chunked else b"")
        lines += (self._client.connection_line(keep_alive), b"\r\n")
        self._client.write(b"".join(lines))

    def write(self, data: bytes) -> None:
        if data:
            self._client.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    async def send(self, data: bytes) -> None:
        """Writes, and waits while the client is behind."""
        self.write(data)
        if not self._room.is_set():
            await self._room.wait()

    def end(self) -> None:
        self.ended = True
        if self._chunked:
            self._client.write(b"0\r\n\r\n")
        self._client.answered(self._client.keeps_alive and self._chunked)

    def break_off(self) -> None:
        """Ends the connection with the answer unfinished."""
        self.ended = True
        self._client.break_off()

    # Exchange.

    def client_left(self) -> None:
        self.ended = True
        if self._task is not None:
            self._task.cancel()

    def client_full(self) -> None:
        self._room.clear()

    def client_ready(self) -> None:
        self._room.set()


Answer = Callable[[Request, Responder], Awaitable[None]]


class PlainHandler:
    """Serves every request by one async function. Implements edge.server.Handler."""

    def __init__(self, answer: Answer, admit: Callable[[RequestHead], str] = lambda _head: "") -> None:
        self._answer = answer
        self._admit = admit
        self._tasks: set[asyncio.Task[None]] = set()

    def admit(self, head: RequestHead) -> str:
        return self._admit(head)

    def serve(self, client: Client, head: RequestHead, body: bytes) -> Responder:
        responder = Responder(client)
        task = asyncio.get_running_loop().create_task(self._run(client, Request(head, body), responder))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        responder._task = task
        return responder

    async def _run(self, client: Client, request: Request, responder: Responder) -> None:
        try:
            await self._answer(request, responder)
        except Refusal as refusal:
            if not responder.begun:
                client.refuse(refusal)
        except asyncio.CancelledError:
            if not responder.ended:
                responder.break_off()
            raise
        except Exception:
            log.exception("answering %s %s failed", request.method, request.path)
            if not responder.begun:
                client.refuse(Refusal(500, "The request failed inside.", code="internal_error", kind="server_error"))
            elif not responder.ended:
                responder.break_off()

    def new_request_id(self) -> bytes:
        return b""

    def refused(self, refusal: Refusal, request_id: bytes) -> None:
        pass
