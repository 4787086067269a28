"""A table of the configuration: its values, their types and sentences, and what is said of a wrong one."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

Seconds = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]
Bytes = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]

PriorityName = Literal["high", "normal", "low"]
PolicyName = Literal[
    "round_robin",
    "random",
    "least_loaded",
    "power_of_two",
    "latency",
    "session",
    "prefix_hash",
    "approximate",
    "overlap",
    "price",
]


class ConfigError(Exception):
    """What is wrong with a configuration, as a sentence for the person who wrote it."""


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of the file."""


def section_of(kind: Any) -> type[Section] | None:
    """The table that a field of this type holds (once or many times), if it holds one."""
    if get_origin(kind) is tuple:
        return section_of(get_args(kind)[0])
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def refuse_unknown_keys(table: Mapping[str, Any], section: type[Section], prefix: str) -> None:
    fields = {field.name: field.type for field in msgspec.structs.fields(section)}
    for key, value in table.items():
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1, cutoff=0.5)
            hint = f"; did you mean {prefix}{near[0]}?" if near else f"; known here: {', '.join(sorted(fields))}"
            raise ConfigError(f"unknown key {prefix}{key}{hint}")
        inner = section_of(fields[key])
        if inner is None:
            continue
        tables = value if isinstance(value, list) else [value]
        for inner_table in tables:
            if isinstance(inner_table, dict):
                refuse_unknown_keys(inner_table, inner, f"{prefix}{key}.")


def in_words(message: str) -> str:
    """`Expected `int`, got `str` - at `$.listen.port`` → `listen.port: expected `int`, got `str``."""
    what, separator, where = message.rpartition(" - at `$")
    if not separator:
        return message
    path = where.rstrip("`").lstrip(".").replace("[...]", "")
    return f"{path}: {what[0].lower()}{what[1:]}"


def described(section: type[Section]) -> Iterator[tuple[str, str, Any, str]]:
    """Each value of a table: name, type in words, default (or msgspec.NODEFAULT), sentence. Not the tables in it."""
    hints = get_type_hints(section, include_extras=True)
    for field in msgspec.structs.fields(section):
        hint = hints[field.name]
        if section_of(hint) is not None:
            continue
        sentence = ""
        while get_origin(hint) is Annotated:
            hint, *metas = get_args(hint)
            for meta in metas:
                sentence = getattr(meta, "description", None) or sentence
        default = field.default
        if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        yield field.name, _type_in_words(hint), default, sentence


def _type_in_words(hint: Any) -> str:
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) is Literal:
        return " / ".join(f'"{value}"' for value in get_args(hint))
    if get_origin(hint) is tuple:
        return f"list of {_type_in_words(get_args(hint)[0])}"
    if get_origin(hint) is dict:
        return f"table of {_type_in_words(get_args(hint)[1])}"
    if get_origin(hint) in (UnionType, Union):
        return ", ".join(_type_in_words(kind) for kind in get_args(hint) if kind is not NoneType)
    return {str: "text", int: "whole number", float: "number", bool: "true / false"}.get(hint, str(hint))
