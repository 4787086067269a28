"""What `serve` and `picker` have in common: flags that override the configuration, and the steps before the service."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from warmroute import config as configuration
from warmroute.config import Config, ConfigError, NodeConfig
from warmroute.event_log import EventLog
from warmroute.service.startup_checks import check_startup
from warmroute.telemetry import log as logs

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
    for warning in report.warnings:
        log.warning("config_warning", warning)
