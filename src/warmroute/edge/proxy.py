"""The proxy as a whole: it takes the requests of all listeners, and answers some paths itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import msgspec

from warmroute._kernel import MAX_LOOKUP_TOKENS, MAX_LOOP_BYTES, TOKEN_BYTES, Outline, RequestHead
from warmroute.app.capture import Capture, CapturedPrompt
from warmroute.config import Config
from warmroute.core.admission import Admission
from warmroute.core.brain import Dispatcher
from warmroute.core.calls import Attempts
from warmroute.core.fleet import Fleet
from warmroute.core.last_decisions import Journal
from warmroute.core.messages import KvTransfer, Lookup, RoutingRequest
from warmroute.core.node import Node
from warmroute.core.rate_limits import Charge, RateLimits, TenantLimits
from warmroute.core.rejections import RETRY_AFTER_S, NotAdmitted, RateLimited, RoutingError, to_error
from warmroute.core.router import Router
from warmroute.core.traffic import Counters
from warmroute.edge import errors
from warmroute.edge.arrival import (
    FORWARDED,
    HEALTH,
    WITH_OUTPUT_TOKENS,
    BodyScanner,
    RequestBuilder,
    Rights,
    ScannedBody,
    check_path,
    lookup_of,
    random_ids,
    scan,
)
from warmroute.edge.client_address import ClientAddresses
from warmroute.edge.client_connection import ClientConnection
from warmroute.edge.client_errors import ClientErrors, is_client_error
from warmroute.edge.connection_pool import ConnectionPools
from warmroute.edge.ended_request import EndedRequest
from warmroute.edge.errors import HttpError
from warmroute.edge.exchange import ProxyExchange
from warmroute.edge.large_body import LargeBodyExchange, end_with
from warmroute.edge.proxy_client import ProxyClient, RequestExchange
from warmroute.edge.splittable import ONLY_VLLM, may_split
from warmroute.edge.trace_context import RequestTrace, Tracing
from warmroute.event_log import EventLog, where_it_failed
from warmroute.prompt.prompt import Prompt, estimated_tokens, longest_prompt, most_tokens
from warmroute.prompt.reader import PendingPrompt, PromptReader
from warmroute.prompt.request_body import has_prompt

# The endpoints that the router answers itself: /health, /ready and /v1/models.


class OwnEndpoints:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.starting = False
        self.stopping = False
        self.waits_for_first_node: Callable[[], bool] = lambda: False
        """Whether requests wait while the fleet is empty, because the autoscaler will add a node."""

    def serve(self, client: ProxyClient, path: bytes) -> None:
        """Raises HttpError for a model that no node serves."""
        if path == b"/health":
            client.reply(200, b'{"status":"alive"}')
        elif path == b"/ready":
            status, text = self.readiness()
            client.reply(status, text, () if status == 200 else (("Retry-After", str(RETRY_AFTER_S)),))
        elif path == b"/v1/models":
            client.reply(200, msgspec.json.encode({"object": "list", "data": self.model_cards()}))
        else:
            name = unquote(path.removeprefix(b"/v1/models/").decode("ascii", "replace"))
            card = next((card for card in self.model_cards() if card["id"] == name), None)
            if card is None:
                raise errors.model_not_found(name)
            client.reply(200, msgspec.json.encode(card))

    def readiness(self) -> tuple[int, bytes]:
        if self.stopping:
            return 503, b'{"status":"stopping"}'
        if self.starting:
            return 503, b'{"status":"starting"}'
        if not self._fleet.can_serve and not (self.waits_for_first_node() and self._is_scaled_to_zero()):
            return 503, b'{"status":"no node can serve"}'
        return 200, b'{"status":"ready"}'

    def _is_scaled_to_zero(self) -> bool:
        return all(node.draining for node in self._fleet)

    def model_cards(self) -> Sequence[dict[str, object]]:
        """Every model of the fleet, as the first node with the longest context window describes it."""
        cards: dict[str, dict[str, object]] = {}
        for node in self._fleet:
            if node.draining:
                continue
            described = {str(card.get("id")): card for card in node.model_cards}
            for model in node.models or ():
                plain = {"id": model, "object": "model", "created": 0, "owned_by": "warmroute"}
                card = described.get(model, plain)
                if model not in cards or _window(card) > _window(cards[model]):
                    cards[model] = card
        return list(cards.values())


def _window(card: dict[str, object]) -> int:
    window = card.get("max_model_len")
    return window if isinstance(window, int) else 0


# Serves a client's request: checks its path and key, builds its RoutingRequest, reads its prompt, asks for a node.

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
        capture: Capture,
        now: Callable[[], float] = time.monotonic,
        kv_transfers: Mapping[str, KvTransfer] | None = None,
    ) -> None:
        """`kv_transfers`: the KV transfer protocols by engine."""
        self._fleet = fleet
        self.router = router
        self.admission = admission
        self.pools = pools
        self.counters = counters
        self.now = now
        self.rate_limits = RateLimits((), now())
        self.requests = RequestBuilder(config, fleet, now, self.rate_limits)
        self.body_scanner = BodyScanner()
        self.own_endpoints = OwnEndpoints(fleet)
        self.ended = EndedRequest(self.internal_error)
        self._kv_transfers = kv_transfers or {}
        self.dispatcher = Dispatcher(
            fleet, router, admission, counters, journal, config.upstream.max_attempts, now, self._node_freed,
            hedging=config.hedging, call_soon=_call_soon,
        )  # fmt: skip
        self.dispatcher.capture = capture.request_ended
        self._capture = capture
        self._prompt_reader = prompt_reader
        self._held: list[PendingPrompt] | None = None
        """Requests that wait while the router starts; None: they do not wait."""
        self._freed_nodes: dict[Node, None] = {}
        """Nodes that may have room for queued requests since the last iteration of the event loop."""
        self.new_request_id = random_ids().__next__
        self.create_exchange: Callable[[Proxy, Any, RequestHead, bytes, RoutingRequest], RequestExchange] = _to_nodes
        """Creates what does the I/O of a request: of its own connections to nodes, or of Envoy's."""
        self.sample_prompt: Callable[[Attempts, bytes, bytes], object] | None = None
        """Called with the path and the body of each request; None: prompts are not sampled."""
        self.client_errors = ClientErrors()
        self.tracing: Tracing | None = None
        """None: the header lines of traces pass unchanged."""
        self.reconfigure(config)

    def reconfigure(self, config: Config) -> None:
        self.rate_limits.reconfigure(config.keys, self.now())
        self.requests.reconfigure(config)
        self.dispatcher.max_attempts = config.upstream.max_attempts
        self.dispatcher.hedging.config = config.hedging
        if self.tracing is not None:
            self.tracing.reconfigure(config.tracing)
        self._addresses = ClientAddresses(config.listen.trusted_proxies)
        self.log_requests = config.log.requests
        self.node_headers = "" if config.journal.response_headers == "off" else config.journal.response_headers
        """Which responses name the node that served them: none (empty), those that ask for it, or all."""
        self.keeps_error_text = config.journal.error_text
        self._min_tokens = config.index.min_prompt_tokens

    # Before the body is read.

    def admit(self, head: RequestHead) -> Rights:
        """Return what the request may do. Raises HttpError."""
        target = head.target
        if target in FORWARDED:
            if head.method != b"POST":
                raise errors.method_not_allowed("POST")
        else:
            path = target.partition(b"?")[0]
            if path in HEALTH:
                if head.method not in (b"GET", b"HEAD"):
                    raise errors.method_not_allowed("GET")
                return self.requests.keys.without_key
            check_path(head.method, path)
        return self.requests.keys.rights(head)

    # With the body.

    def serve(self, client: ProxyClient, head: RequestHead, body: bytes) -> RequestExchange | LargeBodyExchange | None:
        path = head.target
        if b"?" in path:
            path = path.partition(b"?")[0]
        if head.method != b"POST":
            self.own_endpoints.serve(client, path)
            return None
        if self.tracing is None:
            if len(body) <= MAX_LOOP_BYTES:
                return self.begin(client, head, path, body, scan(path, head.content_type, body), None)
            return self._serve(client, head, path, body, None)
        route = path if path in FORWARDED else b"/v1/*"
        trace = self.tracing.begin(head.forwarded_fields, route, client.body_started_s or self.now())
        try:
            return self._serve(client, head, path, body, trace)
        except Exception as error:
            if isinstance(trace, RequestTrace):
                end_with(trace, error, self.now())
            raise

    def _serve(
        self, client: ProxyClient, head: RequestHead, path: bytes, body: bytes, trace: RequestTrace | bytes | None
    ) -> RequestExchange | LargeBodyExchange:
        if len(body) <= MAX_LOOP_BYTES:
            return self.begin(client, head, path, body, scan(path, head.content_type, body), trace)
        large = LargeBodyExchange(self, client, head, path, body, trace)
        large.scanning = self.body_scanner.scan_in_thread(path, head.content_type, body, large.scanned)
        return large

    def begin(
        self, client: ProxyClient, head: RequestHead, path: bytes, body: bytes, scanned: ScannedBody,
        trace: RequestTrace | bytes | None,
    ) -> RequestExchange:  # fmt: skip
        """Serve a request whose body is scanned. Raises HttpError."""
        rights = client.rights
        request = self.requests.build(head, path, scanned, rights)
        has_pairs = bool(self._kv_transfers) and self._fleet.has_roles
        if request.route:
            self.counters.route_requests[request.route] += 1
        charge = self._begin_charge(rights.limits, request, path, body) if rights.limits is not None else None
        exchange = self.create_exchange(self, client, head, body, request)
        request_id = head.request_id or self.new_request_id()
        exchange.attempts = Attempts(self.dispatcher, exchange, request, request_id)
        if isinstance(trace, bytes):
            exchange.node_fields = trace
        elif trace is not None:
            exchange.trace = trace
            trace.begin(exchange.attempts)
        if charge is not None:
            exchange.attempts.charge = charge
        if has_pairs and isinstance(exchange, ProxyExchange):
            allowed = self._fleet.pairs_only_with_vllm or path not in ONLY_VLLM
            request.may_split = allowed and may_split(path, body, scanned.outline)
            exchange.outline = scanned.outline if request.may_split else None
        if path not in FORWARDED:  # the router does not know what such a path does
            exchange.attempts.repeatable = False
        elif self.sample_prompt is not None:
            self.sample_prompt(exchange.attempts, path, body)
        if self._held is not None and request.may_queue and not request.deadline_s and not request.total_deadline_s:
            exchange.pending_prompt = PendingPrompt(lambda _: self._resume(exchange, path, body, scanned.outline))
            self._held.append(exchange.pending_prompt)
            return exchange
        try:
            self._route(exchange, path, body, scanned.outline)
        except HttpError:
            exchange.forget()
            raise
        except Exception as error:
            exchange.release()
            raise self.internal_error(error, request_id) from None
        return exchange

    def _route(self, exchange: RequestExchange, path: bytes, body: bytes, outline: Outline | None) -> None:
        """Read the prompt and ask for a node. Raises HttpError."""
        attempts = exchange.attempts
        if self._capture.on and has_prompt(path):
            attempts.captured = CapturedPrompt(len(body))
        prompt = self.read_prompt(attempts.request, path, body, outline, exchange.prompt_read)
        if isinstance(prompt, PendingPrompt):
            exchange.pending_prompt = prompt
        else:
            self.enter(attempts, prompt)

    # While the router starts.

    def hold_requests(self) -> None:
        """Let new requests wait until `release_requests`, except those with a deadline or `X-Queue: no`."""
        self._held = []

    def release_requests(self) -> None:
        held, self._held = self._held, None
        for pending in held or ():
            pending.done(None)

    def _resume(self, exchange: RequestExchange, path: bytes, body: bytes, outline: Outline | None) -> None:
        exchange.pending_prompt = None
        try:
            self._route(exchange, path, body, outline)
        except HttpError as error:
            exchange.send_error(error)
        except Exception as error:
            exchange.internal_error(error)

    def read_prompt(
        self, request: RoutingRequest, path: bytes, body: bytes, outline: Outline | None,
        then: Callable[[Prompt | None], None],
    ) -> Prompt | PendingPrompt | None:  # fmt: skip
        """The prompt; or PendingPrompt, which calls `then`; or None where neither the policy, nor the nodes' context
        windows, nor a capture need it."""
        router = self.router
        policy = router.policy_of(request) if request.route else router.policy
        wanted = (policy.wants_tokens or self._capture.on) and len(body) >= self._min_tokens
        group = self.dispatcher.fleet.group(request.model)
        if group is not None and group.windows is not None and outline is not None:
            shortest = group.windows.sizes[0]
            if most_tokens(len(body)) + (request.max_output_tokens or 0) > shortest:
                request.input_tokens = estimated_tokens(len(body))
                wanted = True
        if not wanted:
            return None
        return self._prompt_reader.read(request.model, path, body, then, outline)

    def lookup(self, request: RoutingRequest, prompt: Prompt | None) -> Lookup | None:
        """What the index is asked for; None for a prompt too short to matter."""
        if prompt is None:
            return None
        if request.input_tokens:  # the prompt may not fit into every node's context window
            request.input_tokens, request.input_exact = longest_prompt(prompt)
            if not self.router.policy_of(request).wants_tokens:
                return None
        elif self._capture.on and not self.router.policy_of(request).wants_tokens:
            return None
        tokens = prompt.total_tokens if prompt.others else len(prompt.tokens) // TOKEN_BYTES
        if tokens < self._min_tokens:
            return None
        lookup = lookup_of(prompt, request.cache_group)
        return lookup if tokens <= MAX_LOOKUP_TOKENS else lookup.prefix(MAX_LOOKUP_TOKENS)

    def enter(self, attempts: Attempts, prompt: Prompt | None) -> None:
        """Asks for a node. Raises HttpError."""
        request = attempts.request
        if attempts.captured is not None:
            attempts.captured.prompt = prompt
        try:
            tokens = prompt.total_tokens if prompt is not None and attempts.charge is not None else None
            attempts.enter(self.lookup(request, prompt), tokens, self.now())
        except RoutingError as why:
            why.__traceback__ = None  # its frames hold the request, and `why`
            raise self.to_http_error(why, request) from None

    def _begin_charge(self, limits: TenantLimits, request: RoutingRequest, path: bytes, body: bytes) -> Charge:
        try:
            return limits.begin(self.now(), len(body), path in WITH_OUTPUT_TOKENS)
        except RateLimited as limited:
            raise self.to_http_error(limited, request) from None

    def kv_transfer(self, prefill_node: Node) -> KvTransfer:
        """Return the protocol of a prefill node; vLLM's while the engine is not known."""
        transfers = self._kv_transfers
        return transfers.get(prefill_node.engine) or transfers["vllm"]

    def to_http_error(self, why: RoutingError, request: RoutingRequest) -> HttpError:
        """The client's error for a request without a node; counted."""
        if isinstance(why, NotAdmitted):
            self.counters.rejected[why.reason, request.priority] += 1
            self.counters.rejected_by_tenant[request.tenant, request.priority, why.reason] += 1
        return to_error(why, request)

    def internal_error(self, error: Exception, request_id: bytes = b"") -> HttpError:
        log.error(
            "request_failed_internally",
            "The client receives status 500, or its response breaks off.",
            request_id=request_id.decode("ascii", "replace"),
            reason=where_it_failed(error),
        )
        return errors.internal_error()

    def _node_freed(self, node: Node, _now_s: float) -> None:
        """Look at the admission queue once for all that happens in this iteration of the event loop."""
        if self.admission.queue.waiting:
            if not self._freed_nodes:
                asyncio.get_running_loop().call_soon(self._fill_freed_nodes)
            self._freed_nodes[node] = None

    def _fill_freed_nodes(self) -> None:
        nodes, self._freed_nodes = self._freed_nodes, {}
        self.admission.nodes_freed(nodes, self.now())

    # The request log.

    def error_sent(self, error: HttpError, request_id: bytes, peer: bytes, forwarded_for: bytes) -> None:
        status = error.status
        self.counters.errors[status, error.code] += 1
        if is_client_error(status):
            source = self._addresses.source(peer, forwarded_for)
            self.client_errors.count(status, error.code, source, error.key_sha256)
        if self.log_requests:
            more: dict[str, object] = {"key_sha256": error.key_sha256} if error.key_sha256 else {}
            log.info(
                "request_rejected", request_id=request_id.decode("ascii"), status=status, reason=error.code,
                source=self._addresses.source(peer, forwarded_for), **more,
            )  # fmt: skip

    def client_left(self, exchange: RequestExchange) -> None:
        """End a request whose client has disconnected."""
        attempts = exchange.attempts
        if attempts.done:
            return
        if exchange.has_last_event():
            exchange.response_complete()
            return
        exchange.release()
        self.counters.disconnects += 1
        if exchange.trace is not None:
            exchange.trace.end(self.now(), attempts.status, client_left=True)
        if attempts.tried and self.log_requests:
            self.log_request(attempts, "client_left")

    def log_request(self, attempts: Attempts, ended: str) -> None:
        now_s, ticket, request = self.now(), attempts.ticket, attempts.request
        first_ms = (ticket.first_token_s - ticket.opened_s) * 1000.0 if ticket.first_token_s else None
        log.info(
            "request",
            request_id=attempts.request_id.decode("ascii", "replace"),
            node=ticket.node.name,
            tenant=request.tenant,
            model=request.model,
            status=attempts.status,
            outcome=ended,
            ttft_ms=None if first_ms is None else round(first_ms, 1),
            duration_ms=round((now_s - ticket.opened_s) * 1000.0, 1),
            attempts=attempts.tried,
        )


def _to_nodes(
    proxy: Proxy, client: ClientConnection, head: RequestHead, body: bytes, _request: RoutingRequest
) -> ProxyExchange:
    return ProxyExchange(proxy, client, head, body)


def _call_soon(act: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_soon(act)
