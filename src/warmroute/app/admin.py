"""The admin API: nodes, islands, scaling, decisions, captures."""

from __future__ import annotations

import asyncio
import re
import time
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import parse_qs, unquote

import msgspec

from warmroute._kernel import RequestHead
from warmroute.app.capture import TrafficCapture
from warmroute.app.journal import describe, describe_decision, describe_last_failure
from warmroute.app.live_page import PAGE_PATHS, LiveFeed, PageFiles
from warmroute.app.metrics.exposition import Scrapes
from warmroute.config import ConfigError, NodeConfig, is_loopback, node_name, parse_section
from warmroute.config.clients import canonical_address
from warmroute.config.file import same_engine
from warmroute.config.nodes import Role
from warmroute.core.brain import Brain
from warmroute.core.cache_view import CacheView
from warmroute.core.decision import Decision
from warmroute.core.decision_record import explain_decision
from warmroute.core.fleet import Fleet
from warmroute.core.islands import IslandRegistry
from warmroute.core.last_decisions import LastDecisions, search
from warmroute.core.messages import Outcome
from warmroute.core.node import Node
from warmroute.core.rejections import NameTaken, RoutingError, UnknownNode, rejection
from warmroute.edge.arrival import WITH_OUTPUT_TOKENS, Rights
from warmroute.edge.async_handler import Request, Responder, decode_body
from warmroute.edge.errors import HttpError, method_not_allowed, rendered
from warmroute.edge.http1 import read_request_head
from warmroute.edge.proxy import Proxy
from warmroute.engines.block_reports import BlockReports
from warmroute.event_log import EventLog

# GET /admin/capture/stream: a capture that lasts as long as its client reads it, one JSON object per line.
#
# An empty line comes every second, so that a client without traffic notices that the router is still there.

log = EventLog("warmroute.capture")

MAX_STREAMS: Final = 4
"""Streams of captures at a time. Each holds lines in memory for a client that may be slow."""
MAX_UNREAD_BYTES: Final = 64 << 20
"""Bytes that the client may leave unread. Beyond them, the stream leaves out requests."""
KEEP_ALIVE_S: Final = 1.0
"""An empty line shows a client that waits that the stream lives, and the router that the client does."""


class CaptureStreams:
    def __init__(self, capture: TrafficCapture) -> None:
        self._capture = capture
        self._open = 0

    def describe(self) -> dict[str, Any]:
        return self._capture.describe()

    async def stream(self, responder: Responder) -> None:
        """Send requests until the client disconnects. Raises HttpError."""
        if self._open >= MAX_STREAMS:
            raise HttpError(
                503, f"{MAX_STREAMS} clients read a capture already.", code="too_many_captures",
                headers=(("Retry-After", "10"),),
            )  # fmt: skip
        self._open += 1
        responder.start(200, "application/x-ndjson", (("Cache-Control", "no-store"),))
        target = self._capture.start(_ResponseSink(responder, asyncio.get_running_loop()))
        log.info("capture_stream_started", "A client of the admin API captures traffic.")
        try:
            while not responder.ended:
                responder.write(b"\n")
                await asyncio.sleep(KEEP_ALIVE_S)
        finally:
            self._open -= 1
            self._capture.stop(target)
            log.info("capture_stream_ended", requests=target.written, dropped=target.dropped)


class _ResponseSink:
    """Hands lines from the capture's thread to the event loop, which sends them."""

    def __init__(self, responder: Responder, loop: asyncio.AbstractEventLoop) -> None:
        self.path = Path("admin API")
        self._responder = responder
        self._loop = loop
        self._unsent_bytes = 0

    def write(self, lines: bytes) -> None:
        if self._unsent_bytes + self._responder.unread_bytes > MAX_UNREAD_BYTES:
            raise OSError(0, "the client reads too slowly")
        self._unsent_bytes += len(lines)
        self._loop.call_soon_threadsafe(self._send, lines)

    def _send(self, lines: bytes) -> None:
        self._unsent_bytes -= len(lines)
        if not self._responder.ended:
            self._responder.write(lines)


# A dry run: what the router would decide for a request now. Nothing is sent, and no state changes.


