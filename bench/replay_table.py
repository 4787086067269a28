"""Records the table that `warmroute replay` prints, for the docs:

python bench/replay_table.py --record NAME [--columns A,B] WORKLOAD [options of `warmroute replay` …]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from record import Report, add_record_option, shell_command

from warmroute.app.main import main as warmroute
from warmroute.lab.report import columns, ms


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--columns", metavar="A,B", help="only these, comma-separated (all that are not 0)")
    add_record_option(parser)
    args, words = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "runs.json"
        if code := warmroute(["replay", *words, "--quiet", "--json", str(file)]):
            return code
        runs = json.loads(file.read_text())["runs"]
    report = Report()
    rows = {column.head: [column.text(run) for run in runs] for column in columns(runs)}
    shown = [head for head, cells in rows.items() if any(cell != "0" for cell in cells)]
    shown = args.columns.split(",") if args.columns else shown
    report.table("runs", *shown)
    for cells in zip(*(rows[head] for head in shown), strict=True):
        report.row(*cells)
    if any("by_priority" in run for run in runs):
        report.table("priorities", "threshold", "priority", "requests", "rejected", "TTFT p50", "p99")
        for run in runs:
            for name, one in run["by_priority"].items():
                rejected = f"{one['rejected']} ({one['rejected'] / one['requests']:.0%})"
                times = (ms(one["ttft_ms"][key]) for key in ("p50", "p99"))
                report.row(run["queue_threshold"], name, one["requests"], rejected, *times)
    report.record(args.record, shell_command(["warmroute", "replay", *words]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
