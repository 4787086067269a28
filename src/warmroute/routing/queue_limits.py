"""How many requests may wait in the admission queue, and which of them makes room for another one. No I/O.

From half of `max_waiting` on, low-priority requests no longer overtake others; if the queue is full, others displace
them. So no request is rejected in favour of a low-priority one. If the queue is full of requests of the same priority,
a request displaces one of the tenant that has the most. So no tenant can keep others out by sending many requests.
"""

from __future__ import annotations

from math import inf

from warmroute.config.priority import HIGH, LOW
from warmroute.fleet.arrival_rate import ArrivalRate
from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing.admission_queue import AdmissionQueue
from warmroute.routing.queued_request import PendingRequest
from warmroute.routing.routing_errors import QueueFull


class QueueLimits:
    def __init__(self, queue: AdmissionQueue) -> None:
        self._queue = queue
        self.max_waiting = 0
        self.admission_rate = ArrivalRate()
        """Of queued requests."""

    @property
    def half_full(self) -> bool:
        return self._queue.waiting >= self.max_waiting // 2

    def drain_s(self, now_s: float) -> float:
        """Return how long the queue takes to drain at the current rate."""
        per_s = self.admission_rate.per_ms(now_s) * 1000.0
        return self._queue.waiting / per_s if per_s else inf

    def to_displace(self, request: RoutingRequest, now_s: float) -> PendingRequest | None:
        """Return the queued request that a new one displaces; None if it displaces none. Raises QueueFull."""
        if self._queue.waiting < (self.max_waiting // 2 if request.priority == LOW else self.max_waiting):
            return None
        displaced = self._queue.next_to_displace(request)
        if displaced is None and request.priority != HIGH:
            raise QueueFull(self.drain_s(now_s))
        return displaced
