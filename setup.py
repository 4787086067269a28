"""Builds the compiled part of the package; pyproject.toml has everything else.

WARMROUTE_COMPILE=1    mypyc compiles the Python modules of the request path, too, as in a release. Plain Python does
                       the same and takes more CPU. pip installs what mypyc needs: tools/build_backend.py asks for it
WARMROUTE_DEV=1        compiler warnings are errors (the Makefile sets it)
WARMROUTE_SANITIZE=1   with AddressSanitizer and UndefinedBehaviorSanitizer (fuzz/sanitize.py sets it)
"""

import os
import re
import tomllib
from glob import glob
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build

PACKAGE = "src/warmroute"
KERNEL = f"{PACKAGE}/_kernel"
COMPILED = [
    "app/prompt_doctor/samples",
    "core/admission",
    "core/brain",
    "core/cache_view",
    "core/calls",
    "core/cluster/cluster_state",
    "core/cluster/peer",
    "core/cluster/publisher",
    "core/cluster/shared_speeds",
    "core/decision",
    "core/fleet",
    "core/health",
    "core/last_decisions",
    "core/output_length",
    "core/policies/price",
    "core/prediction",
    "core/prefill_work",
    "core/queue",
    "core/queue_order",
    "core/reported_values",
    "core/reuse",
    "core/router",
    "core/routing_context",
    "core/traffic",
    "edge/arrival",
    "edge/client_connection",
    "edge/connection_pool",
    "edge/exchange",
    "edge/node_connection",
    "edge/proxy",
    "edge/response",
    "edge/timer_wheel",
    "edge/tries",
    "prompt/encoding_time",
    "prompt/plain_chats",
    "prompt/reader",
    "prompt/request_body",
]
"""The Python modules of the request path. CONTRIBUTING.md has the rules for them."""


def enabled(variable: str) -> bool:
    return os.environ.get(variable, "0") not in ("", "0")


def installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def compiled_modules() -> list[Extension]:
    """mypyc reads the types of the router's dependencies, so the environment must have them, too."""
    dependencies = tomllib.loads(Path("pyproject.toml").read_text())["project"]["dependencies"]
    names = ["mypy", *(re.split(r"[^\w.-]", dependency, maxsplit=1)[0] for dependency in dependencies)]
    if missing := [name for name in names if not installed(name)]:
        raise SystemExit(
            f"warmroute: WARMROUTE_COMPILE=1 needs packages that this environment does not have: {', '.join(missing)}. "
            "pip installs them for the build, unless it is called with --no-build-isolation."
        )
    from mypyc.build import mypycify

    sources = [f"{PACKAGE}/{module}.py" for module in COMPILED]
    arguments = ["--config-file=pyproject.toml", *sources]
    return list(mypycify(arguments, group_name="warmroute", opt_level="2", debug_level="0"))


class Build(build):
    """mypyc runs in this command only. Commands that write metadata or a source distribution list the extensions, too,
    and an editable install does not run it: compiled modules beside the sources would hide their changes."""

    def run(self) -> None:
        if enabled("WARMROUTE_COMPILE"):
            self.distribution.ext_modules = [kernel, *compiled_modules()]
        super().run()


compile_args = ["-O3", "-fvisibility=hidden"]
link_args = []
if enabled("WARMROUTE_DEV"):
    compile_args += ["-Wall", "-Wextra", "-Werror"]
if enabled("WARMROUTE_SANITIZE"):
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    compile_args = [*compile_args, *sanitizers, "-O1", "-g", "-fno-omit-frame-pointer"]
    link_args = sanitizers

kernel = Extension(
    "warmroute._kernel._native",
    sources=sorted(glob(f"{KERNEL}/*.c")),
    depends=sorted(glob(f"{KERNEL}/*.h")),
    extra_compile_args=compile_args,
    extra_link_args=link_args,
)
setup(cmdclass={"build": Build}, ext_modules=[kernel])
