"""Data that is not in the repository: benchmarks take it from `--data DIR`."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_data_option(parser: argparse.ArgumentParser, *names: str) -> None:
    parser.add_argument("--data", type=Path, metavar="DIR", help=f"directory that contains {', '.join(names)}")


def data_files(data: Path | None, *names: str) -> list[Path]:
    """Return the paths of these files under `--data DIR`. Exits with a message if one is missing."""
    wanted = "".join(f"\n    {name}" for name in names)
    if not names:
        return []
    if data is None:
        raise SystemExit(f"--data DIR is required. DIR must contain:{wanted}")
    missing = [name for name in names if not (data / name).exists()]
    if missing:
        raise SystemExit(f"--data {data}: {', '.join(missing)} not found. The directory must contain:{wanted}")
    return [data / name for name in names]
