"""Builds the compiled part of the package; pyproject.toml has everything else.

WARMROUTE_DEV=1        compiler warnings are errors (the Makefile sets it)
WARMROUTE_SANITIZE=1   with AddressSanitizer and UndefinedBehaviorSanitizer (tools/sanitize.py sets it)
"""

import os
from glob import glob

from setuptools import Extension, setup

KERNEL = "src/warmroute/_kernel"


def enabled(variable: str) -> bool:
    return os.environ.get(variable, "0") not in ("", "0")


compile_args = ["-O3", "-fvisibility=hidden"]
link_args = []
if enabled("WARMROUTE_DEV"):
    compile_args += ["-Wall", "-Wextra", "-Werror"]
if enabled("WARMROUTE_SANITIZE"):
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    compile_args = [*compile_args, *sanitizers, "-O1", "-g", "-fno-omit-frame-pointer"]
    link_args = sanitizers

setup(
    ext_modules=[
        Extension(
            "warmroute._kernel._native",
            sorted(glob(f"{KERNEL}/*.c")),
            depends=sorted(glob(f"{KERNEL}/*.h")),
            extra_compile_args=compile_args,
            extra_link_args=link_args,
        )
    ]
)
