"""The second act on a terminal: a few lines that change while it runs, then a table, two curves and the reasons."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from warmroute.demo.variable_load import VariableLoad
from warmroute.demo.scaling_demo import Sample, LoadPlan, ScalingResult
from warmroute.demo.autoscaled_fleet import FleetOptions

LEVELS = "▁▂▃▄▅▆▇█"
CURVE = 54
BAR = 30
PARTS = {
    "calm": "a little to do",
    "rise": "the load rises",
    "busy": "as much as it gets",
    "fall": "hardly anybody asks any more",
}


def introduce(console: Console, shape: FleetOptions) -> None:
    console.print(
        f"[bold]As many as it takes[/]: the load rises and falls, and the fleet follows, from {shape.least} to "
        f"{shape.most} engines and back.\nThe router starts and ends them itself: processes here, machines of a cloud "
        f"elsewhere. They are {shape.profile}, {shape.speed:g} times as fast as life.\n",
        soft_wrap=True,
    )


class Screen:
    """What is going on just now. Where there is no terminal, a line for each change."""

    def __init__(self, console: Console, shape: FleetOptions, plot: LoadPlan) -> None:
        self._console = console
        self._shape = shape
        self._plot = plot
        self._moments: list[Sample] = []
        self._live = Live(console=console, refresh_per_second=8, transient=True)

    def __enter__(self) -> Screen:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def show(self, moment: Sample) -> None:
        before = self._moments[-1] if self._moments else None
        self._moments.append(moment)
        if self._console.is_terminal:
            self._live.update(self._lines(moment))
        elif before is None or (before.part, _engines(before)) != (moment.part, _engines(moment)):
            self._console.print(
                f"{moment.at_s:5.1f} s  {PARTS[moment.part]:<28}  {moment.rate:4.1f} requests/s  {_engines(moment)}",
                highlight=False,
            )

    def _lines(self, moment: Sample) -> Table:
        look = moment.look
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim")
        table.add_column()
        full = round(BAR * moment.rate / self._plot.peak_rate)
        bar = Text("━" * full, "magenta").append("━" * (BAR - full), "bright_black")
        table.add_row("load", bar.append(f"  {moment.rate:.1f} requests/s, {PARTS[moment.part]}", "default"))
        lamps = (
            Text("● " * look.serving, "green").append("◌ " * look.coming, "yellow").append("● " * look.leaving, "red")
        )
        free = max(0, self._shape.most - look.serving - look.coming - look.leaving)
        table.add_row("engines", lamps.append("· " * free, "bright_black").append(f" {_engines(moment)}", "default"))
        ttft = "" if moment.ttft_ms is None else f", first token after {moment.ttft_ms:,.0f} ms"
        table.add_row("requests", f"{moment.under_way} under way, {look.waiting} of them wait for an engine{ttft}")
        table.add_row("", f"{_rates(self._moments, self._plot)}  requests/s")
        table.add_row("", f"{_nodes(self._moments, self._shape)}  engines, {moment.at_s:.0f} s so far")
        table.add_row("why", "; ".join(look.reasons) or "so many are enough")
        return table


def conclude(console: Console, shape: FleetOptions, load: VariableLoad, story: ScalingResult) -> bool:
    """Shows what came of it; whether everything is as it should be."""
    busy = sum(1 for under_way in story.endings.values() if under_way)
    failed = sum(load.failed.values())
    rows = [
        ("requests answered whole", f"{load.whole} of {load.sent}", load.whole == load.sent),
        ("failed, or cut short", f"{failed}, {load.short}", not failed and not load.short),
        ("engines at most, and in the end", f"{story.most}, {story.last}", _grew_and_shrank(shape, story)),
        ("engines ended with a request on them", f"{busy} of {len(story.endings)}", not busy),
        ("time to first token, p50 and p90", f"{_quantile(load, 0.5):,.0f} ms, {_quantile(load, 0.9):,.0f} ms", True),
        ("prompt tokens from cache", f"{load.cached_tokens / max(1, load.prompt_tokens):.1%}", True),
        (f"engine time, and with {shape.most} all along", _engine_time(shape, story), True),
    ]
    table = Table(title="What came of it", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value, good in rows:
        table.add_row(name, value if good else f"[red]{value}")
    console.print(table)
    for reason, count in load.failed.items():
        console.print(f"  {count} × {reason}", style="red", markup=False)
    plot = LoadPlan()
    console.print(f"{_rates(story.moments, plot)}  requests/s, up to {plot.peak_rate:g}", highlight=False)
    console.print(f"{_nodes(story.moments, shape)}  engines, in {story.seconds:.0f} s\n", highlight=False)
    console.print("Why, in the router's words:")
    for change in story.changes:
        console.print(
            f"  {change.nodes} → {change.desired}: {change.why}",
            style="cyan",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    if not _grew_and_shrank(shape, story):
        console.print(
            f"The fleet did not come to {shape.most} engines and back to {shape.least} in its time. "
            "This machine may be busy with other things.",
            style="red",
        )
    return all(good for _, _, good in rows)


def _engines(moment: Sample) -> str:
    look = moment.look
    parts = [f"{look.serving} serve"]
    parts += [f"{look.coming} start"] if look.coming else []
    parts += [f"{look.leaving} finish"] if look.leaving else []
    return ", ".join(parts)


def _grew_and_shrank(shape: FleetOptions, story: ScalingResult) -> bool:
    return story.most == shape.most and story.last == shape.least


def _quantile(load: VariableLoad, quantile: float) -> float:
    times = sorted(load.ttft_ms)
    return times[min(len(times) - 1, int(quantile * len(times)))] if times else 0.0


def _engine_time(shape: FleetOptions, story: ScalingResult) -> str:
    """All that are paid for: those that start and those that finish, too."""
    used_s = before_s = 0.0
    for moment in story.moments:
        look = moment.look
        used_s += (look.serving + look.coming + look.leaving) * (moment.at_s - before_s)
        before_s = moment.at_s
    return f"{used_s:.0f} s, {shape.most * story.seconds:.0f} s"


def _rates(moments: Sequence[Sample], plot: LoadPlan) -> str:
    return curve([moment.rate for moment in moments], [moment.at_s for moment in moments], plot.peak_rate)


def _nodes(moments: Sequence[Sample], shape: FleetOptions) -> str:
    return curve([moment.look.serving for moment in moments], [moment.at_s for moment in moments], shape.most)


def curve(values: Sequence[float], at_s: Sequence[float], most: float, width: int = CURVE) -> str:
    """A character for each stretch of time: the largest value in it, or that before where there is none."""
    if not values:
        return ""
    width = min(width, len(values))
    stretch_s = (at_s[-1] - at_s[0]) / width or 1.0
    heights: list[float | None] = [None] * width
    for value, s in zip(values, at_s, strict=True):
        place = min(width - 1, int((s - at_s[0]) / stretch_s))
        heights[place] = max(value, heights[place] or 0.0)
    drawn, last = [], values[0]
    for height in heights:
        last = last if height is None else height
        drawn.append(LEVELS[min(len(LEVELS) - 1, max(0, round(last / most * len(LEVELS)) - 1))])
    return "".join(drawn)
