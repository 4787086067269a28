"""The compiled part; everything else about the package stands in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(f"warmroute._kernel.{name}", [f"src/warmroute/_kernel/{name}.c"], extra_compile_args=["-O3"])
        for name in ("_hash", "_http", "_index", "_messages", "_price", "_recency", "_scan")
    ]
)
