"""Warmroute: an OpenAI-compatible proxy that sends each request where it costs the least new GPU work.

This file has its version, and whether the modules of the request path are compiled.
"""

from __future__ import annotations

from importlib.util import find_spec

# Warmroute: an OpenAI-compatible proxy that sends each request where it costs the least new GPU work.

__version__ = "0.2.0"


# Which build of Warmroute runs: the version, and whether the modules of the request path are compiled (setup.py).


def is_compiled() -> bool:
    spec = find_spec("warmroute.core.calls")
    return spec is not None and not str(spec.origin).endswith(".py")


def build() -> str:
    """Return the value of the label `build` and of the field `build`: compiled or interpreted."""
    return "compiled" if is_compiled() else "interpreted"


def build_advice() -> str:
    """Return a sentence for operators of the interpreted build, and nothing for others."""
    if is_compiled():
        return ""
    return (
        "This build is interpreted: it takes 1.2 to 1.8 times the CPU of the compiled one. Install the compiled one in "
        "Warmroute's repository: WARMROUTE_COMPILE=1 pip install ."
    )


def version_and_build() -> str:
    return f"{__version__} ({build()})"
