"""SVG drawing with plain text: scales, axes, curves, marks. Colours and fonts come from the page's style sheet."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from html import escape, unescape
from unicodedata import east_asian_width

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
