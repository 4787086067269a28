"""A table of the configuration: its values, their types and sentences, and what is said of a wrong one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

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


SomeSection = TypeVar("SomeSection", bound=Section)


def section_of(kind: Any) -> type[Section] | None:
    """The table that a field of this type holds (once or many times), if it holds one."""
    if get_origin(kind) is tuple:
        return section_of(get_args(kind)[0])
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _tables_with(key: str, tables: Mapping[str, Any]) -> list[str]:
    """Which of the tables have such a key: those that stand there once, else those that may stand there often."""
    found = [name for name, kind in tables.items() if (inner := section_of(kind)) and key in inner.__struct_fields__]
    return [name for name in found if get_origin(tables[name]) is not tuple] or found


def refuse_unknown_keys(table: Mapping[str, Any], section: type[Section], prefix: str) -> None:
    fields = {field.name: field.type for field in msgspec.structs.fields(section)}
    for key, value in table.items():
        if key not in fields:
            elsewhere = [] if prefix else _tables_with(key, fields)
            near = difflib.get_close_matches(key, fields, n=1, cutoff=0.5)
            if elsewhere:
                hint = f"did you mean {' or '.join(f'{table}.{key}' for table in elsewhere)}?"
            else:
                hint = f"did you mean {prefix}{near[0]}?" if near else f"known here: {', '.join(sorted(fields))}"
            raise ConfigError(f"unknown key {prefix}{key}; {hint}")
        inner = section_of(fields[key])
        if inner is None:
            continue
        tables = value if isinstance(value, list) else [value]
        for inner_table in tables:
            if isinstance(inner_table, dict):
                refuse_unknown_keys(inner_table, inner, f"{prefix}{key}.")


_NAMES: Final = {
    "int": "a whole number", "float": "a number", "str": "text", "bool": "true or false", "array": "a list",
    "object": "a table", "null": "nothing", "datetime": "a date and time", "date": "a date", "time": "a time",
}  # fmt: skip
_LIMITED: Final = re.compile(r"Expected `(.+?)`(, got `(.+)`)?(.*)", re.DOTALL)


def in_words(message: str, section: type[Section]) -> str:
    """`Expected `int`, got `str` - at `$.listen.port`` → `listen.port: expected a whole number, got text`. The values
    themselves are not said, except where there are only a few to choose from: they may be secret."""
    what, separator, where = message.rpartition(" - at `$")
    if not separator:
        what, where = message, ""
    path = where.rstrip("`").lstrip(".").replace("[...]", "")
    said = _wrong(what, path, _hint_at(section, path))
    return f"{path}: {said}" if path else said


def made_of(section: type[SomeSection], table: object) -> SomeSection:
    """A table as it was read from a file or a request; raises ConfigError with a sentence that names the key."""
    if isinstance(table, dict):
        refuse_unknown_keys(table, section, "")
    try:
        return msgspec.convert(table, section, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(in_words(str(error), section)) from None


def _wrong(what: str, path: str, hint: Any) -> str:
    choices = _choices(hint)
    if what.startswith("Invalid enum value") and choices:
        given = what.removeprefix("Invalid enum value ").strip("'")
        near = difflib.get_close_matches(given.lower(), choices, n=1, cutoff=0.5)
        instead = f"did you mean {near[0]}? There" if near else "there"
        return f"{given!r} is none of its values; {instead} are {', '.join(choices)}"
    limited = _LIMITED.fullmatch(what)
    if limited is None:
        return what[:1].lower() + what[1:]
    expected, _, got, rest = limited.groups()
    if " matching regex " in rest:
        if path.endswith("sha256"):
            return "is not a SHA-256 in hex: `warmroute hash-key` makes it"
        return f"does not look right: {_sentence(hint) or 'it is written in another way'}"
    name = re.sub(r"\[\d+\]", "", path)
    if name and got == "object" and section_of(hint) is not None:
        return f"write [[{name}]]: it may stand there many times"
    if name and got == "array" and section_of(hint) is not None and get_origin(hint) is not tuple:
        return f"write [{name}]: it stands there once"
    kinds = " or ".join(_NAMES.get(kind, kind) for kind in expected.split(" | ") if kind != "null")
    return f"expected {kinds}" + (f", got {_NAMES.get(got, got)}" if got else "") + rest


def _hint_at(section: type[Section], path: str) -> Any:
    """The type of what stands there, with its sentence; None where that is not known."""
    hint: Any = section
    for name in re.sub(r"\[\d+\]", "", path).split(".") if path else ():
        inner = section_of(hint)
        hint = get_type_hints(inner, include_extras=True).get(name) if inner is not None else None
    return hint


def _choices(hint: Any) -> tuple[str, ...]:
    """The texts that a value is one of, if it is."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    if get_origin(hint) in (Annotated, tuple):
        return _choices(get_args(hint)[0])
    if get_origin(hint) in (UnionType, Union):
        return next((found for kind in get_args(hint) if (found := _choices(kind))), ())
    return ()


def _sentence(hint: Any) -> str:
    """What is said of a value of this type."""
    metas = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((meta.description for meta in reversed(metas) if getattr(meta, "description", None)), "")


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
