"""warmroute check-config: checks a configuration file and warns of probable mistakes."""

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
    from warmroute.edge.connection_pool import node_tls
    from warmroute.edge.listening_sockets import server_tls

    config = configuration.load(args.file)
    try:
        server_tls(config.listen.tls_cert, config.listen.tls_key)
        node_tls(config.upstream)
        folder = Path(config.journal.file).parent
        if config.journal.file and not folder.is_dir():
            raise ConfigError(f"journal.file: the directory {folder} does not exist")
        warnings = [*_check_provisioners(config), *_unset_variables(config), *_unknown_names(config)]
    except ConfigError as error:
        raise ConfigError(f"{args.file}: {error}") from None
    for warning in warnings:
        print(f"warning: {args.file}: {warning}", file=sys.stderr)
    print(f"{args.file}: valid; {len(config.nodes)} nodes, {len(config.keys)} keys, policy {config.routing.policy}")
    return 0


def _check_provisioners(config: Config) -> Iterator[str]:
    """Create the provisioners as `serve` would. Yields warnings. Raises ConfigError if scaling is enabled and one
    cannot be created."""
    from warmroute.scaling.provisioners import create_provisioner

    for one in config.provisioners:
        try:
            create_provisioner(one)
        except ConfigError as error:
            if config.scaling.enabled:
                raise
            yield f"{error} (the provisioner is unused while scaling.enabled is false)"
        if one.kind == "process" and one.command and not any("{port}" in word for word in one.command):
            yield f"provisioners.command ({one.label}) has no {{port}}: all its engines would listen on the same port"


def _unset_variables(config: Config) -> Iterator[str]:
    for node in config.nodes:
        if node.api_key_env and not os.environ.get(node.api_key_env):
            yield f"nodes.api_key_env: {node.api_key_env} is not set here; it has the API key of {node.url}"
    for one in config.provisioners:
        if one.api_key_env and not os.environ.get(one.api_key_env):
            yield f"provisioners.api_key_env: {one.api_key_env} is not set here; it has the API key of {one.label}"


def _unknown_names(config: Config) -> Iterator[str]:
    islands = _islands(config)
    for limits in config.scaling.islands:
        if islands is not None and limits.island not in islands:
            known = ", ".join(sorted(islands)) or "none"
            yield f"scaling.islands: no node or provisioner is on island {limits.island!r}; known islands: {known}"
    tenants = {key.tenant for key in config.keys}
    for route in config.routes:
        if route.tenant and "*" not in route.tenant and route.tenant not in tenants:
            known = ", ".join(sorted(tenants)) or "none"
            yield f"routes: no key has the tenant {route.tenant!r} of route {route.name!r}; known tenants: {known}"


def _islands(config: Config) -> set[str] | None:
    """Return all islands that nodes can be on; None if only a provisioner knows them."""
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
