"""Adds the other router processes, and the link to them, to the metrics page."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from warmroute.app.metrics import page as metrics
from warmroute.app.metrics.exposition import Page


class ClusterFigures(NamedTuple):
    peers: int
    messages: dict[str, int]
    """By direction."""
    limit_fraction: float
    link: tuple[bool, bool, float] | None
    """Whether the link is connected, whether it is writable, and its delay in seconds; None without Redis."""


class ClusterMetrics:
    def __init__(self, figures: Callable[[], ClusterFigures | None]) -> None:
        """`figures` returns None if this process is alone."""
        self._figures = figures

    def __call__(self, page: Page) -> None:
        figures = self._figures()
        if figures is None:
            return
        page[metrics.CLUSTER_PEERS].add(figures.peers)
        for direction, count in figures.messages.items():
            page[metrics.CLUSTER_MESSAGES].add(count, f'direction="{direction}"')
        page[metrics.CLUSTER_LIMIT_FRACTION].add(figures.limit_fraction)
        if figures.link is not None:
            connected, writable, delay_s = figures.link
            page[metrics.CLUSTER_CONNECTED].add(connected)
            page[metrics.CLUSTER_WRITABLE].add(writable)
            page[metrics.CLUSTER_DELAY].add(delay_s)
