"""warmroute check-config: reports everything in a configuration file that `warmroute serve` would refuse, and warns of
probable mistakes."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

from warmroute import config as configuration
from warmroute.config import Config, ConfigError


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser("check-config", help="check a configuration file")
    parser.add_argument("file", type=Path, nargs="?", metavar="FILE")
    parser.add_argument("--config", type=Path, metavar="FILE", help="the same, as other commands take it")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from warmroute.service.startup_checks import check_startup

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
    from warmroute.prompt.tokenizer_registry import TokenizerRegistry

    registry = TokenizerRegistry(config.prompts, config.models)
    try:
        asyncio.run(registry.load_configured())
    except ConfigError as error:
        return list(error.problems)
    finally:
        registry.close()
    return []
