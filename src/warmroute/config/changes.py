"""What a reload changes, in a few words for the log: keys, names, and values that cannot be secret.

Texts of the file may be passwords or hashes of keys, so only numbers, switches and values of a fixed set are shown. Of
other keys the log has the name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from warmroute.config.config import Config
from warmroute.config.node_settings import NodeConfig, node_name
from warmroute.config.section import Section, choices_of, keys_of, section_of
from warmroute.config.serving_settings import KeyConfig

MAX_CHANGES: Final = 20
"""Changes that are named one by one, so that a line of the log stays readable. The others are counted."""
MAX_CHARACTERS: Final = 120
"""Length of one change: names of nodes, tenants and routes can be long."""


def describe_changes(before: Config, after: Config, waiting: Sequence[str] = ()) -> list[str]:
    """Return one phrase for each change, such as `limits.connections 20000 -> 100` or `nodes +gpu-c`. `waiting`: keys
    whose change takes effect after a restart."""
    found = [one if len(one) <= MAX_CHARACTERS else f"{one[: MAX_CHARACTERS - 1]}…" for one in _of_table(before, after)]
    found = [f"{one}, from the next restart on" if _is_of(one, waiting) else one for one in found]
    if len(found) <= MAX_CHANGES:
        return found
    return [*found[:MAX_CHANGES], f"{len(found) - MAX_CHANGES} more"]


def _of_table(before: Section, after: Section, prefix: str = "") -> Iterator[str]:
    """Yield the changes of a table's keys. `prefix` begins the path of each key."""
    for name, kind in keys_of(type(after)).items():
        old, new, path = getattr(before, name), getattr(after, name), prefix + name
        if old == new:
            continue
        if isinstance(old, Section) and isinstance(new, Section):
            yield from _of_table(old, new, f"{path}.")
        elif section_of(kind) is KeyConfig:
            yield from _of_api_keys(old, new)
        elif section_of(kind) is not None:
            yield from _of_list(path, old, new)
        elif _is_no_secret(kind, old) and _is_no_secret(kind, new):
            yield f"{path} {_shown(old)} -> {_shown(new)}"
        else:
            yield f"{path} changed"


def _is_of(change: str, keys: Sequence[str]) -> bool:
    path = change.partition(" ")[0]
    return any(path == key or path.startswith(f"{key}.") for key in keys)


def _of_list(path: str, before: Sequence[Section], after: Sequence[Section]) -> Iterator[str]:
    """Yield the changes of a repeatable table."""
    old, new = ({_label(number, one): one for number, one in enumerate(items)} for items in (before, after))
    yield from (f"{path} +{name}" for name in new if name not in old)
    yield from (f"{path} -{name}" for name in old if name not in new)
    stay = [name for name in new if name in old]
    for name in stay:
        yield from _of_table(old[name], new[name], f"{path} {name}: ")
    if stay != [name for name in old if name in new]:  # of routes, the first that matches applies
        yield f"{path} in another order"


def _of_api_keys(before: Sequence[KeyConfig], after: Sequence[KeyConfig]) -> Iterator[str]:
    """Yield the changes of API keys, which are known by their tenant."""
    for tenant in sorted({key.tenant for key in (*before, *after)}):
        old, new = ({key.sha256: key for key in keys if key.tenant == tenant} for keys in (before, after))
        added, removed = (
            [key for one, key in these.items() if one not in others] for these, others in ((new, old), (old, new))
        )
        if not old or not new:
            yield f"keys {'-' if old else '+'}{tenant}"
            continue
        if len(added) == len(removed) != 0:
            yield f"keys {tenant}: rotated" + (f" ({len(added)} keys)" if len(added) > 1 else "")
        elif added or removed:
            yield f"keys {tenant}: {len(added)} added, {len(removed)} removed"
        pairs = [(old[one], key) for one, key in new.items() if one in old]
        if len(added) == len(removed) == 1:
            pairs.append((removed[0], msgspec.structs.replace(added[0], sha256=removed[0].sha256)))
        for pair in pairs:
            yield from _of_table(*pair, f"keys {tenant}: ")


def _label(number: int, item: Section) -> str:
    """Return how the log names an item of a repeatable table."""
    if isinstance(item, NodeConfig):
        return node_name(item)
    names = (getattr(item, name, "") for name in ("label", "name", "island", "role"))
    return next((str(name) for name in names if name), f"{number + 1}")


def _is_no_secret(kind: Any, value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float)) or value in choices_of(kind)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "none" if value is None else str(value)
