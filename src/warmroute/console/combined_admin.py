"""The admin API of `serve --workers`: the parent asks its workers, and replies as one process would.

A change of a node goes to one worker, which shares it with the others and replies once all of them have confirmed it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol
from urllib.parse import parse_qs, unquote

import msgspec

from warmroute.console.admin import check_token
from warmroute.console.combined_live import CombinedLive
from warmroute.console.combined_views import (
    combine_decisions,
    combine_islands,
    combine_models,
    combine_node,
    combine_nodes,
    leading_view,
)
from warmroute.console.page_files import PageFiles
from warmroute.console.worker_api import Reply, ask, ask_all, no_worker
from warmroute.edge.async_handler import Request, Responder
from warmroute.edge.errors import HttpError
from warmroute.edge.http1 import RequestHead
from warmroute.telemetry import metric_definitions as metrics
from warmroute.telemetry.combined_metrics import CombinedMetrics
from warmroute.telemetry.exposition import CONTENT_TYPE

DEFAULT_DECISIONS: Final = 20


class Workers(Protocol):
    """The workers, as the parent knows them."""

    @property
    def sockets(self) -> list[tuple[int, str]]:
        """Number and admin socket of each worker that serves."""

    @property
    def restarts(self) -> int: ...

    async def reload(self, reason: str) -> tuple[int, bytes]:
        """Reload the configuration of all workers. Return the status and body of the answer."""


class CombinedAdmin:
    def __init__(self, workers: Workers, token_sha256: str) -> None:
        self._workers = workers
        self._token = bytes.fromhex(token_sha256)
        self._metrics = CombinedMetrics()
        self._live = CombinedLive(lambda: workers.sockets)
        self._page = PageFiles()
        self._turn = 0

    def admit(self, head: RequestHead) -> None:
        """Check the token. Raises HttpError."""
        check_token(head, self._token)

    async def answer(self, request: Request, responder: Responder) -> None:
        target = request.head.target.decode("ascii")
        match request.method, [unquote(part) for part in request.path.split("/")[1:]]:
            case "GET", ["health"]:
                responder.reply(200, b'{"status":"alive"}')
            case "GET", [""] | ["page", _]:
                self._page.reply(request, responder)
            case "GET", ["metrics"]:
                responder.reply(200, await self.metrics_page(), CONTENT_TYPE)
            case "GET", ["ready"]:
                replies = sorted(await self._ask(request, target), key=lambda reply: reply.status)
                _pass(responder, replies[0])
            case "GET", ["admin", "capture", *_]:
                raise HttpError(
                    409, "A capture is written by one process: start the router without --workers.",
                    code="not_with_workers",
                )  # fmt: skip
            case "GET", ["admin", "live"]:
                await self._live.stream(responder)
            case "GET", ["admin", "nodes"]:
                await self._combine(request, responder, target, combine_nodes)
            case "GET", ["admin", "models"]:
                await self._combine(request, responder, target, combine_models)
            case "GET", ["admin", "islands"]:
                await self._combine(request, responder, target, combine_islands)
            case "GET", ["admin", "nodes", _]:
                await self._combine(request, responder, target, combine_node)
            case "GET", ["admin", "decisions"]:
                limit = parse_qs(request.query).get("limit", [str(DEFAULT_DECISIONS)])[-1]
                most = int(limit) if limit.isascii() and limit.isdigit() and len(limit) < 10 else 0
                await self._combine(request, responder, target, lambda replies: combine_decisions(replies, most))
            case "GET", ["admin", "decisions", _]:
                replies = sorted(await self._ask(request, target), key=lambda reply: reply.status)
                _pass(responder, replies[0])
            case "POST", ["admin", "reload"]:
                status, body = await self._workers.reload("admin API")
                responder.reply(status, body)
            case "GET", ["admin", "scaling"]:
                await self._combine(request, responder, target, leading_view)
            case "POST", ["admin", "nodes", _, "blocks"]:
                await self._report_blocks(request, responder, target)
            case _:
                _pass(responder, await self._ask_one(request, target))

    async def metrics_page(self) -> bytes:
        workers = self._workers.sockets
        replies = await ask_all(workers, "GET", "/metrics")
        pages = {reply.socket: reply.body for reply in replies if reply.status == 200}
        self._metrics.update(pages, {socket for _, socket in workers})
        own = {metrics.WORKERS.name: float(len(workers)), metrics.WORKER_RESTARTS.name: float(self._workers.restarts)}
        return await asyncio.get_running_loop().run_in_executor(None, self._metrics.render, own)

    # Changes.

    async def _report_blocks(self, request: Request, responder: Responder, target: str) -> None:
        """Pass what a node's cache holds to all workers: each has an index of its own."""
        replies = await self._ask(request, target)
        _pass(responder, min(replies, key=lambda reply: reply.status))

    async def reload_workers(self) -> tuple[int, bytes]:
        replies = await ask_all(self._workers.sockets, "POST", "/admin/reload")
        if not replies:
            return 503, b'{"error":{"message":"No worker serves.","type":"server_error","code":"no_worker"}}'
        worst = max(replies, key=lambda reply: reply.status)
        return worst.status, worst.body

    # Asking.

    async def _ask(self, request: Request, target: str) -> list[Reply]:
        """Return the replies of all workers, at least one. Raises HttpError."""
        replies = await ask_all(self._workers.sockets, request.method, target, request.body)
        if not replies:
            raise no_worker()
        return replies

    async def _ask_one(self, request: Request, target: str) -> Reply:
        """Return the reply of one worker, of another one each time. Raises HttpError."""
        workers = self._workers.sockets
        self._turn += 1
        for at in range(len(workers)):
            reply = await ask(*workers[(self._turn + at) % len(workers)], request.method, target, request.body)
            if reply is not None:
                return reply
        raise no_worker()

    async def _combine(
        self, request: Request, responder: Responder, target: str, combine: Callable[[Sequence[Any]], Any]
    ) -> None:
        replies = await self._ask(request, target)
        good = [reply for reply in replies if reply.status == 200]
        if not good:
            _pass(responder, replies[0])
            return
        combined = combine([msgspec.json.decode(reply.body) for reply in good])
        responder.reply(200, msgspec.json.encode(combined))


def _pass(responder: Responder, reply: Reply) -> None:
    responder.reply(reply.status, reply.body)
