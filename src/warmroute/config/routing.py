"""Settings of routing: policies, prices, admission, index, priorities, routes and how a request finds its route."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, ClassVar, Final, Literal, get_args

import msgspec
from msgspec import Meta

from warmroute.config.section import NOT_IN_FILE, REMOVED, Count, PolicyName, PrefixKey, Section

# Settings of routing policies, admission and the cache index.


class Index(Section, frozen=True):
    """The index of the nodes' KV caches."""

    memory_bytes: Annotated[
        int, Meta(ge=1 << 20, description="Maximum memory. A cached block of a node takes about 48 bytes.")
    ] = 268_435_456
    min_prompt_tokens: Annotated[int, Meta(ge=0), REMOVED] = 200
    """The router ignores caches for prompts shorter than this and routes them by load: their prefill costs less than a
    worse balance."""
    assumed_cache_tokens: Annotated[
        Count, Meta(description="Size of a node's KV cache if the node does not report it.")
    ] = 131_072


class Routing(Section, frozen=True):
    """The routing policy."""

    removed: ClassVar = {
        "seed": "a random one",
    }

    policy: Annotated[PolicyName, Meta(description="Policy that picks the node for a request.")] = "price"
    session_headers: Annotated[
        tuple[str, ...], Meta(description="Request headers with a session id. The first one present counts.")
    ] = ("x-session-id", "x-conversation-id")
    prefix_key: Annotated[PrefixKey, REMOVED] = "system_and_user"
    """What requests of `prefix_hash` share a node by: the start of the system prompt and of the first user message, of
    the system prompt alone, or of the whole prompt (system prompt, tools, messages). The last two also place requests
    of `session` that name no session. Two conversations with the same system prompt are apart by the first."""
    prefix_characters: Annotated[int, Meta(ge=1, le=65_536), REMOVED] = 256
    """Length of these starts in characters, four of which are about a token. `system_and_user` and `system` use at most
    256."""
    seed: Annotated[int, REMOVED] = 0
    """Seed of random choices, for reproducible experiments. 0: from the operating system."""
    load_factor: Annotated[float, Meta(ge=1), NOT_IN_FILE] = 1.25
    """`prefix_hash` and `session` skip a node with more than this × the mean number of requests in flight."""

    @property
    def looks_up_caches(self) -> bool:
        return self.policy in ("approximate", "overlap", "price")

    @property
    def uses_kv_events(self) -> bool:
        """Whether the policy needs the nodes' KV events."""
        return self.policy in ("overlap", "price")


class Pricing(Section, frozen=True):
    """The policy `price`."""

    second_home_ms: Annotated[float, Meta(ge=0), REMOVED] = 250.0
    """Extra time a request may take on another node in order to cache a hot prefix there, too: as
    `max_node_backlog_ms`, what it would wait for at the first. 0: only where it takes no longer."""
    cache_weight: Annotated[float, Meta(ge=0, le=1), REMOVED] = 1.0
    """Weight of cached prefix tokens: 1 counts all, 0 routes by load alone. The price already says what a hit saves."""
    late_penalty_ms: Annotated[float, Meta(ge=0), REMOVED] = 10_000.0
    """Penalty in milliseconds for missing the TTFT deadline: more than any other term, so that a node that meets it
    wins."""
    adapter_load_ms: Annotated[float, Meta(ge=0), REMOVED] = 200.0
    """Time a node takes to load a LoRA adapter, until it was measured."""
    split: Annotated[
        Literal["by_price", "always", "never"],
        Meta(
            description="When a `prefill` node prefills for another node: where that costs less, always if a prefill "
            "node is up, or never."
        ),
    ] = "by_price"
    max_saving_ms: Annotated[float, Meta(gt=0), NOT_IN_FILE] = 60_000.0
    """Upper limit for the time that a cached prefix saves, so that no prefix keeps its node for ever."""
    room: Annotated[bool, NOT_IN_FILE] = True
    """Count the time to free KV memory on a full node."""
    memory: Annotated[bool, NOT_IN_FILE] = True
    """Count the cost of the blocks that a request evicts from a node's cache."""
    congestion: Annotated[bool, NOT_IN_FILE] = True
    """Count the time that a request adds to those behind it."""


