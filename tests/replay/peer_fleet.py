"""A small fleet under another router's policy, and KV events for it."""

from __future__ import annotations

from typing import Any

from small_worlds import NEAR, nodes_of, prompt, specs

from warmroute.core.policy import Policy
from warmroute.core.routing_context import Query
from warmroute.lab.engine.blocks import BlockStored
from warmroute.lab.request_flow import SimulatedRequest, simulated_request
from warmroute.lab.world import World


class Fleet:
    """A small fleet under another router's policy. The test sets the nodes' loads."""

    def __init__(self, peer: Any, count: int = 3) -> None:
        self.peer = peer
        self.world = World(specs(count), NEAR, policy=peer, listener=peer)
        self.nodes = nodes_of(self.world)
        self._count = 0

    def request(self, *names: object, tokens: int = 160, **more: Any) -> SimulatedRequest:
        self._count += 1
        return simulated_request(prompt(*names, tokens=tokens, **more), self._count)

    def decide(self, request: SimulatedRequest, now_s: float = 0.0) -> int:
        policy: Policy = self.peer
        group = self.world.fleet.group("sim")
        assert group is not None
        return self.nodes.index(policy.decide(Query(request, group.up, group, now_s, None, self.world.cache_view)).node)

    def send(self, at: int, *names: object, **more: Any) -> SimulatedRequest:
        request = self.request(*names, **more)
        self.peer.request_sent(request, self.nodes[at], 0.0)
        return request

    def choices(self, *names: object, times: int = 60, now_s: float = 0.0) -> set[int]:
        return {self.decide(self.request(*names), now_s) for _ in range(times)}

    def load(self, *loads: int) -> None:
        for node, load in zip(self.nodes, loads, strict=True):
            node.inflight = load


def stored(request: SimulatedRequest, count: int) -> list[Any]:
    return [BlockStored(request.blocks(16)[:count], None, [], 16, None, "GPU", None)]
