"""Replaces impossible metrics in a fleet view: not a number, below 0, or a speed that no hardware has. The autoscaler
treats such a value as unknown and reports it.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, isfinite
from typing import Any, Final, TypeVar

import msgspec

from warmroute.scaling.fleet_observer import FleetView, NodeView, WindowMetrics
from warmroute.scaling.offer import is_quantity

T = TypeVar("T", WindowMetrics, NodeView)

_LIMITS: Final = {
    "hit_ratio": (0.0, 1.0),
    "good_ratio": (0.0, 1.0),
    "ms_per_token": (1e-6, 1e6),
    "long_ms_per_token": (1e-6, 1e6),
}
"""The possible range of a field, where 0 to infinity is too wide."""
_NODE_FIELDS: Final = (
    "usd_per_hour", "kv_usage", "ms_per_token", "long_ms_per_token", "step_ms", "cache_blocks", "kv_tokens",
    "held_blocks", "oldest_age_s", "queued",
)  # fmt: skip


def sanitize(view: FleetView, problems: list[str]) -> FleetView:
    """Return the view without impossible values, and append a sentence to `problems` for each of them."""
    return msgspec.structs.replace(
        view,
        stable=_window(view.stable, problems),
        panic=_window(view.panic, problems),
        growth_per_s=view.growth_per_s if isfinite(view.growth_per_s) else 0.0,
        nodes=tuple(_node(node, problems) for node in view.nodes),
        waiting=max(0, view.waiting),
    )


def _window(window: WindowMetrics, problems: list[str]) -> WindowMetrics:
    return _replace_impossible(window, WindowMetrics(), WindowMetrics.__struct_fields__, "", problems)


def _node(node: NodeView, problems: list[str]) -> NodeView:
    sanitized = _replace_impossible(node, NodeView(name=""), _NODE_FIELDS, f" of node {node.name}", problems)
    if (sanitized.ms_per_token, sanitized.long_ms_per_token) != (node.ms_per_token, node.long_ms_per_token):
        return msgspec.structs.replace(sanitized, learned=False)
    return sanitized


def _replace_impossible(values: T, unknown: T, fields: Iterable[str], whose: str, problems: list[str]) -> T:
    changed: dict[str, Any] = {}
    for field in fields:
        value = getattr(values, field)
        least, most = _LIMITS.get(field, (0.0, inf))
        if value is None or (is_quantity(value) and least <= value <= most):
            continue
        changed[field] = getattr(unknown, field)
        problems.append(f"ignoring {field} {value}{whose}")
    return msgspec.structs.replace(values, **changed) if changed else values
