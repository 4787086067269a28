"""The edge as a whole: the handler of its listeners. It tells the core what happens, and obeys what the core commands.

A request's head is checked before its body is read. With the body come its RoutingRequest, its prompt and `Arrive`;
from then on its exchange does what the core says. `handle` is the only way to the core, and commands come only as its
answer.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol
from urllib.parse import unquote

import msgspec

from warmroute._kernel import MAX_LOOKUP_TOKENS, MAX_LOOP_BYTES, TOKEN_BYTES, Outline, RequestHead
from warmroute.config import Config
from warmroute.core.messages import (
    DUE,
    UNKNOWN,
    Arrive,
    Charge,
    Command,
    Event,
    Failed,
    KvTransfer,
    Lookup,
    OpenTry,
    Reject,
    RoutingRequest,
    Send,
    Tables,
    Withdraw,
)
from warmroute.edge import errors
from warmroute.edge.arrival import (
    FORWARDED,
    HEALTH,
    WITH_OUTPUT_TOKENS,
    BodyScanner,
    Keep,
    Kept,
    RequestBuilder,
    Rights,
    ScannedBody,
    check_path,
    lookup_of,
    random_ids,
    scan,
)
from warmroute.edge.client_address import ClientAddresses
from warmroute.edge.client_errors import ClientErrors, is_client_error
from warmroute.edge.connection_pool import ConnectionPools
from warmroute.edge.errors import Headers, HttpError
from warmroute.edge.exchange import Exchange, ScanningExchange
from warmroute.edge.trace_context import EdgeTrace, EndedEarly, TraceSampling
from warmroute.edge.tries import ONLY_VLLM, may_split
from warmroute.event_log import EventLog, where_it_failed
from warmroute.prompt.prompt import Prompt, estimated_tokens, longest_prompt, most_tokens
from warmroute.prompt.reader import PendingPrompt, PromptReader

log = EventLog("warmroute.requests")

EXPLAIN_HEADER: Final = b"x-warmroute-explain"
_MAX_LOOKUP_BYTES: Final = MAX_LOOKUP_TOKENS * TOKEN_BYTES
RETRY_AFTER_S: Final = 1
"""Of /ready while no node can serve."""


class Client(Protocol):
    """Where a request comes from: a client's connection, or a stream of Envoy."""

    exchange: Any
    """Answers the current request; None: it is answered."""
    rights: Rights
    """What the current request may do."""
    body_started_s: float

    def reply(self, status: int, body: bytes, headers: Headers = (), content_type: str = "") -> None:
        """Send a response of the router itself."""

    def send_error(self, error: HttpError, request_id: bytes = b"") -> None: ...

    def is_serving(self, exchange: Any) -> bool:
        """Return whether this exchange answers the current request, and its client is there."""


class CallExchange(Protocol):
    """A call at the edge: over the edge's own connections (exchange.py), or over those of Envoy."""

    request: RoutingRequest
    request_id: bytes
    head: RequestHead
    repeatable: bool
    outline: Outline | None
    trace: EdgeTrace | None
    node_fields: bytes
    kept: Kept | None
    pending_prompt: PendingPrompt | None
    known: bool
    arrived: bool
    over: bool

    @property
    def id(self) -> int: ...
    @property
    def envoy(self) -> bool: ...
    def open_tries(self) -> list[OpenTry]: ...
    def prompt_read(self, prompt: Prompt | None) -> None: ...
    def send(self, command: Send) -> None: ...
    def withdraw(self, command: Withdraw) -> None: ...
    def reject(self, command: Reject) -> None: ...
    def cut(self, command: Any) -> None: ...
    def internal_error(self, error: Exception) -> None: ...


class EdgeCounters(Protocol):
    errors: Counter[tuple[int, str]]
    """Error responses of the router itself, by status and code."""
    route_requests: Counter[str]
    disconnects: int
    """Of clients that left before the core knew of their request. The core counts the others."""
    stale_connections: int


# The endpoints that the router answers itself: /health, /ready and /v1/models.


