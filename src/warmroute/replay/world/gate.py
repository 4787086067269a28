"""A gate by queue threshold, the same for every policy and peer that an experiment compares: nodes with `threshold`
requests or more (ours exactly, others' as polled) are passed over; where all are, the request is refused with 429.
High priority passes always; low is refused from half the threshold on.
"""

from __future__ import annotations

from warmroute.fleet.group import Candidates
from warmroute.prompt.routing_request import HIGH, LOW
from warmroute.routing.decision import Decision, Policy
from warmroute.routing.query import Query
from warmroute.routing.refusals import Undecided


class Shed(Undecided):
    """Every node is over the threshold: 429."""


class QueueGate:
    """A policy around another one."""

    def __init__(self, policy: Policy, threshold: float) -> None:
        self.name = policy.name
        self.holds = policy.holds
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
                raise Shed
        return self._policy.decide(query)
