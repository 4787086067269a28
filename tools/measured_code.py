"""Hashes of the code that a benchmark measures, so that a figure can say that its code has changed since.

`bench/measured_code.toml` names parts of the code and lists for each record of bench/results the parts that it
measures. A record keeps one hash for each of them. The hash of a part is that of its top-level definitions: their
syntax trees without docstrings, comments, positions and imports, in any order. So a moved or renamed file, or a merge
of two files of a part, changes no hash once the part lists the new path. Of C files it is the text without comments
and blanks.

    python tools/measured_code.py carry [NAME…]     where replays are byte-equal, records get the hashes of today's code
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
ORACLE = ROOT / "tests" / "fixtures" / "replay_oracle.json"

C_COMMENT_OR_TEXT = re.compile(r'/\*.*?\*/|//[^\n]*|("(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\')', re.DOTALL)


class UndeclaredCode(Exception):
    """The list of measured code does not fit the repository."""


@functools.cache
def declared() -> dict[str, Any]:
    return tomllib.loads((ROOT / "bench" / "measured_code.toml").read_text())


def normalized(tree: Any) -> Any:
    """Return a syntax tree as nested lists that are equal on all Python versions. Empty fields are left out, because
    versions differ in which ones there are."""
    if isinstance(tree, ast.AST):
        fields = ((name, normalized(value)) for name, value in ast.iter_fields(tree) if name not in ("ctx", "kind"))
        return [type(tree).__name__, *([name, value] for name, value in fields if value not in (None, []))]
    if isinstance(tree, list):
        return [normalized(one) for one in tree if not _says_nothing(one)]
    return None if tree is None else f"{type(tree).__name__} {tree!r}"


def _says_nothing(statement: Any) -> bool:
    """Return whether a statement is an import or a docstring, of a field too."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return True
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def name_of(statement: ast.stmt) -> str:
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return statement.name
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", statement)]
    return " ".join(target.id for target in targets if isinstance(target, ast.Name))


def definitions(path: str, text: str) -> set[tuple[str, str]]:
    """Return the name and the hash of each top-level definition of a file."""
    if not path.endswith(".py"):
        bare = C_COMMENT_OR_TEXT.sub(lambda match: match.group(1) or " ", text)
        return {("", _hash("".join(bare.split())))}
    kept = (statement for statement in ast.parse(text).body if not _says_nothing(statement))
    return {(name_of(statement), _hash(repr(normalized(statement)))) for statement in kept}


@functools.cache
def _definitions_in(file: Path) -> set[tuple[str, str]]:
    return definitions(file.name, file.read_text())


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def part_definitions(part: str) -> set[tuple[str, str]]:
    """Return the definitions of a part: the name of a part, or a path, or a path with the name of one definition."""
    found: set[tuple[str, str]] = set()
    for item in declared()["parts"].get(part, {}).get("code") or [part]:
        path, _, name = item.partition(":")
        files = sorted(ROOT.glob(path)) if "*" in path else [ROOT / path]
        try:
            here = {one for file in files for one in _definitions_in(file)}
        except OSError:
            here = set()
        wanted = {one for one in here if not name or one[0] == name}
        if not wanted:
            raise UndeclaredCode(f"bench/measured_code.toml: {item} is not there; if it moved, list its new place")
        found |= wanted
    return found


def digest(found: set[tuple[str, str]]) -> str:
    return _hash("\n".join(sorted(one for _, one in found)))


@functools.cache
def hash_of_part(part: str) -> str:
    return digest(part_definitions(part))


def parts_of(record: str) -> list[str]:
    try:
        parts: list[str] = declared()["records"][record]
    except KeyError:
        raise UndeclaredCode(f"bench/measured_code.toml does not say which code {record} measures") from None
    return parts


def hashes(record: str) -> dict[str, str]:
    return {part: hash_of_part(part) for part in parts_of(record)}


def changed_parts(record: str, measured: dict[str, Any]) -> list[str]:
    """Return the parts whose code is not the measured one. Hashes count, not names: a part may be renamed."""
    known = set(measured["code"].values())
    return [part for part, now in hashes(record).items() if now not in known]


def replayed_runs(parts: list[str]) -> str:
    """Return a hash of the recorded replays (tools/replay_oracle.py) of these parts' policies."""
    policies = {one for part in parts for one in declared()["parts"].get(part, {}).get("policies", [])}
    replays: dict[str, Any] = json.loads(ORACLE.read_text())
    runs = {
        f"{name} {run}": figures
        for name, replay in replays.items()
        for run, figures in replay["runs"].items()
        if run.partition(" ")[2].partition(":")[0] in policies
    }
    return _hash(json.dumps(runs, sort_keys=True))


def measured_now(record: str) -> dict[str, Any]:
    """Return what a new record says of the code that it measures."""
    return {
        "version": re.findall(r'__version__ = "(.*)"', (ROOT / "src" / "warmroute" / "__init__.py").read_text())[0],
        "commit": _commit(),
        "code": hashes(record),
        "replays": replayed_runs(parts_of(record)),
    }


def _commit() -> str:
    """Return the commit of the checkout, with `+` if its code has changed since. '' without git."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "src", "bench", ":!bench/results")
        return git("rev-parse", "--short=8", "HEAD").strip() + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def carry(names: list[str]) -> int:
    """Give records today's hashes, if only code that replays run has changed and all replays are equal."""
    chosen = {}
    for path in sorted(RESULTS.glob("*.json")):
        record = json.loads(path.read_text())
        parts = changed_parts(path.stem, record["measured"])
        if not parts or (names and path.stem not in names):
            continue
        if unseen := [part for part in parts if not declared()["parts"].get(part, {}).get("replayed")]:
            print(f"{path.stem}: replays do not run {', '.join(unseen)}; measure it again")
        elif record["measured"]["replays"] != replayed_runs(parts_of(path.stem)):
            print(f"{path.stem}: the recorded replays of its policies changed since it was measured; measure it again")
        else:
            chosen[path] = record
    if not chosen:
        return 1
    if subprocess.run([sys.executable, str(ROOT / "tools" / "replay_oracle.py")]).returncode:
        print("The replays are not equal: no record is carried over.")
        return 1
    for path, record in chosen.items():
        record["measured"]["code"] = hashes(path.stem)
        path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
        print(f"{path.stem}: carried over")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["carry"])
    parser.add_argument("name", nargs="*", help="records; all that can be carried over if none is named")
    return carry(parser.parse_args().name)


if __name__ == "__main__":
    sys.exit(main())
