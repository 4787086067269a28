"""Builds of the package: `WARMROUTE_COMPILE=1` compiles it or fails, and tools/build_wheel.sh builds what lies at the
given path, and nothing else."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from sysconfig import get_config_var, get_path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SITE_PACKAGES = Path(get_path("purelib"))
COMPILE = {"WARMROUTE_COMPILE": "1"}
RECORDER = """#!/bin/sh
if [ "$2" = venv ]; then
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python"
fi
echo "$@" >> "@CALLS@"
"""
"""Stands for Python: notes its arguments, and makes an environment whose Python does the same. A real build takes
minutes and a package index."""
CALL = """
import json, sys
sys.path[:0] = [{backend!r}, {packages!r}]
import build_backend
result = getattr(build_backend, {hook!r})(*{arguments!r})
print("RESULT", json.dumps(result))
"""
"""What pip does to build a package: it calls a function of the backend, in the folder of the package."""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files that git knows: a build writes beside the sources."""
    copy = tmp_path_factory.mktemp("checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    for name in (name for name in listed if not name.startswith(("tests/", "docs/", "bench/", "ui/", "fuzz/"))):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def setuptools_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages as in pip's environment for builds: setuptools, and neither mypy nor the dependencies."""
    packages = tmp_path_factory.mktemp("packages")
    for found in (*SITE_PACKAGES.glob("setuptools*"), SITE_PACKAGES / "_distutils_hack"):
        (packages / found.name).symlink_to(found)
    return packages


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WARMROUTE_")}
    return {**kept, **variables}


def call(
    source: Path, packages: Path, hook: str, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    code = CALL.format(backend=str(source / "tools"), packages=str(packages), hook=hook, arguments=arguments)
    return subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=source, env=environment(**variables), capture_output=True, text=True, timeout=550,
    )  # fmt: skip


def result(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(done.stdout.rpartition("RESULT ")[2])


def pins(path: Path) -> set[str]:
    return set(re.findall(r"^[\w.-]+==\S+", path.read_text(), re.MULTILINE))


@pytest.mark.parametrize("hook", ["get_requires_for_build_wheel", "get_requires_for_build_sdist"])
def test_a_compiled_build_asks_for_the_pinned_mypy_and_dependencies(
    checkout: Path, setuptools_alone: Path, hook: str
) -> None:
    found = result(call(checkout, setuptools_alone, hook, **COMPILE))
    runtime, every = pins(ROOT / "requirements.lock"), pins(ROOT / "requirements-dev.lock")
    assert len(runtime) > 5 and runtime <= set(found) <= runtime | every
    more = {pin.partition("==")[0] for pin in set(found) - runtime}
    assert {"mypy", "mypy-extensions"} <= more and "pytest" not in more and len(more) < 10
    for off in ({}, {"WARMROUTE_COMPILE": ""}, {"WARMROUTE_COMPILE": "0"}):
        assert result(call(checkout, setuptools_alone, hook, **off)) == []


@pytest.mark.parametrize("hook", ["build_wheel", "setup.py"])
def test_a_compiled_build_without_mypy_fails_with_a_sentence(
    checkout: Path, setuptools_alone: Path, tmp_path: Path, hook: str
) -> None:
    if hook == "build_wheel":
        done = call(checkout, setuptools_alone, hook, str(tmp_path), **COMPILE)
    else:
        done = subprocess.run(
            [sys.executable, "-S", "setup.py", "build", "--build-base", str(tmp_path)],
            cwd=checkout, env=environment(PYTHONPATH=str(setuptools_alone), **COMPILE),
            capture_output=True, text=True, timeout=550,
        )  # fmt: skip
    assert done.returncode != 0
    [line] = [line for line in done.stderr.splitlines() if line.startswith("warmroute: ")]
    assert line == (
        "warmroute: WARMROUTE_COMPILE=1 needs packages that this environment does not have: mypy, fastokens, jinja2, "
        "msgspec, pyzmq, rich, tokenizers, uvloop. pip installs them for the build, unless it is called with "
        "--no-build-isolation."
    )
    assert not list(tmp_path.rglob("*.whl"))


@pytest.mark.parametrize("hook", ["get_requires_for_build_editable", "build_editable"])
def test_an_editable_install_cannot_be_compiled_and_says_so(
    checkout: Path, setuptools_alone: Path, tmp_path: Path, hook: str
) -> None:
    arguments = [str(tmp_path)] if hook == "build_editable" else []
    done = call(checkout, setuptools_alone, hook, *arguments, **COMPILE)
    assert done.returncode != 0
    assert "an editable install runs the checkout's own Python files" in done.stderr.splitlines()[-1]


@pytest.mark.timeout(600)
def test_a_wheel_of_a_source_distribution_contains_nothing_of_an_earlier_build(
    checkout: Path, setuptools_alone: Path, tmp_path: Path
) -> None:
    """setuptools would take compiled modules of an earlier build from build/, and Python would prefer them to the
    sources. The source distribution has what a compiled build needs."""
    archive = tmp_path / result(call(checkout, setuptools_alone, "build_sdist", str(tmp_path)))
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    [source] = tmp_path.glob("warmroute-*/")
    wanted = result(call(checkout, setuptools_alone, "get_requires_for_build_wheel", **COMPILE))
    assert result(call(source, setuptools_alone, "get_requires_for_build_wheel", **COMPILE)) == wanted
    suffix = get_config_var("EXT_SUFFIX")
    for folder in ("lib", f"lib.linux-x86_64-{sys.implementation.cache_tag}"):
        (source / "build" / folder / "warmroute" / "routing").mkdir(parents=True)
        (source / "build" / folder / "warmroute" / "routing" / f"attempts{suffix}").write_bytes(b"old")
    (tmp_path / "cc").write_text('#!/bin/sh\nexec cc "$@" -O0\n')  # the real compiler, in a fifth of the time
    (tmp_path / "cc").chmod(0o755)
    wheel = tmp_path / result(call(source, setuptools_alone, "build_wheel", str(tmp_path), CC=str(tmp_path / "cc")))
    with zipfile.ZipFile(wheel) as opened_wheel:
        compiled = [name for name in opened_wheel.namelist() if name.endswith(".so")]
    assert compiled == [f"warmroute/_kernel/_native{suffix}"]


@pytest.mark.build
@pytest.mark.timeout(3600)
def test_one_command_installs_the_compiled_build_from_a_checkout_and_from_a_source_distribution(
    checkout: Path, setuptools_alone: Path, tmp_path: Path
) -> None:
    """The command of README and the quick start, with the pip of a new environment. It downloads."""
    archive = tmp_path / result(call(checkout, setuptools_alone, "build_sdist", str(tmp_path)))
    for number, (source, variables, build) in enumerate(
        [(checkout, COMPILE, "compiled"), (archive, COMPILE, "compiled"), (checkout, {}, "interpreted")]
    ):
        target = tmp_path / f"venv-{number}"
        venv.create(target, with_pip=True)
        subprocess.run(
            [target / "bin" / "pip", "install", "--quiet", str(source)],
            cwd=tmp_path, env=environment(**variables), check=True,
        )  # fmt: skip
        version = subprocess.run(
            [target / "bin" / "warmroute", "--version"], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout
        assert f"({build}" in version, source


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
