"""warmroute init: asks nodes what they are, and writes a commented configuration."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import tomllib
from pathlib import Path
from typing import Any

from warmroute import config as configuration
from warmroute.cli.arguments import number, port
from warmroute.config import Config, ConfigError, NodeConfig


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "init", help="ask nodes what they are, and write a commented configuration"
    )
    parser.add_argument(
        "--node", action="append", default=[], required=True, metavar="URL", help="engine to ask; repeatable"
    )
    parser.add_argument("--key-env", metavar="NAME", help="environment variable with the API key of the engines")
    parser.add_argument("--output", type=Path, metavar="FILE", help="file to write (default: standard output)")
    parser.add_argument("--force", action="store_true", help="overwrite the file")
    parser.add_argument("--host", default="127.0.0.1", help="address that the router listens on (default: 127.0.0.1)")
    parser.add_argument("--port", type=port, default=8080, help="port that the router listens on (default: 8080)")
    parser.add_argument("--admin-port", type=port, default=8081, help="port of the admin listener (default: 8081)")
    parser.add_argument(
        "--timeout", type=number(above=0), default=5.0, metavar="S", help="timeout of each question (default: 5)"
    )
    parser.set_defaults(run=run)


def check_key_env(command: str, variable: str | None) -> None:
    """Raises ConfigError if the variable has no key."""
    if variable is not None and not os.environ.get(variable):
        raise ConfigError(f"{command}: --key-env: the environment variable {variable!r} is not set")


def run(args: argparse.Namespace) -> int:
    from warmroute.doctor.starter_config import ask_nodes, problem_of, starter_config

    if args.output is not None and args.output.exists() and not args.force:
        raise ConfigError(f"init: {args.output} exists; use --force to overwrite it")
    logging.getLogger("warmroute").addHandler(logging.NullHandler())
    urls = [url if "://" in url else f"http://{url}" for url in args.node]
    check_key_env("init", args.key_env)
    config = Config(nodes=tuple(NodeConfig(url=url, api_key_env=args.key_env or "") for url in urls))
    configuration.check(config)
    nodes = asyncio.run(ask_nodes(config, args.timeout))
    text = starter_config(nodes, args.host, args.port, args.admin_port)
    configuration.from_table(tomllib.loads(text))
    problems = {facts.config.url: problem for facts in nodes if (problem := problem_of(facts))}
    refused = any(facts.refused[1] for facts in nodes)
    if args.output is None:
        print(text, end="")
    else:
        try:
            args.output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"init: cannot write {args.output}: {error.strerror}") from None
        print(f"{args.output}: {len(nodes)} nodes. Next: warmroute doctor --config {args.output}", file=sys.stderr)
    for url, problem in problems.items():
        print(f"warmroute: {url} {problem}", file=sys.stderr)
    if refused and not args.key_env:
        print("warmroute: name the variable with their API key: --key-env NAME", file=sys.stderr)
    return 1 if problems else 0
