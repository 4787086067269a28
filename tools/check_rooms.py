"""Checks which room of src/warmroute may import which. Run by `make lint`; `--count` prints the figures of the house.

The tables below are the architecture (docs/concepts/architecture.md). A line of code that needs an arrow that is not
there is in the wrong room, or the rooms are wrong. Either way it is a decision, not an import.

1. A room imports only the rooms that MAY_KNOW lists for it. Imports inside functions and for types alone count as well.
2. EXCEPTIONS may only get shorter: one that no import needs any more is an error, as is an arrow that none needs.
3. No files import each other in a circle when they are loaded.
4. The `__init__` of a room imports nothing, but for those in LISTS_NAMES.
5. Nothing that serves requests loads lab: only the files in STARTS_LAB import it, inside functions.
6. The core does no I/O, starts no thread and has no clock of its own: it imports nothing of IO.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "warmroute"

FLOOR = "floor"
"""The files of the package's root: version, log events, threads, two clients. Every room that knows others knows it."""
MAY_KNOW: dict[str, set[str]] = {
    "_kernel": set(),
    "config": set(),
    FLOOR: {"config", "_kernel"},
    "core": {"config", "_kernel"},
    "prompt": {"config", "_kernel"},
    "edge": {"core.messages", "core.wire", "prompt", "config", "_kernel"},
    "engines": {"core", "config"},
    "scaling": {"core", "config"},
    "lab": {"core", "engines", "scaling", "edge", "config"},
    "app": {"core", "prompt", "edge", "engines", "scaling", "lab", "config", "_kernel"},
}
LISTS_NAMES = {"config", "engines"}
"""`config/__init__` lists the names that other rooms import, `engines/__init__` the engines."""
STARTS_LAB = {f"app/commands/{name}.py" for name in ("__init__", "replay", "plan", "simulate")}
IO = {
    "asyncio", "concurrent", "http", "io", "multiprocessing", "os", "pathlib", "queue", "select", "selectors",
    "shutil", "signal", "socket", "ssl", "subprocess", "tempfile", "threading", "time", "urllib.request", "uvloop",
    "warmroute.blocking", "warmroute.http_client", "warmroute.kubernetes_api",
}  # fmt: skip

EXCEPTIONS = {
    ("engines/block_reports.py", "warmroute.edge.async_handler"),
    ("engines/block_reports.py", "warmroute.edge.errors"),
    ("lab/workloads/trace.py", "warmroute.app.capture"),  # a file name
    ("prompt/reader.py", "warmroute.core.traffic"),
}
"""Importing file and imported module, of imports that break a rule."""


class Import(NamedTuple):
    file: str
    line: int
    module: str
    when_loaded: bool
    """Else inside a function, or for types alone."""

    @property
    def room(self) -> str:
        return room_of_file(self.file)


def room_of_file(file: str) -> str:
    if file == "__main__.py":  # the command, by another name
        return "app"
    return file.partition("/")[0] if "/" in file else FLOOR


def all_imports(package: Path) -> list[Import]:
    """Return every import of every file. Modules are named as far as they are files: not the names that are in them."""
    found = []
    for path in sorted(package.rglob("*.py")):
        file = str(path.relative_to(package))
        for statement, when_loaded in _statements(ast.parse(path.read_text(), str(path)), True):
            found += [
                Import(file, statement.lineno, module, when_loaded) for module in sorted(_modules(statement, package))
            ]
    return found


