"""tools/build_wheel.sh builds what lies at the given path, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RECORDER = """#!/bin/sh
if [ "$2" = venv ]; then
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python"
fi
echo "$@" >> "@CALLS@"
"""
"""Stands for Python: notes its arguments, and makes an environment whose Python does the same. A real build takes
minutes and a package index."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a checkout, a source distribution and a file that is neither."""
    python = tmp_path / "python"
    python.write_text(RECORDER.replace("@CALLS@", str(tmp_path / "calls")))
    python.chmod(0o755)
    (tmp_path / "wr").mkdir()
    (tmp_path / "wr/pyproject.toml").write_text("[project]")
    (tmp_path / "empty").mkdir()
    (tmp_path / "wr-1.tar.gz").write_bytes(b"")
    (tmp_path / "notes").write_text("")
    return tmp_path


def build(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    shell = shutil.which("sh")
    assert shell is not None
    return subprocess.run(
        [shell, str(ROOT / "tools/build_wheel.sh"), *arguments], cwd=folder, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("source", ["wr", "./wr", "wr/", "wr-1.tar.gz"])
def test_a_relative_source_is_a_path_and_no_package_of_an_index(folder: Path, source: str) -> None:
    done = build(folder, str(folder / "python"), source, "dist")
    assert done.returncode == 0, done.stderr
    built = (folder / "calls").read_text().splitlines()[-1]
    assert "pip wheel" in built and built.split()[-1] == str((folder / source).resolve())


@pytest.mark.parametrize("source", ["warmroute", "empty", "notes", "nowhere/wr-1.tar.gz", ""])
def test_a_source_that_is_no_project_is_an_error(folder: Path, source: str) -> None:
    done = build(folder, str(folder / "python"), source, "dist")
    assert done.returncode == 2 and "neither a folder with a pyproject.toml nor a .tar.gz file" in done.stderr
    assert not (folder / "calls").exists(), "nothing may be installed or built"


def test_a_missing_argument_is_an_error(folder: Path) -> None:
    done = build(folder, str(folder / "python"), "wr")
    assert done.returncode == 2 and "usage" in done.stderr
