"""warmroute demo: simulated engines behind the router, with live output."""

from __future__ import annotations

import argparse
from typing import Any

from warmroute.cli.arguments import number, port
from warmroute.cli.terminal import console


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser("demo", help="show the router at work, without a GPU")
    parser.add_argument("--port", type=port, help="port of the router (default: 8080, or the next free port)")
    parser.add_argument(
        "--only",
        choices=("compare", "scale"),
        help="run one part: round robin against price, or autoscaling (default: both)",
    )
    parser.add_argument(
        "--speed",
        type=number(above=0),
        default=1.0,
        help="speed of the compared engines; 2 is twice as fast (default: 1)",
    )
    parser.add_argument("--exit", action="store_true", help="exit after the last part instead of continuing to serve")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from warmroute.config import ConfigError
    from warmroute.demo.demo_run import DemoOptions, run_demo

    if args.only == "scale" and args.speed != 1.0:
        raise ConfigError("--speed applies to the comparison; it cannot be used with --only scale")
    options = DemoOptions(port=args.port, speed=args.speed, exit=args.exit, only=args.only)
    return run_demo(options, console())
