"""overlap: the node that holds most of the prompt, among those with room; of equals the least loaded; where nobody
holds any of it, the least loaded.

Room: a node whose KV memory is nearly full, or that has far more requests than the others, is passed over. Without
that, a beginning that all prompts share would draw everything to one node.
"""

from __future__ import annotations

from typing import Final

from warmroute.fleet.node import Node
from warmroute.routing.decision import Decision
from warmroute.routing.policies.least_loaded import LeastLoaded
from warmroute.routing.query import Query

NEARLY_FULL: Final = 0.95
"""Share of KV memory that running requests use."""
OVERLOAD_FACTOR: Final = 1.5
OVERLOAD_REQUESTS: Final = 4
"""Overloaded: more than this many requests above the factor × the mean."""


class Overlap:
    name = "overlap"
    wants_tokens = True
    holds = False

    def __init__(self, otherwise: LeastLoaded) -> None:
        self._otherwise = otherwise

    def decide(self, query: Query) -> Decision:
        hits = query.hits()
        nodes = query.candidates.nodes
        if not hits:
            return self._otherwise.decide(query)
        by_name = query.candidates.by_name
        most_load = OVERLOAD_FACTOR * sum([node.load for node in nodes]) / len(nodes) + OVERLOAD_REQUESTS
        most_used = max(NEARLY_FULL, min([node.kv_usage for node in nodes]))
        best: Node | None = None
        best_hit = 0.0
        for name, hit in hits.items():
            node = by_name.get(name)
            if (
                node is None
                or not hit.expected
                or hit.expected < best_hit
                or node.kv_usage > most_used
                or node.load > most_load
            ):
                continue
            if best is None or hit.expected > best_hit or node.load < best.load:
                best, best_hit = node, hit.expected
        if best is None:
            return self._otherwise.decide(query)

        def by_overlap() -> list[Node]:
            ordered = self._otherwise.by_load(nodes)
            ordered.sort(key=lambda node: -hits[node.name].expected if node.name in hits else 0.0)
            return ordered

        return Decision(best, self.name, "longest overlap", by_overlap)


class Approximate(Overlap):
    """The same, by what was routed where: no node's events are listened to."""

    name = "approximate"
