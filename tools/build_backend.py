"""The build backend that pyproject.toml names: setuptools, and what mypyc needs where WARMROUTE_COMPILE=1.

pip builds a package in an empty environment and installs there only what the backend asks for. mypyc is a part of mypy
and reads the types of the router's dependencies, so a compiled build asks for mypy and for them, in the versions of the
lock files.
"""

import os
import re
import tempfile
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import (
    build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

ROOT = Path(__file__).resolve().parent.parent
PINNED = re.compile(r"^(?P<pin>(?P<name>[\w.-]+)==\S+)\n(?P<needed_by>(?: +#.*\n)*)", re.MULTILINE)

Settings = dict[str, str | list[str] | None] | None


def compiles() -> bool:
    return os.environ.get("WARMROUTE_COMPILE", "0") not in ("", "0")


def requirements_of_mypyc() -> list[str]:
    """Return the pinned mypy, what mypy itself needs, and the router's dependencies."""
    pins = {found["pin"] for found in PINNED.finditer((ROOT / "requirements.lock").read_text())}
    for found in PINNED.finditer((ROOT / "requirements-dev.lock").read_text()):
        if found["name"] == "mypy" or re.search(r"[ #]mypy$", found["needed_by"], re.MULTILINE):
            pins.add(found["pin"])
    return sorted(pins)


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    return requirements_of_mypyc() if compiles() else []


def get_requires_for_build_sdist(config_settings: Settings = None) -> list[str]:
    """`python -m build` makes the wheel from the source distribution: a pin that is gone fails before both."""
    return get_requires_for_build_wheel(config_settings)


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    if compiles():
        raise SystemExit(
            "warmroute: an editable install runs the checkout's own Python files, so WARMROUTE_COMPILE=1 cannot "
            "compile them. Unset the variable, or install without -e."
        )
    return []


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    """Build in an empty folder: setuptools puts into the wheel whatever an earlier build has left in build/, such as
    compiled modules, which Python prefers to the sources beside them."""
    with tempfile.TemporaryDirectory() as folder:
        before = (config_settings or {}).get("--global-option") or []
        options = [before] if isinstance(before, str) else before
        settings = {**(config_settings or {}), "--global-option": [*options, "build", f"--build-base={folder}"]}
        wheel: str = build_meta.build_wheel(wheel_directory, settings, metadata_directory)
        return wheel


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    get_requires_for_build_editable()
    wheel: str = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    return wheel
