"""warmroute nodes, drain and undrain: the nodes of a running router, and taking one out of service."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import quote

from warmroute.app.commands import TableColumn, add_admin_options, call_admin, console, fit_tables

NAMES: Final = ("nodes", "drain", "undrain")
Row = dict[str, Any]
"""A node, as the admin API describes it."""

_STYLES: Final = {"up": "green", "draining": "yellow", "unknown": "dim"}
_COLUMNS: Final[tuple[tuple[str, Callable[[Row], str]], ...]] = (
    ("role", lambda node: str(node["role"])),
    ("requests", lambda node: f"{node['requests_in_flight']:,}" + _limit(node)),
    ("waiting in engine", lambda node: "–" if node["engine_waiting"] is None else f"{node['engine_waiting']:,}"),
    ("KV memory", lambda node: "–" if node["kv_usage"] is None else f"{node['kv_usage']:.0%}"),
    ("engine", lambda node: str(node["engine"])),
    ("models", lambda node: _some(node["models"] or ())),
    ("island", lambda node: node["island"] or "–"),
)


def add_to(commands: Any) -> None:
    nodes: argparse.ArgumentParser = commands.add_parser("nodes", help="list the nodes of a running router")
    add_admin_options(nodes)
    nodes.add_argument("--json", action="store_true", help="print the nodes as JSON")
    nodes.set_defaults(run=run)
    for name, purpose in (
        ("drain", "send a node no new requests; running ones finish"),
        ("undrain", "send a drained node requests again"),
    ):
        parser: argparse.ArgumentParser = commands.add_parser(name, help=purpose)
        parser.add_argument("node", metavar="NODE", help="name of the node, as `warmroute nodes` lists it")
        add_admin_options(parser)
        parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.command == "nodes":
        return _list(args)
    node = call_admin(args, f"/admin/nodes/{quote(args.node, safe='')}/{args.command}", b"", expect="state")
    running = node["requests_in_flight"]
    if node["state"] == "draining":
        print(f"{node['name']} gets no new requests; requests that still run: {running:,}")
    else:
        print(f"{node['name']} gets requests again; it is {node['state']}")
    if not node.get("survives_restart", True):
        print("A restart of the router loses this: set directory in [state] of its configuration, or see its log.")
    if missing := (node.get("replicas") or {}).get("unconfirmed"):
        print(f"These replicas or workers have not confirmed it: {', '.join(missing)}")
    return 0


def _list(args: argparse.Namespace) -> int:
    nodes: list[Row] = call_admin(args, "/admin/nodes", expect="nodes")["nodes"]
    if args.json:
        print(json.dumps(nodes, indent=2, ensure_ascii=False))
        return 0
    if not nodes:
        print("the router has no nodes")
        return 0
    from rich.text import Text

    out = console()
    names = [Text(node["name"]) for node in nodes]
    states = [Text(node["state"], _STYLES.get(node["state"], "red")) for node in nodes]
    keys = [TableColumn("node", names, "left"), TableColumn("state", states, "left")]
    shown = [
        TableColumn(head, [Text(text(node)) for node in nodes], "left" if head in ("engine", "models") else "right")
        for head, text in _COLUMNS
    ]
    for table in fit_tables(keys, shown, out.width, framed=False):
        out.print(table)
    for node in nodes:
        if node["state"] != "up" and node["reason"]:
            out.print(f"{node['name']}: {node['reason']}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _limit(node: Row) -> str:
    """The most requests that the router sends to the node at a time, if there is a limit."""
    most = node.get("max_inflight") or node.get("concurrency_limit")
    return f" of {most:,}" if most else ""


def _some(names: list[str] | tuple[str, ...]) -> str:
    if not names:
        return "–"
    more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
    return f"{names[0]}{more}"
