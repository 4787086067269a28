"""Runs the tests under coverage and writes the share of src that they run to bench/results/coverage.json."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))

from record import record  # noqa: E402


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "coverage.json"
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", "--cov=warmroute", f"--cov-report=json:{report}", *sys.argv[1:]], cwd=ROOT
        )
        if ran.returncode:
            return ran.returncode
        found = json.loads(report.read_text())
    rooms: dict[str, list[int]] = {}
    for name, file in found["files"].items():
        parts = Path(name).parts
        room = parts[parts.index("warmroute") + 1].removesuffix(".py")
        covered, statements = file["summary"]["covered_lines"], file["summary"]["num_statements"]
        total = rooms.setdefault(room, [0, 0])
        total[0] += covered
        total[1] += statements
    rows: list[list[str | int | float]] = [
        [room, lines, f"{100 * covered / max(1, lines):.0f} %"] for room, (covered, lines) in sorted(rooms.items())
    ]
    share = f"{found['totals']['percent_covered']:.1f} %"
    record("coverage", values={"total": share}, tables={"rooms": (["room", "statements", "run by tests"], rows)},
           command="make coverage")  # fmt: skip
    print(f"coverage: {share}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
