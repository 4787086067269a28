"""Adds the picker's figures to the metrics page under the names of the Gateway API Inference Extension.

Dashboards and autoscalers of the extension read these. They are computed when the page is rendered.
"""

from __future__ import annotations

from collections.abc import Callable

from warmroute.fleet.fleet import Fleet
from warmroute.fleet.health import HealthState
from warmroute.telemetry import metric_definitions as metrics
from warmroute.telemetry.exposition import Page, format_labels


class InferencePoolMetrics:
    def __init__(self, fleet: Fleet, waiting: Callable[[], int], pool: Callable[[], str | None]) -> None:
        """`pool`: the name of the InferencePool; None if this is not a picker."""
        self._fleet = fleet
        self._waiting = waiting
        self._pool = pool

    def __call__(self, page: Page) -> None:
        pool = self._pool()
        if pool is None:
            return
        up = [node for node in self._fleet if node.health.state is HealthState.UP and not node.draining]
        count = max(1, len(up))
        name = format_labels(name=pool)
        page[metrics.POOL_KV_USAGE].add(sum(node.kv_usage or 0.0 for node in up) / count, name)
        page[metrics.POOL_QUEUE].add(sum(node.waiting for node in up) / count, name)
        page[metrics.POOL_RUNNING].add(sum(node.running for node in up) / count, name)
        page[metrics.POOL_READY].add(len(up), name)
        page[metrics.EXTENSION_QUEUE].add(self._waiting(), format_labels(inference_pool=pool))
        for model in self._fleet.models:
            group = self._fleet.group(model)
            if group is not None:
                page[metrics.OBJECTIVE_RUNNING].add(group.inflight, format_labels(model_name=model))
