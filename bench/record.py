"""Prints a benchmark's figures as Markdown tables and, with `--record NAME`, writes them to bench/results/NAME.json.

The docs take their figures from these files (tools/docs_figures.py). A file holds the command, the date, the machine,
`values` (name → number or text, quoted inline by the docs), `tables` (name → columns and rows, as the docs print
them) and `measured` (the version, the commit and hashes of the code, tools/measured_code.py).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
import measured_code

ROOT, RESULTS = measured_code.ROOT, measured_code.RESULTS
Cell = str | int | float
Table = tuple[Sequence[str], Sequence[Sequence[Cell]]]


def add_record_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--record", type=_result_name, metavar="NAME", help="write the figures to bench/results/NAME.json"
    )


def _result_name(name: str) -> str:
    """Check the name before the benchmark runs."""
    path = RESULTS / f"{name}.json"
    if not re.fullmatch(r"[\w.-]+", name):
        raise argparse.ArgumentTypeError(f"{name!r} is not a name of letters, digits, _, . and -")
    if not os.access(next(one for one in (path, RESULTS, RESULTS.parent) if one.exists()), os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {path}")
    try:
        measured_code.measured_now(name)
    except measured_code.UndeclaredCode as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return name


class Report:
    """Prints rows as they are measured, and keeps them for the result file."""

    def __init__(self) -> None:
        self.values: dict[str, Cell] = {}
        self.tables: dict[str, tuple[list[str], list[list[Cell]]]] = {}

    def table(self, name: str, *columns: str) -> None:
        """Begin a table. Rows follow until the next one."""
        self.tables[name] = (list(columns), [])
        print(f"\n{name}\n\n{_markdown(columns)}\n{_markdown(['---'] * len(columns))}", flush=True)

    def row(self, *cells: Cell) -> None:
        rows = next(reversed(self.tables.values()))[1]
        rows.append(list(cells))
        print(_markdown(cells), flush=True)

    def value(self, name: str, value: Cell) -> None:
        self.values[name] = value
        print(f"{name}: {value}", flush=True)

    def record(self, name: str | None, command: str = "") -> None:
        """Write the result file, if `--record` named one."""
        if name:
            record(name, values=self.values, tables=self.tables, command=command)


def record(
    name: str,
    *,
    values: Mapping[str, Cell] | None = None,
    tables: Mapping[str, Table] | None = None,
    command: str = "",
) -> Path:
    """Write the result file and return its path. `command` defaults to this process's own."""
    path = RESULTS / f"{name}.json"
    content = {
        "command": command or shell_command(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": f"{os.cpu_count()} cores, {_processor()}, Linux {platform.release().split('-')[0]}, "
        f"Python {platform.python_version()}",
        "measured": measured_code.measured_now(name),
        "values": dict(values or {}),
        "tables": {
            title: {"columns": list(columns), "rows": [list(row) for row in rows]}
            for title, (columns, rows) in (tables or {}).items()
        },
    }
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return path


def load_average() -> str:
    """Return the machine's load. Figures of CPU time are better on an idle machine."""
    return f"{os.getloadavg()[0]:.1f}"


def _markdown(cells: Sequence[Cell]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def shell_command(words: Sequence[str]) -> str:
    """Return the command as a line. Directories outside the repository become DIR."""
    return shlex.join(_without_directory(word) for word in words)


def _without_directory(word: str) -> str:
    if not os.path.isabs(word):
        return word
    return f"DIR/{Path(word).name}" if Path(word).is_file() else "DIR"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
