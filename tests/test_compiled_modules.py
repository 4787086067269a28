"""The modules that mypyc compiles in releases (setup.py): a checkout runs their sources, and nobody needs mypyc."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from warmroute import build, is_compiled, version_and_build
from warmroute.app.main import create_parser
from warmroute.app.metrics.page import MetricsPage
from warmroute.config import Health, Index
from warmroute.core.cache_view import CacheView
from warmroute.core.fleet import Fleet
from warmroute.core.traffic import Counters

REPOSITORY = Path(__file__).parent.parent
PACKAGE = REPOSITORY / "src" / "warmroute"


def compiled_modules() -> list[str]:
    listed = (REPOSITORY / "setup.py").read_text().split("COMPILED = [")[1].split("]")[0]
    return re.findall(r'"([^"]+)"', listed)


def test_every_compiled_module_exists() -> None:
    modules = compiled_modules()
    assert len(modules) > 10 and modules == sorted(modules)
    assert all((PACKAGE / f"{module}.py").is_file() for module in modules)


def test_compiled_classes_inherit_from_compiled_classes_only() -> None:
    """mypyc accepts the kernel's types as base classes, and then allocates too little memory."""
    trees = [ast.parse((PACKAGE / f"{module}.py").read_text()) for module in compiled_modules()]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    names = {node.name for node in classes}
    for node in classes:
        bases = {ast.unparse(base) for base in node.bases}
        assert bases <= names | {"Protocol", "Enum", "enum.Enum", "NamedTuple"}, node.name


def test_a_checkout_contains_no_compiled_modules() -> None:
    found = [path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.so")]
    assert set(found) <= {"_kernel"}


def test_the_version_says_which_build_runs() -> None:
    assert version_and_build().endswith("(compiled)" if is_compiled() else "(interpreted)")
    [version] = [action for action in create_parser()._actions if "--version" in action.option_strings]
    assert getattr(version, "version", "") == f"warmroute {version_and_build()}"


def test_the_metrics_say_which_build_runs() -> None:
    page = MetricsPage(Fleet(Health()), CacheView(Index()), Counters(), lambda: (0, 0), lambda: (0, 0)).render()
    [line] = [line for line in b"".join(page).decode().splitlines() if line.startswith("warmroute_build_info{")]
    assert f'build="{build()}"' in line
