"""overlap: the node with the longest cached prefix of the prompt; ties go to the least loaded.

Nodes whose KV memory is nearly full, or that have far more requests than the others, are skipped: otherwise a prefix
that all prompts share would attract every request to one node. If no node has any of the prompt cached, the least
loaded one is chosen.
"""

from __future__ import annotations

from typing import Final

from warmroute.core.decision import Decision
from warmroute.core.node import Node
from warmroute.core.policies.by_load import LeastLoaded
from warmroute.core.policy import Policy
from warmroute.core.routing_context import Query

NEARLY_FULL: Final = 0.95
"""Share of KV memory that running requests use."""
OVERLOAD_FACTOR: Final = 1.5
OVERLOAD_REQUESTS: Final = 4
"""A node is overloaded with more requests than the factor × the mean, plus this number."""


class Overlap(Policy):
    name = "overlap"
    wants_tokens = True

    def __init__(self, without_hit: LeastLoaded) -> None:
        self._without_hit = without_hit

    def decide(self, query: Query) -> Decision:
        hits = query.hits()
        nodes = query.candidates.nodes
        if not hits:
            return self._without_hit.decide(query)
        by_name = query.candidates.by_name
        max_load = OVERLOAD_FACTOR * sum([node.load for node in nodes]) / len(nodes) + OVERLOAD_REQUESTS
        max_usage = max(NEARLY_FULL, min([node.kv_usage for node in nodes]))
        best: Node | None = None
        best_hit = 0.0
        for name, hit in hits.items():
            node = by_name.get(name)
            if (
                node is None
                or not hit.expected
                or hit.expected < best_hit
                or node.kv_usage > max_usage
                or node.load > max_load
            ):
                continue
            if best is None or hit.expected > best_hit or node.load < best.load:
                best, best_hit = node, hit.expected
        if best is None:
            return self._without_hit.decide(query)

        def by_overlap() -> list[Node]:
            ordered = self._without_hit.by_load(nodes)
            ordered.sort(key=lambda node: -hits[node.name].expected if node.name in hits else 0.0)
            return ordered

        return Decision(best, self.name, "longest overlap", by_overlap)


class Approximate(Overlap):
    """The same, with caches inferred from routed requests: the router subscribes to no KV events."""

    name = "approximate"
