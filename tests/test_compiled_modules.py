"""The modules that setup.py compiles: a checkout must not use a build that is older than a source."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

import warmroute

REPOSITORY = Path(__file__).parent.parent


def make_package(folder: Path, source_age_s: float) -> str:
    """Write a package with one compiled module, whose source is this much older than the build."""
    (folder / "edge").mkdir()
    source = folder / "edge" / "invented.py"
    source.write_text("VALUE = 1\n")
    stamp = folder / ".compiled"
    stamp.write_text("edge/invented")
    os.utime(source, (1000.0 - source_age_s, 1000.0 - source_age_s))
    os.utime(stamp, (1000.0, 1000.0))
    return str(folder)


@pytest.mark.parametrize(("source_age_s", "from_source"), [(10.0, False), (-10.0, True)])
def test_a_source_that_is_newer_than_the_build_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source_age_s: float, from_source: bool
) -> None:
    before = list(sys.meta_path)
    monkeypatch.setattr(sys, "meta_path", list(before))
    warmroute._prefer_changed_sources(make_package(tmp_path, source_age_s))
    added = [finder for finder in sys.meta_path if finder not in before]
    specs = [finder.find_spec("warmroute.edge.invented", None) for finder in added]
    assert [spec.origin for spec in specs if spec] == [str(tmp_path / "edge" / "invented.py")] * from_source
    assert all(finder.find_spec("warmroute.edge.other", None) is None for finder in added)


def test_an_installed_package_has_no_finder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    before = len(sys.meta_path)
    warmroute._prefer_changed_sources(str(tmp_path))
    assert len(sys.meta_path) == before


def test_every_compiled_module_exists() -> None:
    listed = (REPOSITORY / "setup.py").read_text().split("COMPILED = [")[1].split("]")[0]
    modules = re.findall(r'"([^"]+)"', listed)
    assert len(modules) > 10
    assert all((REPOSITORY / "src" / "warmroute" / f"{module}.py").is_file() for module in modules)
