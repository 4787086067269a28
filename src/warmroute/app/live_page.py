"""The live page: its files, its feed and its viewers."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from warmroute import __version__, build
from warmroute.app.alerts import ActiveAlerts, describe_alert
from warmroute.app.history import COARSE_S, FINE_S, History, Point, Sums, Window, sums_of
from warmroute.app.journal import describe, describe_failed, describe_last_failure
from warmroute.config.routing import PRIORITY_NAMES
from warmroute.core.cache_view import CacheView
from warmroute.core.calls import Call
from warmroute.core.fleet import Fleet
from warmroute.core.health import HealthState
from warmroute.core.hot_prefixes import PopularPrefix
from warmroute.core.last_decisions import LastDecisions
from warmroute.core.messages import FAILURES, Outcome
from warmroute.core.node import Node
from warmroute.core.node_cache import NodeCache
from warmroute.core.queue import AdmissionQueue
from warmroute.core.traffic import Traffic
from warmroute.edge.async_handler import Request, Responder
from warmroute.edge.client_errors import ClientErrors
from warmroute.edge.errors import Headers, HttpError
from warmroute.event_log import EventLog

# What the live page and `warmroute top` show, as plain JSON values. All of it is built here.
#
# A snapshot is a dict of sections. The live feed sends all sections to a new viewer, and afterwards those that changed.
# The times in it are Unix times in seconds.

MAX_HOLDERS: Final = 8
"""Nodes that are named for each popular prefix."""
MAX_FAILED_REQUESTS: Final = 20
"""The page shows the last ones."""
MAX_TENANTS: Final = 50
MIN_PREFIX_SHARE: Final = 0.1
"""Prefixes with less than this fraction of the most popular one's prompts are left out: single conversations."""
SHOWN_ENDED_ALERTS: Final = 8

Section = dict[str, Any] | list[Any] | None


class LoopState(NamedTuple):
    prefixes: list[PopularPrefix]
    scaling: dict[str, Any]


