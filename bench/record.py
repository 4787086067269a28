"""Writes a benchmark's figures to bench/results/NAME.json, from where the docs take them (tools/docs_figures.py).

A result file holds the command, the date and the machine, `values` (name → number or text, quoted inline by the docs)
and `tables` (name → columns and rows, as the docs print them).
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
Cell = str | int | float


def record(
    name: str,
    *,
    values: Mapping[str, Cell] | None = None,
    tables: Mapping[str, tuple[Sequence[str], Sequence[Sequence[Cell]]]] | None = None,
    command: str = "",
) -> Path:
    """Write the result file and return its path. `command` defaults to this process's own."""
    path = RESULTS / f"{name}.json"
    content = {
        "command": command or " ".join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": f"{os.cpu_count()} cores, {_processor()}, Linux {platform.release().split('-')[0]}, "
        f"Python {platform.python_version()}",
        "values": dict(values or {}),
        "tables": {
            title: {"columns": list(columns), "rows": [list(row) for row in rows]}
            for title, (columns, rows) in (tables or {}).items()
        },
    }
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return path


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
