"""Builds the RoutingRequest of an HTTP request from its head, body, key and route. Nothing else builds one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from warmroute._kernel import Outline
from warmroute.config import Config
from warmroute.config.priority import HIGH, LOW, NORMAL, PRIORITY_NUMBERS
from warmroute.edge import errors
from warmroute.edge.api_keys import ApiKeys
from warmroute.edge.http1 import RequestHead
from warmroute.edge.paths import CHATS, FORWARDED, not_found
from warmroute.edge.request_headers import read_routing_headers
from warmroute.fleet.fleet import Fleet
from warmroute.prompt.body_fields import NotJson, lacks_field, read_json
from warmroute.prompt.multipart import form_model, is_multipart_form
from warmroute.prompt.request_body import generation_options
from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing.route_matching import Routes

MAX_OUTPUT_TOKENS: Final = 1 << 31
"""A limit beyond this, or below one token, says nothing about the length of the response."""


class RequestBuilder:
    def __init__(self, config: Config, fleet: Fleet, now: Callable[[], float]) -> None:
        self._fleet = fleet
        self._now = now
        self.reconfigure(config)

    def reconfigure(self, config: Config) -> None:
        self._keys = ApiKeys(config.keys) or None
        self._routes = Routes(config.routes) or None
        self._session_headers = [name.lower().encode() for name in config.routing.session_headers]
        self._session_wanted = "session" in (config.routing.policy, *(route.policy for route in config.routes))

    def tenant(self, head: RequestHead) -> str:
        """The tenant of the request's key; empty where no keys are configured. Raises HttpError for an unknown key."""
        if self._keys is None:
            return ""
        tenant = self._keys.tenant(head)
        if tenant is None:
            raise errors.invalid_api_key()
        return tenant

    def build(self, head: RequestHead, path: bytes, body: bytes, tenant: str) -> tuple[RoutingRequest, Outline | None]:
        """The request, and the outline of its body for the reader of its prompt. Raises HttpError."""
        outline: Outline | None = None
        if is_multipart_form(head.content_type):
            model, system, user, session = form_model(head.content_type, body), None, None, b""
        else:
            try:
                model, system, user, session, outline = read_json(body)
            except NotJson as why:
                raise errors.malformed_json(str(why)) from None
            if system is None and user is None and path in CHATS and lacks_field(body, "messages"):
                raise errors.missing_messages()
        if not model:
            if path not in FORWARDED:
                raise not_found(path)
            group = self._fleet.only_group
            if group is not None:
                model = group.model
        now_s = self._now()
        priority, may_queue = NORMAL, True
        deadline_s = total_deadline_s = 0.0
        route_name = ""
        if self._routes is not None:
            route = self._routes.pick(model, path.decode("ascii", "replace"), tenant, head.get)
            if route is not None:
                route_name, priority = route.name, route.priority
                deadline_s = now_s + route.ttft_s if route.ttft_s else 0.0
                total_deadline_s = now_s + route.total_s if route.total_s else 0.0
        max_output_tokens, body_priority, streams = generation_options(path, body, outline)
        if max_output_tokens is not None and not 0 < max_output_tokens <= MAX_OUTPUT_TOKENS:
            max_output_tokens = None
        if body_priority:  # as vLLM reads it: a lower number is served first
            priority = HIGH if body_priority < 0 else LOW
        if head.has_routing_headers:
            priority, may_queue, deadline_s, total_deadline_s = read_routing_headers(
                head, now_s, priority, deadline_s, total_deadline_s
            )
        if self._keys is not None:
            priority = max(priority, PRIORITY_NUMBERS[self._keys.highest_priority(head, tenant)])
        return RoutingRequest(
            model, system, user, session, tenant, route_name, priority, may_queue, now_s, deadline_s, total_deadline_s,
            self._session_header(head), streams, max_output_tokens,
        ), outline  # fmt: skip

    def _session_header(self, head: RequestHead) -> bytes:
        if self._session_wanted or self._fleet.islands.several:
            for name in self._session_headers:
                if value := head.get(name):
                    return value
        return b""
