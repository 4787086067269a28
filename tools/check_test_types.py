"""Type-checks the tests and the benchmarks in one mypy run. Run by `make lint`.

pytest imports the helper modules of a test folder by their bare names, so all folders are on mypy's path. Module names
must be unique there, but every folder may have a conftest.py: mypy reads it through a link that has the folder's name.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".mypy_cache" / "tests"


def link_conftest(path: Path) -> Path:
    link = CACHE / "conftest" / f"{path.parent.name}_conftest.py"
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.exists():
        link.symlink_to(path)
    return link


def main() -> int:
    files = sorted(path for folder in ("bench", "tests") for path in (ROOT / folder).rglob("*.py"))
    links = {path: link_conftest(path) for path in files if path.name == "conftest.py"}
    packages = {path.parent for path in files if path.name == "__init__.py"}
    search = [ROOT / "src", ROOT / "tools", *sorted({path.parent for path in files} - packages)]
    sources = [links.get(path, path) for path in files]
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-warn-unreachable", "--cache-dir", CACHE, *sources],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "MYPYPATH": ":".join(map(str, search))},
    )  # fmt: skip
    report = ran.stdout + ran.stderr
    for path, link in links.items():
        report = report.replace(str(link.relative_to(ROOT)), str(path.relative_to(ROOT)))
    print(report.strip() if ran.returncode else f"types: {len(files)} files of tests and benchmarks are clean")
    return ran.returncode


if __name__ == "__main__":
    sys.exit(main())
