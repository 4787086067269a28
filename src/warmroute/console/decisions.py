"""GET /admin/decisions and GET /admin/decisions/REQUEST_ID: recent decisions, their reasons, and what failed.

    ?limit=20   ?failed=1   ?tenant=search   ?status=502   ?request_id=…      each, or several together

POST /admin/explain: the decision that the router would take for a request now:

    {"path": "/v1/chat/completions", "headers": {"X-Session-Id": "7"}, "tenant": "search", "body": {"model": …}}

Only `body` is required. `tenant` replaces the API key.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, Final
from urllib.parse import parse_qs

import msgspec

from warmroute.config.priority import PRIORITY_NAMES
from warmroute.edge.api_keys import Rights
from warmroute.edge.async_handler import decode_body
from warmroute.edge.dry_run import dry_run
from warmroute.edge.errors import HttpError
from warmroute.edge.http1 import RequestHead, read_request_head
from warmroute.edge.proxy import Proxy
from warmroute.routing.explanation import explain_decision
from warmroute.telemetry.journal import Journal, describe_decision, search

DEFAULT_LIMIT: Final = 20
_FLAGS: Final = {"0": False, "false": False, "": False, "1": True, "true": True}
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE: Final = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_TARGET: Final = re.compile(r"/[\x21-\x7e]*")
_CONNECTION_HEADERS: Final = frozenset({"host", "content-length", "transfer-encoding", "connection", "expect"})
"""Headers that belong to the connection of the original request."""


class ExplainRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    body: msgspec.Raw
    path: str = "/v1/chat/completions"
    headers: dict[str, str] = {}
    tenant: str = ""


_explain_request: Final = msgspec.json.Decoder(ExplainRequest)


class Decisions:
    def __init__(self, journal: Journal, proxy: Proxy) -> None:
        self._journal = journal
        self._proxy = proxy

    async def recent(self, query: str) -> dict[str, Any]:
        """Return the latest decisions that the query asks for, newest first, up to `limit`. Raises HttpError."""
        fields = {name: values[-1] for name, values in parse_qs(query, keep_blank_values=True).items()}
        limit, status = fields.get("limit", str(DEFAULT_LIMIT)), fields.get("status")
        if not _number(limit) > 0:
            raise HttpError(400, f"limit must be above 0, not {limit[:40]!r}.", code="bad_limit", param="limit")
        if status is not None and not 100 <= _number(status) <= 599:
            raise HttpError(
                400, f"status must be from 100 to 599, not {status[:40]!r}.", code="bad_query", param="status"
            )
        failed = fields.get("failed", "0")
        if failed not in _FLAGS:
            raise HttpError(400, f"failed must be 0 or 1, not {failed[:40]!r}.", code="bad_query", param="failed")
        request_id = fields.get("request_id")
        journal = self._journal
        stored = journal.stored()

        def find_all() -> list[dict[str, Any]]:
            entries = search(
                stored, int(limit), failed=_FLAGS[failed], tenant=fields.get("tenant"),
                status=None if status is None else int(status),
                request_id=None if request_id is None else request_id.encode("utf-8", "replace"),
            )  # fmt: skip
            return [journal.describe(entry) for entry in entries]

        described = await asyncio.get_running_loop().run_in_executor(None, find_all)
        return {"stored": len(journal), "decisions": described}

    def find(self, request_id: str) -> dict[str, Any]:
        entry = self._journal.find(request_id.encode("utf-8", "replace"))
        if entry is None:
            raise HttpError(
                404,
                f"The journal has no request {request_id[:200]!r}. It contains the last "
                f"{self._journal.config.max_decisions:,} requests (journal.max_decisions) that were sent to a node.",
                code="unknown_request",
            )
        return self._journal.describe(entry)

    async def explain(self, body: bytes) -> dict[str, Any]:
        try:
            request = decode_body(body, _explain_request)
        except msgspec.DecodeError as error:
            raise HttpError(
                400, f'Send the request as {{"path": "/v1/…", "body": {{…}}}}: {error}', code="bad_request"
            ) from None
        request_body = bytes(request.body)
        head = _head(request, len(request_body))
        decision, would_queue = await dry_run(self._proxy, head, request_body, self._rights(request, head))
        record, query = decision.record(), decision.query
        assert query is not None
        return {
            "tenant": query.request.tenant,
            "model": query.request.model,
            "route": query.request.route,
            "priority": PRIORITY_NAMES[query.request.priority],
            "explanation": explain_decision(record)
            + ("; the request would wait in the router until the node has room" if would_queue else ""),
            **describe_decision(record),
            "would_queue": would_queue,
        }

    def _rights(self, request: ExplainRequest, head: RequestHead) -> Rights:
        """Of a tenant with several keys, and no key in the request: those of the key with the lowest priority."""
        named = self._proxy.requests.keys.rights_of(request.tenant)
        if request.tenant and named is None:
            raise HttpError(
                400, f"No API key has the tenant {request.tenant[:200]!r}.", code="unknown_tenant", param="tenant"
            )
        try:
            rights = self._proxy.admit(head)
        except HttpError as error:
            if error.status != 401:
                raise
            if named is None:
                raise HttpError(
                    400, "The router requires API keys: name the tenant of the request (`tenant`).",
                    code="missing_tenant", param="tenant",
                ) from None  # fmt: skip
            return named
        return rights if named is None or rights.tenant == named.tenant else named


def _number(text: str) -> int:
    """Return a whole number of a query; -1 if it is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1


def _head(request: ExplainRequest, length: int) -> RequestHead:
    if not _TARGET.fullmatch(request.path):
        raise HttpError(400, f"{request.path[:200]!r} is not a path.", code="bad_request", param="path")
    lines = [f"POST {request.path} HTTP/1.1", "Host: dry-run", f"Content-Length: {length}"]
    for name, value in request.headers.items():
        if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
            raise HttpError(400, f"{name[:200]!r} is not a valid header.", code="bad_request", param="headers")
        if name.lower() not in _CONNECTION_HEADERS:
            lines.append(f"{name}: {value}")
    if not any(line.lower().startswith("content-type:") for line in lines):
        lines.append("Content-Type: application/json")
    head = "\r\n".join(lines).encode("latin-1")
    return read_request_head(head + b"\r\n\r\n", len(head))
