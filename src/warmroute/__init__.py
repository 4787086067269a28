"""Warmroute: an OpenAI-compatible proxy that sends each request where it costs the least new GPU work."""

import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from types import SimpleNamespace
from typing import Any

__version__ = "0.2.0"


def _prefer_changed_sources(package: str) -> None:
    """In a checkout, use the sources of the compiled modules if one of them is newer than the build."""
    stamp = os.path.join(package, ".compiled")  # setup.py writes it; an installed package does not have it
    if not os.path.exists(stamp):
        return
    with open(stamp, encoding="ascii") as file:
        modules = file.read().split()
    built_s = os.stat(stamp).st_mtime
    sources = {f"warmroute.{module.replace('/', '.')}": os.path.join(package, f"{module}.py") for module in modules}
    if any(not os.path.exists(path) or os.stat(path).st_mtime > built_s for path in sources.values()):

        def find_source(name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
            return spec_from_file_location(name, sources[name]) if name in sources else None

        finder: Any = SimpleNamespace(find_spec=find_source)
        sys.meta_path.insert(0, finder)


_prefer_changed_sources(os.path.dirname(__file__))
