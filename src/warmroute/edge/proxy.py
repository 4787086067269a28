"""Serves a client's request: checks its path and key, builds its RoutingRequest, reads its prompt, asks for a node."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from itertools import count

from warmroute._kernel import Outline
from warmroute.config import Config
from warmroute.edge import errors
from warmroute.edge.admission_errors import to_error
from warmroute.edge.client_connection import ClientConnection
from warmroute.edge.connection_pool import ConnectionPools
from warmroute.edge.errors import HttpError
from warmroute.edge.exchange import ProxyExchange
from warmroute.edge.http1 import RequestHead
from warmroute.edge.own_endpoints import OwnEndpoints
from warmroute.edge.paths import FORWARDED, HEALTH, WITH_OUTPUT_TOKENS, check_path
from warmroute.edge.prompt_reader import PendingPrompt, PromptReader
from warmroute.edge.request_builder import RequestBuilder
from warmroute.event_log import EventLog, where_it_failed
from warmroute.fleet.fleet import Fleet
from warmroute.fleet.node import Node
from warmroute.prompt.prompt import Prompt
from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing.admission import Admission
from warmroute.routing.attempts import Attempts, Dispatcher
from warmroute.routing.query import Lookup, lookup_of
from warmroute.routing.rate_limits import Charge, RateLimits
from warmroute.routing.router import Router
from warmroute.routing.routing_errors import NotAdmitted, RateLimited, RoutingError
from warmroute.telemetry.counters import Counters
from warmroute.telemetry.journal import Journal

log = EventLog("warmroute.requests")


class Proxy:
    def __init__(
        self,
        config: Config,
        fleet: Fleet,
        router: Router,
        admission: Admission,
        prompt_reader: PromptReader,
        pools: ConnectionPools,
        counters: Counters,
        journal: Journal,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.router = router
        self.admission = admission
        self.pools = pools
        self.counters = counters
        self.now = now
        self.requests = RequestBuilder(config, fleet, now)
        self.own_endpoints = OwnEndpoints(fleet)
        self.rate_limits = RateLimits((), now())
        self.dispatcher = Dispatcher(
            fleet, router, admission, counters, journal, config.upstream.max_attempts, now, self._node_freed
        )
        self._prompt_reader = prompt_reader
        self._id_prefix = b"wr-" + os.urandom(6).hex().encode() + b"-"
        self._id_numbers = count(1)
        self.reconfigure(config)

    def reconfigure(self, config: Config) -> None:
        self.requests.reconfigure(config)
        self.dispatcher.max_attempts = config.upstream.max_attempts
        self.log_requests = config.log.requests
        self.tenants = frozenset(key.tenant for key in config.keys)
        self.node_headers = "" if config.journal.response_headers == "off" else config.journal.response_headers
        """Which responses name the node that served them: none (empty), those that ask for it, or all."""
        self.passes_authorization = not config.keys
        """A key for the router is not sent to nodes; without keys the header is meant for the nodes."""
        self._min_tokens = config.index.min_prompt_tokens
        self._sharing = config.cache_groups()
        self.rate_limits.reconfigure(config.keys, self.now())
        self._limited = bool(self.rate_limits)

    # Before the body is read.

    def admit(self, head: RequestHead) -> str:
        """Return the request's tenant. Raises HttpError."""
        target = head.target
        if target in FORWARDED:
            if head.method != b"POST":
                raise errors.method_not_allowed("POST")
        else:
            path = target.partition(b"?")[0]
            if path in HEALTH:
                if head.method not in (b"GET", b"HEAD"):
                    raise errors.method_not_allowed("GET")
                return ""
            check_path(head.method, path)
        return self.requests.tenant(head)

    # With the body.

    def serve(self, client: ClientConnection, head: RequestHead, body: bytes) -> ProxyExchange | None:
        path = head.target.partition(b"?")[0]
        if head.method != b"POST":
            self.own_endpoints.serve(client, path)
            return None
        request, outline = self.requests.build(head, path, body, client.tenant)
        if request.route:
            self.counters.route_requests[request.route] += 1
        charge = self._begin_charge(request, path, body) if self._limited else None
        exchange = ProxyExchange(self, client, head, body)
        request_id = head.request_id or self.new_request_id()
        exchange.attempts = Attempts(self.dispatcher, exchange, request, request_id)
        if charge is not None:
            exchange.attempts.charge = charge
        prompt = self.read_prompt(request, path, body, outline, exchange.prompt_read)
        if isinstance(prompt, PendingPrompt):
            exchange.pending_prompt = prompt
        else:
            self.enter(exchange.attempts, prompt)
        return exchange

    def read_prompt(
        self, request: RoutingRequest, path: bytes, body: bytes, outline: Outline | None,
        then: Callable[[Prompt | None], None],
    ) -> Prompt | PendingPrompt | None:  # fmt: skip
        """The prompt; or PendingPrompt, which calls `then`; or None where the policy does not need it."""
        if not self.router.policy_of(request).wants_tokens or len(body) < self._min_tokens:
            return None
        return self._prompt_reader.read(request.model, path, body, then, outline)

    def lookup(self, request: RoutingRequest, prompt: Prompt | None) -> Lookup | None:
        """What the index is asked for; None for a prompt too short to matter."""
        if prompt is None or prompt.token_count < self._min_tokens:
            return None
        return lookup_of(prompt, self._sharing.get(request.tenant, ""))

    def enter(self, attempts: Attempts, prompt: Prompt | None) -> None:
        """Asks for a node. Raises HttpError."""
        request = attempts.request
        try:
            tokens = prompt.token_count if prompt is not None else None
            attempts.enter(self.lookup(request, prompt), tokens, self.now())
        except RoutingError as why:
            raise self.to_http_error(why, request) from None
        except Exception as error:
            attempts.abandon(self.now())
            raise self.internal_error(error) from None

    def _begin_charge(self, request: RoutingRequest, path: bytes, body: bytes) -> Charge | None:
        limits = self.rate_limits.of(request.tenant)
        if limits is None:
            return None
        try:
            return limits.begin(self.now(), len(body), path in WITH_OUTPUT_TOKENS)
        except RateLimited as limited:
            raise self.to_http_error(limited, request) from None

    def to_http_error(self, why: RoutingError, request: RoutingRequest) -> HttpError:
        """The client's error for a request without a node; counted."""
        if isinstance(why, NotAdmitted):
            self.counters.rejected[why.reason, request.priority] += 1
            self.counters.rejected_by_tenant[request.tenant, request.priority, why.reason] += 1
        return to_error(why, request)

    def internal_error(self, error: Exception) -> HttpError:
        log.error("request_failed_internally", "The client receives status 500.", reason=where_it_failed(error))
        return errors.internal_error()

    def _node_freed(self, node: Node, now_s: float) -> None:
        if self.admission.queue.waiting:
            asyncio.get_running_loop().call_soon(self.admission.node_freed, node, now_s)

    def new_request_id(self) -> bytes:
        return self._id_prefix + b"%d" % next(self._id_numbers)

    # The request log.

    def error_sent(self, error: HttpError, request_id: bytes) -> None:
        self.counters.errors[error.status, error.code] += 1
        if self.log_requests:
            log.info("request_rejected", request_id=request_id.decode("ascii"), status=error.status, reason=error.code)

    def log_request(self, attempts: Attempts, ended: str) -> None:
        now_s, ticket, request = self.now(), attempts.ticket, attempts.request
        first_ms = (ticket.first_byte_s - ticket.opened_s) * 1000.0 if ticket.first_byte_s else None
        log.info(
            "request",
            request_id=attempts.request_id.decode("ascii", "replace"),
            node=ticket.node.name,
            tenant=request.tenant,
            model=request.model,
            status=attempts.status,
            outcome=ended,
            first_byte_ms=None if first_ms is None else round(first_ms, 1),
            duration_ms=round((now_s - ticket.opened_s) * 1000.0, 1),
            attempts=attempts.tried,
        )
