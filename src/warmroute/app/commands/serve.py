"""warmroute serve and warmroute picker: run the router."""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import msgspec
import uvloop

from warmroute import config as configuration
from warmroute.app import log as logs
from warmroute.app.brain_server import KeptConfig
from warmroute.app.commands import port, whole
from warmroute.app.edge_processes import EdgeProcesses
from warmroute.app.edge_service import EdgeService
from warmroute.app.process import go_on_without_parent, keep_freed_memory, leave, raise_file_limit, show_as
from warmroute.app.process_seat import Seat, take_seat
from warmroute.app.service import EnvoyClients, Service
from warmroute.app.startup import check_startup
from warmroute.config import Config, ConfigError, NodeConfig, missing_extra
from warmroute.edge.link import Address
from warmroute.event_log import EventLog

# What `serve` and `picker` have in common: flags that override the configuration, and the steps before the service.

log = EventLog("warmroute.service")


def read_config(args: argparse.Namespace, table: str) -> Config:
    """Return the configuration of the file. Flags override it: --host and --port those of `table`."""
    config: Config = configuration.load(args.config) if args.config else Config()
    replace: Any = msgspec.structs.replace
    address = {key: value for key, value in (("host", args.host), ("port", args.port)) if value is not None}
    config = replace(config, **{table: replace(getattr(config, table), **address)})
    if args.admin_port is not None:
        config = replace(config, admin=replace(config.admin, port=args.admin_port))
    if args.policy:
        config = replace(config, routing=replace(config.routing, policy=args.policy))
    if args.node:
        config = replace(config, nodes=(*config.nodes, *(NodeConfig(url=url) for url in args.node)))
    configuration.check(config)
    return config


def check_and_log(args: argparse.Namespace, config: Config) -> None:
    """Check what the configuration needs, and set up the log. Raises ConfigError."""
    report = check_startup(config)
    if report.problems:
        where = f"{args.config}: " if args.config else ""
        raise ConfigError(*(where + problem for problem in report.problems))
    logs.set_up(config.log)
    for warning in report.warnings:
        log.warning("config_warning", warning)


# warmroute serve: runs the router.


def add_serve(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser("serve", help="run the router")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="configuration file (docs/reference/configuration.md)"
    )
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=port, help="port to listen on (default: 8080)")
    parser.add_argument("--admin-port", type=port, help="port of the admin listener (default: 8081)")
    parser.add_argument(
        "--node", action="append", default=[], metavar="URL", help="engine to send requests to; repeatable"
    )
    parser.add_argument("--policy", choices=get_args(configuration.PolicyName), help="routing policy (default: price)")
    parser.add_argument(
        "--edges",
        type=whole(1, 256),
        metavar="N",
        help="processes that serve clients behind one port, and one that decides for all of them (default: one process "
        "does both; see docs/concepts/several-processes.md)",
    )
    parser.add_argument("--workers", type=whole(1, 256), metavar="N", help="the former name of --edges")
    parser.set_defaults(run=run_serve)


def run_serve(args: argparse.Namespace) -> int:
    if (seat := take_seat()) is not None:
        return _run_process(args, seat)
    config = read_config(args, "listen")
    check_and_log(args, config)
    if args.workers:
        log.warning(
            "flag_replaced", "Use --edges. --workers is accepted until the next release.", flag="--workers",
            edges=args.workers if args.workers > 1 else "off",
        )  # fmt: skip
    edges = args.edges or (args.workers if (args.workers or 1) > 1 else 0)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if edges:
            command = [sys.executable, "-m", "warmroute", *args.own_arguments]
            return runner.run(_supervise(lambda: read_config(args, "listen"), edges, command))
        keep_freed_memory()
        raise_file_limit()
        runner.run(Service(lambda: read_config(args, "listen"), args.config).run_until_signal())
        leave()
    return 0


async def _supervise(read: Callable[[], Config], edges: int, command: list[str]) -> int:
    return await EdgeProcesses(read, edges, command).run_until_signal()


def _run_process(args: argparse.Namespace, seat: Seat) -> int:
    """Be the brain or an edge of `serve --edges`."""
    show_as(seat.title)
    go_on_without_parent()
    faulthandler.enable()  # a process that hangs gets SIGABRT
    keep_freed_memory()
    raise_file_limit()
    if seat.kind == "brain":
        kept, read = KeptConfig(Path(seat.folder)), lambda: read_config(args, "listen")
        logs.set_up(kept.first(read).log, seat.name)
        service: Service | EdgeService = Service(lambda: kept.read(read), args.config, seat=seat)
    else:
        logs.set_up(configuration.Log(), seat.name)
        sockets = [socket.socket(fileno=fd) for fd in seat.listening_fds]
        service = EdgeService(seat, [Address(path=seat.brain_socket)], sockets)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(service.run_until_signal())
        leave()
    return 0


# warmroute picker: runs the endpoint picker for Envoy.


def add_picker(commands: Any) -> None:
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
    parser.set_defaults(run=run_picker)


def run_picker(args: argparse.Namespace) -> int:
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
        from warmroute.edge.envoy.server import PickerServer
    except ImportError as error:
        if (error.name or "").startswith("warmroute"):
            raise
        raise missing_extra("the picker", error, "picker") from None

    def create(service: Service) -> EnvoyClients:
        return PickerServer(
            service.proxy, service.config.limits, lambda: service.config.picker, service.discovery.priorities
        )

    return create
