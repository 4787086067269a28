"""The compiled part; everything else about the package stands in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            f"warmroute._kernel.{name}",
            [f"src/warmroute/_kernel/{name}.c"],
            depends=["src/warmroute/_kernel/_json.h", "src/warmroute/_kernel/_mirror.h"],
            extra_compile_args=["-O3"],
        )
        for name in ("_hash", "_http", "_index", "_messages", "_price", "_recency", "_scan")
    ]
)
