"""Routes: which settings count for a request. The first one that fits it, by model, path, tenant and header.

What a route changes beyond this (its policy, its admission) lies with those who use it, under the route's name: a
request that waits across a reload finds the settings that its route has then, or none where it is no more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

from warmroute.config import PriorityName, RouteConfig
from warmroute.prompt.routing_request import HIGH, LOW, NORMAL, RoutingRequest

PRIORITIES: Final[dict[PriorityName, int]] = {"high": HIGH, "normal": NORMAL, "low": LOW}
Matches = Callable[[str], object]
Header = Callable[[bytes], bytes]
"""What a request's header of that name says; empty where it has none."""


class Route:
    __slots__ = ("_header", "_header_value", "_model", "_path", "_tenant", "name", "priority", "total_s", "ttft_s")

    def __init__(self, config: RouteConfig) -> None:
        self.name = config.name
        self.priority = PRIORITIES[config.priority]
        self.ttft_s = config.ttft_ms / 1000.0
        self.total_s = config.total_ms / 1000.0
        self._model = _pattern(config.model)
        self._path = _pattern(config.path)
        self._tenant = _pattern(config.tenant)
        name, equals, value = config.header.partition("=")
        self._header = name.lower().encode()
        self._header_value = _pattern(value.strip()) if equals else None

    def fits(self, model: str, path: str, tenant: str, header: Header) -> bool:
        return (
            (self._model is None or bool(self._model(model)))
            and (self._tenant is None or bool(self._tenant(tenant)))
            and (self._path is None or bool(self._path(path)))
            and (not self._header or self._fits_header(header(self._header)))
        )

    def _fits_header(self, value: bytes) -> bool:
        if not value:
            return False
        return self._header_value is None or bool(self._header_value(value.decode("latin-1")))

    def apply(self, request: RoutingRequest, now_s: float) -> None:
        """The request goes this way: what it is given where it does not say otherwise."""
        request.route = self.name
        request.priority = self.priority
        if self.ttft_s:
            request.deadline_s = now_s + self.ttft_s
        if self.total_s:
            request.total_deadline_s = now_s + self.total_s


class Routes:
    def __init__(self, routes: Sequence[RouteConfig] = ()) -> None:
        self._routes = tuple(Route(config) for config in routes)

    def __bool__(self) -> bool:
        return bool(self._routes)

    def pick(self, model: str, path: str, tenant: str, header: Header) -> Route | None:
        for route in self._routes:
            if route.fits(model, path, tenant, header):
                return route
        return None


def _pattern(text: str) -> Matches | None:
    """None where anything will do."""
    if not text:
        return None
    if "*" not in text:
        return text.__eq__
    return re.compile(".*".join(re.escape(part) for part in text.split("*")), re.DOTALL).fullmatch
