"""warmroute serve and warmroute picker: run the router."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any, get_args

import msgspec
import uvloop

from warmroute import config as configuration
from warmroute.app import log as logs
from warmroute.app.commands import port, whole
from warmroute.app.process import keep_freed_memory, leave, raise_file_limit
from warmroute.app.service import EnvoyClients, Service
from warmroute.app.startup import check_startup
from warmroute.app.workers.seat import take_seat
from warmroute.app.workers.supervisor import Supervisor
from warmroute.app.workers.worker import Worker
from warmroute.app.workers.worker_process import worker_command
from warmroute.config import Config, ConfigError, NodeConfig, missing_extra
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


def check_and_log(args: argparse.Namespace, config: Config, worker: int | None = None) -> None:
    """Check what the configuration needs, and set up the log. Raises ConfigError. `worker`: as for logs.set_up."""
    report = check_startup(config)
    if report.problems:
        where = f"{args.config}: " if args.config else ""
        raise ConfigError(*(where + problem for problem in report.problems))
    logs.set_up(config.log, worker)
    for warning in report.warnings if worker is None else ():  # the parent of workers has logged them
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
        "--workers",
        type=whole(1, 256),
        metavar="N",
        help="processes that serve requests, behind one port (default: 1; see docs/concepts/several-processes.md)",
    )
    parser.set_defaults(run=run_serve)


def run_serve(args: argparse.Namespace) -> int:
    config = read_config(args, "listen")
    seat = take_seat()
    check_and_log(args, config, seat.number if seat is not None else None)
    keep_freed_memory()
    raise_file_limit()
    if seat is None and (args.workers or 1) > 1:
        return _supervise(args, config)
    if seat is None:
        service = Service(lambda: read_config(args, "listen"), args.config)
    else:  # the parent watches the configuration file
        service = Service(lambda: read_config(args, "listen"), worker=Worker(seat))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(service.run_until_signal())
        leave()
    return 0


def _supervise(args: argparse.Namespace, config: Config) -> int:
    if config.capture.directory:
        raise ConfigError("--workers: a capture is written by one process; remove --workers or capture.directory")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:

        async def supervise() -> int:
            supervisor = Supervisor(
                lambda: read_config(args, "listen"), args.config, args.workers, worker_command(args.own_arguments)
            )
            return await supervisor.run_until_signal()

        return runner.run(supervise())


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