class OwnEndpoints:
    def __init__(self, tables: Callable[[], Tables]) -> None:
        self._tables = tables
        self.starting = False
        self.stopping = False

    def serve(self, client: Client, path: bytes) -> None:
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
        if not self._tables().is_ready:
            return 503, b'{"status":"no node can serve"}'
        return 200, b'{"status":"ready"}'

    def model_cards(self) -> Sequence[dict[str, object]]:
        return self._tables().cards()


class Proxy:
    def __init__(
        self,
        config: Config,
        handle: Callable[[Event, float], Sequence[Command]],
        due_now: Callable[[], bool],
        tables: Callable[[], Tables],
        prompt_reader: PromptReader,
        pools: ConnectionPools,
        counters: EdgeCounters,
        *,
        keep: Keep | None = None,
        tracing: TraceSampling | None = None,
        kv_transfers: Mapping[str, KvTransfer] | None = None,
        now: Callable[[], float] = time.monotonic,
        first_id: int = 0,
    ) -> None:
        """`handle`: the core's door. `due_now`: whether it wants Due soon. `tables`: what it knows of the fleet.
        `tracing`: None: the header lines of traces pass unchanged. `kv_transfers`: the KV transfer protocols by
        engine. `first_id`: the numbers of this edge's calls begin behind it."""
        self.handle = handle
        self._due_now = due_now
        self.tables = tables
        self.pools = pools
        self.counters = counters
        self._keep = keep
        self._tracing = tracing
        self.now = now
        self.exchanges: dict[int, CallExchange] = {}
        """The open calls, by their number."""
        self._last_id = first_id
        self._later: list[Command] = []
        """What the core answered while commands were carried out."""
        self._obeying = self._due_comes = False
        self._ended_early: list[EndedEarly] = []
        self.requests = RequestBuilder(config, now)
        self.body_scanner = BodyScanner()
        self.own_endpoints = OwnEndpoints(tables)
        self._kv_transfers = kv_transfers or {}
        self._prompt_reader = prompt_reader
        self._held: list[PendingPrompt] | None = None
        """Requests that wait while the router starts; None: they do not wait."""
        self._ids: list[bytes] = []
        """Ids for requests that have none."""
        self.client_errors = ClientErrors()
        self.reconfigure(config)

    def reconfigure(self, config: Config) -> None:
        self.requests.reconfigure(config)
        if self._tracing is not None:
            self._tracing.reconfigure(config.tracing)
        self._addresses = ClientAddresses(config.listen.trusted_proxies)
        self._logs_requests = config.log.requests
        self.node_headers = "" if config.journal.response_headers == "off" else config.journal.response_headers
        """Which responses name the node that served them: none (empty), those that ask for it, or all."""
        self.keeps_error_text = config.journal.error_text
        self._min_tokens = config.index.min_prompt_tokens

    # To and from the core.

    def tell(self, event: Event, now_s: float | None = None) -> None:
        """Tell the core, and obey."""
        answer = self.handle(event, self.now() if now_s is None else now_s)
        if answer:
            self.obey(answer)

    def obey(self, answer: Sequence[Command]) -> None:
        """Carry out what the core has answered. What an exchange tells meanwhile is told at once; what the core answers
        then comes behind the other commands. So nothing is re-entered, and each call gets its commands in their
        order."""
        if self._obeying:
            self._later.extend(answer)
            return
        self._obeying, obeyed = True, 0
        try:
            while answer:
                obeyed += len(answer)
                for command in answer:
                    exchange = self.exchanges.get(command.id)
                    if exchange is None:
                        if isinstance(command, Send):
                            self.tell(Failed(command.id, command.try_, UNKNOWN, "the edge does not know this call"))
                        continue
                    try:
                        if isinstance(command, Send):
                            exchange.send(command)
                        elif isinstance(command, Withdraw):
                            exchange.withdraw(command)
                        elif isinstance(command, Reject):
                            exchange.reject(command)
                        else:
                            exchange.cut(command)
                    except Exception as error:
                        self.fail(exchange, error)
                answer = self._later
                if answer:
                    self._later = []
        finally:
            self._obeying = False
        # After a single command nothing is left over.
        if obeyed > 1 and not self._due_comes and self._due_now():
            self._due_comes = True
            asyncio.get_running_loop().call_soon(self._tell_due)

    def _tell_due(self) -> None:
        self._due_comes = False
        self.tell(DUE)

    def fail(self, exchange: CallExchange, error: Exception) -> None:
        """The edge failed at one call. It ends, and no other."""
        try:
            exchange.internal_error(error)
        except Exception as another:
            self.internal_error(another, exchange.request_id)

    # Before the body is read.

    def check_head(self, head: RequestHead) -> Rights:
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
        keys = self.requests.keys
        return keys.rights(head) if keys.required else keys.without_key

    # With the body.

    def serve(self, client: Client, head: RequestHead, body: bytes, kind: Any = Exchange) -> None:
        """Answer a request, or set `client.exchange` to what answers it later. Raises HttpError. `kind`: the class of
        its exchange."""
        path = head.target
        if b"?" in path:
            path = path.partition(b"?")[0]
        if head.method != b"POST":
            self.own_endpoints.serve(client, path)
            return
        trace, tracing = None, self._tracing
        if tracing is not None:
            route = path if path in FORWARDED else b"/v1/*"
            trace = tracing.begin(head.forwarded_fields, route, client.body_started_s or self.now())
        if len(body) > MAX_LOOP_BYTES:
            large = client.exchange = ScanningExchange(self, client, head, path, body, trace, kind)
            large.scanning = self.body_scanner.scan_in_thread(path, head.content_type, body, large.scanned)
            return
        try:
            scanned = scan(path, head.content_type, body)
        except Exception as error:
            raise self._rejected(error, head, trace) from None
        self.begin(client, head, path, body, scanned, trace, kind)

    def begin(
        self, client: Client, head: RequestHead, path: bytes, body: bytes, scanned: ScannedBody,
        trace: EdgeTrace | bytes | None, kind: Any,
    ) -> None:  # fmt: skip
        """Serve a request whose body is scanned. Raises HttpError."""
        rights, tables = client.rights, self.tables()
        try:
            request = self.requests.build(head, path, scanned, rights, tables)
        except Exception as error:
            raise self._rejected(error, head, trace) from None
        if request.route:
            self.counters.route_requests[request.route] += 1
        ids = self._ids
        request_id = head.request_id or (ids.pop() if ids else self.new_request_id())
        self._last_id = number = self._last_id + 1
        exchange = kind(self, client, head, body, request, request_id, number)
        self.exchanges[number] = client.exchange = exchange
        try:
            if isinstance(trace, bytes):
                exchange.node_fields = trace
            elif trace is not None:
                exchange.trace = trace
            if rights.is_limited:
                exchange.known = True
                charge = Charge(number, len(body), path in WITH_OUTPUT_TOKENS, request)
                self.tell(charge, request.arrived_s)
                if exchange.over:
                    return
            outline = scanned.outline
            if tables.has_pairs:
                self._see_whether_it_splits(exchange, path, body, outline, tables)
            if path not in FORWARDED:  # the router does not know what such a path does
                exchange.repeatable = False
            kept = self._keep(request, path, body) if self._keep is not None else None
            if isinstance(trace, EdgeTrace):
                kept = kept or Kept()
                kept.trace = trace
            if kept is not None:
                exchange.kept = kept
            if self._held is not None and request.may_queue and not request.deadline_s and not request.total_deadline_s:
                self._hold(exchange, path, body, outline)
                return
            captures = kept is not None and kept.body_bytes >= 0
            prompt = self.read_prompt(request, path, body, outline, exchange.prompt_read, tables, captures)
            if isinstance(prompt, PendingPrompt):
                exchange.pending_prompt = prompt
            else:
                self.arrive(exchange, prompt)
        except Exception as error:
            self.fail(exchange, error)

    def _see_whether_it_splits(
        self, exchange: CallExchange, path: bytes, body: bytes, outline: Outline | None, tables: Tables
    ) -> None:
        """Note whether one node may prefill the request for another one."""
        if not self._kv_transfers or exchange.envoy:
            return
        allowed = tables.pairs_only_with_vllm or path not in ONLY_VLLM
        exchange.request.may_split = allowed and may_split(path, body, outline)
        exchange.outline = outline if exchange.request.may_split else None

    def _rejected(self, error: Exception, head: RequestHead, trace: EdgeTrace | bytes | None) -> HttpError:
        """Return the error of a request that cannot be read."""
        rejected = error if isinstance(error, HttpError) else self.internal_error(error, head.request_id)
        if isinstance(trace, EdgeTrace):
            self.end_early(rejected, trace)
        return rejected

    def read_prompt(
        self, request: RoutingRequest, path: bytes, body: bytes, outline: Outline | None,
        then: Callable[[Prompt | None], None], tables: Tables, captures: bool = False,
    ) -> Prompt | PendingPrompt | None:  # fmt: skip
        """The prompt; or PendingPrompt, which calls `then`; or None where neither the policy, nor the nodes' context
        windows, nor a capture need it."""
        wants_tokens = captures or tables.route_wants_tokens.get(request.route, tables.wants_tokens)
        wanted = wants_tokens and len(body) >= self._min_tokens
        shortest = tables.shortest_window.get(request.model)
        if (
            shortest is not None
            and outline is not None
            and most_tokens(len(body)) + (request.max_output_tokens or 0) > shortest
        ):
            request.input_tokens = estimated_tokens(len(body))
            wanted = True
        if not wanted:
            return None
        return self._prompt_reader.read(request.model, path, body, then, outline)

    def lookup(self, request: RoutingRequest, prompt: Prompt, captures: bool = False) -> Lookup | None:
        """What the index is asked for; None for a prompt too short to matter."""
        for_others = captures or request.input_tokens != 0
        if request.input_tokens:  # the prompt may not fit into every node's context window
            request.input_tokens, request.input_exact = longest_prompt(prompt)
        if for_others:  # the policy may not need it
            tables = self.tables()
            if not tables.route_wants_tokens.get(request.route, tables.wants_tokens):
                return None
        tokens = prompt.total_tokens if prompt.others else len(prompt.tokens) // TOKEN_BYTES
        if tokens < self._min_tokens:
            return None
        lookup = lookup_of(prompt, request.cache_group)
        return lookup if tokens <= MAX_LOOKUP_TOKENS else lookup.prefix(MAX_LOOKUP_TOKENS)

    def arrive(self, exchange: CallExchange, prompt: Prompt | None) -> None:
        """Ask the core for a node."""
        request, kept, lookup, tokens = exchange.request, exchange.kept, None, None
        if prompt is not None:
            captures = kept is not None and kept.body_bytes >= 0
            if captures or request.input_tokens or prompt.others or len(prompt.tokens) > _MAX_LOOKUP_BYTES:
                lookup = self.lookup(request, prompt, captures)
            elif len(prompt.tokens) >= self._min_tokens * TOKEN_BYTES:  # as `lookup`, without a call
                lookup = lookup_of(prompt, request.cache_group)
            if exchange.known:
                tokens = prompt.total_tokens
            if kept is not None:
                if captures:
                    kept.prompt = prompt
                if kept.sample is not None and lookup is not None and not lookup.text:
                    kept.tokens = lookup.tokens
        names = self.node_headers
        names_node = bool(names) and (names == "always" or exchange.head.get(EXPLAIN_HEADER) == b"1")
        exchange.known = exchange.arrived = True
        arrive = Arrive(
            exchange.id,
            exchange.request_id,
            request,
            lookup,
            tokens,
            exchange.repeatable,
            exchange.envoy,
            names_node,
            kept,
        )
        answer = self.handle(arrive, self.now())
        if answer:
            self.obey(answer)

    async def read(
        self, head: RequestHead, body: bytes, rights: Rights
    ) -> tuple[RoutingRequest, Prompt | None, Lookup | None]:
        """Read a request as if it were served. Nothing changes. Raises HttpError."""
        path, tables = head.target.partition(b"?")[0], self.tables()
        scanned = await self.body_scanner.scan(path, head.content_type, body)
        request = self.requests.build(head, path, scanned, rights, tables)
        future: asyncio.Future[Prompt | None] = asyncio.get_running_loop().create_future()
        prompt = self.read_prompt(request, path, body, scanned.outline, future.set_result, tables)
        if isinstance(prompt, PendingPrompt):
            pending = prompt
            try:
                prompt = await future
            finally:
                pending.cancel()
        return request, prompt, self.lookup(request, prompt) if prompt is not None else None

    # While the router starts.

    def hold_requests(self) -> None:
        """Let new requests wait until `release_requests`, except those with a deadline or `X-Queue: no`."""
        self._held = []

    def release_requests(self) -> None:
        held, self._held = self._held, None
        for pending in held or ():
            pending.done(None)

    def _hold(self, exchange: CallExchange, path: bytes, body: bytes, outline: Outline | None) -> None:
        assert self._held is not None
        exchange.pending_prompt = PendingPrompt(lambda _: self._resume(exchange, path, body, outline))
        self._held.append(exchange.pending_prompt)

    def _resume(self, exchange: CallExchange, path: bytes, body: bytes, outline: Outline | None) -> None:
        exchange.pending_prompt = None
        try:
            kept, then, tables = exchange.kept, exchange.prompt_read, self.tables()
            if tables.has_pairs:  # as is known only now
                self._see_whether_it_splits(exchange, path, body, outline, tables)
            captures = kept is not None and kept.body_bytes >= 0
            prompt = self.read_prompt(exchange.request, path, body, outline, then, tables, captures)
            if isinstance(prompt, PendingPrompt):
                exchange.pending_prompt = prompt
            else:
                self.arrive(exchange, prompt)
        except Exception as error:
            self.fail(exchange, error)

    # What exchanges need.

    def new_request_id(self) -> bytes:
        if not self._ids:
            self._ids = random_ids()
        return self._ids.pop()

    def kv_transfer(self, engine: str) -> KvTransfer:
        """Return the protocol of an engine; vLLM's while it is not known."""
        transfers = self._kv_transfers
        return transfers.get(engine) or transfers["vllm"]

    def end_early(
        self, error: HttpError | None, trace: EdgeTrace | None, kept: Kept | None = None,
        request: RoutingRequest | None = None, request_id: bytes = b"",
    ) -> None:  # fmt: skip
        """Note a request that ends before it asks for a node. `error`: None if its client has left."""
        status, code = (error.status, error.code) if error is not None else (0, "")
        self._ended_early.append(EndedEarly(trace, kept, self.now(), status, code, error is None, request, request_id))

    def take_ended_early(self) -> list[EndedEarly]:
        """Return what others want of requests that ended before they asked for a node, and forget it."""
        ended, self._ended_early = self._ended_early, []
        return ended

    def internal_error(self, error: Exception, request_id: bytes = b"") -> HttpError:
        log.error(
            "request_failed_internally",
            "The client receives status 500, or its response breaks off.",
            request_id=request_id.decode("ascii", "replace"),
            reason=where_it_failed(error),
        )
        return errors.internal_error()

    def error_sent(self, error: HttpError, request_id: bytes, peer: bytes, forwarded_for: bytes) -> None:
        status = error.status
        self.counters.errors[status, error.code] += 1
        if is_client_error(status):
            source = self._addresses.source(peer, forwarded_for)
            self.client_errors.count(status, error.code, source, error.key_sha256)
        if self._logs_requests:
            more: dict[str, object] = {"key_sha256": error.key_sha256} if error.key_sha256 else {}
            log.info(
                "request_rejected", request_id=request_id.decode("ascii"), status=status, reason=error.code,
                source=self._addresses.source(peer, forwarded_for), **more,
            )  # fmt: skip
