"""Routes: settings for a part of the requests, told by their model, path, tenant or a header."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from warmroute.config.routing import Admission, Pricing, Routing
from warmroute.config.section import PolicyName, PriorityName, Section

_PRICED = ("locality", "max_saving_ms", "second_home_ms", "room", "memory", "congestion")
_ADMITTED = ("queue_threshold", "hold", "max_wait_s")


class RouteConfig(Section, frozen=True):
    """Settings for requests of one kind. The first route that fits a request counts; `*` stands for any characters."""

    name: Annotated[str, Meta(min_length=1, description="Name in metrics.")]
    model: Annotated[str, Meta(description="The model that requests name, say `qwen3-*`; empty: any.")] = ""
    path: Annotated[str, Meta(description="Their path, without its query, say `/v1/embeddings`; empty: any.")] = ""
    tenant: Annotated[str, Meta(description="Whose key they carry; empty: anybody's.")] = ""
    header: Annotated[
        str,
        Meta(
            pattern=r"^([!#$%&'*+.^_`|~0-9A-Za-z-]+(=.*)?)?$",
            description="A header that they have: `name=value`, or `name` alone for any value; empty: any request.",
        ),
    ] = ""
    policy: Annotated[PolicyName | None, Meta(description="Their policy; unset: that of `[routing]`.")] = None
    max_saving_ms: Annotated[
        Annotated[float, Meta(gt=0)] | None, Meta(description="In place of `price.max_saving_ms`.")
    ] = None
    locality: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None, Meta(description="In place of `price.locality`.")
    ] = None
    second_home_ms: Annotated[
        Annotated[float, Meta(ge=0)] | None, Meta(description="In place of `price.second_home_ms`.")
    ] = None
    room: Annotated[bool | None, Meta(description="In place of `price.room`.")] = None
    memory: Annotated[bool | None, Meta(description="In place of `price.memory`.")] = None
    congestion: Annotated[bool | None, Meta(description="In place of `price.congestion`.")] = None
    ttft_ms: Annotated[
        float,
        Meta(
            ge=0,
            description="When the first token is due, where a request does not say (`X-Deadline-Ttft-Ms`); 0: never.",
        ),
    ] = 0.0
    total_ms: Annotated[
        float,
        Meta(
            ge=0, description="When the whole answer is due, where a request does not say (`X-Deadline-Ms`); 0: never."
        ),
    ] = 0.0
    priority: Annotated[
        PriorityName, Meta(description="The priority of those that do not ask for one; a key caps it, too.")
    ] = "normal"
    queue_threshold: Annotated[
        Annotated[int, Meta(ge=0)] | None, Meta(description="In place of `admission.queue_threshold`.")
    ] = None
    hold: Annotated[bool | None, Meta(description="In place of `admission.hold`.")] = None
    max_wait_s: Annotated[
        Annotated[float, Meta(ge=0)] | None, Meta(description="In place of `admission.max_wait_s`.")
    ] = None

    def routing(self, routing: Routing) -> Routing:
        """`[routing]` for these requests."""
        return msgspec.structs.replace(routing, policy=self.policy) if self.policy is not None else routing

    def pricing(self, pricing: Pricing) -> Pricing:
        """`[price]` for these requests."""
        return msgspec.structs.replace(pricing, **self._set(_PRICED))

    def admission(self, admission: Admission) -> Admission:
        """`[admission]` for these requests."""
        return msgspec.structs.replace(admission, **self._set(_ADMITTED))

    def _set(self, names: tuple[str, ...]) -> dict[str, object]:
        return {name: value for name in names if (value := getattr(self, name)) is not None}
