"""The rooms: tools/check_rooms.py finds what breaks its rules; what serves requests loads no lab."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from warmroute import __version__

ROOT = Path(__file__).resolve().parents[1]


# The tool.


@pytest.fixture(scope="module")
def tool() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools" / "check_rooms.py"))


FILES = {
    "event_log.py": "",
    "core/messages.py": "import msgspec\nfrom urllib.parse import quote\n",
    "core/calls.py": "from warmroute.core.messages import Send\nfrom warmroute import event_log\n",
    "edge/proxy.py": "from warmroute.core import messages\n",
    "app/service.py": "from warmroute.edge.proxy import Proxy\n",
    "app/commands/plan.py": "def run():\n    from warmroute.lab.sizing import plan\n",
    "lab/sizing.py": "",
}
"""A house in which nothing is wrong."""


def found(tool: dict[str, Any], folder: Path, files: dict[str, str], exceptions: set[tuple[str, str]]) -> list[str]:
    package = folder / "warmroute"
    for file, text in (FILES | files).items():
        path = package / file
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text)
    problems = tool["problems"](tool["all_imports"](package), package, exceptions)
    return [problem for problem in problems if "nothing needs the arrow" not in problem]


def test_a_house_in_order_has_no_problems(tool: dict[str, Any], tmp_path: Path) -> None:
    assert found(tool, tmp_path, {}, set()) == []


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("core/router.py", "from warmroute.edge.proxy import Proxy", "core may not know edge.proxy"),
        ("edge/tries.py", "from warmroute.core.calls import Try", "edge may not know core.calls"),
        ("edge/tries.py", "from warmroute.core import calls", "edge may not know core.calls"),
        ("prompt/reader.py", "def f():\n    import warmroute.core.calls", "prompt may not know core.calls"),
        ("engines/vllm.py", "if TYPE_CHECKING:\n    from warmroute.app import service", "engines may not know app"),
        ("config/file.py", "from warmroute import event_log", "config may not know event_log"),
        ("core/router.py", "from . import calls", "relative imports"),
        ("core/router.py", "import asyncio", "the core does no I/O"),
        ("core/router.py", "from time import monotonic", "the core does no I/O"),
        ("core/router.py", "import urllib.request", "the core does no I/O"),
        ("app/service.py", "def f():\n    from warmroute.lab import sizing", "may import lab"),
        ("app/commands/plan.py", "from warmroute.lab import sizing", "may import lab"),
        ("core/__init__.py", "from warmroute.core import calls", "the first page of a room imports nothing"),
        ("cache/__init__.py", "import warmroute", "the room 'cache' is not in"),
        ("core/messages.py", "import warmroute.core.calls", "circle: core/calls.py, core/messages.py"),
    ],
)  # fmt: skip
def test_what_breaks_a_rule_is_found(tool: dict[str, Any], tmp_path: Path, file: str, text: str, problem: str) -> None:
    [one] = found(tool, tmp_path, {file: text}, set())
    assert problem in one


def test_a_circle_of_imports_for_types_or_inside_functions_is_none(tool: dict[str, Any], tmp_path: Path) -> None:
    text = "if TYPE_CHECKING:\n    from warmroute.core import calls\ndef f():\n    import warmroute.core.calls\n"
    assert found(tool, tmp_path, {"core/messages.py": text}, set()) == []


def test_an_exception_allows_one_import_until_nothing_needs_it(tool: dict[str, Any], tmp_path: Path) -> None:
    exceptions = {("core/brain.py", "time")}
    assert found(tool, tmp_path, {"core/brain.py": "import time"}, exceptions) == []
    [one] = found(tool, tmp_path, {"core/brain.py": ""}, exceptions)
    assert "nothing needs the exception core/brain.py → time any more" in one


def test_lines_of_code_leave_out_comments_and_docstrings(tool: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text(
        '"""What\nit is."""\n\n# why\nx = """a\nb"""  # 2 lines\n\n\ndef f():\n    "f"\n    x\n'
    )
    assert tool["lines_of_code"](tmp_path / "file.py") == 4


# First pages.


FIRST_PAGES = sorted((ROOT / "src" / "warmroute").glob("*/__init__.py"))


@pytest.mark.parametrize("page", FIRST_PAGES, ids=lambda page: page.parent.name)
def test_the_first_page_of_a_room_names_files_that_exist(page: Path) -> None:
    text = ast.get_docstring(ast.parse(page.read_text())) or ""
    assert text, "a room's __init__ says what the room is for"
    for name in re.findall(r"\b[\w/]+(?:\.(?:py|h)\b|/(?=\s))", text):
        assert (page.parent / name).exists() or (page.parent.parent / name).exists(), name


# What serves requests.

BUILD_THE_SERVICE = """
import sys
from warmroute.app.commands import serve
from warmroute.app.main import create_parser
from warmroute.app.service import Service
from warmroute.config import from_table

create_parser()
config = from_table({
    "nodes": [{"url": "http://127.0.0.1:1"}],
    "provisioners": [{"kind": "process", "gpu": "L4"}],
    "scaling": {"enabled": True, "replay": {"enabled": True}},
})
Service(lambda: config)
serve.picker_factory()
print([name for name in sys.modules if name.startswith("warmroute.lab")])
"""


def test_serve_and_picker_load_no_lab() -> None:
    ran = subprocess.run([sys.executable, "-c", BUILD_THE_SERVICE], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "[]\n"


def test_the_package_can_be_run() -> None:
    ran = subprocess.run([sys.executable, "-m", "warmroute", "--version"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(f"warmroute {__version__} (")