def _statements(node: ast.AST, when_loaded: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield node, when_loaded
    for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    if for_types or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        when_loaded = False
    for child in ast.iter_child_nodes(node):
        yield from _statements(child, when_loaded)


def _modules(statement: ast.Import | ast.ImportFrom, package: Path) -> set[str]:
    if isinstance(statement, ast.Import):
        return {alias.name for alias in statement.names}
    module = "." * statement.level + (statement.module or "")
    names = {f"{module}.{alias.name}" for alias in statement.names}
    return {name if _file_of(name, package) else module for name in names}


def _file_of(module: str, package: Path) -> str:
    """Return the file of a module of the package; an empty string for other modules."""
    top, *parts = module.split(".")
    if top == package.name:
        for path in (package.joinpath(*parts, "__init__.py"), package.joinpath(*parts).with_suffix(".py")):
            if path.is_file():
                return str(path.relative_to(package))
    return ""


def room_of(module: str, package: Path) -> str:
    """Return the room of a module; an empty string if it is not of the package."""
    top, *parts = module.split(".")
    if top != package.name:
        return ""
    return parts[0] if parts and (package / parts[0]).is_dir() else FLOOR


def problem_of(one: Import, package: Path) -> str:
    """Return which rule an import breaks; an empty string for most."""
    known = room_of(one.module, package)
    if one.module.startswith("."):
        return "relative imports hide the arrows; name the room"
    if one.room not in MAY_KNOW:
        return f"the room {one.room!r} is not in tools/check_rooms.py"
    if one.room == "core" and any(f"{one.module}.".startswith(f"{module}.") for module in IO):
        return f"the core does no I/O and has no clock ({one.module})"
    if one.room == "app" and known == "lab" and (one.when_loaded or one.file not in STARTS_LAB):
        return f"only {', '.join(sorted(STARTS_LAB))} may import lab, inside functions ({one.module})"
    if known and one.file == f"{one.room}/__init__.py" and one.room not in LISTS_NAMES | {"_kernel"}:
        return f"the first page of a room imports nothing ({one.module})"
    if known in ("", one.room) or (known == FLOOR and MAY_KNOW[one.room]):
        return ""
    if _arrow(one, package) not in MAY_KNOW[one.room]:
        return f"{one.room} may not know {one.module.removeprefix('warmroute.')}"
    return ""


def _arrow(one: Import, package: Path) -> str:
    """Return what of MAY_KNOW an import needs: a room, or the one file of it that the importing room may know."""
    below = one.module.removeprefix(f"{package.name}.")
    return below if below in MAY_KNOW[one.room] else room_of(one.module, package)


def circle(imports: list[Import], package: Path) -> list[str]:
    """Return the files that import each other in a circle when they are loaded, and those between two circles."""
    arrows = {(one.file, _file_of(one.module, package)) for one in imports if one.when_loaded}
    while True:
        importing, imported = {file for file, _ in arrows}, {target for _, target in arrows}
        left = {(file, target) for file, target in arrows if file in imported and target in importing}
        if left == arrows:
            return sorted(importing)
        arrows = left


def problems(imports: list[Import], package: Path, exceptions: set[tuple[str, str]] = EXCEPTIONS) -> Iterator[str]:
    needed, arrows = set(), set()
    for one in imports:
        problem = problem_of(one, package)
        if not problem:
            arrows.add((one.room, _arrow(one, package)))
        elif (one.file, one.module) in exceptions:
            needed.add((one.file, one.module))
        else:
            yield f"src/warmroute/{one.file}:{one.line}: {problem}"
    if files := circle(imports, package):
        yield f"these files import each other in a circle: {', '.join(files)}"
    for file, module in sorted(exceptions - needed):
        yield f"tools/check_rooms.py: nothing needs the exception {file} → {module} any more: remove it"
    for room, known in MAY_KNOW.items():
        for other in sorted(known):
            if (room, other) not in arrows:
                yield f"tools/check_rooms.py: nothing needs the arrow {room} → {other} any more: remove it"


def lines_of_code(path: Path) -> int:
    """Return the number of lines that are neither blank, nor comments, nor docstrings."""
    source = path.read_text()
    nothing = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in nothing:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def print_counts(imports: list[Import], package: Path) -> None:
    files = {str(path.relative_to(package)): lines_of_code(path) for path in package.rglob("*.py")}
    arrows: dict[str, set[str]] = {room: set() for room in MAY_KNOW}
    for one in imports:
        known = room_of(one.module, package)
        if known not in ("", FLOOR, one.room) and (one.file, one.module) not in EXCEPTIONS:
            arrows[one.room].add(known)
    print("room        files    lines   imports")
    for room, rooms in arrows.items():
        lines = [count for file, count in files.items() if room_of_file(file) == room]
        print(f"{room:8} {len(lines):8} {sum(lines):8}   {', '.join(sorted(rooms))}")
    between = sum(len(rooms) for room, rooms in arrows.items() if room not in ("app", FLOOR))
    print(f"arrows between rooms: {between}, and {len(arrows['app'])} of app")
    print(f"exceptions: {len(EXCEPTIONS)}")
    print(f"files: {len(files)}, lines of code: {sum(files.values())}")


def main() -> int:
    imports = all_imports(PACKAGE)
    if "--count" in sys.argv[1:]:
        print_counts(imports, PACKAGE)
        return 0
    wrong = list(problems(imports, PACKAGE))
    print("\n".join(wrong) if wrong else f"rooms: all arrows point the right way; exceptions left: {len(EXCEPTIONS)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
