"""warmroute init, check-config and hash-key: what an operator does before the first start."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import sys
import tomllib
from pathlib import Path
from typing import Any

from warmroute import config as configuration
from warmroute.app.commands import number, port
from warmroute.config import Config, ConfigError, NodeConfig

# warmroute init: asks nodes what they are, and writes a commented configuration.


def add_init(commands: Any) -> None:
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
    parser.set_defaults(run=run_init)


def check_key_env(command: str, variable: str | None) -> None:
    """Raises ConfigError if the variable has no key."""
    if variable is not None and not os.environ.get(variable):
        raise ConfigError(f"{command}: --key-env: the environment variable {variable!r} is not set")


def run_init(args: argparse.Namespace) -> int:
    from warmroute.app.doctor.starter_config import ask_nodes, problem_of, starter_config

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


# warmroute check-config: reports everything in a configuration file that `warmroute serve` would refuse, and warns of
# probable mistakes.


def add_check_config(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser("check-config", help="check a configuration file")
    parser.add_argument("file", type=Path, nargs="?", metavar="FILE")
    parser.add_argument("--config", type=Path, metavar="FILE", help="the same, as other commands take it")
    parser.set_defaults(run=run_check_config)


def run_check_config(args: argparse.Namespace) -> int:
    from warmroute.app.startup import check_startup

    file = args.config or args.file
    if file is None or (args.config and args.file):
        raise ConfigError("check-config needs one FILE")
    config = configuration.load(file)
    report = check_startup(config)
    problems = dict.fromkeys([*report.problems, *_tokenizer_problems(config)])  # each of them once
    for warning in report.warnings:
        print(f"warning: {file}: {warning}", file=sys.stderr)
    if problems:
        raise ConfigError(*(f"{file}: {problem}" for problem in problems))
    print(f"{file}: valid; {len(config.nodes)} nodes, {len(config.keys)} keys, policy {config.routing.policy}")
    return 0


def _tokenizer_problems(config: Config) -> list[str]:
    """Load the configured tokenizers, as `serve` does."""
    from warmroute.prompt.registry import TokenizerRegistry

    registry = TokenizerRegistry(config.prompts, config.models)
    try:
        asyncio.run(registry.load_configured())
    except ConfigError as error:
        return list(error.problems)
    finally:
        registry.close()
    return []


# warmroute hash-key: creates an API key, or reads one, and prints its hash for the configuration.


def add_hash_key(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "hash-key", help="create an API key or admin token, and print its hash for the configuration"
    )
    parser.add_argument("--stdin", action="store_true", help="read the key from standard input and print its hash")
    parser.set_defaults(run=run_hash_key)


def run_hash_key(args: argparse.Namespace) -> int:
    from warmroute.edge.arrival import hash_key

    if args.stdin:
        print(hash_key(sys.stdin.readline().strip()))
        return 0
    key = "wr-" + secrets.token_urlsafe(32)
    print(f"key     {key}   (for the client; it cannot be shown again)")
    print(f"sha256  {hash_key(key)}   (for the configuration)")
    return 0
