"""Views of fleets for tests of the scaling core: what an observer would have seen."""

from __future__ import annotations

from typing import Any

from warmroute.config import Scaling
from warmroute.scaling.choose_up import Market
from warmroute.scaling.loop import Coming, Scaler
from warmroute.scaling.observe import FleetView, NodeView, Seen
from warmroute.scaling.offer import Offer

WORK = 10_000.0
MS = 0.05
"""A request is half a second of a node."""


def offer(name: str = "small", **more: Any) -> Offer:
    told: dict[str, Any] = {"island": "local", "gpu": "L4", "usd_per_hour": 1.0, "start_s": 60.0, **more}
    return Offer(provisioner="cloud", name=name, **told)


def node(name: str, **more: Any) -> NodeView:
    told: dict[str, Any] = {
        "gpu": "L4",
        "offer": ("cloud", "small"),
        "usd_per_hour": 1.0,
        "ms_per_token": MS,
        "learned": True,
        "cache_blocks": 10_000,
        "held_blocks": 5_000,
        "oldest_age_s": 600.0,
        **more,
    }
    return NodeView(name=name, **told)


def nodes(count: int, **more: Any) -> tuple[NodeView, ...]:
    return tuple(node(f"n{at}", **more) for at in range(count))


def seen(arrivals_per_s: float, **more: Any) -> Seen:
    told: dict[str, Any] = {
        "span_s": 60.0,
        "arrivals": int(arrivals_per_s * 60),
        "hit_ratio": 0.8,
        "work": WORK,
        "ttft_p90_ms": 400.0,
        "ttft_p99_ms": 900.0,
        "first_tokens": int(arrivals_per_s * 60),
        **more,
    }
    return Seen(arrivals_per_s=arrivals_per_s, **told)


def view(now_s: float, count: int, arrivals_per_s: float, **more: Any) -> FleetView:
    """`arrivals_per_s` · 0.5 s of work, on so many nodes; `stable` and `panic` may hold more of what was seen."""
    stable = seen(arrivals_per_s, **more.pop("stable", {}))
    panic = seen(arrivals_per_s, **more.pop("panic", {}))
    told: dict[str, Any] = {"nodes": nodes(count), **more}
    return FleetView(now_s=now_s, stable=stable, panic=panic, **told)


def scaler(*offers: Offer, **config: Any) -> tuple[Scaler, Market]:
    made = Scaling(enabled=True, **{"max_nodes": 32, "wait_ms": 1e6, **config})
    market = Market(made)
    market.offered(offers or (offer(),))
    return Scaler(made, market), market


def coming(count: int, **more: Any) -> list[Coming]:
    told: dict[str, Any] = {"offer": ("cloud", "small"), "island": "local", "gpu": "L4", "usd_per_hour": 1.0, **more}
    return [Coming(**told) for _ in range(count)]
