"""Replaces impossible metrics in a fleet view: not a number, below 0, or a speed that no hardware has. The autoscaler
treats such a value as unknown and reports it.
"""

from __future__ import annotations

from math import isfinite
from typing import Any, Final

import msgspec

from warmroute.scaling.fleet_observer import FleetView, NodeView, WindowMetrics
from warmroute.scaling.validate_offers import is_quantity

MIN_MS_PER_TOKEN: Final = 1e-6
MAX_MS_PER_TOKEN: Final = 1e6
_UNKNOWN_WINDOW: Final = WindowMetrics()
_UNKNOWN_NODE: Final = NodeView(name="")
_NODE_FIELDS: Final = (
    "usd_per_hour", "kv_usage", "ms_per_token", "cache_blocks", "held_blocks", "oldest_age_s", "queued",
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
    changed: dict[str, Any] = {}
    for field in WindowMetrics.__struct_fields__:
        value = getattr(window, field)
        if value is not None and (not is_quantity(value) or (field == "hit_ratio" and value > 1)):
            changed[field] = getattr(_UNKNOWN_WINDOW, field)
            problems.append(f"ignoring {field} {value}")
    return msgspec.structs.replace(window, **changed) if changed else window


def _node(node: NodeView, problems: list[str]) -> NodeView:
    changed: dict[str, Any] = {}
    for field in _NODE_FIELDS:
        value = getattr(node, field)
        if not is_quantity(value) or (field == "ms_per_token" and not MIN_MS_PER_TOKEN <= value <= MAX_MS_PER_TOKEN):
            changed[field] = getattr(_UNKNOWN_NODE, field)
            problems.append(f"ignoring {field} {value} of node {node.name}")
    if "ms_per_token" in changed:
        changed["learned"] = False
    return msgspec.structs.replace(node, **changed) if changed else node
