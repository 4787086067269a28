"""The report of replays as one page with plots."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from html import escape, unescape
from pathlib import Path
from unicodedata import east_asian_width

from warmroute.lab.report import LOAD_COLUMNS, Column, best_of, by_load, columns, loop_name, ms, number
from warmroute.lab.summary import Run

# SVG drawing with plain text: scales, axes, curves, marks. Colours and fonts come from the page's style sheet.

Point = tuple[float, float]
Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""

_TEXT = re.compile(r'<text x="([-0-9.]+)" y="[-0-9.]+" class="([^"]*)" text-anchor="(\w+)">([^<]*)</text>')
_MARGIN_PX = 3.0
COLOURS = 8
DASHES = ("", "7 4", "2 4", "10 3 2 3")


class Scale:
    """Maps values to coordinates, linearly or logarithmically, with ticks at round values."""

    def __init__(self, low: float, high: float, start: float, end: float, log: bool = False) -> None:
        self.log = log
        if log:
            low, high = math.log10(low), math.log10(high)
        self._low, self._width = low, (high - low) or 1.0
        self._start, self._length = start, end - start

    def __call__(self, value: float) -> float:
        at = math.log10(value) if self.log else value
        return self._start + (at - self._low) / self._width * self._length

    def ticks(self, about: int = 5) -> list[float]:
        low, high = self._low, self._low + self._width
        if self.log:
            steps = (1, 2, 5) if high - low < 2.2 else (1, 3) if high - low < 3.2 else (1,)
            powers = range(math.floor(low), math.ceil(high) + 1)
            found = [step * 10.0**power for power in powers for step in steps]
            return [value for value in found if low - 1e-9 <= math.log10(value) <= high + 1e-9]
        step = nice_step((high - low) / about)
        first = math.ceil(low / step - 1e-9)
        return [at * step for at in range(first, math.floor(high / step + 1e-9) + 1)]


def nice_step(rough: float) -> float:
    """Return 1, 2 or 5 times a power of ten, at least `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= rough * 0.999)


def picture(width: int, height: int, parts: Sequence[str], label: str) -> str:
    """Put the parts into a picture, which is wider than `width` if a text needs more room."""
    body = "\n".join(parts)
    extents = [_extent(*found.groups()) for found in _TEXT.finditer(body)]
    left = math.floor(min([0.0, *(start for start, _end in extents)]))
    right = math.ceil(max([float(width), *(end for _start, end in extents)]))
    return (
        f'<svg viewBox="{left} 0 {right - left} {height}" role="img" aria-label="{escape(label)}" '
        f'xmlns="http://www.w3.org/2000/svg">\n{body}\n</svg>'
    )


def _extent(x: str, kind: str, anchor: str, words: str) -> tuple[float, float]:
    """Return where a text starts and ends, at most: in the widest of the fonts that the style sheet names."""
    character_px = 9.0 if kind.startswith("label") else 8.3
    length = sum(2 if east_asian_width(character) in "FW" else 1 for character in unescape(words)) * character_px
    start = float(x) - {"start": 0.0, "middle": length / 2, "end": length}[anchor]
    return start - _MARGIN_PX, start + length + _MARGIN_PX


def text(x: float, y: float, words: str, kind: str = "tick", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def rule(x1: float, y1: float, x2: float, y2: float, kind: str = "grid") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def curve(points: Sequence[Point | None], series: int) -> str:
    """Draw a line through the points; None leaves a gap."""
    path: list[str] = []
    pen_up = True
    for point in points:
        if point is None:
            pen_up = True
            continue
        path.append(f"{'M' if pen_up else 'L'}{point[0]:.1f} {point[1]:.1f}")
        pen_up = False
    dash = DASHES[series // COLOURS % len(DASHES)]
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path d="{" ".join(path)}" class="curve c{series % COLOURS}"{dashed}/>'


def mark(x: float, y: float, series: int, words: str, size: float = 4.5) -> str:
    """Draw a point. Its shape distinguishes the series where colours do not."""
    title = f"<title>{escape(words)}</title>"
    kind = f'class="mark c{series % COLOURS}"'
    form = series % 4
    if form == 0:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}" {kind}>{title}</circle>'
    if form == 1:
        side = size * 1.8
        return (
            f'<rect x="{x - side / 2:.1f}" y="{y - side / 2:.1f}" width="{side:.1f}" height="{side:.1f}" {kind}>'
            f"{title}</rect>"
        )
    r = size * 1.3
    if form == 2:
        points = f"{x:.1f},{y - r:.1f} {x + r:.1f},{y + r * 0.8:.1f} {x - r:.1f},{y + r * 0.8:.1f}"
    else:
        points = f"{x:.1f},{y - r:.1f} {x + r:.1f},{y:.1f} {x:.1f},{y + r:.1f} {x - r:.1f},{y:.1f}"
    return f'<polygon points="{points}" {kind}>{title}</polygon>'


def bar(x: float, y: float, width: float, height: float, series: int, words: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{max(0.0, height):.1f}" rx="2" '
        f'class="bar c{series % COLOURS}"><title>{escape(words)}</title></rect>'
    )


def spread_apart(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return positions near the wanted ones, in the same order, at least `gap` apart if there is room."""
    order = sorted(range(len(wanted)), key=lambda at: wanted[at])
    gap = min(gap, (high - low) / max(1, len(wanted) - 1)) if len(wanted) > 1 else gap
    places = [0.0] * len(wanted)
    last = low - gap
    for at in order:
        last = places[at] = max(wanted[at], last + gap)
    limit = high
    for at in reversed(order):
        places[at] = min(places[at], limit)
        limit = places[at] - gap
    return places


def axes(
    x: Scale,
    y: Scale,
    box: Box,
    x_text: Callable[[float], str],
    y_text: Callable[[float], str],
    x_values: Sequence[float] | None = None,
) -> list[str]:
    """Draw horizontal grid lines and the ticks of both axes."""
    left, _, right, bottom = box
    parts: list[str] = []
    for value in y.ticks():
        at = y(value)
        parts.append(rule(left, at, right, at))
        parts.append(text(left - 8, at + 4, y_text(value), anchor="end"))
    values = x.ticks(7) if x_values is None else x_values
    parts.extend(rule(x(value), bottom, x(value), bottom + 5, "axis") for value in values)
    parts.extend(text(x(value), bottom + 20, x_text(value), anchor="middle") for value in _legible(values, x))
    parts.append(rule(left, bottom, right, bottom, "axis"))
    return parts


def _legible(values: Sequence[float], x: Scale, gap: float = 26.0) -> list[float]:
    """Return the values whose labels do not overlap, always with the last one."""
    kept: list[float] = []
    for value in values[:-1]:
        if (not kept or x(value) - x(kept[-1]) >= gap) and x(values[-1]) - x(value) >= gap:
            kept.append(value)
    return [*kept, *values[-1:]]


# The plots of the HTML report. Each function takes the runs and returns an SVG picture.

WIDTH = 600
LABEL_ROOM = 118
TIME_HEIGHT, TIME_BOX = 320, (54.0, 16.0, WIDTH - LABEL_ROOM, 268.0)
"""Height and viewBox of the plots over time."""


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
    x = Scale(loads[0], loads[-1], box[0] + 10, box[2] - 6, log=wide)
    y = Scale(min(values) * 0.8, max(values) * 1.25, box[3], box[1], log=True)
    parts = axes(x, y, box, number, _round_ms, loads)
    parts.append(text((box[0] + box[2]) / 2, height - 8, load_name, "name", "middle"))
    ends = [y(line[-1][1]) for line in lines.values()]
    for place, (policy, line) in zip(spread_apart(ends, 17, box[1], box[3]), lines.items(), strict=True):
        at = series[policy]
        points = [(x(load), y(value)) for load, value in line]
        parts.append(curve(points, at))
        for (px, py), (load, value) in zip(points, line, strict=True):
            parts.append(mark(px, py, at, f"{policy}: {ms(value)} at {number(load)}"))
        parts.append(_label(points[-1][0], points[-1][1], box[2] + 14, place, policy, at))
    return picture(WIDTH, height, parts, f"{percent} against load")


def _round_ms(value: float) -> str:
    return f"{value:g} ms" if value < 1000 else f"{value / 1000:,g} s"


def _label(x: float, y: float, label_x: float, label_y: float, policy: str, at: int) -> str:
    pointer = rule(x + 7, y, label_x - 3, label_y, f"pointer c{at % COLOURS}")
    return pointer + text(label_x, label_y + 4, policy, f"label c{at % COLOURS}")


def _line_labels(ends: list[tuple[str, float, float]], series: dict[str, int], box: Box) -> list[str]:
    """Label each line to the right of its end point."""
    heights = spread_apart([end[2] for end in ends], 17, box[1], box[3])
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
    x = Scale(min(values) * 0.85, max(values) * 1.15, left, WIDTH - 16, log=True)
    parts: list[str] = []
    for value in x.ticks():
        parts.append(rule(x(value), top - 12, x(value), bottom))
        parts.append(text(x(value), bottom + 18, _round_ms(value), anchor="middle"))
    percents = ("p50", "p90", "p99")
    parts += [text(x(rows[0][1][percent]), top - 18, percent, "name", "middle") for percent in percents]
    for index, (policy, row) in enumerate(rows):
        y, at = top + step * index, series[policy]
        parts.append(text(left - 14, y + 4, policy, f"label c{at % COLOURS}", "end"))
        parts.append(curve([(x(row["p50"]), y), (x(row["p99"]), y)], at))
        for percent, size in (("p50", 6.0), ("p90", 4.5), ("p99", 3.0)):
            parts.append(mark(x(row[percent]), y, at, f"{policy} {percent}: {ms(row[percent])}", size))
    return picture(WIDTH, int(bottom + 30), parts, "percentiles by policy")


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
        parts.append(rule(box[0], y(level["hit_rate"]), box[2], y(level["hit_rate"]), "level"))
    ends: list[tuple[str, float, float]] = []
    for policy, line in smooth.items():
        span = lines[policy]["span_s"]
        places = [None if value is None else (x((at + 0.5) * span), y(value)) for at, value in enumerate(line)]
        parts.append(curve(places, series[policy]))
        known = [place for place in places if place is not None]
        if known:
            ends.append((policy, *known[-1]))
    if level:
        ends.append(("oracle", box[2] - 7, y(level["hit_rate"])))
    parts += _line_labels(ends, series, box)
    return picture(WIDTH, TIME_HEIGHT, parts, "hit rate over time")


def _time_axes(end_s: float, top: float, y_text: Callable[[float], str]) -> tuple[Scale, Scale, list[str]]:
    """Return both scales of a plot over time, and its axes."""
    left, upper, right, lower = TIME_BOX
    x, y = Scale(0.0, end_s, left, right - 6), Scale(0.0, top, lower, upper)
    parts = axes(x, y, TIME_BOX, _clock(end_s), y_text)
    parts.append(text((left + right) / 2, TIME_HEIGHT - 8, "time in the run", "name", "middle"))
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
        parts.append(curve(stairs, series[policy]))
        ends.append((policy, box[2] - 7, y(counts[-1])))
    for policy, count in levels.items():
        parts.append(curve([(x(0.0), y(count)), (x(end_s), y(count))], series[policy]))
        ends.append((policy, box[2] - 7, y(count)))
    parts += _line_labels(ends, series, box)
    return picture(WIDTH, TIME_HEIGHT, parts, "nodes over time")


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
        parts.append(text(left - 14, base - tall / 2 + 5, policy, f"label c{colour % COLOURS}", "end"))
        mean = sum(node["mean_in_flight"] for node in run["nodes"]) / len(run["nodes"])
        for place, node in enumerate(run["nodes"]):
            height = tall * node["mean_in_flight"] / most
            words = f"{node['node']}: {node['mean_in_flight']:.2f} in flight, {node['requests']:,} requests"
            words += f", hit rate {node['hit_rate']:.1%}, busy {node['busy_s']:,.0f} s"
            wide = max(1.0, min(slot - 3, 56.0))
            parts.append(bar(left + place * slot + (slot - wide) / 2, base - height, wide, height, colour, words))
        level = base - tall * mean / most
        parts.append(rule(left, level, right, level, "level"))
        parts.append(rule(left, base, right, base, "axis"))
        parts.append(text(right + 10, base - tall / 2 - 1, f"mean {mean:.3g}", "tick"))
        parts.append(text(right + 10, base - tall / 2 + 15, f"CV {run['load_variation']:.2f}", "tick"))
    bottom = 12 + tall + (len(rows) - 1) * step
    names = [node["node"] for node in rows[0]["nodes"]]
    if count <= 16:
        parts.extend(
            text(left + (place + 0.5) * slot, bottom + 18, name.removeprefix("node-"), anchor="middle")
            for place, name in enumerate(names)
        )
    parts.append(text((left + right) / 2, bottom + 36, "node", "name", "middle"))
    return picture(WIDTH, int(bottom + 46), parts, "load by node")


# The look that the live page and replay's HTML report share: colours and type, in theme.css.


def theme_css() -> str:
    return Path(__file__).parents[1].joinpath("theme.css").read_text(encoding="utf-8")


# The report as one HTML page: no scripts, nothing to download, light or dark by the reader's own setting.

ERROR_COLUMNS = ("preemptions", "rejected", "failed", "left", "retries")


def page(runs: Sequence[Run], title: str, measured: Run | None = None) -> str:
    """`measured`: what the capture that was replayed measured."""
    series = {name: at for at, name in enumerate(dict.fromkeys(run["policy"] for run in runs))}
    loads = sorted({load for run in runs if (load := load_of(run)) is not None})
    last = [run for run in runs if load_of(run) == (loads[-1] if loads else None)]
    at_last = f", at {loads[-1]:g} {_unit(runs)}" if len(loads) > 1 else ""
    sections: list[str] = []
    if len(loads) > 1:
        name = _load_name(runs)
        for percent, words in (("p50", "Half of the requests wait less."), ("p90", "One in ten waits longer.")):
            drawn = time_against_load(runs, series, "ttft_ms", percent, name)
            sections.append(_section(f"Time to first token, {percent}", f"{words} Lower is better.", drawn))
    else:
        words = "From a request's arrival to its first token: p50, p90 and p99 on a logarithmic scale. Lower is better."
        sections.append(_section("Time to first token", words, time_ranges(runs, series, "ttft_ms")))
        words = "Mean time between two tokens of a request: p50, p90 and p99. Lower is better."
        sections.append(_section("Time per token", words, time_ranges(runs, series, "inter_token_ms")))
    words = f"Nodes that serve requests{at_last}. The area under a line is the time paid for."
    sections.append(_section("Nodes over time", words, nodes_over_time(last, series)))
    words = f"Cached fraction of the prompt tokens, by the time of arrival{at_last}."
    sections.append(_section("Hit rate over time", words, hits_over_time(last, series)))
    words = f"Mean requests in flight on each node{at_last}. The dashed line is the mean of all nodes."
    sections.append(_section("Load by node", words, load_by_node(last, series)))
    style = "\n" + theme_css() + Path(__file__).with_name("html_report.css").read_text(encoding="utf-8")
    style += "".join(f".c{at} {{ --c: var(--c{at}); }} " for at in range(COLOURS))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Warmroute replay: {escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n"
        f'<h1>{escape(title)}</h1>\n<p>{escape(_subtitle(runs))}</p>\n<p class="lead">{_lead(runs)}</p>\n'
        f'<section class="bare plots">\n{"".join(sections)}</section>\n'
        "<section>\n<h2>All numbers</h2>\n<p>The best value at each load is marked.</p>\n"
        f'<div class="scroll">{_table(runs, series, measured)}</div>\n</section>\n'
        "<footer><p>Simulated engines in virtual time under the production router core. Hover over a mark for its "
        "numbers.</p></footer>\n</main>\n</body>\n</html>\n"
    )


def _section(title: str, words: str, drawn: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n<p>{escape(words)}</p>\n{drawn}\n</section>\n" if drawn else ""


def _load_name(runs: Sequence[Run]) -> str:
    if runs[0]["rate"] is not None:
        return "requests per second"
    return "concurrent clients" if runs[0]["concurrency"] is not None else "queue threshold"


def _unit(runs: Sequence[Run]) -> str:
    name = _load_name(runs)
    return {"requests per second": "requests/s", "concurrent clients": "clients"}.get(name, name)


def _subtitle(runs: Sequence[Run]) -> str:
    policies = len({run["policy"] for run in runs})
    fewest, most = (pick(run["requests"] for run in runs) for pick in (min, max))
    requests = f"{most:,}" if fewest == most else f"{fewest:,} to {most:,}"
    loads = len({load_of(run) for run in runs})
    counts = f"{policies} {'policies' if policies > 1 else 'policy'}, {requests} requests"
    return f"{counts} per run{f', {loads} loads' if loads > 1 else ''}, {loop_name(runs)}, seed {runs[0]['seed']}."


def _lead(runs: Sequence[Run]) -> str:
    """Return the result in a sentence: which policy has the lowest TTFT at the highest load."""
    loads = [load for run in runs if (load := load_of(run)) is not None]
    top = [run for run in runs if load_of(run) == (max(loads) if loads else None) and run["ttft_ms"]["p90"]]
    if len(top) < 2:
        return "One policy: nothing to compare."
    best, worst = (pick(top, key=lambda run: run["ttft_ms"]["p90"]) for pick in (min, max))
    if best is worst:
        return "All policies have the same TTFT."
    times = worst["ttft_ms"]["p90"] / best["ttft_ms"]["p90"]
    factor = f"{times:,.0f}" if times >= 20 else f"{times:.1f}"
    where = f" at {max(loads):g} {_unit(runs)}" if len(set(loads)) > 1 else ""
    return (
        f"Lowest p90 time to first token{where}: <b>{escape(best['policy'])}</b> with {ms(best['ttft_ms']['p90'])}; "
        f"{escape(worst['policy'])} takes {ms(worst['ttft_ms']['p90'])}, {factor} times as long."
    )


def _table(runs: Sequence[Run], series: dict[str, int], measured: Run | None) -> str:
    hidden = [head for head in ERROR_COLUMNS if not any(run.get(head) for run in runs)]
    shown = [column for column in columns(runs) if column.head not in (*LOAD_COLUMNS, *hidden)]
    head = "".join(f"<th>{escape(column.head)}</th>" for column in shown)
    rows: list[str] = []
    for group in by_load(runs):
        best = [best_of(group, column) for column in shown]
        load = load_of(group[0])
        if load is not None:
            rows.append(f'<tr class="load"><td colspan="{len(shown)}">{load:g} {_unit(runs)}</td></tr>')
        for run in group:
            cells = "".join(_cell(run, column, good, series) for column, good in zip(shown, best, strict=True))
            rows.append(f"<tr>{cells}</tr>")
    if measured is not None:
        rows.append(f'<tr class="load"><td colspan="{len(shown)}">The live fleet, as the capture has it</td></tr>')
        cells = "".join(_cell(measured, column, None, series) for column in shown)
        rows.append(f"<tr>{cells}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _cell(run: Run, column: Column, good: float | None, series: dict[str, int]) -> str:
    at = series.get(run["policy"])
    colour = f'style="color: var({f"--c{at % COLOURS}" if at is not None else "--soft"})"'
    words = escape(column.text(run))
    if column.head == "policy":
        words = f'<span class="key" {colour}></span>{words}'
    elif column.head == "hit rate":
        words = f'<span class="meter" {colour}><i style="width: {run["hit_rate"]:.1%}"></i></span>{words}'
    best = good is not None and column.value is not None and run["policy"] != "oracle" and column.value(run) == good
    return f'<td class="best">{words}</td>' if best else f"<td>{words}</td>"
