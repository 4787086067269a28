"""Builds the compiled part of the package; pyproject.toml has everything else.

WARMROUTE_COMPILE=1    mypyc compiles the Python modules of the request path, too (releases, `make compile`). Their
                       sources behave the same, and a checkout uses them once one of them is newer than the build
WARMROUTE_DEV=1        compiler warnings are errors (the Makefile sets it)
WARMROUTE_SANITIZE=1   with AddressSanitizer and UndefinedBehaviorSanitizer (tools/sanitize.py sets it)
"""

import os
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

PACKAGE = "src/warmroute"
KERNEL = f"{PACKAGE}/_kernel"
COMPILED = [
    "edge/body_reader",
    "edge/body_scanner",
    "edge/client_connection",
    "edge/connection_pool",
    "edge/exchange",
    "edge/listener",
    "edge/node_attempt",
    "edge/node_connection",
    "edge/prompt_reader",
    "edge/proxy",
    "edge/request_builder",
    "edge/timer_wheel",
    "fleet/fleet",
    "fleet/health",
    "fleet/reported_values",
    "index/cache_view",
    "index/prediction",
    "index/reuse",
    "prompt/request_body",
    "routing/admission",
    "routing/attempts",
    "routing/decision",
    "routing/dispatcher",
    "routing/output_length",
    "routing/policies/price_policy",
    "routing/query",
    "routing/router",
    "telemetry/journal",
    "telemetry/traffic",
]


def enabled(variable: str) -> bool:
    return os.environ.get(variable, "0") not in ("", "0")


def compiled_modules() -> list[Extension]:
    if not enabled("WARMROUTE_COMPILE"):
        return []
    from mypyc.build import mypycify

    sources = [f"{PACKAGE}/{module}.py" for module in COMPILED]
    return list(mypycify(["--config-file=pyproject.toml", *sources], opt_level="2", debug_level="0"))


class BuildAndStamp(build_ext):
    def run(self) -> None:
        super().run()
        if self.inplace and modules:
            Path(PACKAGE, ".compiled").write_text("\n".join(COMPILED))


compile_args = ["-O3", "-fvisibility=hidden"]
link_args = []
if enabled("WARMROUTE_DEV"):
    compile_args += ["-Wall", "-Wextra", "-Werror"]
if enabled("WARMROUTE_SANITIZE"):
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    compile_args = [*compile_args, *sanitizers, "-O1", "-g", "-fno-omit-frame-pointer"]
    link_args = sanitizers

modules = compiled_modules()
setup(
    cmdclass={"build_ext": BuildAndStamp},
    ext_modules=[
        Extension(
            "warmroute._kernel._native",
            sorted(glob(f"{KERNEL}/*.c")),
            depends=sorted(glob(f"{KERNEL}/*.h")),
            extra_compile_args=compile_args,
            extra_link_args=link_args,
        ),
        *modules,
    ],
)
