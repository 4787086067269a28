"""The plots of the HTML report. Each function takes the runs and returns an SVG picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from warmroute.replay.report import svg
from warmroute.replay.report.table import ms, number
from warmroute.replay.summary import Run

WIDTH = 600
LABEL_ROOM = 118
TIME_HEIGHT, TIME_BOX = 320, (54.0, 16.0, WIDTH - LABEL_ROOM, 268.0)
"""Of the plots over time."""


def load_of(run: Run) -> float | None:
    """Return the load of a run: its rate, its clients or its queue threshold."""
    for key in ("rate", "concurrency", "queue_threshold"):
        if run[key] is not None:
            return float(run[key])
    return None


def time_against_load(runs: Sequence[Run], series: dict[str, int], key: str, percent: str, load_name: str) -> str:
    """Plot a percentile of a time against the load, one line for each policy, on a logarithmic scale."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        load, value = load_of(run), (run.get(key) or {}).get(percent)
        if load is not None and value:
            lines.setdefault(run["policy"], []).append((load, value))
    if not lines:
        return ""
    loads = sorted({load for line in lines.values() for load, _ in line})
    values = [value for line in lines.values() for _, value in line]
    height, box = 360, (64.0, 16.0, WIDTH - LABEL_ROOM, 312.0)
    wide = loads[-1] / loads[0] > 12
    x = svg.Scale(loads[0], loads[-1], box[0] + 10, box[2] - 6, log=wide)
    y = svg.Scale(min(values) * 0.8, max(values) * 1.25, box[3], box[1], log=True)
    parts = svg.axes(x, y, box, number, _round_ms, loads)
    parts.append(svg.text((box[0] + box[2]) / 2, height - 8, load_name, "name", "middle"))
    ends = [y(line[-1][1]) for line in lines.values()]
    for place, (policy, line) in zip(svg.spread_apart(ends, 17, box[1], box[3]), lines.items(), strict=True):
        at = series[policy]
        points = [(x(load), y(value)) for load, value in line]
        parts.append(svg.curve(points, at))
        for (px, py), (load, value) in zip(points, line, strict=True):
            parts.append(svg.mark(px, py, at, f"{policy}: {ms(value)} at {number(load)}"))
        parts.append(_label(points[-1][0], points[-1][1], box[2] + 14, place, policy, at))
    return svg.picture(WIDTH, height, parts, f"{percent} against load")


def _round_ms(value: float) -> str:
    return f"{value:g} ms" if value < 1000 else f"{value / 1000:,g} s"


def _label(x: float, y: float, label_x: float, label_y: float, policy: str, at: int) -> str:
    pointer = svg.rule(x + 7, y, label_x - 3, label_y, f"pointer c{at % svg.COLOURS}")
    return pointer + svg.text(label_x, label_y + 4, policy, f"label c{at % svg.COLOURS}")


def _line_labels(ends: list[tuple[str, float, float]], series: dict[str, int], box: svg.Box) -> list[str]:
    """Label each line to the right of its end point."""
    heights = svg.spread_apart([end[2] for end in ends], 17, box[1], box[3])
    return [
        _label(x, y, box[2] + 14, height, policy, series[policy])
        for height, (policy, x, y) in zip(heights, ends, strict=True)
    ]


