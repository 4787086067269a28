"""The `warmroute` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from warmroute import version_and_build
from warmroute.app.commands import (
    Parser,
    capture,
    doctor,
    explain,
    init,
    nodes,
    plan,
    reference,
    replay,
    serve,
    simulate,
    top,
)
from warmroute.config import ConfigError

# warmroute version: which version and which build is installed.


def add_version(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser("version", help="print the version and the build")
    parser.set_defaults(run=run_version)


def run_version(_args: argparse.Namespace) -> int:
    print(f"warmroute {version_and_build()}")
    return 0


COMMANDS: dict[str, Callable[[Any], None]] = {
    "serve": serve.add_serve,
    "picker": serve.add_picker,
    "init": init.add_init,
    "doctor": doctor.add_to,
    "demo": simulate.add_demo,
    "engine": simulate.add_engine,
    "capture": capture.add_to,
    "replay": replay.add_to,
    "plan": plan.add_to,
    "load": simulate.add_load,
    "explain": explain.add_to,
    "nodes": nodes.add_to,
    "top": top.add_to,
    "check-config": init.add_check_config,
    "hash-key": init.add_hash_key,
    "config-reference": reference.add_config_reference,
    "metrics-reference": reference.add_metrics_reference,
    "monitoring": reference.add_monitoring,
    "version": add_version,
}
"""What adds each command to the parser; `nodes` adds its NAMES. A command imports expensive modules when it runs."""


def create_parser() -> Parser:
    parser = Parser(
        prog="warmroute",
        description="OpenAI-compatible, KV-cache-aware proxy for fleets of LLM engines.",
    )
    parser.add_argument("--version", action="version", version=f"warmroute {version_and_build()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add_command in COMMANDS.values():
        add_command(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    try:
        args = create_parser().parse_args(argv)
    except SystemExit as ended:  # a wrong argument, or --help
        return int(ended.code or 0)
    args.own_arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = int(args.run(args) or 0)
        sys.stdout.flush()
        return code
    except ConfigError as error:
        for problem in error.problems:
            print(f"warmroute: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has read enough
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), sys.stdout.fileno())  # so that the interpreter's last flush does not fail, too
        return 141


if __name__ == "__main__":
    sys.exit(main())
