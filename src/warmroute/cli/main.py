"""The `warmroute` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from warmroute import __version__
from warmroute.cli import (
    check_config,
    config_reference,
    demo,
    engine,
    explain,
    hash_key,
    load,
    metrics_reference,
    plan,
    replay,
    serve,
    top,
)
from warmroute.config import ConfigError

COMMANDS = (
    serve, demo, engine, replay, plan, load, explain, top, check_config, hash_key, config_reference, metrics_reference,
)  # fmt: skip
"""A command is a module with `add_to`. It imports expensive modules when it runs."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="warmroute",
        description="OpenAI-compatible, KV-cache-aware proxy for fleets of LLM engines.",
    )
    parser.add_argument("--version", action="version", version=f"warmroute {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(commands)
    args = parser.parse_args(argv)
    try:
        return int(args.run(args) or 0)
    except ConfigError as error:
        print(f"warmroute: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
