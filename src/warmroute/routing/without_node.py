"""Requests that wait although no node can serve them: for the first node of an autoscaled fleet, or for the first
health check of a new node. Those that wait for room on a node are in admission.py."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Final

from warmroute.config import Admission as AdmissionConfig
from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing.admission_queue import AdmissionQueue
from warmroute.routing.deadline_check import missed
from warmroute.routing.decision import Decision
from warmroute.routing.queued_request import PendingRequest
from warmroute.routing.router import Router
from warmroute.routing.routing_errors import NoNodeAvailable, QueueTimeout, RoutingError

FIRST_CHECK_WAIT_S: Final = 5.0
"""How long a request waits for the first health check of a new node while no other node can serve it."""


class WithoutNode:
    def __init__(
        self,
        queue: AdmissionQueue,
        router: Router,
        find_place: Callable[[PendingRequest, float], tuple[Decision, bool]],
        config_of: Callable[[RoutingRequest], AdmissionConfig],
    ) -> None:
        """`find_place` decides for a request, and returns whether it goes at once. `config_of`: its settings."""
        self._queue = queue
        self._router = router
        self._find_place = find_place
        self._config_of = config_of
        self.first_node_wait_s = 0.0
        """How long a request waits for a first node, if the fleet is autoscaled; 0: it is rejected at once."""

    def wait_s(self, request: RoutingRequest) -> float:
        """How long a request waits while no node can serve it. 0: it is rejected at once."""
        return self.first_node_wait_s or (FIRST_CHECK_WAIT_S if self._router.awaits_first_check(request.model) else 0.0)

    def check(self, now_s: float, margin_s: float) -> None:
        """Continue with the requests whose first node has joined, and reject those that waited too long for it, or that
        would miss a deadline in less than `margin_s`."""
        queue = self._queue
        waits_s: dict[str, float] = {}  # by model
        for key, pending in list(queue.waiting_for_first_node.items()):
            if key not in queue.waiting_for_first_node:
                continue
            request = pending.request
            try:
                decision, goes_at_once = self._find_place(pending, now_s)
            except NoNodeAvailable as error:
                if request.model not in waits_s:
                    waits_s[request.model] = self.wait_s(request)
                wait_s = waits_s[request.model]
                since_s = request.arrived_s if self.first_node_wait_s else queue.without_node_since_s[key]
                until_s = min(since_s + wait_s, request.arrived_s + (self._config_of(request).max_wait_s or inf))
                due_s = min(request.deadline_s or inf, request.total_deadline_s or inf) - margin_s
                if not wait_s or now_s > until_s or now_s > due_s:
                    queue.remove_without_node(pending)
                    why = QueueTimeout() if now_s <= due_s else missed(request, now_s)
                    pending.on_rejected(why if wait_s else error)
            except RoutingError as error:
                queue.remove_without_node(pending)
                pending.on_rejected(error)
            else:
                if goes_at_once:
                    queue.remove_without_node(pending)
                    pending.on_admitted(decision)
                else:
                    queue.first_node_joined(pending, decision)
