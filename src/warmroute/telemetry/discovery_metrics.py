"""Adds the sources of nodes to the metrics page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from warmroute.telemetry import metric_definitions as metrics
from warmroute.telemetry.exposition import Page, format_labels


class DiscoverySource(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def up(self) -> bool: ...
    @property
    def targets(self) -> int: ...
    @property
    def failures(self) -> int: ...
    @property
    def changes(self) -> dict[str, int]: ...


class DiscoveryMetrics:
    def __init__(self, sources: Callable[[], Sequence[DiscoverySource]]) -> None:
        self._sources = sources

    def __call__(self, page: Page) -> None:
        for source in self._sources():
            name = format_labels(source=source.name)
            page[metrics.DISCOVERY_UP].add(source.up, name)
            page[metrics.DISCOVERY_TARGETS].add(source.targets, name)
            page[metrics.DISCOVERY_FAILURES].add(source.failures, name)
            for change, count in source.changes.copy().items():
                page[metrics.DISCOVERY_CHANGES].add(count, format_labels(change=change, source=source.name))
