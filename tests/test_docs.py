"""The documentation is true for the code: generated pages are current; names, links and examples in all pages work."""

from __future__ import annotations

import ast
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path

import pytest
from support.promql import samples_of

from warmroute.app.commands import nodes, reference
from warmroute.app.main import COMMANDS, create_parser, main
from warmroute.app.metrics.page import METRICS, MetricsPage
from warmroute.config import Config, from_table, tables
from warmroute.config.section import keys_of
from warmroute.core import calls, rejections
from warmroute.core.cache_view import CacheView
from warmroute.core.fleet import Fleet
from warmroute.core.messages import RoutingRequest
from warmroute.core.rejections import NotAdmitted, RoutingError, rejection
from warmroute.core.traffic import Counters
from warmroute.scaling.scaling_decision import PoolDecision
from warmroute.scaling.scaling_service import ScalingStats

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "src" / "warmroute"
REFERENCE = ROOT / "docs" / "reference"
PAGES = [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND_NAMES = {*COMMANDS, *nodes.NAMES}


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


every_page = pytest.mark.parametrize("page", PAGES, ids=page_id)


# Generated pages.


def test_the_configuration_reference_is_generated() -> None:
    assert (REFERENCE / "configuration.md").read_text() == reference.config_reference(), "run `make docs`"


def test_the_metrics_reference_is_generated() -> None:
    assert (REFERENCE / "metrics.md").read_text() == reference.metrics_reference(), "run `make docs`"


# Names.


@cache
def exported_metrics() -> set[str]:
    fleet = Fleet(Config().health)
    fleet.add(from_table({"nodes": [{"url": "http://a:1"}]}).nodes[0])
    cache_view = CacheView(Config().index)
    cache_view.add_node("a:1")
    stats = ScalingStats(
        desired_nodes=1, states={"serving": 1}, usd_per_hour=1.0, utilisation=0.5, added=1, removed=0, refused=0,
        lost=0, leading=True, pools={"prefill": PoolDecision(1, 1, 0.5)},
    )  # fmt: skip
    page = MetricsPage(fleet, cache_view, Counters(), lambda: (0, 0), lambda: (0, 0), scaling=lambda: stats)
    lines = b"".join(page.render()).decode().splitlines()
    return {line.split()[2] for line in lines if line.startswith("# TYPE warmroute_")}


def test_the_metrics_reference_lists_exactly_the_exported_metrics() -> None:
    assert set(re.findall(r"^\| `(warmroute_\w+)`", (REFERENCE / "metrics.md").read_text(), re.M)) == exported_metrics()


@every_page
def test_every_metric_in_a_page_is_exported(page: Path) -> None:
    exported = exported_metrics()
    for name, wildcard in re.findall(r"\b(warmroute_[a-z0-9_]+)(\*?)", page.read_text()):
        known = exported | samples_of(METRICS).keys()  # those of a histogram have suffixes
        found = any(metric.startswith(name) for metric in exported) if wildcard else name in known
        assert found, f"{page_id(page)}: {name}{wildcard}"


@every_page
def test_every_configuration_key_in_a_page_exists(page: Path) -> None:
    keys = {name: keys_of(section) for name, section, _ in tables()}
    for table, key in re.findall(r"`((?:scaling\.)?[a-z_]+)\.([a-z_0-9]+)(?: = [^`]*)?`", page.read_text()):
        if table in keys and key not in ("md", "py", "c", "pyi"):
            assert key in keys[table], f"{page_id(page)}: {table}.{key}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "tests" / "README.md"], ids=page_id)
def test_every_source_file_in_a_page_exists(page: Path) -> None:
    folders = (ROOT, SOURCES, ROOT / "tests", page.parent)
    names = {
        path.name for folder in (SOURCES, ROOT / "tests", ROOT / "bench", ROOT / "tools") for path in folder.rglob("*")
    }
    for path in re.findall(r"`([\w./-]+\.(?:py|c|h|toml|gz))(?:::\w+)?`", page.read_text()):
        if path.startswith(("/", "~", ".")) or path in ("warmroute.toml",):
            continue  # an example on the reader's machine
        found = any((folder / path).exists() for folder in folders) or path in names
        assert found, f"{page_id(page)}: {path}"


ARCHITECTURE = ROOT / "docs" / "concepts" / "architecture.md"


def test_the_page_on_architecture_lists_the_rooms_and_what_they_import() -> None:
    rooms = runpy.run_path(str(ROOT / "tools" / "check_rooms.py"))["MAY_KNOW"]
    section = ARCHITECTURE.read_text().split("\n## What may import what\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|$", section, re.M)
    assert {room: set(re.findall(r"`([\w.]+)`", imports)) for room, imports in rows} == rooms


def test_the_page_on_architecture_lists_every_file_of_every_room() -> None:
    section = ARCHITECTURE.read_text().split("\n## The rooms\n")[1].split("\n## ")[0]
    for room in re.split(r"^### ", section, flags=re.M)[1:]:
        name, _, lines = room.partition("\n")
        folder = SOURCES if name == "floor" else SOURCES / name
        files = folder.glob("*.*") if name == "floor" else folder.rglob("*.*")
        sources = {file.name for file in files if file.suffix in (".py", ".c") and file.name != "__init__.py"}
        listed = set(re.findall(r"\w+\.(?:py|c)\b", lines)) - {"__init__.py"}
        assert listed == sources, name


@pytest.mark.parametrize("table", [calls.CALL_ROWS, calls.TRY_ROWS], ids=["call", "try"])
def test_the_page_on_architecture_has_the_states_of_calls_and_tries(table: dict[tuple[type, int], str]) -> None:
    first = next(event.__name__ for event, _ in table)
    text = ARCHITECTURE.read_text().splitlines()
    at = next(number for number, line in enumerate(text) if line.startswith(f"| {first} |"))
    states = [getattr(calls, name.upper()) for name in cells(text[at - 2])[1:]]
    rows = {row[0]: row[1:] for row in map(cells, takewhile(lambda line: line.startswith("|"), text[at:]))}
    assert rows.keys() == {event.__name__ for event, _ in table}
    for event, row in rows.items():
        found = {state for state, cell in zip(states, row, strict=True) if cell != "–"}
        assert found == {state for kind, state in table if kind.__name__ == event}, event


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


# Error codes.

ROUTING_ERRORS = (
    rejections.UnknownModel(), rejections.MissingModel(), rejections.NoNodeAvailable(),
    rejections.NoNodeInSubset(), rejections.ContextTooLong(9000, 2048), rejections.AllNodesFailed(2, None),
    rejections.FailedOnEveryNode(2),
    rejections.AllNodesBusy(1), rejections.AllNodesUnavailable(1), rejections.OutOfResources(), rejections.QueueFull(),
    rejections.Displaced(), rejections.HeldTooLong(),
    rejections.NodeQueuesFull(), rejections.NodesFull(), rejections.WouldQueue(),
    rejections.QueueTimeout(),
    rejections.DeadlineUnreachable(True, 2.0, 1.0), rejections.RateLimited("requests", 1.0, 1, 1.0, ()),
    rejections.DeadlinePassed(True, 2.0),
)  # fmt: skip
"""One of each kind of error that a request without a node gets."""


def test_every_error_code_is_documented_with_its_status_and_exists() -> None:
    text = (REFERENCE / "errors.md").read_text()
    documented = {(int(status), code) for status, code in re.findall(r"^\| (\d{3}) \| `(\w+)` \|", text, re.M)}
    assert documented == set(errors_in_source()) | set(errors_of_routing())


def errors_in_source() -> Iterator[tuple[int, str]]:
    """Yield status and code of each `HttpError(status, …, code=…)` and of each table row `(status, code, message)`."""
    for path in (path for room in ("edge", "app", "engines") for path in (SOURCES / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "HttpError":
                code = next(word.value for word in node.keywords if word.arg == "code")
                if _text(code):
                    yield _number(node.args[0]), _text(code)
            elif isinstance(node, ast.Tuple) and len(node.elts) == 3:
                status, name = _number(node.elts[0]), _text(node.elts[1])
                if name and 400 <= status < 600:
                    yield status, name


def errors_of_routing() -> Iterator[tuple[int, str]]:
    kinds = {kind for kind in vars(rejections).values() if isinstance(kind, type) and issubclass(kind, RoutingError)}
    assert kinds == {*map(type, ROUTING_ERRORS), NotAdmitted, RoutingError}
    for error in ROUTING_ERRORS:
        sent = rejection(error, 1, RoutingRequest("model"))
        yield sent.status, sent.code


def _text(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _number(node: ast.expr) -> int:
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else 0


# Log events.

FORMATTED_EVENTS = {"node_{}": ("node_up", "node_half_open")}
"""Events whose name is an f-string, and the names that it gives."""
LEVELS = {"debug": "debug", "info": "info", "warning": "warning", "error": "error", "exception": "error"}


@cache
def logged_events() -> dict[str, set[str]]:
    """Return the levels of each event that the code logs."""
    events: dict[str, set[str]] = defaultdict(set)
    for path in SOURCES.rglob("*.py"):
        if path.name == "event_log.py":
            continue
        module = ast.parse(path.read_text(), str(path))
        constants, logs = _module_values(module)
        for node in ast.walk(module):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if isinstance(node.func.value, ast.Name) and node.func.value.id in logs and node.func.attr in LEVELS:
                names = _event_names(node.args[0], constants)
                assert names, f"{path}:{node.lineno}: an event needs a name that this test can read"
                for name in names:
                    events[name].add(LEVELS[node.func.attr])
    return events


def _module_values(module: ast.Module) -> tuple[dict[str, str], set[str]]:
    """Return the module's text constants, and the names of its EventLogs."""
    constants, logs = {}, set()
    for statement in module.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
        for target in targets:
            if isinstance(target, ast.Name) and value is not None:
                if _text(value):
                    constants[target.id] = _text(value)
                if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "EventLog":
                    logs.add(target.id)
    return constants, logs


def _event_names(node: ast.expr, constants: dict[str, str]) -> tuple[str, ...]:
    if isinstance(node, ast.JoinedStr):
        return FORMATTED_EVENTS.get("".join(_text(part) or "{}" for part in node.values), ())
    name = constants.get(node.id, "") if isinstance(node, ast.Name) else _text(node)
    return (name,) if name else ()


def test_every_log_event_is_documented_with_its_level_and_exists() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([a-z ]+) \|", (REFERENCE / "log-events.md").read_text(), re.M)
    assert len(rows) == len(dict(rows)), "an event is listed twice"
    assert {name: set(levels.split(" or ")) for name, levels in rows} == logged_events()


@every_page
def test_every_log_event_in_a_page_exists(page: Path) -> None:
    events = logged_events()
    for line in page.read_text().splitlines():
        for name in re.findall(r"(?:logs|log event|logged as|event) `(\w+)`", line):
            assert name in events, f"{page_id(page)}: {name}"


# Links.


@every_page
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page_id(page)}: {target}"
        if anchor:
            assert anchor in anchors(linked), f"{page_id(page)}: {target}"


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("folder", ["src", "tests", "bench", "tools", "docs", "README.md"])
def test_nothing_names_a_path_outside_the_repository(folder: str) -> None:
    outside = re.compile("|".join((r"\.\./" + "shared", "/work" + "/")))
    for path in [ROOT / folder] if (ROOT / folder).is_file() else sorted((ROOT / folder).rglob("*")):
        if path.is_file() and path.suffix in (".py", ".pyi", ".c", ".h", ".md", ".sh", ".toml", ".json"):
            found = outside.search(path.read_text(errors="replace"))
            assert found is None, f"{path.relative_to(ROOT)}: {found[0] if found else ''}"


# Examples.


def shown_commands(page: Path) -> Iterator[list[str]]:
    """Yield the arguments of each `warmroute` command in a page's indented and fenced blocks."""
    for command in re.findall(r"^(?:    )?warmroute ((?:.*\\\n)*.*)$", page.read_text(), re.M):
        yield shlex.split(command.replace("\\\n", " ").removesuffix("&"), comments=True)


@every_page
def test_commands_in_a_page_exist(page: Path) -> None:
    for name in re.findall(r"(?:^    |`)warmroute ([a-z][a-z-]*)", page.read_text(), re.M):
        assert name in COMMAND_NAMES, f"{page_id(page)}: warmroute {name}"


@every_page
def test_commands_in_a_page_have_valid_options(page: Path) -> None:
    for arguments in shown_commands(page):
        try:
            create_parser().parse_args(arguments)
        except SystemExit:
            pytest.fail(f"{page_id(page)}: warmroute {shlex.join(arguments)}")


RUN_ALONE = ("replay", "plan", "hash-key", "check-config", "config-reference", "metrics-reference")
"""Commands that need neither a network nor a running router."""
SAMPLE_CONFIG = '[[nodes]]\nurl = "http://10.0.0.11:8000"\n'


@every_page
def test_commands_in_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "warmroute.toml").write_text(SAMPLE_CONFIG)
    monkeypatch.chdir(tmp_path)
    for arguments in shown_commands(page):
        if arguments[0] in RUN_ALONE and not needs_other_files(page, arguments):
            assert main(shortened(arguments)) == 0, f"warmroute {shlex.join(arguments)}\n{capsys.readouterr().err}"


def needs_other_files(page: Path, arguments: list[str]) -> bool:
    """Return whether a command needs a file of the reader (a name in capitals) or, in the lab, a public trace."""
    traces = [word for word in arguments if word.endswith((".jsonl", ".jsonl.gz")) and not (ROOT / word).exists()]
    in_lab = page.is_relative_to(ROOT / "docs" / "lab")
    return (in_lab and bool(traces)) or any(word.isalpha() and word.isupper() for word in arguments)


def shortened(arguments: list[str]) -> list[str]:
    """Return the arguments of a shorter run: the first of several rates or numbers of clients, and few requests."""
    if arguments[0] not in ("replay", "plan"):
        return arguments
    first_only = [
        word.partition(",")[0] if before in ("--rate", "--concurrency") else word
        for before, word in zip(["", *arguments], arguments, strict=False)
    ]
    return [*first_only, "--limit", "20", "--warm-up", "0", "--quiet"]


@pytest.mark.parametrize("name", sorted(COMMAND_NAMES))
def test_every_command_explains_its_options(name: str) -> None:
    result = subprocess.run([sys.executable, "-m", "warmroute", name, "--help"], capture_output=True, text=True)
    assert result.returncode == 0 and "usage: warmroute" in result.stdout


def test_the_page_on_commands_has_a_section_for_each() -> None:
    text = (REFERENCE / "cli.md").read_text()
    assert set(re.findall(r"^\| \[`warmroute ([a-z-]+)`\]", text, re.M)) == COMMAND_NAMES


@every_page
def test_configuration_examples_are_valid(page: Path) -> None:
    for example in re.findall(r"^```toml\n(.*?)^```", page.read_text(), re.M | re.S):
        table = tomllib.loads(example.replace('sha256 = "…"', f'sha256 = "{"0" * 64}"'))
        if "offers" not in table:  # the file of `replay --offers`
            from_table(table)


# Plain words.

DIALECT = (
    r"whoever", r"of late", r"so many", r"(?:is|are|was|were|be) told", r"believed?", r"beliefs?",
    r"stands? in (?!front)", r"stood in", r"(?:comes?|came|coming) home", r"the books", r"homeless", r"what lacks",
    r"passed over", r"dearer", r"is said", r"heard of", r"tells? of", r"told of", r"unbegun", r"guests?",
)  # fmt: skip
"""Words of an older private dialect. Each has a plain form: "the router estimates", "recently", "the queue"."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_has_marks_of_a_merge(page: Path) -> None:
    lines = page.read_text().splitlines()
    assert not [line for line in lines if line.startswith(("<<<<<<<", ">>>>>>>")) or line == "======="]


@every_page
def test_pages_are_written_in_plain_words(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    found = re.findall(rf"\b(?:{'|'.join(DIALECT)})\b", text, re.I)
    assert not found, f"{page_id(page)}: {found}"
