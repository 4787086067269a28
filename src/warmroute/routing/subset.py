"""Restricts a request to some nodes: Envoy may tell the picker which endpoints are eligible."""

from __future__ import annotations

from warmroute.fleet.group import Candidates


def within_subset(candidates: Candidates, names: frozenset[str]) -> Candidates:
    """Return the candidates with these names."""
    return Candidates([node for node in candidates.nodes if node.name in names], candidates.shared_by)
