"""A table of the configuration file: typed keys with one default each, and errors that name the nearest known key."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Final,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta

# The base class of all tables in the configuration file, and the error messages for invalid values.

Seconds = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]
Bytes = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=0, le=65_535)]
Ratio = Annotated[float, Meta(gt=0, le=1)]

NOT_IN_FILE: Final = Meta(extra={"in_file": False})
"""Marks a value that replay's experiments and tests vary, and that the configuration file cannot set."""
REMOVED: Final = Meta(extra={"in_file": False, "removed": True})
"""Marks a value of this kind that was a key of the file before REMOVED_IN. A file that still has it starts, with a
warning; Warmroute uses the default."""
REMOVED_IN: Final = "0.3"
"""The version that removed all keys which are still accepted with a warning. The version after it rejects them."""

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


PrefixKey = Literal["system_and_user", "system", "start"]


class ConfigError(Exception):
    """What is wrong with the configuration: one sentence for the operator for each problem."""

    def __init__(self, *problems: str) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of the configuration file."""

    removed: ClassVar[Mapping[str, str]] = {}
    """Former keys of this table that are constants now, and what the warning says is in use instead. Former keys that
    are still a value of the class have the mark REMOVED."""


SomeSection = TypeVar("SomeSection", bound=Section)


def section_of(kind: Any) -> type[Section] | None:
    """Return the Section that a field of this type holds, alone or in a list; None for plain values."""
    if get_origin(kind) is tuple:
        return section_of(get_args(kind)[0])
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def keys_of(section: type[Section], *, experiment: bool = False) -> dict[str, Any]:
    """Return the keys that the file may set in this table, with their types; or all that an experiment may set."""
    fields = msgspec.structs.fields(section)
    return {field.name: field.type for field in fields if experiment or _extra(field.type, "in_file", True)}


def removed_keys_of(section: type[Section]) -> dict[str, str]:
    """Return the keys that the file could set in this table before REMOVED_IN, with what is in use instead."""
    fields = {field.name: field for field in msgspec.structs.fields(section) if _extra(field.type, "removed", False)}
    return {name: _with_unit(name, field.default) for name, field in fields.items()} | dict(section.removed)


def _extra(hint: Any, name: str, default: bool) -> bool:
    """Return a mark of a field, such as those of NOT_IN_FILE."""
    metas = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return bool(next((meta.extra[name] for meta in metas if name in (getattr(meta, "extra", None) or {})), default))


_UNITS: Final = {"s": "s", "ms": "ms", "bytes": "bytes", "tokens": "tokens"}


def _with_unit(name: str, value: object) -> str:
    """Return a value with the unit that its name ends with: 0.5 of `breaker_open_s` is `0.5 s`."""
    text = f"{value:,g}" if isinstance(value, float) else toml_value(value)
    unit = _UNITS.get(name.rpartition("_")[2], "") if isinstance(value, int | float) else ""
    return f"{text} {unit}".rstrip()


def toml_value(value: object) -> str:
    """Return a value as a file has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    return f"{value:_}" if isinstance(value, int) and value > 65_535 else str(value)


def without_removed_keys(section: type[Section], table: Mapping[str, Any], name: str = "") -> tuple[Any, list[str]]:
    """Return the table of a file without its removed keys, and one warning for each of them, however often the file
    has it. `name`: the table's name with its brackets left out."""
    keys, removed = keys_of(section), removed_keys_of(section)
    left, warnings = {}, []
    for key, value in table.items():
        path = f"{name}.{key}" if name else key
        inner = section_of(keys.get(key))
        if key in removed:
            warnings.append(f"[{name}] {key} was removed in {REMOVED_IN}; Warmroute uses {removed[key]}")
            continue
        if inner is not None and isinstance(value, dict):
            value, found = without_removed_keys(inner, value, path)
            warnings += found
        elif inner is not None and isinstance(value, list):
            items = [
                without_removed_keys(inner, item, f"[{path}]") if isinstance(item, dict) else (item, [])
                for item in value
            ]
            value = [item for item, _found in items]
            warnings += (warning for _item, found in items for warning in found)
        left[key] = value
    return left, list(dict.fromkeys(warnings))