class Admission(Section, frozen=True):
    """Which requests the router sends on, queues or rejects."""

    queue_at_router: Annotated[bool, REMOVED] = True
    """Queue requests in the router, not in the engine, until their node has room: they can still change nodes, and go
    by priority. For the policy `price`."""
    max_node_backlog_ms: Annotated[float, Meta(gt=0), REMOVED] = 250.0
    """Prefill work left on a node above which further requests wait in the router: enough for the engine's next
    steps."""
    max_waiting: Annotated[
        Count,
        Meta(
            description="Maximum number of requests waiting in the router. Above: 429 for the newest request of the "
            "tenant with the most of them. Low priority: 429 above half of it, and waiting requests make room for "
            "others. High priority: no limit."
        ),
    ] = 4096
    max_wait_s: Annotated[
        float, Meta(ge=0, description="Maximum time a request waits in the router. Above: 503. 0: no limit.")
    ] = 0.0
    queue_threshold: Annotated[
        int,
        Meta(
            ge=0,
            description="The router skips nodes with this many requests in their own queue. If all nodes have: 429. "
            "Low priority: half of it. High priority: no limit. 0: no limit. For all policies.",
        ),
    ] = 0


# Priorities of requests: names in the configuration, headers and metrics; numbers in the admission queue.

PriorityName = Literal["high", "normal", "low"]
HIGH, NORMAL, LOW = range(3)
"""A lower number is served first."""
PRIORITY_NAMES: Final[tuple[PriorityName, ...]] = get_args(PriorityName)
"""Name of each priority, by its number."""
PRIORITY_NUMBERS: Final[dict[str, int]] = {name: number for number, name in enumerate(PRIORITY_NAMES)}


# Settings for a subset of the requests, selected by model, path, tenant or header.

_ROUTING_KEYS = ("policy", "prefix_key", "prefix_characters")
_PRICE_KEYS = ("cache_weight",)
_ADMISSION_KEYS = ("queue_threshold", "queue_at_router", "max_wait_s")
OnDeadline = Literal["advise", "end"]


class RouteConfig(Section, frozen=True):
    """Settings for a subset of the requests. The first matching route applies. `*` matches any characters."""

    removed: ClassVar = {
        name: f"that of [{table}] for all routes"
        for table, names in {
            "routing": ("prefix_key", "prefix_characters"),
            "price": ("cache_weight",),
            "admission": ("queue_at_router",),
        }.items()
        for name in names
    }

    name: Annotated[str, Meta(min_length=1, description="Name in metrics.")]
    model: Annotated[str, Meta(description="Model in the request, for example `qwen3-*`. Empty: any.")] = ""
    path: Annotated[str, Meta(description="Path without query, for example `/v1/embeddings`. Empty: any.")] = ""
    tenant: Annotated[str, Meta(description="Tenant of the API key. Empty: any.")] = ""
    header: Annotated[
        str,
        Meta(
            pattern=r"^([!#$%&'*+.^_`|~0-9A-Za-z-]+(=.*)?)?$",
            description="Header in the request: `name=value`, or `name` for any value. Empty: no condition.",
        ),
    ] = ""
    policy: Annotated[PolicyName | None, Meta(description="Overrides `routing.policy`.")] = None
    prefix_key: Annotated[PrefixKey | None, REMOVED] = None
    """Overrides `routing.prefix_key`."""
    prefix_characters: Annotated[Annotated[int, Meta(ge=1, le=65_536)] | None, REMOVED] = None
    """Overrides `routing.prefix_characters`."""
    cache_weight: Annotated[Annotated[float, Meta(ge=0, le=1)] | None, REMOVED] = None
    """Overrides `price.cache_weight`."""
    ttft_deadline_ms: Annotated[
        float,
        Meta(ge=0, description="Deadline for the first token if the request has no `X-Deadline-Ttft-Ms`. 0: none."),
    ] = 0.0
    total_deadline_ms: Annotated[
        float,
        Meta(ge=0, description="Deadline for the whole response if the request has no `X-Deadline-Ms`. 0: none."),
    ] = 0.0
    on_deadline: Annotated[
        OnDeadline,
        Meta(
            description="`advise`: deadlines decide about nodes, and end nothing that was sent. `end`: a request whose "
            "deadline cannot be met is rejected, also by an idle node's estimate, and one whose deadline has passed is "
            "ended."
        ),
    ] = "advise"
    priority: Annotated[
        PriorityName,
        Meta(description="Priority if the request does not set one. `keys.max_priority` limits it."),
    ] = "normal"
    queue_threshold: Annotated[
        Annotated[int, Meta(ge=0)] | None, Meta(description="Overrides `admission.queue_threshold`.")
    ] = None
    queue_at_router: Annotated[bool | None, REMOVED] = None
    """Overrides `admission.queue_at_router`."""
    max_wait_s: Annotated[
        Annotated[float, Meta(ge=0)] | None, Meta(description="Overrides `admission.max_wait_s`.")
    ] = None
    allow_engine_fields: Annotated[
        bool,
        Meta(
            description="Let clients set the fields with which engines exchange KV caches (`kv_transfer_params` and "
            "others). An engine connects to the addresses in them."
        ),
    ] = False

    def routing(self, routing: Routing) -> Routing:
        """Return `[routing]` with this route's overrides."""
        return msgspec.structs.replace(routing, **self._overrides(_ROUTING_KEYS))

    def pricing(self, pricing: Pricing) -> Pricing:
        """Return `[price]` with this route's overrides."""
        return msgspec.structs.replace(pricing, **self._overrides(_PRICE_KEYS))

    def admission(self, admission: Admission) -> Admission:
        """Return `[admission]` with this route's overrides."""
        return msgspec.structs.replace(admission, **self._overrides(_ADMISSION_KEYS))

    def _overrides(self, names: tuple[str, ...]) -> dict[str, object]:
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def route_problems(routes: Sequence[RouteConfig]) -> Iterator[str]:
    """Find routes that no request can reach, because an earlier route matches all of their requests."""
    for number, route in enumerate(routes):
        for earlier in routes[:number]:
            if earlier.name != route.name and _covers_route(earlier, route):
                yield (
                    f"routes: no request reaches route {route.name!r}, because route {earlier.name!r} before it "
                    f"matches all of its requests: put {route.name!r} first, or remove it"
                )
                break


