"""From the head and body of a request to a routing request: path, key, headers, scanned body, blocks of the prompt."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from math import inf
from typing import Any, Final

from warmroute._kernel import MAX_LOOP_BYTES, TOKEN_BYTES, BadBody, Outline, RequestHead
from warmroute.config import Config
from warmroute.config.routing import HIGH, LOW, NORMAL, PRIORITY_NUMBERS, Routes
from warmroute.core.messages import Lookup, PromptBatch, RoutingRequest, Tables
from warmroute.edge import errors
from warmroute.edge.http1 import form_boundary
from warmroute.edge.trace_context import EdgeTrace
from warmroute.prompt.multipart import BadForm, form_fields
from warmroute.prompt.prompt import Prompt
from warmroute.prompt.request_body import read_json

# The headers by which a client asks for a priority, for deadlines, or not to be queued.
#
# X-Priority: high | normal | low      which requests are served first
# X-Queue: yes | no                    no: 429 at once instead of waiting for a node
# X-Deadline-Ttft-Ms: 800              when the first token is due, counted from the request's arrival
# X-Deadline-Ms: 20000                 when the whole response is due
# X-Vllm-Priority: 5                   vLLM's own priority, in place of `priority` in the body: lower is served first

PRIORITY: Final = b"x-priority"
QUEUE: Final = b"x-queue"
DEADLINE_TTFT: Final = b"x-deadline-ttft-ms"
DEADLINE: Final = b"x-deadline-ms"
ENGINE_PRIORITY: Final = b"x-vllm-priority"
_INTEGER: Final = re.compile(rb"-?[0-9]{1,18}")


def read_routing_headers(
    head: RequestHead, now_s: float, priority: int, deadline_s: float, total_deadline_s: float
) -> tuple[int, bool, float, float]:
    """Return priority, whether the request may queue, and its two deadlines. The arguments are the values where the
    request has no such header. Raises HttpError for a value that is not understood."""
    get = head.get
    if value := get(PRIORITY):
        named = PRIORITY_NUMBERS.get(value.lower().decode("latin-1"))
        if named is None:
            raise errors.invalid_header(PRIORITY.decode(), "high, normal or low")
        priority = named
    queue = get(QUEUE).lower()
    if queue not in (b"", b"yes", b"no"):
        raise errors.invalid_header(QUEUE.decode(), "yes or no")
    if value := get(DEADLINE_TTFT):
        deadline_s = _deadline_s(value, DEADLINE_TTFT, now_s)
    if value := get(DEADLINE):
        total_deadline_s = _deadline_s(value, DEADLINE, now_s)
    return priority, queue != b"no", deadline_s, total_deadline_s


def read_engine_priority(head: RequestHead, priority: int) -> int:
    """Return the priority that vLLM will use; `priority` is the body's. Raises HttpError for anything but an integer:
    vLLM would use the body's priority then, other servers may not."""
    value = head.get(ENGINE_PRIORITY)
    if not value:
        return priority
    if _INTEGER.fullmatch(value) is None:
        raise errors.invalid_header(ENGINE_PRIORITY.decode(), "an integer")
    return int(value)


def _deadline_s(value: bytes, name: bytes, now_s: float) -> float:
    try:
        after_ms = float(value)
    except ValueError:
        after_ms = 0.0
    if not 0.0 < after_ms < inf:
        raise errors.invalid_header(name.decode(), "a number of milliseconds above 0")
    return now_s + after_ms / 1000.0


# Ids for requests whose client sends none.
#
# An engine takes the router's id for its own: with it, a client could read or cancel the stored response of another
# one. So an id cannot be guessed: it has 128 random bits. The system is asked for many of them at once.

_ID_DIGITS: Final = 32
_IDS_AT_ONCE: Final = 256