def time_ranges(runs: Sequence[Run], series: dict[str, int], key: str) -> str:
    """Plot p50, p90 and p99 of each policy, for a report with one load only."""
    rows = [(run["policy"], run[key]) for run in runs if run.get(key) and run[key]["p50"]]
    if not rows:
        return ""
    left, top, step = 124.0, 34.0, 32.0
    bottom = top + step * len(rows) - 8
    values = [row[percent] for _, row in rows for percent in ("p50", "p90", "p99")]
    x = svg.Scale(min(values) * 0.85, max(values) * 1.15, left, WIDTH - 16, log=True)
    parts: list[str] = []
    for value in x.ticks():
        parts.append(svg.rule(x(value), top - 12, x(value), bottom))
        parts.append(svg.text(x(value), bottom + 18, _round_ms(value), anchor="middle"))
    percents = ("p50", "p90", "p99")
    parts += [svg.text(x(rows[0][1][percent]), top - 18, percent, "name", "middle") for percent in percents]
    for index, (policy, row) in enumerate(rows):
        y, at = top + step * index, series[policy]
        parts.append(svg.text(left - 14, y + 4, policy, f"label c{at % svg.COLOURS}", "end"))
        parts.append(svg.curve([(x(row["p50"]), y), (x(row["p99"]), y)], at))
        for percent, size in (("p50", 6.0), ("p90", 4.5), ("p99", 3.0)):
            parts.append(svg.mark(x(row[percent]), y, at, f"{policy} {percent}: {ms(row[percent])}", size))
    return svg.picture(WIDTH, int(bottom + 30), parts, "percentiles by policy")


def hits_over_time(runs: Sequence[Run], series: dict[str, int]) -> str:
    """Plot the smoothed hit rate by time of arrival. The oracle's hit rate is a horizontal line."""
    lines = {run["policy"]: run["timeline"] for run in runs if "timeline" in run}
    level = next((run for run in runs if run["policy"] == "oracle"), None)
    if not lines:
        return ""
    end_s = max(len(line["hit_rate"]) * line["span_s"] for line in lines.values())
    smooth = {policy: _smoothed(line["hit_rate"]) for policy, line in lines.items()}
    highest = max([value for line in smooth.values() for value in line if value is not None], default=0.0)
    highest = max(highest, level["hit_rate"] if level else 0.0, 0.05)
    x, y, parts = _time_axes(end_s, min(1.0, highest * 1.08), lambda value: f"{value:.0%}")
    box = TIME_BOX
    if level:
        parts.append(svg.rule(box[0], y(level["hit_rate"]), box[2], y(level["hit_rate"]), "level"))
    ends: list[tuple[str, float, float]] = []
    for policy, line in smooth.items():
        span = lines[policy]["span_s"]
        places = [None if value is None else (x((at + 0.5) * span), y(value)) for at, value in enumerate(line)]
        parts.append(svg.curve(places, series[policy]))
        known = [place for place in places if place is not None]
        if known:
            ends.append((policy, *known[-1]))
    if level:
        ends.append(("oracle", box[2] - 7, y(level["hit_rate"])))
    parts += _line_labels(ends, series, box)
    return svg.picture(WIDTH, TIME_HEIGHT, parts, "hit rate over time")


def _time_axes(end_s: float, top: float, y_text: Callable[[float], str]) -> tuple[svg.Scale, svg.Scale, list[str]]:
    """Return both scales of a plot over time, and its axes."""
    left, upper, right, lower = TIME_BOX
    x, y = svg.Scale(0.0, end_s, left, right - 6), svg.Scale(0.0, top, lower, upper)
    parts = svg.axes(x, y, TIME_BOX, _clock(end_s), y_text)
    parts.append(svg.text((left + right) / 2, TIME_HEIGHT - 8, "time in the run", "name", "middle"))
    return x, y, parts


