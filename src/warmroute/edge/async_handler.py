"""Serves every request of a listener with one async function, in a task for each request.

The admin API and the simulated engine use it. The proxy does not (edge/exchange.py): a task costs too much there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import msgspec

from warmroute._kernel import RequestHead
from warmroute.edge import errors
from warmroute.edge.arrival import NO_RIGHTS, Rights
from warmroute.edge.client_address import ClientAddresses
from warmroute.edge.client_connection import ClientConnection
from warmroute.edge.client_errors import ClientErrors
from warmroute.edge.errors import Headers, HttpError, render_start
from warmroute.event_log import EventLog, where_it_failed

log = EventLog("warmroute.edge")

_NO_PROXIES = ClientAddresses(())

_Decoded = TypeVar("_Decoded")


def decode_body(body: bytes, decoder: msgspec.json.Decoder[_Decoded]) -> _Decoded:
    """Return what the decoder makes of a body. Raises msgspec.DecodeError for every body that it does not accept."""
    try:
        return decoder.decode(body)
    except UnicodeDecodeError:
        problem = "it is not UTF-8 text"
    except RecursionError:
        problem = "it is nested too deeply"
    raise msgspec.DecodeError(problem)


class Request:
    __slots__ = ("body", "head", "method", "path", "query")

    def __init__(self, head: RequestHead, body: bytes) -> None:
        self.head = head
        self.body = body
        self.method = head.method.decode("ascii")
        self.path, _, self.query = head.target.decode("ascii").partition("?")


class Responder:
    """Sends one response: at once with `reply`, or in pieces with `start`, `write` and `end`."""

    has_node: Final = False

    def __init__(self, client: ClientConnection) -> None:
        self._client = client
        self._chunked = True
        self.task: asyncio.Task[None] | None = None
        """Cancelled when the client disconnects."""
        self.started = False
        self.ended = False

    def reply(self, status: int, body: bytes, content_type: str = "application/json", headers: Headers = ()) -> None:
        self.started = self.ended = True
        self._client.reply(status, body, headers, content_type)

    def start(self, status: int, content_type: str, headers: Headers = ()) -> None:
        self.started = True
        self._chunked = self._client.accepts_chunked
        keep_alive = self._client.keeps_alive and self._chunked
        lines = [render_start(status, content_type)]
        lines += [f"{name}: {value}\r\n".encode() for name, value in headers]
        lines.append(b"Transfer-Encoding: chunked\r\n" if self._chunked else b"")
        lines += (self._client.connection_line(keep_alive), b"\r\n")
        self._client.write(b"".join(lines))

    def write(self, data: bytes) -> None:
        if data:
            self._client.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def end(self) -> None:
        self.ended = True
        if self._chunked:
            self._client.write(b"0\r\n\r\n")
        self._client.response_sent(self._client.keeps_alive and self._chunked)

    def close_unfinished(self) -> None:
        """Close the connection, so that the client sees that the response is incomplete."""
        self.ended = True
        self._client.close_unfinished()

    @property
    def unread_bytes(self) -> int:
        """What was written and is not yet in the kernel's buffers, because the client does not read."""
        size: int = self._client.transport.get_write_buffer_size()
        return size

    def abort(self) -> None:
        """Close the connection at once, and drop what the client has not read."""
        self.ended = True
        self._client.abort()

    # The client connection calls these (listener.Exchange).

    def internal_error(self, error: Exception) -> None:
        log.error("request_failed_internally", "The response breaks off.", reason=where_it_failed(error))
        self.client_left()
        self._client.abort()

    def cut_off(self) -> None:
        self.client_left()
        self._client.abort()

    def client_left(self) -> None:
        self.ended = True
        if self.task is not None:
            self.task.cancel()

    def pause_response(self) -> None:
        """Responses here are small: they are buffered."""

    def resume_response(self) -> None:
        pass


Answer = Callable[[Request, Responder], Awaitable[None]]


class AsyncHandler:
    """Implements listener.Handler."""

    def __init__(
        self,
        answer: Answer,
        check_head: Callable[[RequestHead], None] = lambda _head: None,
        client_errors: ClientErrors | None = None,
    ) -> None:
        """`check_head` raises HttpError for a head that it rejects. `client_errors` counts wrong tokens."""
        self._answer = answer
        self._check_head = check_head
        self._client_errors = client_errors
        self._tasks: set[asyncio.Task[None]] = set()

    def check_head(self, head: RequestHead) -> Rights:
        self._check_head(head)
        return NO_RIGHTS

    def serve(self, client: ClientConnection, head: RequestHead, body: bytes) -> None:
        responder = client.exchange = Responder(client)
        task = asyncio.get_running_loop().create_task(self._run(client, Request(head, body), responder))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        responder.task = task

    async def _run(self, client: ClientConnection, request: Request, responder: Responder) -> None:
        try:
            await self._answer(request, responder)
        except HttpError as error:
            if not responder.started:
                client.send_error(error)
        except asyncio.CancelledError:
            if not responder.ended:
                responder.close_unfinished()
            raise
        except Exception:
            log.exception("handler_failed", "The client receives an error.", method=request.method, path=request.path)
            if not responder.started:
                client.send_error(errors.internal_error())
            elif not responder.ended:
                responder.close_unfinished()

    def new_request_id(self) -> bytes:
        return b""

    def error_sent(self, error: HttpError, request_id: bytes, peer: bytes, forwarded_for: bytes) -> None:
        if self._client_errors is not None and error.status == 401:
            self._client_errors.count(401, error.code, _NO_PROXIES.source(peer, b""), error.key_sha256)

    def internal_error(self, error: Exception, request_id: bytes = b"") -> HttpError:
        log.error("request_failed_internally", "The client receives status 500.", reason=where_it_failed(error))
        return errors.internal_error()
