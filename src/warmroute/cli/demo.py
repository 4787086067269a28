"""warmroute demo: simulated engines and the router in front, with something to see."""

from __future__ import annotations

import argparse
from typing import Any


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser("demo", help="watch the router at work, without a GPU")
    parser.add_argument("--port", type=int, help="port of the router (8080, or the next free one)")
    parser.add_argument(
        "--only",
        choices=("compare", "scale"),
        help="one act: round robin beside price, or a fleet that grows and shrinks (both)",
    )
    parser.add_argument(
        "--speed", type=float, default=1.0, help="how many times faster than life the compared engines run (1)"
    )
    parser.add_argument("--exit", action="store_true", help="end after the last act instead of staying up")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from warmroute import demo
    from warmroute.config import ConfigError

    if args.speed <= 0:
        raise ConfigError("--speed must be above 0")
    if args.only == "scale" and args.speed != 1.0:
        raise ConfigError("--speed is for the comparison: --only scale has engines and times of its own")
    options = demo.DemoOptions(port=args.port, speed=args.speed, leave=args.exit, only=args.only)
    return demo.run(options, Console())
