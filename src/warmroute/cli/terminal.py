"""Terminal output that several commands share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warmroute.cli.column_tables import TableColumn, fit_tables

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from warmroute.replay import Run


def console() -> Console:
    """Return a console for standard output, as wide as the terminal; without one, 80 columns or COLUMNS."""
    from rich.console import Console

    class PipedConsole(Console):
        def on_broken_pipe(self) -> None:
            """Leave the closed pipe to main, instead of exiting with 1."""
            raise BrokenPipeError

    return PipedConsole()


def print_runs(out: Console, runs: Sequence[Run], title: str) -> None:
    """Print the results of runs, with the best value of each load in bold."""
    from rich.text import Text

    from warmroute.replay.report.table import KEY_COLUMNS, best_of, by_load, columns

    groups = by_load(runs)
    rows = [run for group in groups for run in group]
    shown: list[TableColumn] = []
    for column in columns(runs):
        cells = []
        for group in groups:
            best = best_of(group, column)
            for run in group:
                is_best = best is not None and column.value is not None and column.value(run) == best
                cells.append(Text(column.text(run), style="bold green" if is_best else ""))
        shown.append(TableColumn(column.head, cells, "right" if shown else "left"))
    keys = [column for column in shown if column.head in KEY_COLUMNS]
    others = [column for column in shown if column.head not in KEY_COLUMNS]
    ends = [number for number, run in enumerate(rows) if any(run is group[-1] for group in groups)]
    for table in fit_tables(keys, others, out.width, title, ends):
        out.print(table)


def progress_bar(quiet: bool) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=quiet,
    )


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
