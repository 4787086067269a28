"""warmroute serve: runs the router."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any, get_args

import uvloop

from warmroute import config as configuration
from warmroute.cli.arguments import port, whole
from warmroute.cli.service_start import check_and_log, read_config
from warmroute.config import Config, ConfigError
from warmroute.edge.process_limits import keep_freed_memory, raise_file_limit
from warmroute.service import Service
from warmroute.service.process_exit import leave
from warmroute.service.workers.seat import take_seat
from warmroute.service.workers.supervisor import Supervisor
from warmroute.service.workers.worker import Worker
from warmroute.service.workers.worker_process import worker_command


def add_to(commands: Any) -> None:
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
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
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
