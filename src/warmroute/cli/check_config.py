"""warmroute check-config: says whether a configuration file would be taken, and what of it can't be meant."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from warmroute import config as configuration
from warmroute.config import Config, ConfigError


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser("check-config", help="check a configuration file")
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from warmroute.edge.listen import server_tls
    from warmroute.edge.pools import node_tls

    config = configuration.load(args.file)
    try:
        server_tls(config.listen.tls_cert, config.listen.tls_key)
        node_tls(config.upstream)
        folder = Path(config.journal.file).parent
        if config.journal.file and not folder.is_dir():
            raise ConfigError(f"journal.file: there is no folder {folder}")
        warnings = [*_provisioners(config), *_unset(config), *_meant(config)]
    except ConfigError as error:
        raise ConfigError(f"{args.file}: {error}") from None
    for warning in warnings:
        print(f"warning: {args.file}: {warning}", file=sys.stderr)
    print(f"{args.file}: good; {len(config.nodes)} nodes, {len(config.keys)} keys, policy {config.routing.policy}")
    return 0


def _provisioners(config: Config) -> Iterator[str]:
    """Makes them as `serve` would. Raises ConfigError; where nothing is scaled, that is only a warning."""
    from warmroute.scaling.provisioners import provisioner_named

    for one in config.provisioners:
        try:
            provisioner_named(one)
        except ConfigError as error:
            if config.scaling.enabled:
                raise
            yield f"{error}; it is not used while scaling.enabled is false"
        if one.kind == "process" and one.command and not any("{port}" in word for word in one.command):
            yield (
                f"provisioners.command ({one.label}) has no {{port}}: its engines would all listen on the same port, "
                "and not where they are looked for"
            )


def _unset(config: Config) -> Iterator[str]:
    """Environment variables that are named and not there."""
    for node in config.nodes:
        if node.api_key_env and not os.environ.get(node.api_key_env):
            yield f"{node.api_key_env}, which has the key for {node.url}, is not set here"
    for one in config.provisioners:
        if one.api_key_env and not os.environ.get(one.api_key_env):
            yield f"{one.api_key_env}, which has the key for engines of {one.label}, is not set here"


def _meant(config: Config) -> Iterator[str]:
    """Names that nobody else has."""
    known = _islands(config)
    for limits in config.scaling.islands:
        if known is not None and limits.island not in known:
            yield (
                f"scaling.islands: no node, provisioner or [[islands]] names {limits.island!r}; "
                f"there are {', '.join(sorted(known)) or 'none'}"
            )
    tenants = {key.tenant for key in config.keys}
    for route in config.routes:
        if route.tenant and "*" not in route.tenant and route.tenant not in tenants:
            yield (
                f"routes: {route.name!r} is for tenant {route.tenant!r}, which no key has; "
                f"there are {', '.join(sorted(tenants)) or 'no keys'}"
            )


def _islands(config: Config) -> set[str] | None:
    """All that nodes may stand on; None where only a cloud knows."""
    found = {node.island for node in config.nodes} | {island.name for island in config.islands}
    for one in config.provisioners:
        if one.island:
            found.add(one.island)
        elif one.kind == "process":
            found.add("local")
        elif one.kind == "ec2":
            found.update(f"aws/{region}" for region in one.regions)
        else:
            return None
    return found
