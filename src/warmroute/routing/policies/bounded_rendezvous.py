"""Rendezvous hashing with bounded load.

The hash of a key orders the nodes by their names. A node that joins or leaves moves only its own share of the keys, and
a key returns to its home node when that recovers. A node is skipped while it has at least
load_factor × (requests in flight + 1) / nodes requests. Requests without a key go to the least loaded node.
"""

from __future__ import annotations

import math
from abc import abstractmethod

from warmroute._kernel import key_hash, rendezvous_home, rendezvous_order
from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing.decision import Decision
from warmroute.routing.policies.least_loaded import LeastLoaded
from warmroute.routing.policy import Policy
from warmroute.routing.query import Query


class BoundedRendezvous(Policy):
    def __init__(self, load_factor: float, without_key: LeastLoaded) -> None:
        self._load_factor = load_factor
        self._without_key = without_key

    @abstractmethod
    def key(self, request: RoutingRequest) -> bytes | None:
        """Return what decides the home node. Without a key the request goes to the least loaded node."""

    def decide(self, query: Query) -> Decision:
        key, group = self.key(query.request), query.group
        if not key:
            return self._without_key.decide(query)
        hashed = key_hash(key)
        nodes, seeds = query.candidates.nodes, query.candidates.seeds
        home = nodes[rendezvous_home(hashed, seeds)]
        all_members = len(nodes) == len(group.members)
        inflight = group.inflight if all_members else sum(node.inflight for node in nodes)
        limit = math.ceil(self._load_factor * (inflight + 1) / len(nodes))
        if home.inflight < limit:
            return Decision(
                home, self.name, "home", lambda: [nodes[index] for index in rendezvous_order(hashed, seeds)]
            )
        order = [nodes[index] for index in rendezvous_order(hashed, seeds)]
        next_node = next((node for node in order if node.inflight < limit), home)
        return Decision(next_node, self.name, "home overloaded", lambda: order)
