"""warmroute hash-key: creates an API key, or reads one, and prints its hash for the configuration."""

from __future__ import annotations

import argparse
import secrets
import sys
from typing import Any


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "hash-key", help="create an API key or admin token, and print its hash for the configuration"
    )
    parser.add_argument("--stdin", action="store_true", help="read the key from standard input and print its hash")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from warmroute.edge.api_keys import hash_key

    if args.stdin:
        print(hash_key(sys.stdin.readline().strip()))
        return 0
    key = "wr-" + secrets.token_urlsafe(32)
    print(f"key     {key}   (for the client; it cannot be shown again)")
    print(f"sha256  {hash_key(key)}   (for the configuration)")
    return 0
