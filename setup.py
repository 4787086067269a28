"""The compiled part; everything else about the package stands in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            f"warmroute._kernel.{name}",
            [f"src/warmroute/_kernel/{name}.c"],
            depends=[f"src/warmroute/_kernel/{header}.h" for header in ("_books", "_json", "_match", "_mirror")],
            extra_compile_args=["-O3"],
        )
        for name in ("_books", "_hash", "_http", "_index", "_messages", "_price", "_recency", "_scan")
    ]
)
