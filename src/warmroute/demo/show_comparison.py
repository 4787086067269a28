"""Part 1 of the demo on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from warmroute.demo.routing_comparison import (
    BLOCK_SIZE,
    BLOCKS,
    CONVERSATIONS,
    ENGINES,
    POLICIES,
    PROFILE,
    TURNS,
    PolicyRun,
)


def introduce(console: Console) -> None:
    console.print(
        f"[bold]1. Cache-aware routing[/]\n"
        f"Warmroute routes to {ENGINES} simulated engines ({PROFILE}, {BLOCKS * BLOCK_SIZE:,} KV tokens each).\n"
        f"They take as long as real engines and need no GPU. {CONVERSATIONS} conversations\n"
        f"of {TURNS} turns, each about its own document, run twice: with the policy\n"
        f"{POLICIES[0]}, then with price.\n",
        highlight=False,
    )


class ProgressBars:
    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks = {policy: bars.add_task(policy, start=False, total=CONVERSATIONS * TURNS) for policy in POLICIES}

    def advance(self, policy: str) -> None:
        self._bars.start_task(self._tasks[policy])  # has no effect after the first call
        self._bars.advance(self._tasks[policy])


@contextmanager
def progress(console: Console) -> Iterator[ProgressBars]:
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description:<12}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("requests"),
        TimeElapsedColumn(),
        console=console,
    ) as bars:
        yield ProgressBars(bars)


def conclude(console: Console, runs: list[PolicyRun], example_decision: str) -> None:
    console.print(_engines_table(runs), _results_table(runs))
    if example_decision:
        console.print("One decision, as the router explains it:")
        console.print(Padding(Text(example_decision, "cyan"), (0, 0, 1, 2), expand=False))


def _engines_table(runs: list[PolicyRun]) -> Table:
    table = Table(title="Requests and cached prompt tokens of each engine", title_justify="left")
    table.add_column("engine")
    for run in runs:
        table.add_column(f"{run.policy}\nrequests", justify="right", no_wrap=True)
        table.add_column("\ncached", justify="right")
    for index in range(ENGINES):
        row = [f"node-{index + 1}"]
        for run in runs:
            engine = run.engines[index]
            row += [str(engine.requests), f"{engine.cached_tokens / max(1, engine.prompt_tokens):.0%}"]
        table.add_row(*row)
    return table


def _results_table(runs: list[PolicyRun]) -> Table:
    table = Table(title="Results", title_justify="left")
    table.add_column("")
    for run in runs:
        table.add_column(run.policy, justify="right")
    table.add_row("cached prompt tokens", *(f"{run.hit_rate:.1%}" for run in runs))
    for name, fraction in (("p50", 0.5), ("p90", 0.9)):
        table.add_row(f"time to first token, {name}", *(f"{run.ttft_ms(fraction):,.0f} ms" for run in runs))
    table.add_row("total time", *(f"{run.seconds:.1f} s" for run in runs))
    if any(run.failed for run in runs):
        table.add_row("[red]failed requests", *(str(run.failed) for run in runs))
    return table