async def dry_run(proxy: Proxy, brain: Brain, head: RequestHead, body: bytes, rights: Rights) -> tuple[Decision, bool]:
    """Return the decision, and whether the request would wait in the queue first. Raises HttpError if rejected."""
    request, prompt, lookup = await proxy.read(head, body, rights)
    try:
        limits = brain.calls.rate_limits.of(rights.tenant) if brain.calls.rate_limits is not None else None
        if limits is not None:
            tokens = prompt.total_tokens if prompt is not None else None
            output = brain.router.output_lengths.expected(request.model, request.tenant, request.max_output_tokens)
            has_output = head.target.partition(b"?")[0] in WITH_OUTPUT_TOKENS
            limits.check(tokens, output, proxy.now(), len(body), has_output)
        return brain.admission.dry_run(request, lookup, proxy.now())
    except RoutingError as why:
        raise rendered(rejection(why, 0, request)) from None


# GET /admin/decisions and GET /admin/decisions/REQUEST_ID: recent decisions, their reasons, and what failed.
#
#     ?limit=20   ?failed=1   ?tenant=search   ?status=502   ?request_id=…      each, or several together
#
# POST /admin/explain: the decision that the router would take for a request now:
#
#     {"path": "/v1/chat/completions", "headers": {"X-Session-Id": "7"}, "tenant": "search", "body": {"model": …}}
#
# Only `body` is required. `tenant` replaces the API key.

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
    def __init__(self, decisions: LastDecisions, proxy: Proxy, brain: Brain) -> None:
        self._decisions = decisions
        self._proxy = proxy
        self._brain = brain

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
        decisions, wall_s = self._decisions, self._wall_s
        stored = decisions.stored()

        def find_all() -> list[dict[str, Any]]:
            calls = search(
                stored, int(limit), failed=_FLAGS[failed], tenant=fields.get("tenant"),
                status=None if status is None else int(status),
                request_id=None if request_id is None else request_id.encode("utf-8", "replace"),
            )  # fmt: skip
            return [describe(call, wall_s) for call in calls]

        described = await asyncio.get_running_loop().run_in_executor(None, find_all)
        return {"stored": len(decisions), "decisions": described}

    def find(self, request_id: str) -> dict[str, Any]:
        call = self._decisions.find(request_id.encode("utf-8", "replace"))
        if call is None:
            raise HttpError(
                404,
                f"The journal has no request {request_id[:200]!r}. It contains the last "
                f"{self._decisions.config.max_decisions:,} requests that were sent to a node.",
                code="unknown_request",
            )
        return describe(call, self._wall_s)

    @property
    def _wall_s(self) -> float:
        """The Unix time at which the router's clock was 0."""
        return time.time() - self._proxy.now()

    async def explain(self, body: bytes) -> dict[str, Any]:
        try:
            request = decode_body(body, _explain_request)
        except msgspec.DecodeError as error:
            raise HttpError(
                400, f'Send the request as {{"path": "/v1/…", "body": {{…}}}}: {error}', code="bad_request"
            ) from None
        request_body = bytes(request.body)
        head = _head(request, len(request_body))
        decision, would_queue = await dry_run(self._proxy, self._brain, head, request_body, self._rights(request, head))
        record, query = decision.record(), decision.query
        assert query is not None
        return {
            **query.request.facts(),
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
            rights = self._proxy.check_head(head)
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


# The admin API: metrics, nodes, islands, scaling, decisions. It has its own listener, apart from that for clients.

PUBLIC_PATHS: Final = (b"/health", b"/ready", *PAGE_PATHS)
"""Paths that need no token. The live page asks for the token, and sends it with its own requests."""
PIECE_BYTES: Final = 1 << 17
"""A larger metrics page is sent in pieces of this size, and requests are served between them."""

_OTHER_SITES: Final = (b"cross-site", b"same-site")
"""Values of `Sec-Fetch-Site` with which a browser marks requests of other pages."""


class _NewRole(msgspec.Struct):
    """The body of a request for another role."""

    role: Role


_DRAINED: Final = ("it gets no new requests", "an operator drained it: it gets no new requests")
_any: Final = msgspec.json.Decoder()
_new_role: Final = msgspec.json.Decoder(_NewRole)


class AdminOperations(Protocol):
    """What the service does for the admin API."""

    def add_node(self, config: NodeConfig) -> Node: ...
    def remove_node(self, name: str) -> Node: ...
    def drain_node(self, name: str, draining: bool) -> Node: ...
    def set_role(self, name: str, role: Role) -> Node: ...
    def reload(self) -> str | None:
        """Reload the configuration. Return the error if it is invalid."""

    def describe_reload(self) -> dict[str, list[str]]:
        """Return what the last reload has changed, and which keys take effect only after a restart."""

    def readiness(self) -> tuple[int, bytes]: ...
    def describe_models(self) -> list[dict[str, Any]]: ...
    def describe_scaling(self) -> dict[str, Any]: ...
    def describe_prompts(self, show_text: bool) -> dict[str, Any]:
        """Return what prevents reuse; the text around differences only with `show_text`."""

    def describe_cluster(self) -> dict[str, Any]: ...
    def describe_alerts(self) -> dict[str, Any]: ...
    def describe_discovery(self) -> list[dict[str, Any]]: ...
    async def confirm_changes(self, node: Node) -> dict[str, Any]:
        """Wait until the change of this node is kept for the next start, and other replicas know it. Return whether it
        is, and who does."""


class AdminApi:
    def __init__(
        self,
        fleet: Fleet,
        cache_view: CacheView,
        scrapes: Scrapes,
        decisions: Decisions,
        live: LiveFeed,
        captures: CaptureStreams,
        operations: AdminOperations,
        token_sha256: str,
    ) -> None:
        self._fleet = fleet
        self._block_reports = BlockReports(cache_view)
        self._scrapes = scrapes
        self._decisions = decisions
        self._live = live
        self._captures = captures
        self._page = PageFiles()
        self._operations = operations
        self._token = bytes.fromhex(token_sha256)

    def check_head(self, head: RequestHead) -> None:
        """Check the token. Raises HttpError."""
        check_token(head, self._token)

    async def answer(self, request: Request, responder: Responder) -> None:
        match request.method, [unquote(part) for part in request.path.split("/")[1:]]:
            case "GET", ["metrics"]:
                await self._send_metrics(request.head, responder)
            case "GET", ["health"]:
                responder.reply(200, b'{"status":"alive"}')
            case "GET", ["ready"]:
                responder.reply(*self._operations.readiness())
            case "GET", [""] | ["page", _]:
                self._page.reply(request, responder)
            case "GET", ["admin", "live"]:
                await self._live.stream(responder)
            case "GET", ["admin", "capture"]:
                _reply(responder, 200, self._captures.describe())
            case "GET", ["admin", "capture", "stream"]:
                await self._captures.stream(responder)
            case "GET", ["admin", "nodes"]:
                _reply(responder, 200, {"nodes": [describe_node(node) for node in self._fleet]})
            case "GET", ["admin", "models"]:
                _reply(responder, 200, {"models": self._operations.describe_models()})
            case "GET", ["admin", "islands"]:
                _reply(responder, 200, {"islands": describe_islands(self._fleet.islands)})
            case "GET", ["admin", "scaling"]:
                _reply(responder, 200, self._operations.describe_scaling())
            case "GET", ["admin", "cluster"]:
                _reply(responder, 200, self._operations.describe_cluster())
            case "GET", ["admin", "alerts"]:
                _reply(responder, 200, self._operations.describe_alerts())
            case "GET", ["admin", "prompts"]:
                _reply(responder, 200, self._operations.describe_prompts(self._may_show_text(request)))
            case "GET", ["admin", "discovery"]:
                _reply(responder, 200, {"sources": self._operations.describe_discovery()})
            case "POST", ["admin", "nodes"]:
                await self._reply_changed(responder, 201, self._add_node(request.body))
            case "GET", ["admin", "nodes", name]:
                _reply(responder, 200, describe_node(self._find_node(name)))
            case "DELETE", ["admin", "nodes", name]:
                self._find_node(name)
                await self._reply_changed(responder, 200, self._operations.remove_node(name))
            case "POST", ["admin", "nodes", name, ("drain" | "undrain") as action]:
                self._find_node(name)
                await self._reply_changed(responder, 200, self._operations.drain_node(name, action == "drain"))
            case "POST", ["admin", "nodes", name, "role"]:
                await self._reply_changed(responder, 200, self._set_role(self._find_node(name), request.body))
            case "POST", ["admin", "nodes", name, "blocks"]:
                self._find_node(name)
                _reply(responder, 200, await self._block_reports.apply(name, request.body))
            case "GET", ["admin", "decisions"]:
                _reply(responder, 200, await self._decisions.recent(request.query))
            case "GET", ["admin", "decisions", request_id]:
                _reply(responder, 200, self._decisions.find(request_id))
            case "POST", ["admin", "explain"]:
                _reply(responder, 200, await self._decisions.explain(request.body))
            case "POST", ["admin", "reload"]:
                error = self._operations.reload()
                if error is not None:
                    raise HttpError(
                        400, f"Configuration rejected; keeping the previous one: {error}", code="bad_config"
                    )
                _reply(responder, 200, {"status": "reloaded", **self._operations.describe_reload()})
            case _, ["admin", "nodes"]:
                raise method_not_allowed("GET, POST")
            case _, ["admin", "nodes", _]:
                raise method_not_allowed("GET, DELETE")
            case _, ["admin", "models" | "islands" | "scaling" | "discovery" | "alerts" | "prompts" | "live"]:
                raise method_not_allowed("GET")
            case _, ["admin", "decisions", *_] | ["admin", "capture"] | ["admin", "capture", "stream"]:
                raise method_not_allowed("GET")
            case _, ["admin", "explain" | "reload"] | ["admin", "nodes", _, "blocks" | "role"]:
                raise method_not_allowed("POST")
            case _:
                raise HttpError(
                    404,
                    "Not found. The paths are / (the live page), /metrics, /health, /ready, /admin/nodes, "
                    "/admin/nodes/NAME, /admin/nodes/NAME/drain, /admin/nodes/NAME/undrain, /admin/nodes/NAME/role, "
                    "/admin/nodes/NAME/blocks, /admin/models, /admin/islands, /admin/scaling, "
                    "/admin/discovery, /admin/cluster, /admin/alerts, /admin/prompts, "
                    "/admin/live, /admin/capture, /admin/capture/stream, /admin/decisions, "
                    "/admin/decisions/REQUEST_ID, /admin/explain and /admin/reload.",
                    code="not_found",
                )

    async def _reply_changed(self, responder: Responder, status: int, node: Node) -> None:
        """Reply once the change is kept, and other replicas know it: then none of them sends a drained node another
        request."""
        description = describe_node(node)
        _reply(responder, status, description | await self._operations.confirm_changes(node))

    def _may_show_text(self, request: Request) -> bool:
        """Return whether the request asks for the text of prompts. Raises HttpError if the admin API has no token."""
        if parse_qs(request.query).get("show_text", ["0"])[-1] in ("0", "false", ""):
            return False
        if not self._token:
            raise HttpError(
                403, "The text of prompts is shown only if the admin API requires a token: set admin.token_sha256.",
                code="forbidden", kind="permission_error",
            )  # fmt: skip
        return True

    async def _send_metrics(self, head: RequestHead, responder: Responder) -> None:
        pieces, content_type, headers = await self._scrapes.page(head.get(b"accept"), head.get(b"accept-encoding"))
        if sum(map(len, pieces)) <= PIECE_BYTES:
            responder.reply(200, b"".join(pieces), content_type, headers)
            return
        responder.start(200, content_type, headers)
        for piece in pieces:
            for at in range(0, len(piece), PIECE_BYTES):
                responder.write(piece[at : at + PIECE_BYTES])
                await asyncio.sleep(0)
        responder.end()

    def _find_node(self, name: str) -> Node:
        try:
            return self._fleet.node(name)
        except UnknownNode:
            raise HttpError(
                404, f"No node has the name {name[:200]!r}. GET /admin/nodes lists all nodes.", code="unknown_node"
            ) from None

    def _add_node(self, body: bytes) -> Node:
        try:
            config = parse_section(NodeConfig, decode_body(body, _any))
            self._check_address(config)
            return self._operations.add_node(config)
        except msgspec.DecodeError:
            problem = "the body is not JSON"
        except ConfigError as error:
            problem = str(error)
        except NameTaken as error:
            raise HttpError(409, f"A node with the name {str(error)!r} already exists.", code="name_taken") from None
        raise HttpError(400, f'Send the node as {{"url": "http://host:port", …}}: {problem}', code="bad_node")

    def _set_role(self, node: Node, body: bytes) -> Node:
        try:
            role = decode_body(body, _new_role).role
        except msgspec.DecodeError:
            raise HttpError(
                400, 'Send the role as {"role": "mixed"}, {"role": "prefill"} or {"role": "decode"}.', code="bad_role"
            ) from None
        obstacle = node.obstacle_to(role)
        if obstacle:
            raise HttpError(409, f"The role of {node.name!r} cannot change: {obstacle}.", code="role_fixed")
        return self._operations.set_role(node.name, role)

    def _check_address(self, config: NodeConfig) -> None:
        """Raises HttpError if another node is the same engine."""
        name, address = node_name(config), canonical_address(config.url)
        for node in self._fleet:
            if node.name != name and canonical_address(node.url) == address:
                raise HttpError(409, f"{same_engine(node.name, name, config.url)}.", code="same_engine")


def check_token(head: RequestHead, token_sha256: bytes) -> None:
    """Raises HttpError if the request may not use the admin API."""
    if head.target in PUBLIC_PATHS:
        return
    if not token_sha256:
        _reject_browsers(head)
        return
    scheme, _, token = head.authorization.partition(b" ")
    digest = sha256(token.strip()).digest()
    if scheme.lower() != b"bearer" or not compare_digest(digest, token_sha256):
        raise HttpError(
            401, "The admin API requires its token: send `Authorization: Bearer TOKEN`.", code="invalid_token",
            headers=(("WWW-Authenticate", "Bearer"),), key_sha256=digest.hex()[:8] if token else "",
        )  # fmt: skip


def _reject_browsers(head: RequestHead) -> None:
    """Without a token, everybody on this machine has access. That must not include other web pages in a browser.

    The live page itself has the origin of this listener. A page of another site that resolves its name to this machine
    sends that name as the host.
    """
    address = head.get(b"host").decode("ascii", "replace")
    host = address.rpartition(":")[0] or address
    origin = head.get(b"origin")
    foreign = origin and origin != b"http://" + head.get(b"host")
    if foreign or head.get(b"sec-fetch-site") in _OTHER_SITES or not is_loopback(host.strip("[]")):
        raise HttpError(
            403, "Without a token the admin API serves only programs on this machine, at its loopback address.",
            code="forbidden", kind="permission_error",
        )  # fmt: skip


def describe_node(node: Node) -> dict[str, Any]:
    health = node.health
    return {
        "name": node.name,
        "url": node.url,
        "models": list(node.models) if node.models is not None else None,
        "engine": node.engine,
        "role": node.role,
        "island": node.island,
        "distance_ms": round(node.distance_ms, 3),
        "lora_adapters": list(node.loaded_adapters),
        "state": "draining" if node.draining else health.state.value,
        "reason": _DRAINED[node.drained_by_hand] if node.draining else health.reason,
        "requests_in_flight": node.inflight,
        "max_inflight": node.max_inflight or None,
        "concurrency_limit": node.concurrency.most or None,
        "other_requests": node.other_load,
        "engine_running": node.running,
        "engine_waiting": node.waiting,
        "kv_usage": node.kv_usage,
        "max_model_len": node.context_window("") or None,
        "engine_hit_ratio": _rounded(node.rates.hit_share),
        "predicted_hit_ratio": _rounded(node.rates.predicted_share),
        "preemptions_per_s": _rounded(node.rates.preemptions_per_s),
        "queue_time_ms": _rounded(node.rates.queue_time_ms),
        "latency_ms": round(node.latency_ms, 3),
        "prefill_ms_per_token": round(node.speed.ms_per_token, 6),
        "prefill_speed_source": node.speed.source,
        "prefill_speed_implausible": node.speed.implausible or None,
        "ejections": dict(node.recent_requests.ejections),
        "outcomes": {outcome.name.lower(): node.outcomes[outcome] for outcome in Outcome},
        "last_failure": describe_last_failure(node, time.time() - time.monotonic()),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def describe_islands(islands: IslandRegistry) -> list[dict[str, Any]]:
    conversations = islands.conversations
    return [
        {
            "name": island.name,
            "nodes": [node.name for node in island.nodes],
            "round_trip_ms": round(island.round_trip_ms, 3),
            "measured_round_trip_ms": None if island.measured_ms is None else round(island.measured_ms, 3),
            "egress_usd_per_gb": island.config.egress_usd_per_gb,
            "egress_ms": round(islands.egress_ms(island), 3),
            "queue_ms": round(island.queue_ms, 3),
            "distance_ms": round(island.distance_ms, 3),
            "conversations_started": conversations.started[island.name],
            "turns_at_home": conversations.served_at_home[island.name],
            "turns_away": conversations.served_away[island.name],
            "conversations_returned": conversations.returned[island.name],
            "conversations_moved": [
                {"to": to, "reason": reason, "count": count}
                for (home, to, reason), count in sorted(conversations.moved.items())
                if home == island.name
            ],
        }
        for island in islands
    ]


def _reply(responder: Responder, status: int, value: object) -> None:
    responder.reply(status, msgspec.json.encode(value))
