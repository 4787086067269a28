"""warmroute hash-key: makes an API key, or takes one, and prints what the configuration stores of it."""

from __future__ import annotations

import argparse
import secrets
import sys
from typing import Any


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "hash-key", help="make an API key or admin token, and the hash that the configuration stores"
    )
    parser.add_argument("--stdin", action="store_true", help="hash the key on standard input instead of making one")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from warmroute.edge.keys import hash_key

    if args.stdin:
        print(hash_key(sys.stdin.readline().strip()))
        return 0
    key = "wr-" + secrets.token_urlsafe(32)
    print(f"key     {key}   (shown only now: give it to the client)")
    print(f"sha256  {hash_key(key)}   (goes into the configuration)")
    return 0
