"""The `warmroute` command."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from warmroute.build_info import version_and_build
from warmroute.cli import (
    capture,
    check_config,
    config_reference,
    demo,
    doctor,
    engine,
    explain,
    hash_key,
    init,
    load,
    metrics_reference,
    monitoring,
    nodes,
    picker,
    plan,
    replay,
    serve,
    top,
    version,
)
from warmroute.cli.arguments import Parser
from warmroute.config import ConfigError

COMMANDS = (
    serve, picker, init, doctor, demo, engine, capture, replay, plan, load, explain, nodes, top, check_config, hash_key,
    config_reference, metrics_reference, monitoring, version,
)  # fmt: skip
"""A command is a module with `add_to`; one module may have several, its NAMES. It imports expensive modules when it
runs."""


def create_parser() -> Parser:
    parser = Parser(
        prog="warmroute",
        description="OpenAI-compatible, KV-cache-aware proxy for fleets of LLM engines.",
    )
    parser.add_argument("--version", action="version", version=f"warmroute {version_and_build()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(commands)
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
