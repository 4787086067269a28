"""What was seen and can't be: it is taken as not known, and said."""

from __future__ import annotations

from math import isfinite
from typing import Any, Final

import msgspec

from warmroute.scaling.capacity import LEAST_MS, MOST_MS
from warmroute.scaling.observe import FleetView, NodeView, Seen

_SEEN_FIELDS: Final = tuple(field.name for field in msgspec.structs.fields(Seen))


def sane(view: FleetView, doubts: list[str]) -> FleetView:
    """The same without what can't be: not a number, below 0, or a speed that nothing has. `doubts` are added to."""
    windows = []
    for name in ("stable", "panic"):
        seen: Seen = getattr(view, name)
        changed = {}
        for field in _SEEN_FIELDS:
            value = getattr(seen, field)
            if value is not None and not (isfinite(value) and value >= 0):
                changed[field] = getattr(Seen(), field)
                doubts.append(f"{field} is {value}: not taken")
        if seen.hit_ratio is not None and seen.hit_ratio > 1:
            changed["hit_ratio"] = None
            doubts.append(f"hit_ratio is {seen.hit_ratio}: not taken")
        windows.append(msgspec.structs.replace(seen, **changed) if changed else seen)
    growth = view.growth_per_s if isfinite(view.growth_per_s) else 0.0
    nodes = tuple(_sane_node(node, doubts) for node in view.nodes)
    waiting = max(0, view.waiting)
    return msgspec.structs.replace(
        view, stable=windows[0], panic=windows[1], growth_per_s=growth, nodes=nodes, waiting=waiting
    )


def _sane_node(node: NodeView, doubts: list[str]) -> NodeView:
    usual = NodeView(name="")
    changed: dict[str, Any] = {}
    for field in ("usd_per_hour", "kv_usage", "ms_per_token", "cache_blocks", "held_blocks", "oldest_age_s", "queued"):
        value = getattr(node, field)
        if not isfinite(value) or value < 0 or (field == "ms_per_token" and not LEAST_MS <= value <= MOST_MS):
            changed[field] = getattr(usual, field)
            doubts.append(f"{field} of {node.name} is {value}: not taken")
    if "ms_per_token" in changed:
        changed["learned"] = False
    return msgspec.structs.replace(node, **changed) if changed else node
