"""warmroute config-reference: prints the configuration reference (docs/reference/configuration.md)."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import msgspec

from warmroute.config import describe_keys, tables
from warmroute.config.config import RESTART_KEYS

INTRODUCTION = """\
# Configuration

`warmroute serve --config FILE` reads one TOML file; `warmroute check-config FILE` checks it. An unknown key is an error
that names the nearest known key.

The router reloads the file when it changes and on SIGHUP. Running requests continue. If the file is invalid, the router
logs the error and keeps the previous configuration. These tables and keys take effect only after a restart: {restart}.

`warmroute config-reference` generates this page.
"""


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser("config-reference")
    parser.set_defaults(run=run)


def run(_args: argparse.Namespace) -> int:
    print(reference(), end="")
    return 0


def reference() -> str:
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    headings = {name: f"[[{name}]]" if repeatable else f"[{name}]" for name, _section, repeatable in tables()}
    yield INTRODUCTION.format(restart=", ".join(f"`{headings.get(name, name)}`" for name in RESTART_KEYS))
    for name, section, repeatable in tables():
        yield f"## `{headings[name]}`"
        yield ""
        yield " ".join((section.__doc__ or "").split()) + (" Repeatable." if repeatable else "")
        yield ""
        yield "| key | type | default | |"
        yield "| --- | --- | --- | --- |"
        for key in describe_keys(section):
            if key.default is msgspec.NODEFAULT:
                default = "required"
            else:
                default = "unset" if key.default is None else f"`{_toml(key.default)}`"
            yield f"| `{key.name}` | {key.type_name} | {default} | {key.description} |"
        yield ""


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return f"{value:_}" if isinstance(value, int) and value > 65_535 else str(value)