def parse_section(section: type[SomeSection], table: object) -> SomeSection:
    """Parse a table of a file or of a request. Raises ConfigError, which names each key with a problem. Removed keys
    count as absent."""
    if isinstance(table, dict):
        left, _warnings = without_removed_keys(section, table)
        problems = [message for _path, message in find_problems(section, left)]
        if problems:
            raise ConfigError(*problems)
        return convert_section(section, left)
    return convert_section(section, table)


def convert_section(section: type[SomeSection], table: object) -> SomeSection:
    """Parse a table that code built: it may also set values that are not in the file. Raises ConfigError."""
    try:
        return msgspec.convert(table, section, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(_error_message(str(error), section)) from None


def find_problems(
    section: type[Section],
    table: Mapping[str, Any],
    root: type[Section] | None = None,
    prefix: str = "",
    *,
    experiment: bool = False,
) -> Iterator[tuple[str, str]]:
    """Find every unknown key, invalid value and missing key of a table. Return the path of each, and a sentence.

    `prefix` is the path of this table in `root`, the section of the outermost table. An experiment may set more than
    the file.
    """
    root, keys = root or section, keys_of(section, experiment=experiment)
    suggestions = ""
    for key, value in table.items():
        path = f"{prefix}{key}"
        if key not in keys:
            named = re.sub(r"\[\d+\]", "", prefix)
            suggestion = _suggestion(key, keys, named)
            suggestions += suggestion
            yield path, f"unknown key {named}{key}; {suggestion}"
            continue
        inner = section_of(keys[key])
        if inner is not None and isinstance(value, dict) and get_origin(keys[key]) is not tuple:
            yield from find_problems(inner, value, root, f"{path}.", experiment=experiment)
        elif inner is not None and isinstance(value, list) and get_origin(keys[key]) is tuple:
            for number, item in enumerate(value):
                if isinstance(item, dict):
                    yield from find_problems(inner, item, root, f"{path}[{number}].", experiment=experiment)
                else:
                    yield from _value_problem(item, inner, root, f"{path}[{number}]")
        else:
            yield from _value_problem(value, keys[key], root, path)
    for field in msgspec.structs.fields(section):
        is_misspelt = f".{field.name}?" in suggestions
        if field.required and field.name not in table and not is_misspelt:
            where = f"{prefix.rstrip('.')}: " if prefix else ""
            yield prefix.rstrip("."), f"{where}missing required field `{field.name}`"


def _value_problem(value: Any, kind: Any, root: type[Section], path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, float) and math.isinf(value):
        yield path, f"{path}: expected a finite number"
        return
    try:
        msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        message = _error_message(str(error), root, path)
        yield message.partition(": ")[0], message


def _suggestion(key: str, keys: Mapping[str, Any], prefix: str) -> str:
    tables = [] if prefix else _tables_with(key, keys)
    if tables:
        return f"did you mean {' or '.join(f'{table}.{key}' for table in tables)}?"
    near = difflib.get_close_matches(key, keys, n=1, cutoff=0.5)
    if near:
        return f"did you mean {prefix}{near[0]}?"
    return f"known keys: {', '.join(sorted(keys))}" if keys else "this table has no keys"


def _tables_with(key: str, tables: Mapping[str, Any]) -> list[str]:
    """Return the tables that have this key: `[table]` before `[[table]]`."""
    found = [name for name, kind in tables.items() if (inner := section_of(kind)) and key in keys_of(inner)]
    return [name for name in found if get_origin(tables[name]) is not tuple] or found


_TYPE_NAMES: Final = {
    "int": "a whole number", "float": "a number", "str": "text", "bool": "true or false", "array": "a list",
    "object": "a table", "null": "nothing", "datetime": "a date and time", "date": "a date", "time": "a time",
}  # fmt: skip
_EXPECTED: Final = re.compile(r"Expected `(.+?)`(, got `(.+)`)?(.*)", re.DOTALL)


def _error_message(message: str, section: type[Section], at: str = "") -> str:
    """Turn msgspec's message into ours. `at` is the path of the converted value in the section.

    "Expected `int`, got `str` - at `$.listen.port`" becomes "listen.port: expected a whole number, got text".
    A value can be secret, so the message contains it only if the key has a fixed set of values.
    """
    problem, separator, where = message.rpartition(" - at `$")
    if not separator:
        problem, where = message, ""
    path = (at + where.rstrip("`")).lstrip(".").replace("[...]", "")
    text = _problem(problem, path, _type_at(section, path))
    return f"{path}: {text}" if path else text


def _problem(problem: str, path: str, hint: Any) -> str:
    choices = choices_of(hint)
    if problem.startswith("Invalid enum value") and choices:
        given = problem.removeprefix("Invalid enum value ").strip("'")
        near = difflib.get_close_matches(given.lower(), choices, n=1, cutoff=0.5)
        hint_text = f"did you mean {near[0]}? Possible" if near else "possible"
        return f"unknown value {given!r}; {hint_text} values: {', '.join(choices)}"
    match = _EXPECTED.fullmatch(problem)
    if match is None:
        return problem[:1].lower() + problem[1:]
    expected, _, got, rest = match.groups()
    if " matching regex " in rest:
        if path.endswith("sha256"):
            return "expected a SHA-256 hash in hex; `warmroute hash-key` prints it"
        return f"invalid format. {_description(hint)}".rstrip()
    name = re.sub(r"\[\d+\]", "", path)
    if name and got == "object" and section_of(hint) is not None:
        return f"write [[{name}]]: this table is repeatable"
    if name and got == "array" and section_of(hint) is not None and get_origin(hint) is not tuple:
        return f"write [{name}]: this table is not repeatable"
    kinds = " or ".join(_TYPE_NAMES.get(kind, kind) for kind in expected.split(" | ") if kind != "null")
    return f"expected {kinds}" + (f", got {_TYPE_NAMES.get(got, got)}" if got else "") + rest


def _type_at(section: type[Section], path: str) -> Any:
    """Return the annotated type of the value at this path; None if it is unknown."""
    hint: Any = section
    for name in re.sub(r"\[\d+\]", "", path).split(".") if path else ():
        inner = section_of(hint)
        hint = get_type_hints(inner, include_extras=True).get(name) if inner is not None else None
    return hint


def choices_of(hint: Any) -> tuple[str, ...]:
    """Return the possible values of a Literal; an empty tuple for every other type."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    if get_origin(hint) in (Annotated, tuple):
        return choices_of(get_args(hint)[0])
    if get_origin(hint) in (UnionType, Union):
        return next((found for kind in get_args(hint) if (found := choices_of(kind))), ())
    return ()


def _description(hint: Any) -> str:
    metas = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((meta.description for meta in reversed(metas) if getattr(meta, "description", None)), "")


class Key(NamedTuple):
    """A key of a table, as the configuration reference shows it."""

    name: str
    type_name: str
    default: Any
    """msgspec.NODEFAULT if the key is required."""
    description: str


def describe_keys(section: type[Section]) -> Iterator[Key]:
    """Describe the keys of a table, without the tables inside it."""
    keys = keys_of(section)
    for field in msgspec.structs.fields(section):
        if field.name not in keys or section_of(field.type) is not None:
            continue
        default = field.default
        if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        yield Key(field.name, _type_name(field.type), default, _description(field.type))


def _type_name(hint: Any) -> str:
    if get_origin(hint) is Annotated:
        return _type_name(get_args(hint)[0])
    if get_origin(hint) is Literal:
        return " / ".join(f'"{value}"' for value in get_args(hint))
    if get_origin(hint) is tuple:
        return f"list of {_type_name(get_args(hint)[0])}"
    if get_origin(hint) is dict:
        return f"table of {_type_name(get_args(hint)[1])}"
    if get_origin(hint) in (UnionType, Union):
        return ", ".join(_type_name(kind) for kind in get_args(hint) if kind is not NoneType)
    return {str: "text", int: "whole number", float: "number", bool: "true / false"}.get(hint, str(hint))


# Packages that only some settings need: the extras of pyproject.toml.


def missing_extra(setting: str, error: ImportError, extra: str) -> ConfigError:
    """Return the error for a setting whose package is not installed."""
    return ConfigError(
        f"{setting} needs the package {error.name}, which is not installed: install Warmroute with its extra {extra!r} "
        f"(pip install '.[{extra}]' in its checkout)"
    )
