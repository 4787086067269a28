"""Packages that only some settings need: the extras of pyproject.toml."""

from __future__ import annotations

from warmroute.config.section import ConfigError


def missing_extra(setting: str, error: ImportError, extra: str) -> ConfigError:
    """Return the error for a setting whose package is not installed."""
    return ConfigError(
        f"{setting} needs the package {error.name}, which is not installed: install Warmroute with its extra {extra!r} "
        f"(pip install '.[{extra}]' in its checkout)"
    )
