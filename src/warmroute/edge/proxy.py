"""The surface: what is served at which path, and to whom."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Final
from urllib.parse import unquote

import msgspec

from warmroute.config import Config
from warmroute.edge import errors
from warmroute.edge.admission_errors import RETRY_AFTER_S, in_words
from warmroute.edge.client import Client
from warmroute.edge.errors import Refusal
from warmroute.edge.exchange import ProxyExchange
from warmroute.edge.head import RequestHead
from warmroute.edge.keys import Keys
from warmroute.edge.pools import Pools
from warmroute.edge.reading import PendingPrompt, PromptReader
from warmroute.edge.request_headers import read_wishes
from warmroute.fleet.fleet import Fleet
from warmroute.fleet.node import Node, Outcome
from warmroute.fleet.ticket import Ticket
from warmroute.prompt.multipart import is_multipart, model_of
from warmroute.prompt.prompt import Prompt
from warmroute.prompt.routing_request import HIGH, LOW, NotJson, RoutingRequest, lacks, read_json
from warmroute.routing.admission import Admission
from warmroute.routing.lookups import Lookup, lookup_of
from warmroute.routing.rate_limits import Charge, RateLimits
from warmroute.routing.refusals import NotAdmitted, RateLimited, Undecided
from warmroute.routing.router import Router
from warmroute.routing.routes import PRIORITIES, Routes
from warmroute.telemetry.counters import Counters
from warmroute.telemetry.journal import Journal

log = logging.getLogger("warmroute.requests")

# Paths that go to a node. Any other path under /v1 does too, if its body names a model.
FORWARDED: Final = frozenset(
    {
        b"/v1/chat/completions",
        b"/v1/completions",
        b"/v1/embeddings",
        b"/v1/responses",
        b"/v1/messages",
        b"/v1/rerank",
        b"/v1/score",
        b"/v1/audio/transcriptions",
        b"/tokenize",
        b"/detokenize",
    }
)
NEVER_FORWARDED: Final = frozenset({b"/v1/load_lora_adapter", b"/v1/unload_lora_adapter"})
"""An engine's own administration, which is no client's business."""
ANSWERED: Final = frozenset({b"/v1/chat/completions", b"/v1/completions", b"/v1/responses", b"/v1/messages"})
"""Paths whose answers have tokens of their own."""
MOST_OUTPUT_TOKENS: Final = 1 << 31
"""Whoever asks for more, or for less than one, has said nothing about its answer's length."""
CHATS: Final = (b"/v1/chat/completions", b"/v1/messages")


