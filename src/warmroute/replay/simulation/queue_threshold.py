"""Admission by queue threshold, wrapped around any policy, so that an experiment can compare policies under the same
rule: nodes with `threshold` requests or more receive no request, and a request is rejected with 429 when all nodes are
over the threshold. High-priority requests are never rejected. Low-priority requests see half the threshold.
"""

from __future__ import annotations

from warmroute.config.priority import HIGH, LOW
from warmroute.fleet.group import Candidates
from warmroute.routing.decision import Decision
from warmroute.routing.policy import Policy
from warmroute.routing.query import Query
from warmroute.routing.routing_errors import RoutingError


class AllNodesOverThreshold(RoutingError):
    """Every node is over the threshold: 429."""


class QueueThresholdPolicy:
    def __init__(self, policy: Policy, threshold: float) -> None:
        self.name = policy.name
        self.queues_at_router = policy.queues_at_router
        self.wants_tokens = policy.wants_tokens
        self._policy = policy
        self._threshold = threshold

    def decide(self, query: Query) -> Decision:
        priority = query.request.priority
        threshold = self._threshold / 2 if priority == LOW else self._threshold
        nodes = query.candidates.nodes
        open_nodes = [node for node in nodes if node.load < threshold]
        if len(open_nodes) < len(nodes):
            if open_nodes:
                query.candidates = Candidates(open_nodes)
            elif priority != HIGH:
                raise AllNodesOverThreshold
        return self._policy.decide(query)
