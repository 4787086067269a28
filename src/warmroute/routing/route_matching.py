"""Routes: the first route that matches a request by model, path, tenant and header decides its settings.

Router and Admission look up their own settings by the route's name. So after a reload, a queued request gets the new
settings of its route, or the defaults if the route is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from warmroute.config import RouteConfig
from warmroute.config.priority import PRIORITY_NUMBERS
from warmroute.config.route_settings import wildcard

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