class Proxy:
    def __init__(
        self,
        config: Config,
        fleet: Fleet,
        router: Router,
        admission: Admission,
        readings: PromptReader,
        pools: Pools,
        counters: Counters,
        journal: Journal,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fleet = fleet
        self.router = router
        self.admission = admission
        self._readings = readings
        self.pools = pools
        self.counters = counters
        self.journal = journal
        self.now = now
        self.stopping = False
        self.rate_limits = RateLimits((), now())
        self._id_prefix = b"wr-" + os.urandom(6).hex().encode() + b"-"
        self._id_numbers = count(1)
        self.reconfigure(config)

    def reconfigure(self, config: Config) -> None:
        self.attempts = config.upstream.attempts
        self.log_requests = config.log.requests
        self.tenants = frozenset(key.tenant for key in config.keys)
        self.tells_where = "" if config.journal.headers == "off" else config.journal.headers
        self._keys = Keys(config.keys) or None
        self.passes_authorization = not config.keys
        """A key that was meant for the router stays here; without keys the field is the nodes' affair."""
        self._session_headers = [name.lower().encode() for name in config.routing.session_headers]
        self._session_wanted = "session" in (config.routing.policy, *(route.policy for route in config.routes))
        self._min_tokens = config.index.min_tokens
        self._sharing = config.sharing()
        self._routes = Routes(config.routes) or None
        self.rate_limits.reconfigure(config.keys, self.now())
        self._limited = bool(self.rate_limits)

    # Before the body is read.

    def admit(self, head: RequestHead) -> str:
        target = head.target
        if target in FORWARDED:
            if head.method != b"POST":
                raise errors.method_not_allowed("POST")
        else:
            path = target.partition(b"?")[0]
            if path in (b"/health", b"/ready"):
                if head.method not in (b"GET", b"HEAD"):
                    raise errors.method_not_allowed("GET")
                return ""
            self._admit_path(head.method, path)
        if not self._keys:
            return ""
        tenant = self._keys.tenant(head)
        if tenant is None:
            raise errors.unauthorized()
        return tenant

    def _admit_path(self, method: bytes, path: bytes) -> None:
        if path == b"/v1/models" or path.startswith(b"/v1/models/"):
            if method not in (b"GET", b"HEAD"):
                raise errors.method_not_allowed("GET")
        elif path in FORWARDED:
            if method != b"POST":
                raise errors.method_not_allowed("POST")
        elif not path.startswith(b"/v1/") or method != b"POST" or path in NEVER_FORWARDED or _reads_otherwise(path):
            raise errors.not_found(path.decode("ascii", "replace")[:200])

    # With the body.

    def serve(self, client: Client, head: RequestHead, body: bytes) -> ProxyExchange | None:
        if head.method != b"POST":
            self._serve_own(client, head)
            return None
        request = self.request(head, body, client.tenant)
        if request.route:
            self.counters.routed[request.route] += 1
        charge = self._begin_charge(request, head, body) if self._limited else None
        exchange = ProxyExchange(self, client, head, body, request, head.request_id or self.new_request_id())
        if charge is not None:
            exchange.charge = charge
        prompt = self.read_prompt(request, head, body, exchange.prompt_read)
        if isinstance(prompt, PendingPrompt):
            exchange.wait_for(prompt)
        else:
            self.enter(exchange, prompt)
        return exchange

    def read_prompt(
        self, request: RoutingRequest, head: RequestHead, body: bytes, then: Callable[[Prompt | None], None]
    ) -> Prompt | PendingPrompt | None:
        """The prompt at once, or PendingPrompt, which calls `then`; None where it is of no interest."""
        if not self.router.policy_of(request).wants_tokens or len(body) < self._min_tokens:
            return None
        model = request.model
        if not model and (group := self.fleet.only_group) is not None:
            model = group.model
        outline, request.outline = request.outline, None
        return self._readings.read(model, head.target.partition(b"?")[0], body, then, outline)

    def lookup(self, request: RoutingRequest, prompt: Prompt | None) -> Lookup | None:
        """What the index is asked for; takes the wishes that stand in the prompt's body."""
        if prompt is None:
            return None
        request.streams = prompt.stream
        if (most := prompt.max_output_tokens) is not None and 0 < most <= MOST_OUTPUT_TOKENS:
            request.max_output_tokens = most  # whatever else it says is the engine's to refuse
        if prompt.priority and not request.priority_said:  # as vLLM reads it: the lower goes first
            request.priority = max(HIGH if prompt.priority < 0 else LOW, request.highest)
        if prompt.token_count < self._min_tokens:
            return None
        return lookup_of(prompt, self._sharing.get(request.tenant, ""))

    def enter(self, exchange: ProxyExchange, prompt: Prompt | None) -> None:
        """Asks for a node. Raises Refusal."""
        request = exchange.request
        try:
            exchange.lookup = self.lookup(request, prompt)
            exchange.entered_s = now_s = self.now()
            if exchange.charge is not None:
                output = self.router.outputs.expected(request.model, request.tenant, request.max_output_tokens)
                exchange.charge.take_tokens(prompt.token_count if prompt is not None else None, output, now_s)
            self.admission.enter(exchange, now_s)
            exchange.waits = True
        except Undecided as undecided:
            if exchange.charge is not None:
                exchange.charge.cancel()
            raise self.refusal(undecided, request) from None
        except Exception as error:
            raise exchange.broke(error) from None

    def _begin_charge(self, request: RoutingRequest, head: RequestHead, body: bytes) -> Charge | None:
        limits = self.rate_limits.of(request.tenant)
        if limits is None:
            return None
        try:
            return limits.begin(self.now(), len(body), head.target.partition(b"?")[0] in ANSWERED)
        except RateLimited as limited:
            raise self.refusal(limited, request) from None

    def refusal(self, why: Undecided, request: RoutingRequest) -> Refusal:
        """Why it got no node, in words; counted."""
        if isinstance(why, NotAdmitted):
            self.counters.shed[why.reason, request.priority] += 1
        return in_words(why, request)

    def close_ticket(self, ticket: Ticket, outcome: Outcome, now_s: float, reason: str = "") -> None:
        self.fleet.close_ticket(ticket, outcome, now_s, reason)
        if self.admission.room.waiting:
            self.freed(ticket.node, now_s)

    def freed(self, node: Node, now_s: float) -> None:
        """A node may have room for somebody who waits."""
        asyncio.get_running_loop().call_soon(self.admission.freed, node, now_s)

    def new_request_id(self) -> bytes:
        return self._id_prefix + b"%d" % next(self._id_numbers)

    def request(self, head: RequestHead, body: bytes, tenant: str) -> RoutingRequest:
        """What a request wants. Raises Refusal."""
        if is_multipart(head.content_type):
            request = RoutingRequest(model_of(head.content_type, body))
        else:
            try:
                request = read_json(body)
            except NotJson as why:
                raise errors.malformed_json(str(why)) from None
            if request.says_nothing and head.target.partition(b"?")[0] in CHATS and lacks(body, "messages"):
                raise errors.missing_messages()
        if not request.model and head.target.partition(b"?")[0] not in FORWARDED:
            raise errors.not_found(head.target.partition(b"?")[0].decode("ascii", "replace")[:200])
        request.tenant = tenant
        if self._routes is not None:
            self._take_route(self._routes, request, head)
        read_wishes(head, request, self.now)
        if self._keys:
            request.highest = PRIORITIES[self._keys.highest_priority(head, tenant)]
            request.priority = max(request.priority, request.highest)
        if self._session_wanted or self.fleet.islands.several:
            for name in self._session_headers:
                value = head.get(name)
                if value:
                    request.session_header = value
                    break
        return request

    def _take_route(self, routes: Routes, request: RoutingRequest, head: RequestHead) -> None:
        group = self.fleet.only_group
        model = request.model or (group.model if group is not None else "")
        path = head.target.partition(b"?")[0].decode("ascii", "replace")
        route = routes.pick(model, path, request.tenant, head.get)
        if route is not None:
            route.apply(request, self.now())

    def _serve_own(self, client: Client, head: RequestHead) -> None:
        path = head.target.partition(b"?")[0]
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
                raise errors.unknown_model(name)
            client.reply(200, msgspec.json.encode(card))

    def readiness(self) -> tuple[int, bytes]:
        if self.stopping:
            return 503, b'{"status":"stopping"}'
        if not self.fleet.can_serve:
            return 503, b'{"status":"no node can serve"}'
        return 200, b'{"status":"ready"}'

    def model_cards(self) -> Sequence[dict[str, object]]:
        """Every model of the fleet, as the first node that serves it describes it."""
        cards: dict[str, dict[str, object]] = {}
        for node in self.fleet:
            if node.draining:
                continue
            described = {str(card.get("id")): card for card in node.model_cards}
            for model in node.models or ():
                plain = {"id": model, "object": "model", "created": 0, "owned_by": "warmroute"}
                cards.setdefault(model, described.get(model, plain))
        return list(cards.values())

    # What happened.

    def refused(self, refusal: Refusal, request_id: bytes) -> None:
        self.counters.refused[refusal.status, refusal.code] += 1
        if self.log_requests:
            log.info("request %s: refused with %d %s", request_id.decode("ascii"), refusal.status, refusal.code)

    def log_request(self, request_id: bytes, tenant: str, ticket: Ticket, tried: int, ended: str) -> None:
        now_s = self.now()
        first_ms = f"{(ticket.first_byte_s - ticket.opened_s) * 1000.0:.1f} ms" if ticket.first_byte_s else "never"
        log.info(
            "request %s%s to %s: %s, first byte: %s, %.1f ms in all, %d tried",
            request_id.decode("ascii", "replace"),
            f" of {tenant}" if tenant else "",
            ticket.node.name,
            ended,
            first_ms,
            (now_s - ticket.opened_s) * 1000.0,
            tried,
        )


def _reads_otherwise(path: bytes) -> bool:
    """Whether a node might read a path as another one than it looks: escapes, dots, empty segments."""
    return b"%" in path or b"\\" in path or any(part in (b"", b".", b"..") for part in path.split(b"/")[1:])
