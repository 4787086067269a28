"""A request in the admission queue.

The order of a tenant's requests is that of their effective work: the prefill time, less WAITING_CREDIT × the time that
the request has waited, for at most CREDIT_S. So a request with somewhat more work is not overtaken again and again
while the queue is short, and a long queue is still served by work.
"""

from __future__ import annotations

from enum import Enum
from math import inf
from typing import Final, Protocol

from warmroute.fleet.group import Group
from warmroute.fleet.node import Node
from warmroute.fleet.prefill_work import work
from warmroute.index.lookup import Lookup
from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing.decision import Decision
from warmroute.routing.routing_errors import RoutingError

WAITING_CREDIT: Final = 0.15
CREDIT_S: Final = 5.0
"""How long a request gains credit. It then counts WAITING_CREDIT × CREDIT_S less than its prefill time."""


class QueueOrder(Enum):
    """The order of one tenant's requests. Replay compares the default with the others."""

    GUARANTEED = "least prefill work first, with a credit for waiting, and a guarantee"
    SHORTEST = "least prefill work first"
    FIRST_COME = "first come, first served"


class PendingRequest(Protocol):
    @property
    def request(self) -> RoutingRequest: ...
    @property
    def lookup(self) -> Lookup | None: ...

    def on_admitted(self, decision: Decision) -> None:
        """Send the request to the decision's node."""

    def on_rejected(self, error: RoutingError) -> None:
        """The request gets no node."""


class QueuedRequest:
    """A pending request in the queue, and the decision it would get."""

    pending: PendingRequest
    decision: Decision
    group: Group
    """The group that counts the request as waiting."""
    number: int
    """In the order in which requests were queued."""
    order: QueueOrder
    version: int = 0
    """The version of Admission's state that the decision is based on."""
    key: float = 0.0
    """Its prefill time, by which it has its place in RequestsByWork. With FIRST_COME the time of its arrival."""
    gains_credit: bool = False
    """Whether it is among the requests that still gain credit."""
    work: float = 0.0
    """Prefill work on its node when it was queued, in tokens of a short prompt."""
    least_work_ms: float = inf
    cheaper_s: float = 0.0
    """When its work last became less than half of `least_work_ms`, because its prefix was cached meanwhile."""
    due_s: float = 0.0
    """It is overdue if it still waits then."""
    is_overdue: bool = False
    work_ahead: float = 0.0
    """Prefill work of the requests that waited when it was queued."""
    work_on_node: float = 0.0
    """Prefill work that its node had then, of requests that may never have waited."""

    def __init__(
        self, pending: PendingRequest, decision: Decision, group: Group, number: int, order: QueueOrder
    ) -> None:
        self.pending = pending
        self.decision = decision
        self.group = group
        self.number = number
        self.order = order

    @property
    def prefill_ms(self) -> float:
        price = self.decision.price
        return price.prefill if price is not None else 0.0

    @property
    def has_deadline(self) -> bool:
        request = self.pending.request
        return bool(request.deadline_s or request.total_deadline_s)

    @property
    def node_is_gone(self) -> bool:
        query = self.decision.query
        assert query is not None
        name, group = self.decision.node.name, query.group.sort_if_changed()
        return name not in group.up.by_name and name not in group.last_resort.by_name

    def decided_since(self, time_s: float) -> bool:
        query = self.decision.query
        return query is not None and query.now_s > time_s

    def current_key(self) -> float:
        """Return the key of its present decision."""
        return self.prefill_ms if self.order is not QueueOrder.FIRST_COME else self.pending.request.arrived_s

    def effective_key(self, now_s: float) -> float:
        """Return the key of its present decision, less its credit: of one tenant's requests, the lowest is first."""
        key = self.current_key()
        if self.order is QueueOrder.GUARANTEED:
            key -= 1000.0 * WAITING_CREDIT * min(max(0.0, now_s - self.pending.request.arrived_s), CREDIT_S)
        return key

    def note_work(self, now_s: float) -> None:
        """Its decision has changed."""
        work_ms = self.prefill_ms
        if work_ms < 0.5 * self.least_work_ms:
            self.least_work_ms, self.cheaper_s = work_ms, now_s

    @property
    def goes_anywhere(self) -> bool:
        """Whether a node that has nothing of its prompt cached would serve it sooner than its node, if it had room."""
        price = self.decision.price
        if price is None:
            return True
        cold_ms = work(price.new + price.cached, 0.0) * self.decision.entry_node.speed.ms_per_token
        return cold_ms <= price.wait + price.prefill + price.room

    def may_go_to(self, node: Node) -> bool:
        query = self.decision.query
        return query is not None and node.name in query.candidates.by_name
