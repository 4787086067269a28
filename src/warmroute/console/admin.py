"""The admin API: metrics, and the fleet's nodes as they are. On its own listener, never on the clients'."""

from __future__ import annotations

import asyncio
from hashlib import sha256
from hmac import compare_digest
from typing import Any, Protocol
from urllib.parse import unquote

import msgspec

from warmroute.config import ConfigError, NodeConfig, is_loopback, made_of
from warmroute.console.decisions import Decisions
from warmroute.console.reports import Reports
from warmroute.edge.errors import Refusal, method_not_allowed
from warmroute.edge.head import RequestHead
from warmroute.edge.plain import Request, Responder
from warmroute.fleet.fleet import Fleet, NameTaken, UnknownNode
from warmroute.fleet.islands import Islands
from warmroute.fleet.node import Node, Outcome
from warmroute.index.cache_view import CacheView
from warmroute.telemetry.exposition import CONTENT_TYPE
from warmroute.telemetry.prometheus import MetricsPage

OPEN_PATHS = (b"/health", b"/ready")


class Operations(Protocol):
    """What the admin API may have done by the service."""

    def add_node(self, config: NodeConfig) -> Node: ...
    def remove_node(self, name: str) -> Node: ...
    def reload(self) -> str | None:
        """Reads the configuration again; returns what is wrong with it, if anything is."""

    def needs_restart(self) -> list[str]:
        """What of the configuration counts only after a restart."""

    def readiness(self) -> tuple[int, bytes]: ...
    def describe_scaling(self) -> dict[str, Any]: ...


class Admin:
    def __init__(
        self,
        fleet: Fleet,
        cache_view: CacheView,
        metrics: MetricsPage,
        decisions: Decisions,
        operations: Operations,
        token_sha256: str,
    ) -> None:
        self._fleet = fleet
        self._reports = Reports(cache_view)
        self._metrics = metrics
        self._decisions = decisions
        self._operations = operations
        self._token = bytes.fromhex(token_sha256)

    def admit(self, head: RequestHead) -> str:
        if head.target in OPEN_PATHS:
            return ""
        if not self._token:
            _refuse_browsers(head)
            return ""
        scheme, _, token = head.authorization.partition(b" ")
        if scheme.lower() != b"bearer" or not compare_digest(sha256(token.strip()).digest(), self._token):
            raise Refusal(
                401, "The admin API needs its token: send it as `Authorization: Bearer TOKEN`.", code="invalid_token",
                headers=(("WWW-Authenticate", "Bearer"),),
            )  # fmt: skip
        return ""

    async def answer(self, request: Request, responder: Responder) -> None:
        match request.method, [unquote(part) for part in request.path.split("/")[1:]]:
            case "GET", ["metrics"]:
                page = await asyncio.get_running_loop().run_in_executor(None, self._metrics.render)
                responder.reply(200, page, CONTENT_TYPE)
            case "GET", ["health"]:
                responder.reply(200, b'{"status":"alive"}')
            case "GET", ["ready"]:
                responder.reply(*self._operations.readiness())
            case "GET", ["admin", "nodes"]:
                _reply(responder, 200, {"nodes": [describe(node) for node in self._fleet]})
            case "GET", ["admin", "islands"]:
                _reply(responder, 200, {"islands": describe_islands(self._fleet.islands)})
            case "GET", ["admin", "scaling"]:
                _reply(responder, 200, self._operations.describe_scaling())
            case "POST", ["admin", "nodes"]:
                _reply(responder, 201, describe(self._add(request.body)))
            case "GET", ["admin", "nodes", name]:
                _reply(responder, 200, describe(self._named(name)))
            case "DELETE", ["admin", "nodes", name]:
                self._named(name)
                _reply(responder, 200, describe(self._operations.remove_node(name)))
            case "POST", ["admin", "nodes", name, ("drain" | "undrain") as action]:
                self._named(name)
                _reply(responder, 200, describe(self._fleet.drain(name, action == "drain")))
            case "POST", ["admin", "nodes", name, "blocks"]:
                self._named(name)
                _reply(responder, 200, await self._reports.take(name, request.body))
            case "GET", ["admin", "decisions"]:
                _reply(responder, 200, await self._decisions.recent(request.query))
            case "GET", ["admin", "decisions", request_id]:
                _reply(responder, 200, self._decisions.of(request_id))
            case "POST", ["admin", "explain"]:
                _reply(responder, 200, await self._decisions.explain(request.body))
            case "POST", ["admin", "reload"]:
                wrong = self._operations.reload()
                if wrong is not None:
                    raise Refusal(
                        400, f"The configuration was not taken, the old one stays: {wrong}", code="bad_config"
                    )
                _reply(responder, 200, {"status": "reloaded", "needs_restart": self._operations.needs_restart()})
            case _, ["admin", "nodes"]:
                raise method_not_allowed("GET, POST")
            case _, ["admin", "islands"] | ["admin", "scaling"]:
                raise method_not_allowed("GET")
            case _, ["admin", "decisions"] | ["admin", "decisions", _]:
                raise method_not_allowed("GET")
            case _, ["admin", "explain"] | ["admin", "reload"]:
                raise method_not_allowed("POST")
            case _, ["admin", "nodes", _, "blocks"]:
                raise method_not_allowed("POST")
            case _, ["admin", "nodes", _]:
                raise method_not_allowed("GET, DELETE")
            case _:
                raise Refusal(
                    404,
                    "Nothing is here. There are /metrics, /health, /ready, /admin/nodes, /admin/nodes/NAME, "
                    "/admin/nodes/NAME/drain, /admin/nodes/NAME/undrain, /admin/nodes/NAME/blocks, /admin/islands, "
                    "/admin/scaling, /admin/decisions, /admin/decisions/REQUEST_ID, /admin/explain and /admin/reload.",
                    code="not_found",
                )

    def _named(self, name: str) -> Node:
        try:
            return self._fleet.node(name)
        except UnknownNode:
            raise Refusal(
                404, f"No node is named {name[:200]!r}. GET /admin/nodes lists them.", code="unknown_node"
            ) from None

    def _add(self, body: bytes) -> Node:
        try:
            return self._operations.add_node(made_of(NodeConfig, msgspec.json.decode(body)))
        except msgspec.DecodeError:
            wrong = "the body is not JSON"
        except ConfigError as error:
            wrong = str(error)
        except NameTaken as taken:
            raise Refusal(409, f"A node named {str(taken)!r} is there already.", code="name_taken") from None
        raise Refusal(400, f'The node is not described as {{"url": "http://host:port", …}}: {wrong}', code="bad_node")


