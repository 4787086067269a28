"""A fleet and a router with one policy, for tests of policies."""

from __future__ import annotations

import json
from typing import Any

from warmroute.config import Health as HealthConfig
from warmroute.config import Index, NodeConfig, Routing
from warmroute.core.cache_view import CacheView
from warmroute.core.decision import Decision
from warmroute.core.fleet import Fleet
from warmroute.core.messages import RoutingRequest
from warmroute.core.node import Node, Ticket
from warmroute.core.router import Router
from warmroute.prompt.request_body import read_json

POLICIES = ["round_robin", "random", "least_loaded", "power_of_two", "latency", "session", "prefix_hash"]


class PolicyHarness:
    """A fleet of nodes that are up, and a router over it."""

    def __init__(self, policy: str, count: int = 4, models: tuple[str, ...] = ("m",), **health: float) -> None:
        self.fleet = Fleet(HealthConfig(**health))  # type: ignore[arg-type]
        for number in range(count):
            node = self.fleet.add(NodeConfig(url=f"http://n{number}:1", models=models))
            self.fleet.check_passed(node, 0)
        self.router = Router(self.fleet, CacheView(Index()), Routing(policy=policy, seed=3))  # type: ignore[arg-type]

    @property
    def nodes(self) -> list[Node]:
        return list(self.fleet)

    def decide(self, text: str = "hi", now_s: float = 0.0, **fields: Any) -> Decision:
        return self.router.decide(request(text, **fields), now_s)

    def send(self, text: str = "hi") -> Ticket:
        return Ticket(self.decide(text).node, 0)


def request(
    text: str = "hi", model: str = "m", system: str = "", session_header: bytes = b"", **fields: object
) -> RoutingRequest:
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": text})
    body = json.dumps({"model": model, "messages": messages, **fields}).encode()
    return RoutingRequest(*read_json(b"/v1/chat/completions", body)[:4], session_header=session_header)
