"""Combines the sections of several workers' live feeds (app/live_page.py): counts are summed, ratios and times are
averaged by their weight, and what every worker sees alike is taken from the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from warmroute.app.workers.combined_views import (
    add_counts,  # fmt: skip
    add_shares,  # fmt: skip
    by_name,  # fmt: skip
    latest_failure,  # fmt: skip
    leading_view,  # fmt: skip
    merge_alerts,  # fmt: skip
)

Section = Any

_SUMS: Final = (
    "requests", "prompt_tokens", "cached_tokens", "predicted_tokens", "reported_tokens", "output_tokens", "saved_s",
    "round_robin_saved_s", "short_reports",
)  # fmt: skip
_TIMES: Final = (
    "ttft_p50_ms", "ttft_p90_ms", "duration_p50_ms", "duration_p90_ms", "token_p50_ms", "token_p90_ms",
)  # fmt: skip
_SUMMED_OF_POINT: Final = frozenset(
    {
        "requests_per_s",
        "saved_gpus",
        "round_robin_saved_gpus",
        "waiting",
        "rejected_per_s",
        "failed_per_s",
        "client_errors_per_s",
    }
)
_WEIGHTED_OF_POINT: Final = frozenset({"hit_ratio", "round_robin_hit_ratio", *_TIMES})


def weighted_mean(pairs: Iterable[tuple[float | None, float]]) -> float | None:
    """Return the mean of values by weight, without those that are None."""
    known = [(value, weight) for value, weight in pairs if value is not None]
    weights = sum(weight for _, weight in known)
    if not known:
        return None
    if not weights:
        return known[0][0]
    return round(sum(value * weight for value, weight in known) / weights, 4)


def combine_sums(views: Sequence[dict[str, Any]]) -> dict[str, Any]:
    total = dict(views[0])
    total["seconds"] = max(view["seconds"] for view in views)
    for key in _SUMS:
        total[key] = sum(view[key] for view in views)
    for key in ("hit_ratio", "round_robin_hit_ratio"):
        total[key] = weighted_mean((view[key], view["prompt_tokens"]) for view in views)
    for key in _TIMES:
        total[key] = weighted_mean((view[key], view["requests"]) for view in views)
    total["token_at_most_ms"] = weighted_mean((view["token_at_most_ms"], view["output_tokens"]) for view in views)
    return total


def _combine_nodes(lists: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    nodes = []
    for views in by_name(lists):
        node = dict(views[0])
        node["ok"], node["failed"] = (sum(view[key] for view in views) for key in ("ok", "failed"))
        node["last_failure"] = latest_failure(views)
        nodes.append(node)
    return nodes


def _combine_routes(lists: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for view in (view for views in lists for view in views):
        found.setdefault((view["model"], view["route"]), []).append(view)
    return [combine_sums(views) for _, views in sorted(found.items())]


def _combine_tenants(views: Sequence[dict[str, Any]]) -> dict[str, Any]:
    rows: dict[str, dict[str, Any]] = {}
    for row in (row for view in views for row in view["rows"]):
        counts = {key: count for key, count in row.items() if key != "tenant"}
        rows[row["tenant"]] = add_counts(rows.get(row["tenant"], {}), counts)
    named = [{"tenant": tenant, **counts} for tenant, counts in rows.items()]
    ordered = sorted(named, key=lambda row: (-row["prompt_tokens"] - row["output_tokens"], row["tenant"]))
    return {
        "count": max(len(ordered), *(view["count"] for view in views)),
        "rows": ordered[: max(len(view["rows"]) for view in views)],
    }


def _combine_queue(views: Sequence[dict[str, Any]]) -> dict[str, Any]:
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for row in (row for view in views for row in view["rows"]):
        known = rows.get((row["priority"], row["tenant"]))
        if known is None:
            rows[row["priority"], row["tenant"]] = dict(row)
        else:
            known["waiting"] += row["waiting"]
            known["rejected"] += row["rejected"]
            known["oldest_s"] = max(known["oldest_s"], row["oldest_s"])
            known["reasons"] = add_counts(known["reasons"], row["reasons"])
    return {
        "waiting": sum(view["waiting"] for view in views),
        "queued_total": sum(view["queued_total"] for view in views),
        "rows": list(rows.values()),
    }


def _combine_prefixes(lists: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for prefix in (prefix for prefixes in lists for prefix in prefixes):
        known = found.setdefault(prefix["id"], {**prefix, "share": 0.0})
        known["share"] = round(known["share"] + prefix["share"] / len(lists), 4)
    return sorted(found.values(), key=lambda prefix: -float(prefix["share"]))


def _combine_client_errors(lists: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for row in (row for rows in lists for row in rows):
        known = found.get(row["code"])
        if known is None:
            found[row["code"]] = row
        else:
            found[row["code"]] = {
                **known,
                "total": known["total"] + row["total"],
                "recent": known["recent"] + row["recent"],
                "sources": add_shares("source", (known["sources"], row["sources"])),
                "keys": add_shares("key_sha256", (known["keys"], row["keys"])),
            }
    return sorted(found.values(), key=lambda row: (-row["recent"], -row["total"], row["code"]))


def _combine_failed_requests(lists: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The latest of all workers, newest first."""
    requests = sorted((one for requests in lists for one in requests), key=lambda one: -float(one["time"]))
    return requests[: max(map(len, lists))]


