"""warmroute picker: runs the endpoint picker for Envoy."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any, get_args

import uvloop

from warmroute import config as configuration
from warmroute.cli.arguments import port
from warmroute.cli.service_start import check_and_log, read_config
from warmroute.config import missing_extra
from warmroute.edge.process_limits import keep_freed_memory, raise_file_limit
from warmroute.service import Service
from warmroute.service.clients import EnvoyClients
from warmroute.service.process_exit import leave


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "picker", help="run the endpoint picker for Envoy (Gateway API Inference Extension)"
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="configuration file (docs/reference/configuration.md)"
    )
    parser.add_argument("--host", help="address to listen on for Envoy (default: 127.0.0.1)")
    parser.add_argument("--port", type=port, help="port to listen on for Envoy (default: 9002)")
    parser.add_argument("--admin-port", type=port, help="port of the admin listener (default: 8081)")
    parser.add_argument("--node", action="append", default=[], metavar="URL", help="engine to choose from; repeatable")
    parser.add_argument("--policy", choices=get_args(configuration.PolicyName), help="routing policy (default: price)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = read_config(args, "picker")
    create = picker_factory()
    check_and_log(args, config)
    keep_freed_memory()
    raise_file_limit()
    service = Service(lambda: read_config(args, "picker"), args.config, create_picker=create)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(service.run_until_signal())
        leave()
    return 0


def picker_factory() -> Any:
    """Return what creates the picker's server. Raises ConfigError if the extra `picker` is not installed."""
    try:
        from warmroute.picker.server import PickerServer
    except ImportError as error:
        if (error.name or "").startswith("warmroute"):
            raise
        raise missing_extra("the picker", error, "picker") from None

    def create(service: Service) -> EnvoyClients:
        return PickerServer(
            service.proxy, service.fleet, service.config.limits, lambda: service.config.picker,
            service.discovery.priorities,
        )  # fmt: skip

    return create
