"""Holds the arrows between the rooms: which room may import which. Run by `make lint`.

The table is the architecture (docs/concepts/architecture.md). A line of code that needs an arrow that is not there is
in the wrong room, or the rooms are wrong; either way it is a decision, not an import.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "warmroute"

MAY_KNOW: dict[str, set[str]] = {
    "_kernel": set(),
    "config": set(),
    "kubernetes_api": {"config"},
    "http_client": {"_kernel"},
    "core": {"_kernel", "config", "app", "edge", "prompt"},
    "prompt": {"_kernel", "config", "core", "engines"},
    "edge": {"_kernel", "app", "config", "core", "prompt"},
    "engines": {"_kernel", "config", "core", "edge", "kubernetes_api"},
    "scaling": {"config", "core", "kubernetes_api"},
    "lab": {"_kernel", "app", "config", "core", "edge", "engines", "scaling"},
}
LEAVES = {"__main__", "blocking", "build", "build_advice", "event_log", "http_client", "version_and_build"}
"""Modules and names that know no room and that every room may know."""
PUTS_TOGETHER = {"app"}
"""Who may know everybody, and is known by nobody but each other."""


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def imports(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                yield node.lineno, "relative import"
            elif node.module == "warmroute":
                yield from ((node.lineno, f"warmroute.{alias.name}") for alias in node.names)
            elif node.module:
                yield node.lineno, node.module
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)


def wrong_arrows() -> Iterator[str]:
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE)
        room = relative.parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        if room not in MAY_KNOW and room not in PUTS_TOGETHER | LEAVES:
            yield f"src/warmroute/{relative}: the room {room!r} is not in tools/check_rooms.py"
            continue
        for line, module in imports(path):
            if module == "relative import":
                yield f"src/warmroute/{relative}:{line}: relative imports hide the arrows; name the room"
                continue
            known = room_of(module) if module.startswith("warmroute") else ""
            if known in ("", "__version__", room) or known in LEAVES or room in PUTS_TOGETHER:
                continue
            if known not in MAY_KNOW.get(room, set()):
                yield f"src/warmroute/{relative}:{line}: {room} may not know {known} ({module})"


def main() -> int:
    wrong = list(wrong_arrows())
    print("\n".join(wrong) if wrong else "rooms: all arrows point the right way")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
