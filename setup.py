"""The compiled part; everything else about the package stands in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension("warmroute._kernel._hash", ["src/warmroute/_kernel/_hash.c"], extra_compile_args=["-O3"]),
    ]
)
