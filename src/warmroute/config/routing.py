"""Settings for a subset of the requests, selected by model, path, tenant or header."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from warmroute.config.priority import PriorityName
from warmroute.config.routing_settings import Admission, Pricing, Routing
from warmroute.config.section import PolicyName, PrefixKey, Section

_ROUTING_KEYS = ("policy", "prefix_key", "prefix_characters")
_PRICE_KEYS = ("cache_weight",)
_ADMISSION_KEYS = ("queue_threshold", "queue_at_router", "max_wait_s")
OnDeadline = Literal["advise", "end"]


class RouteConfig(Section, frozen=True):
    """Settings for a subset of the requests. The first matching route applies. `*` matches any characters."""

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
    prefix_key: Annotated[PrefixKey | None, Meta(description="Overrides `routing.prefix_key`.")] = None
    prefix_characters: Annotated[
        Annotated[int, Meta(ge=1, le=65_536)] | None, Meta(description="Overrides `routing.prefix_characters`.")
    ] = None
    cache_weight: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None, Meta(description="Overrides `price.cache_weight`.")
    ] = None
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
    queue_at_router: Annotated[bool | None, Meta(description="Overrides `admission.queue_at_router`.")] = None
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
