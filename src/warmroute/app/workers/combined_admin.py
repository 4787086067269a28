"""The admin API of `serve --workers`: the parent asks its workers, and replies as one process would.

A change of a node goes to one worker, which shares it with the others and replies once all of them have confirmed it.
No answer waits for a worker that hangs: it says what the others know, and which workers do not answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol
from urllib.parse import parse_qs, unquote

import msgspec

from warmroute._kernel import RequestHead
from warmroute.app.admin import check_token
from warmroute.app.alert_webhook import OUTCOMES, AlertWebhook
from warmroute.app.live_page import PageFiles
from warmroute.app.metrics import page as metrics
from warmroute.app.metrics.exposition import CONTENT_TYPE
from warmroute.app.workers.combined_live import CombinedLive
from warmroute.app.workers.combined_metrics import CombinedMetrics
from warmroute.app.workers.combined_views import (
    combine_alerts,
    combine_decisions,
    combine_islands,
    combine_models,
    combine_node,
    combine_nodes,
    leading_view,
    merge_alerts,
)
from warmroute.app.workers.worker_api import Replies, ServingWorker, ask, ask_all, no_worker, wait_until_s
from warmroute.edge.async_handler import Request, Responder
from warmroute.edge.errors import HttpError

DEFAULT_DECISIONS: Final = 20
NO_WORKER: Final = (503, b'{"error":{"message":"No worker serves.","type":"server_error","code":"no_worker"}}')


class Workers(Protocol):
    """The workers, as the parent knows them."""

    @property
    def serving(self) -> Sequence[ServingWorker]:
        """The workers that serve, also those that hang."""

    @property
    def restarts(self) -> int: ...

    async def reload(self, reason: str) -> tuple[int, bytes]:
        """Reload the configuration of all workers. Return the status and body of the answer."""


class CombinedAdmin:
    def __init__(self, workers: Workers, token_sha256: str) -> None:
        self._workers = workers
        self._token = bytes.fromhex(token_sha256)
        self._metrics = CombinedMetrics()
        self._live = CombinedLive(lambda: [one.admin_socket for one in workers.serving if one.answers])
        self._page = PageFiles()
        self._turn = 0
        self.webhook: AlertWebhook | None = None
        """Where alerts are sent, whose counts are on the metrics page."""

    def check_head(self, head: RequestHead) -> None:
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
                await self._pass_best(request, responder, target)
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
            case "GET", ["admin", "alerts"]:
                await self._combine(request, responder, target, combine_alerts)
            case "GET", ["admin", "nodes", _]:
                await self._combine(request, responder, target, combine_node)
            case "GET", ["admin", "decisions"]:
                limit = parse_qs(request.query).get("limit", [str(DEFAULT_DECISIONS)])[-1]
                most = int(limit) if limit.isascii() and limit.isdigit() and len(limit) < 10 else 0
                await self._combine(request, responder, target, lambda replies: combine_decisions(replies, most))
            case "GET", ["admin", "decisions", _]:
                await self._pass_best(request, responder, target)
            case "POST", ["admin", "reload"]:
                status, body = await self._workers.reload("admin API")
                responder.reply(status, body)
            case "GET", ["admin", "scaling"]:
                await self._combine(request, responder, target, leading_view)
            case "POST", ["admin", "nodes", _, "blocks"]:
                await self._pass_best(request, responder, target)  # each has an index of its own
            case _:
                await self._pass_one(request, responder, target)

    async def metrics_page(self) -> bytes:
        workers = self._workers.serving
        replies = await ask_all(workers, "GET", "/metrics")
        pages = {reply.socket: reply.body for reply in replies.found if reply.status == 200}
        self._metrics.update(pages, {worker.admin_socket for worker in workers})
        own = {metrics.WORKERS.name: float(len(workers)), metrics.WORKER_RESTARTS.name: float(self._workers.restarts)}
        for worker in workers:
            own[f'{metrics.WORKER_ANSWERS.name}{{worker="{worker.number}"}}'] = float(
                worker.number not in replies.missing
            )
        if self.webhook is not None:
            for outcome in OUTCOMES:
                own[f'{metrics.ALERTS_SENT.name}{{outcome="{outcome}"}}'] = float(self.webhook.counts[outcome])
        return await asyncio.get_running_loop().run_in_executor(None, self._metrics.render, own)

    async def alerts(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the alerts of all workers, and whether all workers answered."""
        replies = await ask_all(self._workers.serving, "GET", "/admin/alerts")
        found = [msgspec.json.decode(reply.body)["alerts"] for reply in replies.found if reply.status == 200]
        return merge_alerts(found), bool(found) and len(found) == len(replies.found) and not replies.missing

    async def reload_workers(self) -> tuple[int, bytes, list[int]]:
        """Return the status and body of the answer, and the workers that did not answer."""
        replies = await ask_all(self._workers.serving, "POST", "/admin/reload")
        if not replies.found:
            return *NO_WORKER, replies.missing
        worst = max(replies.found, key=lambda reply: reply.status)
        return worst.status, replies.body_of(worst), replies.missing

    # Asking.

    async def _ask(self, request: Request, target: str) -> Replies:
        """Return the replies of all workers, at least one. Raises HttpError."""
        replies = await ask_all(self._workers.serving, request.method, target, request.body)
        if not replies.found:
            raise no_worker(replies.missing)
        return replies

    async def _pass_best(self, request: Request, responder: Responder, target: str) -> None:
        """Ask all workers, and pass the reply with the lowest status on."""
        replies = await self._ask(request, target)
        best = min(replies.found, key=lambda reply: reply.status)
        responder.reply(best.status, replies.body_of(best))

    async def _pass_one(self, request: Request, responder: Responder, target: str) -> None:
        """Pass the reply of one worker on, of another one each time. Raises HttpError."""
        workers = self._workers.serving
        self._turn += 1
        until_s = wait_until_s(workers)
        for at in range(len(workers)):
            worker = workers[(self._turn + at) % len(workers)]
            reply = await ask(worker, request.method, target, request.body, until_s)
            if reply is not None:
                silent = [worker.number for worker in workers if not worker.answers]
                responder.reply(reply.status, Replies([reply], silent).body_of(reply))
                return
        raise no_worker([worker.number for worker in workers])

    async def _combine(
        self, request: Request, responder: Responder, target: str, combine: Callable[[Sequence[Any]], Any]
    ) -> None:
        replies = await self._ask(request, target)
        good = [reply for reply in replies.found if reply.status == 200]
        if not good:
            responder.reply(replies.found[0].status, replies.body_of(replies.found[0]))
            return
        responder.reply(200, replies.encode(combine([msgspec.json.decode(reply.body) for reply in good])))
