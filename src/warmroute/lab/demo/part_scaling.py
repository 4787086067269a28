"""Part 2 of the demo on a terminal: a live view, then a table, two sparklines and the router's reasons."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from warmroute.demo.autoscaled_fleet import FleetOptions
from warmroute.demo.scaling_demo import LoadPlan, Phase, Sample, ScalingResult
from warmroute.demo.variable_load import VariableLoad
from warmroute.replay.summary import percentile

LEVELS = "▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 50
BAR_WIDTH = 30
PHASES: dict[Phase, str] = {"low": "low load", "rise": "rising load", "peak": "peak load", "fall": "almost no load"}


def introduce(console: Console, options: FleetOptions) -> None:
    console.print(
        f"[bold]2. Autoscaling[/]\n"
        f"The load rises and falls. Warmroute starts and stops engines to match it, from\n"
        f"{options.min_nodes} to {options.max_nodes} and back. Here engines are processes ({options.profile}, "
        f"{options.speed:g} times as fast as\nreal ones). In production they are cloud machines or Kubernetes pods.\n",
        highlight=False,
    )


class LiveView:
    """Shows the current sample. Without a terminal, it prints a line for each change."""

    def __init__(self, console: Console, options: FleetOptions, plan: LoadPlan) -> None:
        self._console = console
        self._options = options
        self._plan = plan
        self._samples: list[Sample] = []
        self._live = Live(console=console, refresh_per_second=8, transient=True)

    def __enter__(self) -> LiveView:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def show(self, sample: Sample) -> None:
        previous = self._samples[-1] if self._samples else None
        self._samples.append(sample)
        if self._console.is_terminal:
            self._live.update(self._table(sample))
        elif previous is None or (previous.phase, _engines(previous)) != (sample.phase, _engines(sample)):
            self._console.print(
                f"{sample.at_s:5.1f} s  {PHASES[sample.phase]:<14}  {sample.rate:4.1f} requests/s  {_engines(sample)}",
                highlight=False,
            )

    def _table(self, sample: Sample) -> Table:
        fleet = sample.fleet
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim")
        table.add_column()
        filled = round(BAR_WIDTH * sample.rate / self._plan.peak_rate)
        bar = Text("━" * filled, "magenta").append("━" * (BAR_WIDTH - filled), "bright_black")
        table.add_row("load", bar.append(f"  {sample.rate:.1f} requests/s, {PHASES[sample.phase]}", "default"))
        lamps = Text("● " * fleet.serving, "green")
        lamps.append("◌ " * fleet.starting, "yellow").append("● " * fleet.stopping, "red")
        unused = max(0, self._options.max_nodes - fleet.serving - fleet.starting - fleet.stopping)
        table.add_row("engines", lamps.append("· " * unused, "bright_black").append(f" {_engines(sample)}", "default"))
        ttft = "" if sample.ttft_ms is None else f", TTFT {sample.ttft_ms:,.0f} ms"
        table.add_row("requests", f"{sample.in_flight} in flight, {fleet.waiting_requests} queued{ttft}")
        table.add_row("", f"{_rate_line(self._samples, self._plan)}  requests/s")
        table.add_row("", f"{_engine_line(self._samples, self._options)}  engines, {sample.at_s:.0f} s")
        table.add_row("reason", "; ".join(fleet.reasons) or "the fleet has the right size")
        return table


def conclude(
    console: Console, options: FleetOptions, plan: LoadPlan, load: VariableLoad, result: ScalingResult
) -> bool:
    """Show the results. Return whether they are as they should be."""
    busy = sum(1 for requests in result.requests_at_stop.values() if requests)
    failed = sum(load.failed.values())
    followed = result.max_serving == options.max_nodes and result.final_serving == options.min_nodes
    ttft_ms = [percentile(sorted(load.ttft_ms), fraction) or 0.0 for fraction in (0.5, 0.9)]
    rows = [
        ("requests completed", f"{load.completed} of {load.sent}", load.completed == load.sent),
        ("requests failed / truncated", f"{failed} / {load.truncated}", not failed and not load.truncated),
        ("engines, maximum / at the end", f"{result.max_serving} / {result.final_serving}", followed),
        ("engines stopped with requests", f"{busy} of {len(result.requests_at_stop)}", not busy),
        ("time to first token, p50 / p90", f"{ttft_ms[0]:,.0f} / {ttft_ms[1]:,.0f} ms", True),
        ("cached prompt tokens", f"{load.cached_tokens / max(1, load.prompt_tokens):.1%}", True),
        (f"engine time / with {options.max_nodes} all the time", _engine_time(options, result), True),
    ]
    table = Table(title="Results", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value, good in rows:
        table.add_row(name, value if good else f"[red]{value}")
    console.print(table)
    for reason, count in load.failed.items():
        console.print(f"  {count} × {reason}", style="red", markup=False)
    rates, engines = _rate_line(result.samples, plan), _engine_line(result.samples, options)
    console.print(f"{rates}  requests/s, up to {plan.peak_rate:g}", highlight=False)
    console.print(f"{engines}  engines, in {result.duration_s:.0f} s\n", highlight=False)
    console.print("Scaling decisions, with the router's reasons:")
    for change in result.changes:
        text = Text(f"{change.nodes} → {change.desired_nodes} engines: {change.reason}", "cyan")
        console.print(Padding(text, (0, 0, 0, 2), expand=False))
    if not followed:
        console.print(
            f"The fleet did not grow to {options.max_nodes} engines and shrink to {options.min_nodes} in time. "
            "This machine may be busy.",
            style="red",
        )
    return all(good for _, _, good in rows)


def _engines(sample: Sample) -> str:
    fleet = sample.fleet
    parts = [f"{fleet.serving} serving"]
    parts += [f"{fleet.starting} starting"] if fleet.starting else []
    parts += [f"{fleet.stopping} stopping"] if fleet.stopping else []
    return ", ".join(parts)


def _engine_time(options: FleetOptions, result: ScalingResult) -> str:
    """Add up the time of all engines, including those that start or stop."""
    used_s = previous_s = 0.0
    for sample in result.samples:
        fleet = sample.fleet
        used_s += (fleet.serving + fleet.starting + fleet.stopping) * (sample.at_s - previous_s)
        previous_s = sample.at_s
    return f"{used_s:.0f} / {options.max_nodes * result.duration_s:.0f} s"


def _rate_line(samples: Sequence[Sample], plan: LoadPlan) -> str:
    return sparkline([sample.rate for sample in samples], [sample.at_s for sample in samples], plan.peak_rate)


def _engine_line(samples: Sequence[Sample], options: FleetOptions) -> str:
    serving = [sample.fleet.serving for sample in samples]
    return sparkline(serving, [sample.at_s for sample in samples], options.max_nodes)


def sparkline(values: Sequence[float], at_s: Sequence[float], highest: float, width: int = SPARKLINE_WIDTH) -> str:
    """Draw one character per time interval: the largest value in it, or the previous one if it has none."""
    if not values:
        return ""
    width = min(width, len(values))
    interval_s = (at_s[-1] - at_s[0]) / width or 1.0
    heights: list[float | None] = [None] * width
    for value, s in zip(values, at_s, strict=True):
        index = min(width - 1, int((s - at_s[0]) / interval_s))
        heights[index] = max(value, heights[index] or 0.0)
    drawn, last = [], values[0]
    for height in heights:
        last = last if height is None else height
        drawn.append(LEVELS[min(len(LEVELS) - 1, max(0, round(last / highest * len(LEVELS)) - 1))])
    return "".join(drawn)
