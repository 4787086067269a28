"""Which build of Warmroute runs: the version, and whether the modules of the request path are compiled (setup.py)."""

from __future__ import annotations

from importlib.util import find_spec

from warmroute import __version__


def is_compiled() -> bool:
    spec = find_spec("warmroute.routing.attempts")
    return spec is not None and not str(spec.origin).endswith(".py")


def build() -> str:
    """Return the value of the label `build` and of the field `build`: compiled or interpreted."""
    return "compiled" if is_compiled() else "interpreted"


def version_and_build() -> str:
    return f"{__version__} ({build()})"
