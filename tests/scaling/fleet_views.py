"""Fleet views for tests of the autoscaler."""

from __future__ import annotations

from typing import Any

from warmroute.config import Scaling
from warmroute.scaling.observer import FleetView, NodeView, WindowMetrics
from warmroute.scaling.offer_selection import OfferSelector
from warmroute.scaling.offers import Offer
from warmroute.scaling.scaler import Scaler
from warmroute.scaling.scaling_decision import PaidNode

PREFILL_WORK = 10_000.0
MS_PER_TOKEN = 0.05
"""A request takes half a second of a node."""


def offer(name: str = "small", **more: Any) -> Offer:
    fields: dict[str, Any] = {"island": "local", "gpu": "L4", "usd_per_hour": 1.0, "start_s": 60.0, **more}
    return Offer(provisioner="cloud", name=name, **fields)


def node(name: str, **more: Any) -> NodeView:
    fields: dict[str, Any] = {
        "gpu": "L4",
        "offer": ("cloud", "small"),
        "usd_per_hour": 1.0,
        "ms_per_token": MS_PER_TOKEN,
        "learned": True,
        "cache_blocks": 10_000,
        "held_blocks": 5_000,
        "oldest_age_s": 600.0,
        **more,
    }
    return NodeView(name=name, **fields)


def nodes(count: int, **more: Any) -> tuple[NodeView, ...]:
    return tuple(node(f"n{at}", **more) for at in range(count))


def window(arrivals_per_s: float, **more: Any) -> WindowMetrics:
    fields: dict[str, Any] = {
        "span_s": 60.0,
        "arrivals": int(arrivals_per_s * 60),
        "hit_ratio": 0.8,
        "prefill_work": PREFILL_WORK,
        "ttft_p99_ms": 900.0,
        "first_tokens": int(arrivals_per_s * 60),
        **more,
    }
    return WindowMetrics(arrivals_per_s=arrivals_per_s, **fields)


def view(now_s: float, count: int, arrivals_per_s: float, **more: Any) -> FleetView:
    """Return a view of nodes with `arrivals_per_s` · 0.5 s of work; `stable` and `panic` may hold more metrics."""
    stable = window(arrivals_per_s, **more.pop("stable", {}))
    panic = window(arrivals_per_s, **more.pop("panic", {}))
    fields: dict[str, Any] = {"nodes": nodes(count), **more}
    return FleetView(now_s=now_s, stable=stable, panic=panic, **fields)


def create_scaler(*offers: Offer, **config: Any) -> tuple[Scaler, OfferSelector]:
    scaling = Scaling(enabled=True, **{"max_nodes": 32, "max_mean_wait_ms": 1e6, **config})
    selector = OfferSelector(scaling)
    selector.update_offers(offers or (offer(),))
    return Scaler(scaling, selector), selector


def pending(count: int, **more: Any) -> list[PaidNode]:
    fields: dict[str, Any] = {"offer": ("cloud", "small"), "island": "local", "gpu": "L4", "usd_per_hour": 1.0, **more}
    return [PaidNode(**fields) for _ in range(count)]
