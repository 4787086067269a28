"""The admin API of `serve --workers`: the parent asks its workers, and replies as one process would.

Changes go to all workers. The parent remembers nodes that were added, removed or drained through the admin API, and
repeats that in a worker that starts later.
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
        self._changes: dict[str, list[tuple[str, str, bytes]]] = {}
        """By node: requests that a new worker has to get."""
        self._turn = 0

    def admit(self, head: RequestHead) -> str:
        """Check the token. Raises HttpError."""
        check_token(head, self._token)
        return ""

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
            case ("POST" | "DELETE", ["admin", "nodes", *_]):
                await self._change(request, responder, target)
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

    async def _change(self, request: Request, responder: Responder, target: str) -> None:
        replies = await self._ask(request, target)
        failed = [reply for reply in replies if reply.status >= 300]
        if len(failed) < len(replies):
            done = next(reply for reply in replies if reply.status < 300)
            if not request.path.endswith("/blocks"):
                self._remember(request, target, done.body)
            _pass(responder, done)
        else:
            _pass(responder, failed[0])

    def _remember(self, request: Request, target: str, reply: bytes) -> None:
        try:
            name = str(msgspec.json.decode(reply)["name"])
        except (msgspec.DecodeError, KeyError, TypeError):
            return
        change = (request.method, target, request.body)
        if target.endswith("/undrain"):
            self._changes[name] = [one for one in self._changes.get(name, []) if not one[1].endswith("/drain")]
        elif request.method == "DELETE" or target.endswith("/drain"):
            before = self._changes.pop(name, [])
            was_added = any(method == "POST" and not path.endswith(("/drain", "/role")) for method, path, _ in before)
            if request.method == "DELETE":
                if not was_added:  # it is in the configuration
                    self._changes[name] = [change]
            else:
                self._changes[name] = [*(one for one in before if one[1] != target), change]
        else:
            self._changes[name] = [*(one for one in self._changes.get(name, []) if one[1] != target), change]

    async def repeat_changes(self, socket: str) -> None:
        """Make a new worker's nodes those of the others."""
        for changes in list(self._changes.values()):
            for method, target, body in changes:
                await ask(0, socket, method, target, body)

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
