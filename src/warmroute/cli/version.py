"""warmroute version: which version and which build is installed."""

from __future__ import annotations

import argparse
from typing import Any

from warmroute.build_info import version_and_build


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser("version", help="print the version and the build")
    parser.set_defaults(run=run)


def run(_args: argparse.Namespace) -> int:
    print(f"warmroute {version_and_build()}")
    return 0
