"""Finds code in src that nothing in src uses: reference implementations belong in tests/, experiments in bench/.

A function, class, method or constant counts as used if its name occurs anywhere else in src. Run by `make lint`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "warmroute"
NAME = re.compile(r"\b[A-Za-z_]\w*\b")

CALLED_FROM_OUTSIDE = {
    # asyncio calls these on a protocol
    "connection_made", "connection_lost", "data_received", "eof_received", "pause_writing", "resume_writing",
    # argparse, logging, msgspec, jinja2 and gRPC call these
    "add_usage", "emit", "error", "on_broken_pipe", "redirect_request", "max_redirections", "format", "converter",
    "default_time_format", "default_msec_format",
    "call_binop", "visit_Concat", "_output_child_pre", "_output_child_post",
}  # fmt: skip
"""Names that a library calls, or that the language gives a meaning."""


def definitions(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        yield from ((target.id, target.lineno) for target in targets if isinstance(target, ast.Name))


def without_text(tree: ast.Module, source: str) -> str:
    """The source without docstrings and comments, where a name does not count as a use."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for at in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[at] = "\n"
    return re.sub(r"(?m)(?:^|\s)#.*$", "", "".join(lines))


def main() -> int:
    uses: Counter[str] = Counter()
    defined: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text()
        tree = ast.parse(source, str(path))
        uses.update(NAME.findall(without_text(tree, source)))
        for name, line in definitions(tree):
            defined.setdefault(name, []).append(f"{path.relative_to(PACKAGE.parent.parent)}:{line}")
    unused = [
        f"{place}: nothing in src uses {name}"
        for name, places in defined.items()
        if uses[name] == len(places) and name not in CALLED_FROM_OUTSIDE and not name.startswith("__")
        for place in places
    ]
    print("\n".join(sorted(unused)) if unused else "unused: everything in src is used in src")
    return 1 if unused else 0


if __name__ == "__main__":
    sys.exit(main())
