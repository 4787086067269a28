"""warmroute serve: runs the router."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any, get_args

import msgspec
import uvloop

from warmroute import config as configuration
from warmroute.config import Config, NodeConfig
from warmroute.edge.process_limits import keep_freed_memory, raise_file_limit
from warmroute.service import Service
from warmroute.telemetry import log as logs


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser("serve", help="run the router")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="configuration file (docs/reference/configuration.md)"
    )
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (default: 8080)")
    parser.add_argument("--admin-port", type=int, help="port of the admin listener (default: 8081)")
    parser.add_argument(
        "--node", action="append", default=[], metavar="URL", help="engine to send requests to; repeatable"
    )
    parser.add_argument("--policy", choices=get_args(configuration.PolicyName), help="routing policy (default: price)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    service = Service(lambda: read_config(args), args.config)
    logs.set_up(service.config.log)
    keep_freed_memory()
    raise_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(service.run_until_signal())
    return 0


def read_config(args: argparse.Namespace) -> Config:
    """Return the configuration of the file. Flags override it."""
    config = configuration.load(args.config) if args.config else Config()
    replace = msgspec.structs.replace
    listen = {key: value for key, value in (("host", args.host), ("port", args.port)) if value is not None}
    config = replace(config, listen=replace(config.listen, **listen))
    if args.admin_port is not None:
        config = replace(config, admin=replace(config.admin, port=args.admin_port))
    if args.policy:
        config = replace(config, routing=replace(config.routing, policy=args.policy))
    if args.node:
        config = replace(config, nodes=(*config.nodes, *(NodeConfig(url=url) for url in args.node)))
    configuration.check(config)
    return config
