"""The first act on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from warmroute.demo.routing_comparison import (
    AFTER,
    BEFORE,
    BLOCK_SIZE,
    BLOCKS,
    CONVERSATIONS,
    ENGINES,
    PROFILE,
    TURNS,
    Pass,
)


def introduce(console: Console) -> None:
    console.print(
        f"[bold]Where it is warm[/]: Warmroute in front of {ENGINES} simulated engines ({PROFILE}, "
        f"{BLOCKS * BLOCK_SIZE:,} KV tokens each).\n{CONVERSATIONS} conversations of {TURNS} turns, each about a "
        f"document of its own, are sent twice: in turn, then by price.\n"
        f"No GPU is needed: the engines take the time that real ones would.\n",
        soft_wrap=True,
    )


class Bars:
    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks = {policy: bars.add_task(policy, total=CONVERSATIONS * TURNS) for policy in (BEFORE, AFTER)}

    def advance(self, policy: str) -> None:
        self._bars.advance(self._tasks[policy])


@contextmanager
def progress(console: Console) -> Iterator[Bars]:
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description:<12}"),
        BarColumn(bar_width=40),
        MofNCompleteColumn(),
        TextColumn("requests"),
        TimeElapsedColumn(),
        console=console,
    ) as bars:
        yield Bars(bars)


def conclude(console: Console, passes: list[Pass], why: str) -> None:
    console.print(_where_it_went(passes), _compared(passes))
    if why:
        console.print("Why one of them went where it went, in the router's words:")
        console.print(f"  {why}\n", style="cyan", markup=False, highlight=False, soft_wrap=True)


def _where_it_went(passes: list[Pass]) -> Table:
    table = Table(title="What went where", title_justify="left")
    table.add_column("engine")
    for one in passes:
        table.add_column(f"{one.policy}\nrequests", justify="right", no_wrap=True)
        table.add_column("\nfrom cache", justify="right")
    for index in range(ENGINES):
        row = [f"node-{index + 1}"]
        for one in passes:
            share = one.shares[index]
            row += [str(share.requests), f"{share.cached_tokens / max(1, share.prompt_tokens):.0%}"]
        table.add_row(*row)
    return table


def _compared(passes: list[Pass]) -> Table:
    table = Table(title="Side by side", title_justify="left")
    table.add_column("")
    for one in passes:
        table.add_column(one.policy, justify="right")
    table.add_row("prompt tokens from cache", *(f"{one.hit_rate:.1%}" for one in passes))
    for name, quantile in (("p50", 0.5), ("p90", 0.9)):
        table.add_row(f"time to first token, {name}", *(f"{one.ttft_ms(quantile):,.0f} ms" for one in passes))
    table.add_row("all done after", *(f"{one.seconds:.1f} s" for one in passes))
    if any(one.failed for one in passes):
        table.add_row("[red]failed", *(str(one.failed) for one in passes))
    return table
