"""The documentation says what the code does: the reference is the code's own, and every name in it exists."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from warmroute.cli.config_reference import reference
from warmroute.cli.main import COMMANDS
from warmroute.config import Config, from_table
from warmroute.edge import errors
from warmroute.fleet.fleet import Fleet
from warmroute.index.cache_view import CacheView
from warmroute.scaling.scaling_service import ScalingStats
from warmroute.telemetry.counters import Counters
from warmroute.telemetry.prometheus import MetricsPage

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_configuration_reference_is_that_of_the_code() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == reference(), "run `make docs`"


def test_every_metric_that_the_docs_name_is_exported_and_the_other_way_round() -> None:
    fleet = Fleet(Config().health)
    fleet.add(from_table({"nodes": [{"url": "http://a:1"}]}).nodes[0])
    cache_view = CacheView(Config().index)
    cache_view.add_node("a:1")
    figures = ScalingStats(
        desired_nodes=1, states={"serving": 1}, usd_per_hour=1.0, utilisation=0.5, added=1, removed=0, refused=0,
        lost=0, leading=True,
    )  # fmt: skip
    page = MetricsPage(fleet, cache_view, Counters(), lambda: (0, 0), lambda: (0, 0), scaling=lambda: figures)
    page_text = page.render().decode()
    exported = {line.split()[2] for line in page_text.splitlines() if line.startswith("# TYPE warmroute_")}
    text = (ROOT / "docs" / "operations.md").read_text()
    table = text[text.index("## Metrics") : text.index("What to be woken by")]
    named = set(re.findall(r"`(warmroute_\w+)`", table))
    named |= {f"warmroute_node{tail}" for tail in re.findall(r"`(_\w+)`", table)}
    assert named == exported - {"warmroute_build_info"}


def test_every_error_code_stands_in_the_docs() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    codes = set(re.findall(r'code="(\w+)"', Path(errors.__file__).read_text()))
    assert not {code for code in codes if f"`{code}`" not in text}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} → {target}"


def test_commands_in_the_docs_are_commands() -> None:
    known = {command.__name__.rpartition(".")[2].replace("_", "-") for command in COMMANDS}
    for page in PAGES:
        for name in re.findall(r"(?:^    |`)warmroute ([a-z-]+)", page.read_text(), re.MULTILINE):
            assert name in known, f"{page.name}: warmroute {name}"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__name__.rpartition(".")[2])
def test_every_command_explains_itself(command: object) -> None:
    name = command.__name__.rpartition(".")[2].replace("_", "-")  # type: ignore[attr-defined]
    said = subprocess.run(
        [sys.executable, "-m", "warmroute.cli.main", *shlex.split(name), "--help"], capture_output=True, text=True
    )
    assert said.returncode == 0 and "usage: warmroute" in said.stdout
