"""Settings for a subset of the requests, selected by model, path, tenant or header."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from warmroute.config.priority import PriorityName
from warmroute.config.routing_settings import Admission, Pricing, Routing
from warmroute.config.section import PolicyName, Section

_PRICE_KEYS = ("cache_weight",)
_ADMISSION_KEYS = ("queue_threshold", "queue_at_router", "max_wait_s")


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

    def routing(self, routing: Routing) -> Routing:
        """Return `[routing]` with this route's overrides."""
        return msgspec.structs.replace(routing, policy=self.policy) if self.policy is not None else routing

    def pricing(self, pricing: Pricing) -> Pricing:
        """Return `[price]` with this route's overrides."""
        return msgspec.structs.replace(pricing, **self._overrides(_PRICE_KEYS))

    def admission(self, admission: Admission) -> Admission:
        """Return `[admission]` with this route's overrides."""
        return msgspec.structs.replace(admission, **self._overrides(_ADMISSION_KEYS))

    def _overrides(self, names: tuple[str, ...]) -> dict[str, object]:
        return {name: value for name in names if (value := getattr(self, name)) is not None}
