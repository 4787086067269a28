"""warmroute top: the live page in a terminal. It reads the same feed, GET /admin/live."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from typing import IO, Any, Final

from warmroute.app.commands import add_admin_options, open_admin
from warmroute.config import ConfigError

RETRY_S: Final = 2.0
Event = tuple[str, dict[str, Any]]


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser("top", help="show the fleet, live, in the terminal")
    add_admin_options(parser)
    parser.add_argument("--once", action="store_true", help="print the current state and exit")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.live import Live

    from warmroute.app.commands.top_view import LiveState, view

    console = Console()
    state = LiveState()
    if args.once or not console.is_terminal:
        if not console.is_terminal:
            console = Console(width=80, highlight=False)
        with open_admin(args, "/admin/live") as response:
            for event in read_events(response):
                state.apply(*event)
                break
        console.print(view(state, console.width, None))
        return 0
    connected = False
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                with open_admin(args, "/admin/live") as response:
                    for event in read_events(response):
                        connected = True
                        state.apply(*event)
                        live.update(view(state, console.width, console.height), refresh=True)
                state.problem = "the router closed the connection"
            except ConfigError as error:
                if not connected:  # a wrong address or token: say so at once
                    raise
                state.problem = str(error)
            live.update(view(state, console.width, console.height), refresh=True)
            time.sleep(RETRY_S)


def read_events(response: IO[bytes]) -> Iterator[Event]:
    """Yield the name and the data of each server-sent event. Raises ValueError if the response is not such a stream."""
    name = ""
    for line in response:
        if line.startswith(b"event: "):
            name = line[7:].decode().strip()
        elif line.startswith(b"data: ") and name:
            yield name, json.loads(line[6:])
        elif line.strip():
            raise ValueError("unexpected response")
