"""How many requests may wait in the admission queue, and which of them makes room for another one. No I/O.

From half of `max_waiting` on, low-priority requests no longer overtake others; if the queue is full, others displace
them. So no request is rejected in favour of a low-priority one. If the queue is full of requests of the same priority,
a request displaces one of the tenant that has the most. So no tenant can keep others out by sending many requests.
"""

from __future__ import annotations

from warmroute.config.priority import HIGH, LOW
from warmroute.fleet.arrival_rate import UNMEASURED_S
from warmroute.fleet.group import Group
from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing.admission_queue import AdmissionQueue
from warmroute.routing.queued_request import PendingRequest
from warmroute.routing.routing_errors import QueueFull


class QueueLimits:
    def __init__(self, queue: AdmissionQueue) -> None:
        self._queue = queue
        self.max_waiting = 0

    @property
    def half_full(self) -> bool:
        return self._queue.waiting >= self.max_waiting // 2

    def retry_after_s(self, group: Group | None, priority: int, now_s: float) -> float:
        """Return after how long a rejected request of this group would get a node: those that wait for the group now
        have got one, and the queue has a place. `group`: None without a node."""
        queue = self._queue
        wait_s = 0.0
        if group is not None and (waiting := group.waiting - group.peer_waiting) > 0:
            wait_s = group.service.time_for(waiting, now_s)
        too_many = queue.waiting + 1 - self._limit(priority)
        if too_many > 0 and queue.tenants:
            wait_s = max(wait_s, queue.service.time_for(too_many, now_s))
        return wait_s or UNMEASURED_S

    def _limit(self, priority: int) -> int:
        """Return the length of the queue from which on a request of this priority does not get into it."""
        return self.max_waiting // 2 if priority == LOW else self.max_waiting

    def to_displace(self, request: RoutingRequest, group: Group | None, now_s: float) -> PendingRequest | None:
        """Return the queued request that a new one displaces; None if it displaces none. Raises QueueFull."""
        if self._queue.waiting < self._limit(request.priority):
            return None
        displaced = self._queue.next_to_displace(request)
        if displaced is None and request.priority != HIGH:
            raise QueueFull(self.retry_after_s(group, request.priority, now_s))
        return displaced
