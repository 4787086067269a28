"""Combines what the admin APIs of several workers reply, as one process would reply.

Figures of a node's load are the same in all workers, since each counts the requests of all. What each worker counted
alone is summed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from warmroute.app.alerts import CLIENT_ERRORS, SEVERITIES, client_errors_title
from warmroute.edge.client_errors import MAX_SOURCES

Json = Any

_SUMMED_OF_ISLAND: Final = ("conversations_started", "turns_at_home", "turns_away", "conversations_returned")


def add_counts(total: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return the sums by key."""
    return {key: total.get(key, 0) + more.get(key, 0) for key in {**total, **more}}


def add_shares(name: str, lists: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the sums of rows with `name` and `count`, the largest first."""
    sums: Counter[str] = Counter()
    for rows in lists:
        sums.update({row[name]: row["count"] for row in rows})
    return [{name: key, "count": count} for key, count in sums.most_common(MAX_SOURCES)]


def combine_node(views: Sequence[dict[str, Any]]) -> dict[str, Any]:
    node = dict(views[0])
    for view in views[1:]:
        for key in ("outcomes", "ejections"):
            node[key] = add_counts(node[key], view[key])
    node["last_failure"] = latest_failure(views)
    return node


def latest_failure(views: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the last failed try on a node that any worker knows."""
    failures = [view["last_failure"] for view in views if view["last_failure"] is not None]
    return max(failures, key=lambda failure: float(failure["time"]), default=None)


def by_name(lists: Sequence[Sequence[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """Group the entries of several lists by their name, in the order of the first list."""
    found: dict[str, list[dict[str, Any]]] = {}
    for entries in lists:
        for entry in entries:
            found.setdefault(str(entry["name"]), []).append(entry)
    return list(found.values())


def combine_nodes(replies: Sequence[Json]) -> Json:
    return {"nodes": [combine_node(views) for views in by_name([reply["nodes"] for reply in replies])]}


def combine_models(replies: Sequence[Json]) -> Json:
    models = []
    for views in by_name([reply["models"] for reply in replies]):
        model = dict(views[0])
        for view in views[1:]:
            model["prompts"] = add_counts(model["prompts"], view["prompts"])
        models.append(model)
    return {"models": models}


def combine_islands(replies: Sequence[Json]) -> Json:
    islands = []
    for views in by_name([reply["islands"] for reply in replies]):
        island = dict(views[0])
        moved: dict[tuple[str, str], int] = {}
        for view in views:
            for one in view["conversations_moved"]:
                way = (one["to"], one["reason"])
                moved[way] = moved.get(way, 0) + one["count"]
        for key in _SUMMED_OF_ISLAND:
            island[key] = sum(view[key] for view in views)
        island["conversations_moved"] = [
            {"to": to, "reason": reason, "count": count} for (to, reason), count in sorted(moved.items())
        ]
        islands.append(island)
    return {"islands": islands}


def merge_alerts(lists: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return one alert for each id: active if it is active in any worker, since the earliest time, with the sums of the
    requests that each worker counted."""
    found: dict[str, list[dict[str, Any]]] = {}
    for alert in (alert for alerts in lists for alert in alerts):
        found.setdefault(str(alert["id"]), []).append(alert)
    merged = []
    for views in found.values():
        views = [view for view in views if view["ended"] is None] or views
        views.sort(key=lambda view: (-view["count"], view["since"]))
        alert = {
            **views[0],
            "since": min(view["since"] for view in views),
            "ended": None if views[0]["ended"] is None else max(view["ended"] for view in views),
            "count": sum(view["count"] for view in views),
            "sources": add_shares("source", [view["sources"] for view in views]),
        }
        if alert["sources"]:
            alert["source"] = alert["sources"][0]["source"]
        if alert["name"] == CLIENT_ERRORS:
            alert["title"] = client_errors_title(alert["id"], alert["count"])
        merged.append(alert)
    merged.sort(key=lambda alert: (alert["ended"] is not None, SEVERITIES.index(alert["severity"]), alert["since"]))
    return merged


def combine_alerts(replies: Sequence[Json]) -> Json:
    return {"alerts": merge_alerts([reply["alerts"] for reply in replies])}


def combine_decisions(replies: Sequence[Json], limit: int) -> Json:
    """The latest decisions of all workers, newest first."""
    decisions = [decision for reply in replies for decision in reply["decisions"]]
    decisions.sort(key=lambda decision: str(decision["time"]), reverse=True)
    return {"stored": sum(reply["stored"] for reply in replies), "decisions": decisions[:limit]}


def leading_view(replies: Sequence[Json]) -> Json:
    """The autoscaler, as the worker sees it that scales the fleet."""
    return next((reply for reply in replies if reply.get("leading")), replies[0])