def _refuse_browsers(head: RequestHead) -> None:
    """Without a token the loopback address is the lock, and a web page in a browser on this machine is inside of it."""
    host = head.get(b"host").decode("ascii", "replace").rpartition(":")[0] or head.get(b"host").decode(
        "ascii", "replace"
    )
    if head.get(b"origin") or not is_loopback(host.strip("[]")):
        raise Refusal(
            403, "Without a token the admin API answers only programs on this machine, by its loopback address.",
            code="forbidden", kind="permission_error",
        )  # fmt: skip


def describe(node: Node) -> dict[str, Any]:
    health = node.health
    return {
        "name": node.name,
        "url": node.url,
        "models": list(node.models) if node.models is not None else None,
        "engine": node.engine,
        "role": node.role,
        "island": node.island,
        "distance_ms": round(node.distance_ms, 3),
        "adapters_loaded": list(node.loaded),
        "state": "draining" if node.draining else health.standing.value,
        "reason": health.reason,
        "inflight": node.inflight,
        "foreign": node.other_load,
        "running": node.running,
        "waiting": node.waiting,
        "kv_usage": node.kv_usage,
        "latency_ms": round(node.latency_ms, 3),
        "outcomes": {outcome.name.lower(): node.outcomes[outcome] for outcome in Outcome},
    }


def describe_islands(islands: Islands) -> list[dict[str, Any]]:
    books = islands.books
    return [
        {
            "name": island.name,
            "nodes": [node.name for node in island.nodes],
            "round_trip_ms": round(island.round_trip_ms, 3),
            "measured_ms": None if island.measured_ms is None else round(island.measured_ms, 3),
            "egress_usd_per_gb": island.config.egress_usd_per_gb,
            "egress_ms": round(islands.egress_ms(island), 3),
            "line_ms": round(island.line_ms, 3),
            "distance_ms": round(island.told_ms, 3),
            "fresh": books.fresh[island.name],
            "stayed": books.stayed[island.name],
            "away": books.away[island.name],
            "came_home": books.came_home[island.name],
            "crossed": [
                {"to": to, "reason": reason, "count": count}
                for (home, to, reason), count in sorted(books.crossed.items())
                if home == island.name
            ],
        }
        for island in islands
    ]


def _reply(responder: Responder, status: int, value: object) -> None:
    responder.reply(status, msgspec.json.encode(value))
