"""warmroute check-config: says whether a configuration file would be taken."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from warmroute import config as configuration


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser("check-config", help="check a configuration file")
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from warmroute.edge.listen import server_tls
    from warmroute.edge.pools import node_tls

    config = configuration.load(args.file)
    server_tls(config.listen.tls_cert, config.listen.tls_key)
    node_tls(config.upstream)
    for node in config.nodes:
        if node.api_key_env and not os.environ.get(node.api_key_env):
            print(
                f"{args.file}: {node.api_key_env}, which has the key for {node.url}, is not set here", file=sys.stderr
            )
    print(f"{args.file}: good; {len(config.nodes)} nodes, {len(config.keys)} keys, policy {config.routing.policy}")
    return 0
