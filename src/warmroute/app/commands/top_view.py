"""What `warmroute top` shows: the sections of the live feed, for a terminal of 80 columns or more."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

LEVELS: Final = " ▁▂▃▄▅▆▇█"
SPARK_WIDTH: Final = 24
KEPT_DECISIONS: Final = 8
STATE_STYLES: Final = {
    "up": "green", "draining": "yellow", "down": "bold red", "half_open": "red", "ejected": "red", "unknown": "dim",
}  # fmt: skip
SEVERITY_STYLES: Final = {"critical": "bold white on red", "warning": "bold black on yellow", "info": "bold"}
TROUBLE: Final = ("up", "draining", "unknown", "ejected", "half_open", "down")
"""States, the worst last."""
CACHES: Final = {
    "events": "events", "incomplete": "partial", "missing": "no events", "mismatch": "tokens!", "inferred": "inferred",
}  # fmt: skip
MIN_NODE_ROWS: Final = 4

Row = dict[str, Any]


class LiveState:
    """The sections as the feed last sent them."""

    def __init__(self) -> None:
        self.sections: dict[str, Any] = {}
        self.fields: list[str] = []
        self.points: deque[list[float | None]] = deque(maxlen=120)
        self.decisions: deque[Row] = deque(maxlen=KEPT_DECISIONS)
        self.problem = ""
        """Why the feed is interrupted."""

    def apply(self, event: str, data: dict[str, Any]) -> None:
        """Take over an event of the feed."""
        self.problem = ""
        data = dict(data)
        if event == "snapshot":
            history = data.pop("history")
            self.fields = history["fields"]
            self.points.clear()
            self.points.extend(history["fine"])
            self.decisions.clear()
        self.points.extend(data.pop("fine", ()))
        data.pop("coarse", None)
        self.decisions.extendleft(data.pop("decisions", ()))
        self.sections.update(data)

    def series(self, field: str) -> list[float | None]:
        at = self.fields.index(field)
        return [point[at] for point in self.points]

    def latest(self, field: str) -> float:
        values = self.series(field)
        return (values[-1] if values else None) or 0.0


def view(state: LiveState, width: int, height: int | None) -> RenderableType:
    """Return one frame. `height` None: as long as it needs to be."""
    sections = state.sections
    if not sections:
        return Text("connecting …")
    top = [_head(state), *_alerts(sections["alerts"], width), *_overview(state, width)]
    bottom = [
        *_routes(sections["routes"]), *_queue(sections["queue"]["rows"]),
        *_client_errors(sections.get("client_errors", ())), *_scaling(sections["scaling"]),
    ]  # fmt: skip
    nodes = _by_trouble(sections["nodes"], sections["alerts"])
    decisions = list(state.decisions)
    if height is not None:
        room = height - len(top) - len(bottom) - 3
        shown = max(MIN_NODE_ROWS, min(len(nodes), room - min(4, len(decisions)) - 1))
        decisions = decisions[: max(0, room - min(shown, len(nodes)) - 1)]
        nodes, hidden = nodes[:shown], len(nodes) - shown
    else:
        hidden = 0
    parts: list[RenderableType] = [*top, _node_table(nodes, sections["nodes"], width)]
    if hidden > 0:
        parts.append(Text(f"and {hidden} more nodes", "dim"))
    parts += bottom
    if decisions:
        parts.append(Text("decisions", "bold"))
        parts += [_line(_clock(one["time"]) + "  " + one["explanation"], width) for one in decisions]
    return Group(*parts)


def _line(text: str, width: int, style: str = "") -> Text:
    line = Text(text, style, no_wrap=True, overflow="ellipsis")
    line.truncate(width, overflow="ellipsis")
    return line


def _head(state: LiveState) -> Text:
    router = state.sections["router"]
    uptime = _seconds(max(0.0, time.time() - router["started"]))
    head = Text.assemble(
        ("Warmroute ", "bold"), f"{router['version']} ({router['build']})  policy {router['policy']}  up {uptime}"
    )
    if state.problem:
        head.append(f"  {state.problem}", "bold red")
    head.no_wrap, head.overflow = True, "ellipsis"
    return head


def _alerts(alerts: Iterable[Row], width: int) -> list[Text]:
    lines: list[Text] = []
    for alert in alerts:
        lines.append(
            Text.assemble(
                (f" {alert['severity']} ", SEVERITY_STYLES[alert["severity"]]),
                " ",
                (alert["title"], "bold"),
                f", most from {alert['source']}" if alert.get("source") else "",
                no_wrap=True,
                overflow="ellipsis",
            )
        )
        lines.append(_line(f"   {alert['what_to_do']}", width, "dim"))
    return lines


def _overview(state: LiveState, width: int) -> list[Text]:
    window = state.sections["window"]
    queue = state.sections["queue"]
    seconds = max(1, window["seconds"])
    rejected = sum(row["rejected"] for row in queue["rows"])
    rows = [
        (
            "cached", "hit_ratio", 1.0,
            f"{_percent(window['hit_ratio'])} of prompt tokens; "
            f"round robin est. {_percent(window['round_robin_hit_ratio'])}",
        ),
        (
            "saved", "saved_gpus", None,
            f"{window['saved_s'] / seconds:.2g} GPUs of prefill; "
            f"round robin est. {window['round_robin_saved_s'] / seconds:.2g}",
        ),
        ("TTFT", "ttft_p90_ms", None, f"p50 {_ms(window['ttft_p50_ms'])}, p90 {_ms(window['ttft_p90_ms'])}"),
        (
            "total", "duration_p90_ms", None,
            f"p50 {_ms(window['duration_p50_ms'])}, p90 {_ms(window['duration_p90_ms'])}; "
            f"{_token_time(window)}/token",
        ),
        (
            "requests", "requests_per_s", None,
            f"{state.latest('requests_per_s'):.1f}/s, {state.latest('in_flight'):.0f} running, "
            f"{queue['waiting']} waiting, {rejected} rejected",
        ),
    ]  # fmt: skip
    lines = [
        Text.assemble((f"{name:<9}", "dim"), (sparkline(state.series(field), top), "cyan"), "  ", text, no_wrap=True)
        for name, field, top, text in rows
    ]
    if short := window["short_reports"]:
        lines.append(
            _line(f"estimates are limited: nodes reported {short:,} prompts shorter than expected", width, "dim")
        )
    return lines


def sparkline(values: list[float | None], top: float | None, width: int = SPARK_WIDTH) -> str:
    """Draw the mean of the values in each part of the time; a space where nothing was measured."""
    parts: list[str] = []
    highest = top or max([value for value in values if value is not None], default=0.0) or 1.0
    size = max(1, len(values) // width)
    recent = values[-size * width :]
    for at in range(0, len(recent), size):
        known = [value for value in recent[at : at + size] if value is not None]
        level = 0 if not known else 1 + round((len(LEVELS) - 2) * min(1.0, sum(known) / len(known) / highest))
        parts.append(LEVELS[level])
    return "".join(parts).rjust(width)


def _by_trouble(nodes: list[Row], alerts: list[Row]) -> list[Row]:
    named = {name for alert in alerts for name in alert["nodes"]}

    def order(node: Row) -> tuple[int, bool, int, str]:
        load = node["in_flight"] + node["other"]
        return -TROUBLE.index(node["state"]), node["name"] not in named, -load, node["name"]

    return sorted(nodes, key=order)


def _node_table(nodes: list[Row], all_nodes: list[Row], width: int) -> Table:
    islands = len({node["island"] for node in all_nodes}) > 1
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 1, 0, 0))
    table.add_column("node", no_wrap=True, overflow="ellipsis", max_width=max(12, width - 62))
    if islands:
        table.add_column("island", no_wrap=True, overflow="ellipsis", max_width=12)
    table.add_column("state", no_wrap=True, max_width=9)
    for head in ("reqs", "queue", "KV", "ms/1k", "backlog", "failed"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("cache", no_wrap=True)
    for node in nodes:
        kv_style = "red" if node["kv_usage"] >= 0.95 else ""
        cells = [Text(node["name"])] + ([Text(node["island"])] if islands else [])
        cells += [
            Text(node["state"].replace("_", " "), STATE_STYLES[node["state"]]),
            Text(str(node["in_flight"] + node["other"])),
            Text(str(node["waiting"])),
            Text(_percent(node["kv_usage"]), kv_style),
            Text(f"{node['prefill_us']:,.0f}"),
            Text(_ms(node["backlog_ms"]) if node["backlog_ms"] else "-"),
            Text(f"{node['failed']:,}", "red" if node["failed"] else ""),
            Text(CACHES[node["cache"]]),
        ]
        table.add_row(*cells)
    return table


def _routes(routes: Iterable[Row]) -> list[Text]:
    lines = [
        Text(
            f"{_cut(route['model'], 20):<21}{_cut(route['route'] or '-', 12):<13}{route['requests']:>7,} req"
            f"{_percent(route['hit_ratio']):>7} cached  "
            + (f"TTFT p90 {_ms(route['ttft_p90_ms'])}" if route["ttft_p90_ms"] is not None else "")
            + (f"total p90 {_ms(route['duration_p90_ms'])}" if route["ttft_p90_ms"] is None else ""),
            no_wrap=True,
            overflow="ellipsis",
        )
        for route in routes
        if route["requests"]
    ]
    return [Text("routes, last 5 minutes", "bold"), *lines[:6]] if lines else []


def _queue(rows: Iterable[Row]) -> list[Text]:
    lines = [
        Text(
            f"{row['priority']:<8}{_cut(row['tenant'] or '-', 18):<19}{row['waiting']:>5} waiting"
            f"{row['rejected']:>7,} rejected  " + ", ".join(row["reasons"]),
            no_wrap=True,
            overflow="ellipsis",
        )
        for row in rows
    ]
    return [Text("queue and rejections", "bold"), *lines[:6]] if lines else []


def _client_errors(rows: Iterable[Row]) -> list[Text]:
    """What the router rejects because of what clients send; `sections` of an older router have none."""
    lines = []
    for row in rows:
        if row["recent"]:
            sources = ", ".join(f"{one['source']} ({one['count']:,})" for one in row["sources"])
            text = f"{row['status']} {_cut(row['code'], 26):<27}{row['recent']:>9,}  from {sources}"
            lines.append(Text(text, no_wrap=True, overflow="ellipsis"))
    return [Text("clients' errors, last 2 minutes", "bold"), *lines[:6]] if lines else []


def _scaling(scaling: Row) -> list[Text]:
    last = scaling.get("last_decision")
    if not scaling["enabled"] or not last:
        return []
    reasons = "; ".join(last["reasons"]) or "the fleet has the right size"
    text = f"scaling  {last['nodes']} of {scaling['desired_nodes']} desired nodes: {reasons}"
    return [Text(text, no_wrap=True, overflow="ellipsis")]


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _clock(utc: str) -> str:
    return utc[11:19]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 1000:.1f} s" if value >= 10_000 else f"{value:,.0f} ms"


def _token_time(sums: Row) -> str:
    """Return the time between two output tokens. Without streams it is at most a token's share of the total time."""
    if sums["token_p50_ms"] is not None or sums["token_at_most_ms"] is None:
        return _ms(sums["token_p50_ms"])
    return f"≤{_ms(sums['token_at_most_ms'])}"


def _seconds(value: float) -> str:
    if value >= 7200:
        return f"{value / 3600:.1f} h"
    return f"{value / 60:.0f} min" if value >= 180 else f"{value:.0f} s"