def _first(views: Sequence[Section]) -> Section:
    return views[0]


def _combine_router(views: Sequence[dict[str, Any]]) -> dict[str, Any]:
    reloads = [view["last_reload"] for view in views if view["last_reload"] is not None]
    reloads.sort(key=lambda reload: (reload["error"] is not None, reload["time"]))
    return {
        **views[0],
        "started": min(view["started"] for view in views),
        "last_reload": reloads[-1] if reloads else None,
    }


_COMBINE: Final[dict[str, Callable[[Sequence[Any]], Section]]] = {
    "router": _combine_router,
    "totals": combine_sums,
    "window": combine_sums,
    "nodes": _combine_nodes,
    "routes": _combine_routes,
    "tenants": _combine_tenants,
    "queue": _combine_queue,
    "prefixes": _combine_prefixes,
    "client_errors": _combine_client_errors,
    "alerts": merge_alerts,
    "ended_alerts": merge_alerts,
    "failed_requests": _combine_failed_requests,
    "scaling": leading_view,
}


def combine_sections(workers: Sequence[dict[str, Section]]) -> dict[str, Section]:
    """Return the sections of all workers as those of one router."""
    names = list(dict.fromkeys(name for sections in workers for name in sections))
    combined = {
        name: _COMBINE.get(name, _first)([sections[name] for sections in workers if name in sections]) for name in names
    }
    active = {alert["id"] for alert in combined.get("alerts", ())}
    combined["ended_alerts"] = [alert for alert in combined.get("ended_alerts", ()) if alert["id"] not in active]
    return combined


def combine_points(fields: Sequence[str], points: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the points of several workers at about the same time as one."""
    rate = fields.index("requests_per_s")
    combined: list[Any] = []
    for at, field in enumerate(fields):
        values = [point[at] for point in points]
        if field in _SUMMED_OF_POINT:
            combined.append(round(sum(values), 4))
        elif field in _WEIGHTED_OF_POINT:
            combined.append(weighted_mean((point[at], point[rate]) for point in points))
        else:  # every worker sees the whole fleet
            combined.append(max(values))
    return combined


def combine_history(fields: Sequence[str], step_s: float, histories: Sequence[Sequence[Sequence[Any]]]) -> list[Any]:
    """Combine the points of several workers that fall into the same step of time."""
    steps: dict[int, list[Sequence[Any]]] = {}
    for point in (point for points in histories for point in points):
        steps.setdefault(int(point[0] // step_s), []).append(point)
    return [combine_points(fields, points) for _, points in sorted(steps.items())]
