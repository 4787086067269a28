"""Adds to the metrics page how requests left the admission queue."""

from __future__ import annotations

from warmroute.routing.admission_queue import AdmissionQueue
from warmroute.telemetry import metric_definitions as metrics
from warmroute.telemetry.exposition import Page


class QueueMetrics:
    def __init__(self, queue: AdmissionQueue) -> None:
        self._queue = queue

    def __call__(self, page: Page) -> None:
        queue = self._queue
        page[metrics.QUEUE_ADMISSIONS].add(queue.admitted_by_work, 'order="work"')
        page[metrics.QUEUE_ADMISSIONS].add(queue.admitted_by_guarantee, 'order="guarantee"')
        page[metrics.QUEUE_GUARANTEE_EXCEEDED].add(queue.guarantee.exceeded)
