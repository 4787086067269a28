"""warmroute config-reference: the configuration reference, made from the code (docs/configuration.md)."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import msgspec

from warmroute import config as configuration

INTRODUCTION = """\
# Configuration

One TOML file, read by `warmroute serve --config FILE` and checked by `warmroute check-config FILE`. Every value has one
default. An unknown key is an error that names the nearest known one. The file is read again when it changes and on
SIGHUP: requests that are running are not touched, and a bad file is said and not taken. `[listen]`, `[admin]`,
`[[provisioners]]`, `scaling.enabled`, `scaling.lock_file`, `scaling.keda_host`, `scaling.keda_port`,
`index.memory_bytes` and `prompts.threads` count only at the start: a change of them is said, and waits for a restart.
This page is made by `warmroute config-reference`.
"""


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "config-reference", help="print the configuration reference as Markdown"
    )
    parser.set_defaults(run=run)


def run(_args: argparse.Namespace) -> int:
    print(reference(), end="")
    return 0


def reference() -> str:
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield INTRODUCTION
    for name, section, many in configuration.tables():
        yield f"## `{'[[' if many else '['}{name}{']]' if many else ']'}`"
        yield ""
        yield f"{(section.__doc__ or '').strip()}{' May stand there many times.' if many else ''}"
        yield ""
        yield "| key | type | default | |"
        yield "| --- | --- | --- | --- |"
        for key, kind, default, sentence in configuration.described(section):
            shown = (
                "required" if default is msgspec.NODEFAULT else "unset" if default is None else f"`{_toml(default)}`"
            )
            yield f"| `{key}` | {kind} | {shown} | {sentence} |"
        yield ""


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return f"{value:_}" if isinstance(value, int) else str(value)