class LiveSnapshot:
    def __init__(
        self,
        fleet: Fleet,
        cache_view: CacheView,
        queue: AdmissionQueue,
        traffic: Traffic,
        history: History,
        alerts: ActiveAlerts,
        client_errors: ClientErrors,
        decisions: LastDecisions,
        describe_policy: Callable[[], str],
        describe_reload: Callable[[], dict[str, Any] | None],
        describe_scaling: Callable[[], dict[str, Any]],
        describe_prompts: Callable[[], dict[str, Any]],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._cache_view = cache_view
        self._queue = queue
        self._traffic = traffic
        self.history = history
        self._alerts = alerts
        self._client_errors = client_errors
        self._decisions = decisions
        self._describe_policy = describe_policy
        self._describe_reload = describe_reload
        self._describe_scaling = describe_scaling
        self._describe_prompts = describe_prompts
        self._now = now
        self._started_s = now()

    def read_on_loop(self) -> LoopState:
        """Read what changes while a thread would read it. Call it on the event loop, and pass it to `sections`."""
        popular = self._traffic.prefixes.popular(self._now())
        least = MIN_PREFIX_SHARE * max([prefix.share for prefix in popular], default=0.0)
        return LoopState([prefix for prefix in popular if prefix.share >= least], self._describe_scaling())

    def sections(self, state: LoopState) -> dict[str, Section]:
        """Return the current state, without history and decisions. A thread may call it."""
        now_s = self._now()
        wall_s = time.time() - now_s
        window = self.history.window(now_s)
        down = {node.name for node in self._fleet if node.health.state is HealthState.DOWN}
        return {
            "router": {
                "version": __version__,
                "build": build(),
                "last_reload": self._describe_reload(),
                "policy": self._describe_policy(),
                "started": round(wall_s + self._started_s),
                "models": list(self._fleet.models),
                "journal": self._decisions.on and bool(self._decisions.config.max_decisions),
            },
            "totals": _describe_sums(sums_of(self._traffic.total), now_s - self._started_s),
            "window": _describe_sums(window.total, window.seconds),
            "nodes": [_describe_node(node, self._cache_view.cache(node.name), wall_s) for node in self._fleet],
            "islands": [
                {
                    "name": island.name,
                    "distance_ms": round(island.distance_ms, 1),
                    "queue_ms": round(island.queue_ms, 1),
                }
                for island in list(self._fleet.islands)
            ],
            "routes": [
                {"model": model, "route": route, **_describe_sums(sums, window.seconds)}
                for (model, route), sums in sorted(window.routes.items())
            ],
            "tenants": _describe_tenants(window),
            "queue": self._describe_queue(window, now_s),
            "prefixes": [self._describe_prefix(prefix, down) for prefix in state.prefixes],
            "scaling": self._describe_scaling_changes(state.scaling, wall_s),
            "client_errors": self._client_errors.describe(),
            "prompts": self._describe_prompts(),
            "alerts": [describe_alert(alert, wall_s) for alert in self._alerts.current],
            "ended_alerts": [describe_alert(alert, wall_s) for alert in self._alerts.ended[:SHOWN_ENDED_ALERTS]],
            "failed_requests": [
                describe_failed(call, wall_s) for call in self._decisions.latest_failed(MAX_FAILED_REQUESTS)
            ],
        }

    def describe_alerts(self) -> dict[str, Any]:
        """Return all alerts that are active or ended recently, for GET /admin/alerts."""
        wall_s = time.time() - self._now()
        alerts = (*self._alerts.current, *self._alerts.ended)
        return {"alerts": [describe_alert(alert, wall_s) for alert in alerts]}

    def describe_history(self) -> dict[str, Any]:
        history = self.history
        return {
            "fields": Point._fields,
            "fine_s": FINE_S,
            "coarse_s": COARSE_S,
            "fine": self.describe_points(list(history.fine)),
            "coarse": self.describe_points(list(history.coarse)),
        }

    def describe_points(self, points: Iterable[Point]) -> list[list[float | None]]:
        wall_s = time.time() - self._now()
        return [
            [round(wall_s + point.at_s, 1), *[None if value is None else round(value, 4) for value in point[1:]]]
            for point in points
        ]

    def ended_since(self, ended_s: float, limit: int, search: int = 64) -> list[Call]:
        """Return the latest calls that ended after this time, the oldest first. Of many, a few."""
        ended = [call for call in self._decisions.latest(search) if call.end is not None and call.end[5] > ended_s]
        ended.sort(key=lambda call: call.end[5] if call.end is not None else 0.0)
        return ended[:: max(1, len(ended) // limit)][-limit:] if ended else []

    def describe_decisions(self, calls: Iterable[Call]) -> list[dict[str, Any]]:
        """Return the decisions with all prices. This takes about 100 µs each."""
        wall_s = time.time() - self._now()
        return [describe(call, wall_s) for call in calls]

    def _describe_queue(self, window: Window, now_s: float) -> dict[str, Any]:
        queue = self._queue
        rows: dict[tuple[int, str], dict[str, Any]] = {}

        def row(priority: int, tenant: str) -> dict[str, Any]:
            return rows.setdefault(
                (priority, tenant),
                {
                    "priority": PRIORITY_NAMES[priority],
                    "tenant": tenant,
                    "waiting": 0,
                    "oldest_s": 0.0,
                    "rejected": 0,
                    "reasons": {},
                },
            )

        for (priority, tenant), waiting in list(queue.tenants.items()):
            found = row(priority, tenant)
            pending = list(waiting.waiting.values())
            found["waiting"] += len(pending)
            if pending:
                found["oldest_s"] = round(now_s - pending[0].call.request.arrived_s, 1)
        for pending_request in list(queue.waiting_for_first_node.values()):
            request = pending_request.request
            found = row(request.priority, request.tenant)
            found["waiting"] += 1
            found["oldest_s"] = max(found["oldest_s"], round(now_s - request.arrived_s, 1))
        for (tenant, priority, reason), count in window.rejected.items():
            if count:
                found = row(priority, tenant)
                found["rejected"] += count
                found["reasons"][reason] = count
        ordered = [rows[key] for key in sorted(rows)]
        return {"waiting": queue.waiting, "queued_total": queue.queued_total, "rows": ordered}

    def _describe_prefix(self, prefix: PopularPrefix, down: Collection[str]) -> dict[str, Any]:
        """`down`: nodes whose cache no request can use."""
        holders = sorted([name for name in self._cache_view.holders(prefix.chain) if name not in down])
        model, route, tenant = prefix.sender or ("", "", "")
        return {
            "id": prefix.chain[-8:].hex()[:8],
            "tokens": prefix.tokens,
            "share": round(prefix.share, 4),
            "model": model,
            "route": route,
            "tenant": tenant,
            "holder_count": len(holders),
            "holders": holders[:MAX_HOLDERS],
        }

    def _describe_scaling_changes(self, described: dict[str, Any], wall_s: float) -> dict[str, Any]:
        changes = [
            {
                "time": round(wall_s + change.at_s),
                "nodes": change.nodes,
                "desired_nodes": change.desired_nodes,
                "reasons": change.reasons,
            }
            for change in reversed(list(self.history.scaling_changes))
        ]
        return {**described, "changes": changes}


def _describe_sums(sums: Sums, seconds: float) -> dict[str, Any]:
    return {
        "seconds": round(seconds),
        "requests": sums.requests,
        "prompt_tokens": sums.prompt_tokens,
        "cached_tokens": sums.cached_tokens,
        "predicted_tokens": round(sums.predicted_tokens),
        "reported_tokens": sums.reported_tokens,
        "output_tokens": sums.output_tokens,
        "hit_ratio": _round(sums.hit_ratio),
        "round_robin_hit_ratio": _round(sums.round_robin_hit_ratio),
        "ttft_p50_ms": _round(sums.ttft_ms(0.5), 1),
        "ttft_p90_ms": _round(sums.ttft_ms(0.9), 1),
        "duration_p50_ms": _round(sums.duration_ms(0.5), 1),
        "duration_p90_ms": _round(sums.duration_ms(0.9), 1),
        "token_p50_ms": _round(sums.token_ms(0.5), 1),
        "token_p90_ms": _round(sums.token_ms(0.9), 1),
        "token_at_most_ms": _round(sums.token_at_most_ms, 3),
        "short_reports": sums.short_reports,
        "saved_s": round(sums.saved_gpu_ms / 1000.0, 3),
        "round_robin_saved_s": round(sums.round_robin_saved_gpu_ms / 1000.0, 3),
    }


def _describe_tenants(window: Window) -> dict[str, Any]:
    """Return the tenants with the most tokens in the window."""
    known = [(tenant, sums) for tenant, sums in window.tenants.items() if sums.requests]
    known.sort(key=lambda one: (-one[1].prompt_tokens - one[1].output_tokens, one[0]))
    return {
        "count": len(known),
        "rows": [{"tenant": tenant, **sums._asdict()} for tenant, sums in known[:MAX_TENANTS]],
    }


def _describe_node(node: Node, cache: NodeCache | None, wall_s: float) -> dict[str, Any]:
    outcomes = node.outcomes
    if cache is None or not cache.ranks:
        source = "inferred"
    elif cache.token_mismatch:
        source = "mismatch"
    elif cache.events_missing:
        source = "missing"
    else:
        source = "events" if cache.complete else "incomplete"
    return {
        "name": node.name,
        "island": node.island,
        "models": node.models or (),
        "engine": node.engine,
        "state": "draining" if node.draining else node.health.state.value,
        "reason": node.health.reason,
        "in_flight": node.inflight,
        "other": node.other_load,
        "waiting": node.waiting,
        "kv_usage": round(node.kv_usage, 3),
        "kv_tokens": cache.capacity_blocks * cache.block_size if cache is not None else 0,
        "prefill_us": round(node.speed.long_ms_per_token * 1000.0, 1),
        "backlog_ms": round(node.pending_work * node.speed.ms_per_token, 1),
        "latency_ms": round(node.latency_ms, 1),
        "cache": source,
        "agreement": round(cache.accuracy.agreement(), 3) if cache is not None else None,
        "ok": outcomes[Outcome.OK],
        "failed": sum([outcomes[outcome] for outcome in FAILURES]),
        "last_failure": describe_last_failure(node, wall_s),
    }


def _round(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)


# The viewers of GET /admin/live: how many there may be, and what happens to one that reads too slowly.

log = EventLog("warmroute.console")

MAX_VIEWERS: Final = 16
"""One rendered update serves all viewers; each costs a connection and what it has not read."""
MAX_UNREAD_BYTES: Final = 1_048_576
"""What a viewer may leave unread before it is disconnected."""
HEADERS: Final = (("Cache-Control", "no-store"), ("X-Accel-Buffering", "no"))


class LiveViewers:
    def __init__(self) -> None:
        self._viewers: dict[Responder, asyncio.Event] = {}
        """Each with the event that ends its response."""

    def __len__(self) -> int:
        return len(self._viewers)

    @contextmanager
    def joined(self, responder: Responder) -> Iterator[asyncio.Event]:
        """Count a viewer, and yield the event that ends its response. It gets no updates before `start`.

        Raises HttpError if there are too many viewers."""
        if len(self._viewers) >= MAX_VIEWERS:
            raise HttpError(
                503, f"The live feed has its maximum of {MAX_VIEWERS} viewers. Close another page.",
                code="too_many_viewers", headers=(("Retry-After", "10"),),
            )  # fmt: skip
        ended = self._viewers[responder] = asyncio.Event()
        try:
            yield ended
        finally:
            self._viewers.pop(responder, None)

    def start(self, responder: Responder, snapshot: bytes) -> None:
        responder.start(200, "text/event-stream; charset=utf-8", HEADERS)
        responder.write(snapshot)

    def send(self, event: bytes) -> None:
        for responder, ended in list(self._viewers.items()):
            if not responder.started:
                continue
            if responder.unread_bytes > MAX_UNREAD_BYTES:
                log.info("live_viewer_too_slow", "The router disconnected it.", unread_bytes=responder.unread_bytes)
                responder.abort()
                ended.set()
            else:
                responder.write(event)


def server_sent_event(name: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(fields))


# GET /admin/live: the state of the router as server-sent events, for the live page and `warmroute top`.
#
#     event: snapshot    all sections of LiveSnapshot, an hour of history, and some recent decisions
#     event: update      every second: the sections that changed, the new points of the history, some new decisions
#
# Each update is rendered once, in a thread, for all viewers. Without viewers nothing is rendered. A viewer that reads
# too slowly is disconnected, so that no data piles up for it.

INTERVAL_S: Final = 1.0
DECISIONS_PER_UPDATE: Final = 2
"""Describing one takes 0.15 ms in a fleet of 64 nodes: more than anything else in an update."""
FIRST_DECISIONS: Final = 12
"""A new viewer sees these at once, instead of an empty list for seconds."""


class LiveFeed:
    def __init__(self, snapshot: LiveSnapshot) -> None:
        self._snapshot = snapshot
        self._viewers = LiveViewers()
        self._lock = asyncio.Lock()
        """Held while an update is rendered and sent."""
        self._task: asyncio.Task[None] | None = None
        self._sent: dict[str, bytes] = {}
        """The sections as the viewers know them."""
        self._sent_fine: Point | None = None
        self._sent_coarse: Point | None = None
        self._ended_s = 0.0
        """When the last request ended whose decision was sent."""

    @property
    def viewers(self) -> int:
        return len(self._viewers)

    async def stream(self, responder: Responder) -> None:
        """Send the feed until the viewer leaves. Raises HttpError if there are too many viewers."""
        with self._viewers.joined(responder) as ended:
            try:
                await self._send_snapshot(responder)
                if self._task is None:
                    self._task = asyncio.get_running_loop().create_task(self._run())
                await ended.wait()
            finally:
                if len(self._viewers) == 1 and self._task is not None:  # it is the last one
                    self._task.cancel()
                    self._task = None

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                await self.send_update()
            except Exception:
                log.exception("live_feed_failed", "Viewers get the next update.")

    async def send_update(self) -> None:
        """Render what changed and send it to all viewers."""
        async with self._lock:
            snapshot, history = self._snapshot, self._snapshot.history
            state = snapshot.read_on_loop()
            calls = snapshot.ended_since(self._ended_s, DECISIONS_PER_UPDATE)
            fine = history.fine[-1] if history.fine else None
            coarse = history.coarse[-1] if history.coarse else None
            points = (
                [fine] if fine is not None and fine is not self._sent_fine else [],
                [coarse] if coarse is not None and coarse is not self._sent_coarse else [],
            )
            render = self._render_update
            event, sections = await asyncio.get_running_loop().run_in_executor(None, render, state, calls, points)
            # From here on nothing is awaited: what counts as sent is sent, also if a viewer left meanwhile.
            self._sent, self._sent_fine, self._sent_coarse = sections, fine, coarse
            if calls:
                self._ended_s = max(call.end[5] for call in calls if call.end is not None)
            self._viewers.send(event)

    def _render_update(
        self, state: LoopState, calls: list[Call], points: tuple[list[Point], list[Point]]
    ) -> tuple[bytes, dict[str, bytes]]:
        snapshot = self._snapshot
        sections = {name: msgspec.json.encode(section) for name, section in snapshot.sections(state).items()}
        changed = {name: section for name, section in sections.items() if self._sent.get(name) != section}
        fine, coarse = points
        more: dict[str, Any] = {"fine": snapshot.describe_points(fine), "coarse": snapshot.describe_points(coarse)}
        if calls:
            more["decisions"] = snapshot.describe_decisions(calls)
        return _event("update", changed, more), sections

    async def _send_snapshot(self, responder: Responder) -> None:
        """Bring the other viewers up to date, so that all have the same sections, and send all to a new one."""
        await self.send_update()
        async with self._lock:
            sections, calls = self._sent, self._snapshot.ended_since(-1e9, FIRST_DECISIONS)

            def render() -> bytes:
                described = self._snapshot.describe_decisions(calls)
                return _event(
                    "snapshot", sections, {"history": self._snapshot.describe_history(), "decisions": described}
                )

            event = await asyncio.get_running_loop().run_in_executor(None, render)
            self._viewers.start(responder, event)


def _event(name: str, sections: dict[str, bytes], more: dict[str, Any]) -> bytes:
    fields = {key: msgspec.Raw(value) for key, value in sections.items()}
    return server_sent_event(name, {**fields, **more})


# The files of the live page: built from ui/ by `make page`, and served with headers that allow nothing else.
#
# They contain no data of the router, so they need no token.

FOLDER: Final = Path(__file__).with_name("page")
_FILES: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/page/app.css": ("app.css", "text/css; charset=utf-8"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
PAGE_PATHS: Final = tuple(path.encode() for path in _FILES)
SECURITY_HEADERS: Final[Headers] = (
    (
        "Content-Security-Policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Permissions-Policy", "camera=(), geolocation=(), microphone=()"),
)


class _File(NamedTuple):
    content_type: str
    plain: bytes
    compressed: bytes


class PageFiles:
    """Reads each file once, when it is first asked for."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._read = cache(self._read_file)

    def reply(self, request: Request, responder: Responder) -> None:
        """Raises HttpError for an unknown path."""
        if request.path not in _FILES:
            raise HttpError(404, "The live page has no such file.", code="not_found")
        file = self._read(request.path)
        headers: Headers = (*SECURITY_HEADERS, ("Cache-Control", "no-cache"), ("Vary", "Accept-Encoding"))
        if b"gzip" in request.head.get(b"accept-encoding"):
            responder.reply(200, file.compressed, file.content_type, (*headers, ("Content-Encoding", "gzip")))
        else:
            responder.reply(200, file.plain, file.content_type, headers)

    def _read_file(self, path: str) -> _File:
        name, content_type = _FILES[path]
        plain = (self._folder / name).read_bytes()
        return _File(content_type, plain, gzip.compress(plain, mtime=0))