def _covers_route(earlier: RouteConfig, later: RouteConfig) -> bool:
    keys = ("model", "path", "tenant")
    if not all(_covers(getattr(earlier, key), getattr(later, key)) for key in keys):
        return False
    if not earlier.header:
        return True
    name, _, value = earlier.header.partition("=")
    later_name, _, later_value = later.header.partition("=")
    return name.lower() == later_name.lower() and _covers(value.strip(), later_value.strip())


def _covers(pattern: str, other: str) -> bool:
    """Return whether a pattern matches everything that another one matches. An empty pattern matches anything.

    A `*` of the other pattern stands for any text, which only a `*` of the first one is certain to match.
    """
    pattern, other = pattern or "*", other or "*"
    return wildcard(pattern)(other)


def wildcard(pattern: str) -> Callable[[str], bool]:
    """Return a function that matches a text against a pattern, where `*` stands for any text.

    Its time grows with the text, whatever the number of `*`: a regular expression would try every way to share out
    the text among them.
    """
    first, *between = pattern.split("*")
    if not between:
        return pattern.__eq__
    last = between.pop()

    def matches(text: str) -> bool:
        at, end = len(first), len(text) - len(last)
        if at > end or not text.startswith(first) or not text.endswith(last):
            return False
        for part in between:
            at = text.find(part, at, end)
            if at < 0:
                return False
            at += len(part)
        return True

    return matches


# Routes: the first route that matches a request by model, path, tenant and header decides its settings.
#
# Router and Admission look up their own settings by the route's name. So after a reload, a queued request gets the new
# settings of its route, or the defaults if the route is gone.

Matches = Callable[[str], bool]
GetHeader = Callable[[bytes], bytes]
"""Returns the value of a request header; empty if the request does not have it."""


class Route:
    __slots__ = (
        "_header", "_header_value", "_model", "_path", "_tenant", "ends_late", "engine_fields", "name", "priority",
        "total_s", "ttft_s",
    )  # fmt: skip

    def __init__(self, config: RouteConfig) -> None:
        self.name = config.name
        self.priority = PRIORITY_NUMBERS[config.priority]
        self.ttft_s = config.ttft_deadline_ms / 1000.0
        self.engine_fields = config.allow_engine_fields
        """Whether clients may set the fields with which engines exchange KV caches."""
        self.total_s = config.total_deadline_ms / 1000.0
        self.ends_late = config.on_deadline == "end"
        self._model = _pattern(config.model)
        self._path = _pattern(config.path)
        self._tenant = _pattern(config.tenant)
        name, equals, value = config.header.partition("=")
        self._header = name.lower().encode()
        self._header_value = _pattern(value.strip()) if equals else None

    def matches(self, model: str, path: str, tenant: str, header: GetHeader) -> bool:
        return (
            (self._model is None or self._model(model))
            and (self._tenant is None or self._tenant(tenant))
            and (self._path is None or self._path(path))
            and (not self._header or self._header_matches(header(self._header)))
        )

    def _header_matches(self, value: bytes) -> bool:
        if not value:
            return False
        return self._header_value is None or self._header_value(value.decode("latin-1"))


class Routes:
    def __init__(self, routes: Sequence[RouteConfig] = ()) -> None:
        self._routes = tuple(Route(config) for config in routes)

    def __bool__(self) -> bool:
        return bool(self._routes)

    def pick(self, model: str, path: str, tenant: str, header: GetHeader) -> Route | None:
        for route in self._routes:
            if route.matches(model, path, tenant, header):
                return route
        return None


def _pattern(text: str) -> Matches | None:
    """Return a function that matches a value against the pattern; None if it is empty."""
    return wildcard(text) if text else None
