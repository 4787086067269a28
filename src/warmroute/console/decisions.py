"""GET /admin/decisions, GET /admin/decisions/REQUEST_ID: what was decided of late, and why. POST /admin/explain: what
would be decided of a request now:

    {"path": "/v1/chat/completions", "headers": {"X-Session-Id": "7"}, "tenant": "search", "body": {"model": …}}

All but `body` may be left out. `tenant` stands for its key, where clients need one.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, Final
from urllib.parse import parse_qs

import msgspec

from warmroute.edge.dry_run import rehearse
from warmroute.edge.errors import Refusal
from warmroute.edge.head import RequestHead, read_request_head
from warmroute.edge.proxy import Proxy
from warmroute.routing.reasons import sentence
from warmroute.telemetry.journal import PRIORITIES, Journal, describe

USUAL_LIMIT: Final = 20
MAX_FIELDS: Final = 100
_FIELD_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_FIELD_VALUE: Final = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_TARGET: Final = re.compile(r"/[\x21-\x7e]*")
_OF_THE_WAY: Final = frozenset({"host", "content-length", "transfer-encoding", "connection", "expect"})
"""Fields that belong to the connection that a request came by, and not to the request."""


class Rehearsed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    body: msgspec.Raw
    path: str = "/v1/chat/completions"
    headers: dict[str, str] = {}
    tenant: str = ""


class Decisions:
    def __init__(self, journal: Journal, proxy: Proxy) -> None:
        self._journal = journal
        self._proxy = proxy

    async def recent(self, query: str) -> dict[str, Any]:
        """The latest first; `limit` of them."""
        asked = parse_qs(query).get("limit", [str(USUAL_LIMIT)])[-1]
        if not asked.isascii() or not asked.isdigit() or not 0 < len(asked) < 10 or not int(asked):
            raise Refusal(400, f"limit is a number from 1 on, not {asked[:40]!r}.", code="bad_limit", param="limit")
        entries = self._journal.latest(int(asked))

        def in_words() -> list[dict[str, Any]]:
            return [self._journal.describe(entry) for entry in entries]

        found = await asyncio.get_running_loop().run_in_executor(None, in_words)
        return {"kept": len(self._journal), "decisions": found}

    def of(self, request_id: str) -> dict[str, Any]:
        entry = self._journal.find(request_id.encode("utf-8", "replace"))
        if entry is None:
            raise Refusal(
                404,
                f"No decision about a request {request_id[:200]!r} is kept here. The last "
                f"{self._journal.config.keep:,} are (journal.keep); those that were refused before a node was chosen "
                "are not among them.",
                code="unknown_request",
            )
        return self._journal.describe(entry)

    async def explain(self, given: bytes) -> dict[str, Any]:
        """What would be decided now."""
        try:
            request = msgspec.json.decode(given, type=Rehearsed)
        except msgspec.DecodeError as error:
            raise Refusal(
                400, f'The request is not told as {{"path": "/v1/…", "body": {{…}}}}: {error}', code="bad_request"
            ) from None
        body = bytes(request.body)
        head = _head(request, len(body))
        decision, waits = await rehearse(self._proxy, head, body, self._tenant(request, head))
        grounds, query = decision.grounds(), decision.query
        assert query is not None
        return {
            "tenant": query.request.tenant,
            "model": query.request.model,
            "route": query.request.route,
            "priority": PRIORITIES[query.request.priority],
            "sentence": sentence(grounds) + ("; it would wait here first, until there is room" if waits else ""),
            **describe(grounds, self._journal.config.candidates),
            "would_wait": waits,
        }

    def _tenant(self, request: Rehearsed, head: RequestHead) -> str:
        tenants = self._proxy.tenants
        if request.tenant and request.tenant not in tenants:
            raise Refusal(
                400, f"No key is of a tenant {request.tenant[:200]!r}.", code="unknown_tenant", param="tenant"
            )
        try:
            tenant = self._proxy.admit(head)
        except Refusal as refusal:
            if refusal.status != 401:
                raise
            if not request.tenant:
                raise Refusal(
                    400, "Clients need a key here: say whose request it is (`tenant`).", code="missing_tenant",
                    param="tenant",
                ) from None  # fmt: skip
            tenant = request.tenant
        return request.tenant or tenant


def _head(request: Rehearsed, length: int) -> RequestHead:
    if not _TARGET.fullmatch(request.path):
        raise Refusal(400, f"{request.path[:200]!r} is not a path.", code="bad_request", param="path")
    lines = [f"POST {request.path} HTTP/1.1", "Host: rehearsal", f"Content-Length: {length}"]
    for name, value in request.headers.items():
        if not _FIELD_NAME.fullmatch(name) or not _FIELD_VALUE.fullmatch(value):
            raise Refusal(400, f"{name[:200]!r} is not a header field.", code="bad_request", param="headers")
        if name.lower() not in _OF_THE_WAY:
            lines.append(f"{name}: {value}")
    if not any(line.lower().startswith("content-type:") for line in lines):
        lines.append("Content-Type: application/json")
    head = "\r\n".join(lines).encode("latin-1")
    return read_request_head(head + b"\r\n\r\n", len(head), MAX_FIELDS)
