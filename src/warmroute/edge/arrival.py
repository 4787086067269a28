"""Builds the RoutingRequest of an HTTP request from its head, body, key and route. Nothing else builds one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from warmroute.config import Config
from warmroute.config.priority import HIGH, LOW, NORMAL
from warmroute.edge import errors
from warmroute.edge.api_keys import ApiKeys, Rights
from warmroute.edge.body_scanner import ScannedBody
from warmroute.edge.http1 import RequestHead
from warmroute.edge.paths import CHATS, FORWARDED, not_found
from warmroute.edge.request_headers import read_engine_priority, read_routing_headers
from warmroute.fleet.fleet import Fleet
from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing.rate_limits import RateLimits

MAX_OUTPUT_TOKENS: Final = 1 << 31
"""A limit beyond this, or below one token, says nothing about the length of the response."""


class RequestBuilder:
    def __init__(self, config: Config, fleet: Fleet, now: Callable[[], float], limits: RateLimits) -> None:
        self._fleet = fleet
        self._now = now
        self._limits = limits
        self.reconfigure(config)

    def reconfigure(self, config: Config) -> None:
        self.keys = ApiKeys(config, self._limits)
        self._session_headers = [name.lower().encode() for name in config.routing.session_headers]
        routings = (config.routing, *(route.routing(config.routing) for route in config.routes))
        self._start_bytes = max((one.prefix_characters for one in routings if one.prefix_key == "start"), default=0)
        policies = [config.routing.policy, *[route.policy for route in config.routes]]
        self._session_wanted = "session" in policies

    def build(self, head: RequestHead, path: bytes, body: ScannedBody, rights: Rights) -> RoutingRequest:
        """Raises HttpError."""
        model, system, user, outline = body.model, body.system, body.user, body.outline
        max_output_tokens, engine_priority = body.max_output_tokens, body.priority
        if system is None and user is None and path in CHATS and (outline is None or "messages" not in outline.fields):
            raise errors.missing_messages()
        if not model:
            if path not in FORWARDED:
                raise not_found(path)
            group = self._fleet.only_group
            if group is not None:
                model = group.model
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
            self._session_header(head) if self._session_wanted or self._fleet.islands.several else b"",
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
