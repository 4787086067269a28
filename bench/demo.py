"""The results of `make run` that README.md shows: cached prompt tokens and times of the demo, by policy.

    python bench/demo.py [--runs 3]

The demo runs in real time, so its figures differ from run to run. Of several runs, the report has the one with the
median TTFT of `price`.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys

from record import Report, add_record_option, load_average

COMMAND = (sys.executable, "-m", "warmroute", "demo", "--only", "compare", "--exit")
ROWS = ("cached prompt tokens", "time to first token, p50", "time to first token, p90", "total time")


def results() -> list[list[str]]:
    """Run the demo, and return the rows of its results: what, with round_robin, with price."""
    printed = subprocess.run(COMMAND, check=True, capture_output=True, text=True).stdout
    rows = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in printed.splitlines() if "│" in line]
    found = [row for row in rows if row[0] in ROWS]
    assert [row[0] for row in found] == list(ROWS), printed
    return found


def ttft_ms(rows: list[list[str]]) -> float:
    return float(re.sub(r"[^\d.]", "", rows[1][2]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    add_record_option(parser)
    args = parser.parse_args()
    runs = sorted((results() for _ in range(args.runs)), key=ttft_ms)
    report = Report()
    report.table("results", "", "`round_robin`", "`price`")
    for row in runs[len(runs) // 2]:
        report.row(*row)
    report.value("load", load_average())
    report.record(args.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