def random_ids() -> list[bytes]:
    digits = os.urandom(_ID_DIGITS // 2 * _IDS_AT_ONCE).hex().encode()
    return [b"wr-" + digits[start : start + _ID_DIGITS] for start in range(0, len(digits), _ID_DIGITS)]


# Which paths the router forwards to nodes, and which it answers itself.

# Any other path under /v1 is forwarded too, if its body names a model.
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
"""An engine's administration is not for clients."""
WITH_OUTPUT_TOKENS: Final = frozenset({b"/v1/chat/completions", b"/v1/completions", b"/v1/responses", b"/v1/messages"})
"""Paths whose responses have generated tokens."""
_PLAIN_PATH: Final = re.compile(rb"(?:/(?!\.{1,2}(?:/|\Z))[A-Za-z0-9_~.:@!$&'()*+,=-]+)+")
"""Segments of characters that have one meaning only; no segment is empty, `.` or `..`."""
CHATS: Final = (b"/v1/chat/completions", b"/v1/messages")
HEALTH: Final = (b"/health", b"/ready")


def is_anthropic(target: bytes) -> bool:
    """Return whether the path belongs to Anthropic's API."""
    return target.startswith(b"/v1/messages") and target[12:13] in (b"", b"/", b"?")


def check_path(method: bytes, path: bytes) -> None:
    """Raises HttpError for a path or a method that the router does not serve."""
    if path == b"/v1/models" or path.startswith(b"/v1/models/"):
        if method not in (b"GET", b"HEAD"):
            raise errors.method_not_allowed("GET")
    elif path in FORWARDED:
        if method != b"POST":
            raise errors.method_not_allowed("POST")
    elif not path.startswith(b"/v1/") or method != b"POST" or path in NEVER_FORWARDED or _ambiguous(path):
        raise not_found(path)


def not_found(path: bytes) -> errors.HttpError:
    return errors.not_found(path.decode("ascii", "replace")[:200])


def _ambiguous(path: bytes) -> bool:
    """Whether a node could read the path as another one: escapes, parameters (`;`), dots, empty segments."""
    return _PLAIN_PATH.fullmatch(path) is None


# API keys of clients, and what a request with a key may do.
#
# The configuration holds the keys' SHA-256 hashes; a key is looked up by its hash, once, when the request's head
# arrives.

SHOWN_HASH: Final = 8
"""Characters of the hash of a wrong key that logs and alerts show."""


def hash_key(key: str) -> str:
    """Return the hash that the configuration holds for a key."""
    return sha256(key.encode()).hexdigest()


class Rights:
    """What a request may do. A request keeps the rights that its head had: a reload makes new ones for later heads.

    Otherwise a client could send a head, wait until its key is revoked, and send a body that no limit counts.
    """

    def __init__(
        self,
        tenant: str,
        max_priority: int,
        is_limited: bool,
        cache_group: str,
        routes: Routes | None,
        passes_authorization: bool,
    ) -> None:
        self.tenant = tenant
        """Empty where no keys are configured."""
        self.max_priority = max_priority
        self.is_limited = is_limited
        """Whether the tenant has rate limits, which only the core looks into."""
        self.cache_group = cache_group
        """Whose prompts count as cached; empty: everybody's."""
        self.routes = routes
        """The routes when the head arrived; None: there were none."""
        self.passes_authorization = passes_authorization
        """Whether nodes get the client's key: not if it is a key for the router."""
        self.body_tenant: str | None = None
        """Whose share of the memory for bodies this request takes from; None: there is one tenant, and no shares."""


NO_RIGHTS: Final = Rights("", LOW, False, "", None, False)
"""Of requests to a listener that forwards nothing."""


class ApiKeys:
    def __init__(self, config: Config) -> None:
        routes = Routes(config.routes) or None
        groups = config.cache_groups()
        limited = {key.tenant for key in config.keys if key.requests_per_min or key.tokens_per_min}
        self.required = bool(config.keys)
        self.without_key = Rights("", LOW if config.keys else HIGH, False, "", routes, not config.keys)
        """Of requests that need no key."""
        self._by_digest: dict[bytes, Rights] = {}
        self._by_tenant: dict[str, Rights] = {}
        for key in config.keys:
            rights = Rights(
                key.tenant, PRIORITY_NUMBERS[key.max_priority], key.tenant in limited, groups.get(key.tenant, ""),
                routes, False,
            )  # fmt: skip
            self._by_digest[bytes.fromhex(key.sha256)] = rights
            known = self._by_tenant.get(key.tenant)
            if known is None or known.max_priority < rights.max_priority:
                self._by_tenant[key.tenant] = rights
        if len(self._by_tenant) > 1:
            for rights in (self.without_key, *self._by_digest.values()):
                rights.body_tenant = rights.tenant

    def rights(self, head: RequestHead) -> Rights:
        """Return the rights of the key in `Authorization: Bearer` or `X-Api-Key`. Raises HttpError without a valid
        key, if keys are required."""
        if not self.required:
            return self.without_key
        scheme, _, key = head.authorization.partition(b" ")
        if scheme.lower() != b"bearer":
            key = head.api_key
        if not key:
            raise errors.invalid_api_key()
        digest = sha256(key.strip()).digest()
        found = self._by_digest.get(digest)
        if found is None:
            raise errors.invalid_api_key(digest.hex()[:SHOWN_HASH])
        return found

    def rights_of(self, tenant: str) -> Rights | None:
        """Return the rights of the tenant's key with the lowest priority; None if no key has this tenant."""
        return self._by_tenant.get(tenant)


# Reads what routing needs of a request's body: on the event loop if the body is small, otherwise in a thread.
#
# The scan of a large body releases the interpreter lock, so the event loop serves other requests meanwhile.

_JSON: Final = b"application/json"
"""The type of nearly all bodies."""
_THREADS: Final = 2


class ScannedBody:
    model: str
    """Empty where the body names none."""
    system: bytes | None
    """First characters of the system prompt."""
    user: bytes | None
    """First characters of the first user message."""
    session: bytes
    """The conversation's name; empty where the body has none."""
    outline: Outline | None
    """The positions of the fields of a JSON body."""
    max_output_tokens: int | None
    priority: int
    """As vLLM reads it: a lower number is served first."""
    streams: bool
    engine_field: str | None
    """The name of a field that only the router may set (ENGINE_FIELDS)."""

    def __init__(
        self,
        model: str,
        system: bytes | None = None,
        user: bytes | None = None,
        session: bytes = b"",
        outline: Outline | None = None,
        max_output_tokens: int | None = None,
        priority: int = 0,
        streams: bool = True,
        engine_field: str | None = None,
    ) -> None:
        self.model = model
        self.system = system
        self.user = user
        self.session = session
        self.outline = outline
        self.max_output_tokens = max_output_tokens
        self.priority = priority
        self.streams = streams
        self.engine_field = engine_field


def scan(path: bytes, content_type: bytes, body: bytes) -> ScannedBody:
    """Raises HttpError for a body that is malformed, or that the engine might read in another way."""
    boundary = None if content_type == _JSON else form_boundary(content_type)
    if boundary is not None:
        try:
            model, engine_field = form_fields(boundary, body)
            return ScannedBody(model, engine_field=engine_field)
        except BadForm as bad:
            raise errors.malformed_form(str(bad)) from None
    try:
        model, system, user, session, outline, max_output_tokens, priority, streams = read_json(path, body)
        return ScannedBody(
            model, system, user, session, outline, max_output_tokens, priority, streams, outline.engine_field
        )
    except BadBody as bad:
        problem, field = bad.args
        raise errors.invalid_field(field, problem) if field else errors.malformed_json(problem) from None


class BodyScanner:
    """Scans large bodies in threads."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "warmroute-body")

    def scan_in_thread(
        self, path: bytes, content_type: bytes, body: bytes, then: Callable[[Future[ScannedBody]], None]
    ) -> Future[ScannedBody]:
        """Return the scan, which can be cancelled until it starts. `then` is called on the event loop."""
        loop = asyncio.get_running_loop()

        def hand_to_loop(done: Future[ScannedBody]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(then, done)

        scanning = self._threads.submit(scan, path, content_type, body)
        scanning.add_done_callback(hand_to_loop)
        return scanning

    async def scan(self, path: bytes, content_type: bytes, body: bytes) -> ScannedBody:
        """Scan a body of any size. Raises HttpError."""
        if len(body) <= MAX_LOOP_BYTES:
            return scan(path, content_type, body)
        return await asyncio.wrap_future(self._threads.submit(scan, path, content_type, body))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


# Builds the RoutingRequest of an HTTP request from its head, body, key and route. Nothing else builds one.

MAX_OUTPUT_TOKENS: Final = 1 << 31
"""A limit beyond this, or below one token, says nothing about the length of the response."""


class RequestBuilder:
    def __init__(self, config: Config, now: Callable[[], float]) -> None:
        self._now = now
        self.reconfigure(config)

    def reconfigure(self, config: Config) -> None:
        self.keys = ApiKeys(config)
        self._session_headers = [name.lower().encode() for name in config.routing.session_headers]
        routings = (config.routing, *(route.routing(config.routing) for route in config.routes))
        self._start_bytes = max((one.prefix_characters for one in routings if one.prefix_key == "start"), default=0)
        policies = [config.routing.policy, *[route.policy for route in config.routes]]
        self._session_wanted = "session" in policies

    def build(
        self, head: RequestHead, path: bytes, body: ScannedBody, rights: Rights, tables: Tables
    ) -> RoutingRequest:
        """Raises HttpError."""
        model, system, user, outline = body.model, body.system, body.user, body.outline
        max_output_tokens, engine_priority = body.max_output_tokens, body.priority
        if system is None and user is None and path in CHATS and (outline is None or "messages" not in outline.fields):
            raise errors.missing_messages()
        if not model:
            if path not in FORWARDED:
                raise not_found(path)
            model = tables.only_model
        now_s = self._now()
        priority, may_queue, ends_late = NORMAL, True, False
        deadline_s = total_deadline_s = 0.0
        route_name, engine_fields = "", False
        tenant, routes = rights.tenant, rights.routes
        if routes is not None:
            route = routes.pick(model, path.decode("ascii", "replace"), tenant, head.get)
            if route is not None:
                route_name, priority, engine_fields = route.name, route.priority, route.engine_fields
                ends_late = route.ends_late
                deadline_s = now_s + route.ttft_s if route.ttft_s else 0.0
                total_deadline_s = now_s + route.total_s if route.total_s else 0.0
        if body.engine_field is not None and not engine_fields:
            raise errors.engine_field_not_allowed(body.engine_field)
        if max_output_tokens is not None and not 0 < max_output_tokens <= MAX_OUTPUT_TOKENS:
            max_output_tokens = None
        if head.has_routing_headers:
            engine_priority = read_engine_priority(head, engine_priority)
        if engine_priority:
            priority = HIGH if engine_priority < 0 else LOW
        if head.has_routing_headers:
            priority, may_queue, deadline_s, total_deadline_s = read_routing_headers(
                head, now_s, priority, deadline_s, total_deadline_s
            )
        if priority < rights.max_priority:
            priority = rights.max_priority
        if engine_priority < 0 and rights.max_priority != HIGH:
            raise errors.priority_not_allowed()  # the node would see it: the router does not change a body
        request = RoutingRequest(
            model, system, user, body.session, tenant, route_name, priority, may_queue, now_s, deadline_s,
            total_deadline_s,
            self._session_header(head) if self._session_wanted or tables.has_several_islands else b"",
            body.streams, max_output_tokens,
            start=outline.text_start(self._start_bytes) if self._start_bytes and outline is not None else b"",
        )  # fmt: skip
        if ends_late and (deadline_s or total_deadline_s):
            request.ends_late = True
        if rights.cache_group:
            request.cache_group = rights.cache_group
        return request

    def _session_header(self, head: RequestHead) -> bytes:
        for name in self._session_headers:
            if value := head.get(name):
                return value
        return b""


def lookup_of(prompt: Prompt, cache_group: str) -> Lookup:
    """Return the lookup of a tokenized prompt. `cache_group`: the tenant, or the tenants it shares caches with."""
    tokens, exact, truncated = prompt.tokens, prompt.exact, prompt.truncated
    lookup = Lookup(
        tokens, len(tokens) // TOKEN_BYTES, prompt.exact_tokens if exact else 0, prompt.cache_salt, cache_group,
        prompt.media, truncated or not exact,
    )  # fmt: skip
    if truncated or prompt.skips_cache or prompt.others:
        others = tuple([lookup_of(other, cache_group) for other in prompt.others])
        prompts = 1 + len(others) + prompt.unread_prompts
        lookup.batch = PromptBatch(prompt.skips_cache, others, prompts, prompt.total_tokens)
        for other in others:
            other.batch = PromptBatch(prompt.skips_cache, total_tokens=other.token_count)
    return lookup


class Kept:
    """What others want of a request beside its answer. The core gives it back when the call has ended."""

    body_bytes: int
    """Of a request that is captured; -1: it is not."""
    prompt: Prompt | None
    """Of a request that is captured."""
    sample: Any
    """The prompt doctor's."""
    tokens: bytes = b""
    """Of a request that the prompt doctor samples, if they are the engine's: four bytes each."""
    trace: EdgeTrace | None = None

    def __init__(self, body_bytes: int = -1, prompt: Prompt | None = None, sample: Any = None) -> None:
        self.body_bytes = body_bytes
        self.prompt = prompt
        self.sample = sample


Keep = Callable[[RoutingRequest, bytes, bytes], Kept | None]
"""Takes a request that has just arrived, its path and its body. Returns what is wanted of it; None: nothing."""
