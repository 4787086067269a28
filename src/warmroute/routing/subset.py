"""Restricts a request to some nodes: Envoy may tell the picker which endpoints are eligible."""

from __future__ import annotations

from collections.abc import Iterable

from warmroute.fleet.group import Candidates
from warmroute.fleet.node import Node


def within_subset(candidates: Candidates, names: frozenset[str]) -> Candidates:
    """Return the candidates with these names."""
    return Candidates([node for node in candidates.nodes if node.name in names], candidates.shared_by)


def is_outside_subset(members: Iterable[Node], names: frozenset[str]) -> bool:
    """Return whether none of these nodes has such a name."""
    return not any(node.name in names for node in members)