def _smoothed(values: Sequence[float | None]) -> list[float | None]:
    """Return the running mean over a fortieth of the run to either side."""
    reach = max(1, len(values) // 40)
    found: list[float | None] = []
    for at in range(len(values)):
        near = [value for value in values[max(0, at - reach) : at + reach + 1] if value is not None]
        found.append(sum(near) / len(near) if near else None)
    return found


def _clock(end_s: float) -> Callable[[float], str]:
    """Return how to print times of a run of this length."""
    for unit_s, name in ((3600.0, "h"), (60.0, "min")):
        if end_s >= 5 * unit_s:
            return lambda seconds: f"{seconds / unit_s:.3g} {name}"
    return lambda seconds: f"{seconds:g} s"


def nodes_over_time(runs: Sequence[Run], series: dict[str, int]) -> str:
    """Nodes that serve, as stairs; a fleet that is not scaled is a level."""
    scaled = {run["policy"]: run["scaling"]["timeline"] for run in runs if "scaling" in run}
    if not scaled:
        return ""
    levels = {run["policy"]: run["node_count"] for run in runs if "scaling" not in run and run.get("duration_s")}
    end_s = max(len(line["serving"]) * line["span_s"] for line in scaled.values())
    most = max([*(max(line["serving"]) for line in scaled.values()), *levels.values()])
    x, y, parts = _time_axes(end_s, most * 1.08, number)
    box = TIME_BOX
    ends: list[tuple[str, float, float]] = []
    for policy, line in scaled.items():
        span, counts = line["span_s"], line["serving"]
        stairs: list[tuple[float, float] | None] = []
        for at, count in enumerate(counts):
            stairs += [(x(at * span), y(count)), (x(min(end_s, (at + 1) * span)), y(count))]
        parts.append(svg.curve(stairs, series[policy]))
        ends.append((policy, box[2] - 7, y(counts[-1])))
    for policy, count in levels.items():
        parts.append(svg.curve([(x(0.0), y(count)), (x(end_s), y(count))], series[policy]))
        ends.append((policy, box[2] - 7, y(count)))
    parts += _line_labels(ends, series, box)
    return svg.picture(WIDTH, TIME_HEIGHT, parts, "nodes over time")


def load_by_node(runs: Sequence[Run], series: dict[str, int]) -> str:
    """Plot the mean requests in flight of each node, one row for each policy, all on one scale."""
    rows = [run for run in runs if run.get("nodes")]
    if not rows:
        return ""
    most = max(node["mean_in_flight"] for run in rows for node in run["nodes"]) or 1.0
    count = max(len(run["nodes"]) for run in rows)
    left, right = 124.0, WIDTH - 86.0
    tall = min(64.0, max(40.0, 230.0 / len(rows) - 16.0))
    step = tall + 16.0
    slot = (right - left) / count
    parts: list[str] = []
    for at, run in enumerate(rows):
        base = 12 + tall + at * step
        policy, colour = run["policy"], series[run["policy"]]
        parts.append(svg.text(left - 14, base - tall / 2 + 5, policy, f"label c{colour % svg.COLOURS}", "end"))
        mean = sum(node["mean_in_flight"] for node in run["nodes"]) / len(run["nodes"])
        for place, node in enumerate(run["nodes"]):
            height = tall * node["mean_in_flight"] / most
            words = f"{node['node']}: {node['mean_in_flight']:.2f} in flight, {node['requests']:,} requests"
            words += f", hit rate {node['hit_rate']:.1%}, busy {node['busy_s']:,.0f} s"
            wide = max(1.0, min(slot - 3, 56.0))
            parts.append(svg.bar(left + place * slot + (slot - wide) / 2, base - height, wide, height, colour, words))
        level = base - tall * mean / most
        parts.append(svg.rule(left, level, right, level, "level"))
        parts.append(svg.rule(left, base, right, base, "axis"))
        parts.append(svg.text(right + 10, base - tall / 2 - 1, f"mean {mean:.3g}", "tick"))
        parts.append(svg.text(right + 10, base - tall / 2 + 15, f"CV {run['load_variation']:.2f}", "tick"))
    bottom = 12 + tall + (len(rows) - 1) * step
    names = [node["node"] for node in rows[0]["nodes"]]
    if count <= 16:
        parts.extend(
            svg.text(left + (place + 0.5) * slot, bottom + 18, name.removeprefix("node-"), anchor="middle")
            for place, name in enumerate(names)
        )
    parts.append(svg.text((left + right) / 2, bottom + 36, "node", "name", "middle"))
    return svg.picture(WIDTH, int(bottom + 46), parts, "load by node")
