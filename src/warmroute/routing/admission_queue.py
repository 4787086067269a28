"""The admission queue: requests that wait at the router for a node, and whose turn is next. No I/O.

Order: higher priority first, then the tenant with the least admitted work. One turn in LONGEST_WAITING_TURN goes to the
tenant whose request has waited the longest, so that no request waits forever behind higher priorities. Requests for
which no node exists at all wait separately (`waiting_for_first_node`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Final, Protocol

import msgspec

from warmroute.config.priority import HIGH, LOW, PRIORITY_NAMES
from warmroute.fleet.group import Group
from warmroute.fleet.node import Node
from warmroute.index.lookup import Lookup
from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing.decision import Decision
from warmroute.routing.routing_errors import RoutingError

LONGEST_WAITING_TURN: Final = 16
LONG_WAIT_S: Final = 10.0
"""Those turns are used only if a request has waited at least this long."""
AGE_BONUS: Final = 0.1
"""10 ms of waiting count as much as 1 ms less work."""
FAIR_LEAD: Final = 2
"""A tenant has to make room for another one of the same priority if it has this many queued requests more."""
HEAD_SAMPLE: Final = 8
"""Requests of each tenant and node that `heads` looks at."""
WORK_SAMPLE: Final = 64
"""Requests of each tenant that `work_ahead_ms` looks at. It extrapolates to the others."""

Key = tuple[int, str]
"""Priority and tenant."""


def _key(pending: PendingRequest) -> Key:
    return pending.request.priority, pending.request.tenant


class PendingRequest(Protocol):
    @property
    def request(self) -> RoutingRequest: ...
    @property
    def lookup(self) -> Lookup | None: ...

    def on_admitted(self, decision: Decision) -> None:
        """Send the request to the decision's node."""

    def on_rejected(self, error: RoutingError) -> None:
        """The request gets no node."""


class QueuedRequest(msgspec.Struct, eq=False):
    """A pending request in the queue, and the decision it would get."""

    pending: PendingRequest
    decision: Decision
    group: Group
    """The group that counts the request as waiting."""
    version: int = 0
    """The version of Admission's state that the decision is based on."""

    def score(self, now_s: float) -> float:
        """Return the prefill time minus a bonus for waiting: of one tenant's requests, the lowest score is first."""
        price = self.decision.price
        prefill_ms = price.prefill if price is not None else 0.0
        return prefill_ms - AGE_BONUS * (now_s - self.pending.request.arrived_s) * 1000.0

    def may_go_to(self, node: Node) -> bool:
        query = self.decision.query
        if query is None:
            return False
        return node.name in query.candidates.by_name or (
            query.group.has_roles and node.name in query.group.prefill_nodes.by_name
        )


class TenantQueue(msgspec.Struct, eq=False):
    """The queued requests of one tenant and priority."""

    work_ms: float
    """Prefill work that was admitted."""
    waiting: dict[int, QueuedRequest] = {}
    """In order of arrival, by the pending request's id()."""
    _by_node: dict[Node, dict[int, QueuedRequest]] = {}
    """The same, by the node of each decision."""

    def add(self, queued: QueuedRequest) -> None:
        key = id(queued.pending)
        self.waiting[key] = queued
        self._by_node.setdefault(queued.decision.entry_node, {})[key] = queued
        queued.group.waiting += 1

    def remove(self, pending: PendingRequest) -> bool:
        queued = self.waiting.pop(id(pending), None)
        if queued is None:
            return False
        self._remove_from_node(queued)
        queued.group.waiting -= 1
        return True

    def update_decision(self, queued: QueuedRequest, decision: Decision) -> None:
        """The group changes, too, if all nodes of the model left and others joined."""
        query = decision.query
        if query is not None and query.group is not queued.group:
            queued.group.waiting -= 1
            queued.group = query.group
            queued.group.waiting += 1
        if decision.entry_node is not queued.decision.entry_node:
            self._remove_from_node(queued)
            self._by_node.setdefault(decision.entry_node, {})[id(queued.pending)] = queued
        queued.decision = decision

    def _remove_from_node(self, queued: QueuedRequest) -> None:
        node = queued.decision.entry_node
        on_node = self._by_node[node]
        del on_node[id(queued.pending)]
        if not on_node:
            del self._by_node[node]

    def by_node(self) -> Iterator[tuple[Node, list[QueuedRequest]]]:
        """Yield each node that requests wait for, with the oldest of them."""
        for node, queued in self._by_node.items():
            yield node, list(islice(queued.values(), HEAD_SAMPLE))

    def candidates_for(self, node: Node, limit: int) -> Iterator[list[QueuedRequest]]:
        """Yield the `limit` oldest requests; then, if none of them may use this node at all, the oldest ones for it.

        So requests for other models or islands hide none for this node. If they may use the node but prefer another
        one, the turn passes to the next tenant.
        """
        oldest = list(islice(self.waiting.values(), limit))
        yield oldest
        if len(self.waiting) > limit and not any(queued.may_go_to(node) for queued in oldest):
            yield list(islice(self._by_node.get(node, {}).values(), limit))


class AdmissionQueue:
    def __init__(self) -> None:
        self.tenants: dict[Key, TenantQueue] = {}
        """Those with queued requests."""
        self.past_work_ms: dict[Key, float] = {}
        """Work of the other tenants while the queue was not empty: a tenant that sends one request at a time has to
        wait its turn, too."""
        self._work_level = [0.0] * len(PRIORITY_NAMES)
        """By priority: admitted work of the tenant whose turn was last. New tenants start there."""
        self.waiting_for_first_node: dict[int, PendingRequest] = {}
        """Requests for which no node exists, in order of arrival, by id()."""
        self._counts: Counter[Key] = Counter()
        """Queued requests of each tenant, including those that wait for a first node."""
        self._admitted = 0
        self.waiting = 0
        """Number of queued requests, including those that wait for a first node."""
        self.queued_total = 0
        """Requests that were ever queued."""

    # Adding and removing.

    def add(self, pending: PendingRequest, decision: Decision) -> None:
        """Queue a request until its node has room."""
        self.queued_total += 1
        self._add(pending, decision)

    def add_without_node(self, pending: PendingRequest) -> None:
        """Queue a request until a first node joins."""
        self.queued_total += 1
        self._add_without_node(pending)

    def last_node_left(self, key: Key, pending: PendingRequest) -> None:
        """A queued request continues to wait for a first node."""
        self.remove(key, pending)
        self._add_without_node(pending)

    def first_node_joined(self, pending: PendingRequest, decision: Decision) -> None:
        """A request that waited for a first node continues to wait for room on it."""
        self.remove_without_node(pending)
        self._add(pending, decision)

    def cancel(self, pending: PendingRequest) -> None:
        """Remove a request if it is queued."""
        if not self.remove_without_node(pending):
            self.remove(_key(pending), pending)

    def remove(self, key: Key, pending: PendingRequest) -> bool:
        """Return False if the request was not queued."""
        tenant = self.tenants.get(key)
        if tenant is None or not tenant.remove(pending):
            return False
        self._count_removed(key)
        if not tenant.waiting:
            self.past_work_ms[key] = tenant.work_ms
            del self.tenants[key]
            if not self.tenants:
                self.past_work_ms.clear()
                self._work_level = [0.0] * len(PRIORITY_NAMES)
        return True

    def remove_without_node(self, pending: PendingRequest) -> bool:
        """Return False if the request did not wait for a first node."""
        if self.waiting_for_first_node.pop(id(pending), None) is None:
            return False
        self._count_removed(_key(pending))
        return True

    def _count_removed(self, key: Key) -> None:
        self.waiting -= 1
        self._counts[key] -= 1
        if not self._counts[key]:
            del self._counts[key]

    def _add(self, pending: PendingRequest, decision: Decision) -> None:
        key = _key(pending)
        tenant = self.tenants.get(key)
        if tenant is None:
            work_ms = max(self._work_level[key[0]], self.past_work_ms.pop(key, 0.0))
            tenant = self.tenants[key] = TenantQueue(work_ms)
        query = decision.query
        assert query is not None
        tenant.add(QueuedRequest(pending, decision, query.group))
        self.waiting += 1
        self._counts[key] += 1

    def _add_without_node(self, pending: PendingRequest) -> None:
        self.waiting_for_first_node[id(pending)] = pending
        self.waiting += 1
        self._counts[_key(pending)] += 1

    def update_decision(self, key: Key, queued: QueuedRequest, decision: Decision) -> None:
        self.tenants[key].update_decision(queued, decision)

    # Contents.

    def all_queued(self) -> list[tuple[Key, QueuedRequest]]:
        """Return all requests, except those that wait for a first node."""
        return [(key, queued) for key, tenant in self.tenants.items() for queued in tenant.waiting.values()]

    def contains(self, key: Key, queued: QueuedRequest) -> bool:
        tenant = self.tenants.get(key)
        return tenant is not None and tenant.waiting.get(id(queued.pending)) is queued

    @property
    def has_higher_priority(self) -> bool:
        """Whether a request above low priority waits for room."""
        return any(key[0] != LOW for key in self.tenants)

    def next_to_displace(self, request: RoutingRequest) -> PendingRequest | None:
        """Return the queued request that makes room for a new one; None if none has to.

        That is the newest request of the largest tenant: with low priority, if the new one has a higher priority; else
        with the priority of the new one, if that tenant has at least two requests more than the new one's tenant.
        """
        if request.priority != LOW and (found := self._largest(LOW)) is not None:
            return self._newest(found[1])
        found = self._largest(request.priority) if request.priority != HIGH else None
        if found is None or found[0] < self._counts[request.priority, request.tenant] + FAIR_LEAD:
            return None
        return self._newest(found[1])

    def _largest(self, priority: int) -> tuple[int, Key] | None:
        """Return the tenant with the most queued requests of this priority, and their number."""
        return max(((count, key) for key, count in self._counts.items() if key[0] == priority), default=None)

    def _newest(self, key: Key) -> PendingRequest:
        tenant = self.tenants.get(key)
        if tenant is not None:
            return next(reversed(tenant.waiting.values())).pending
        return next(pending for pending in reversed(self.waiting_for_first_node.values()) if _key(pending) == key)

    def work_ahead_ms(self, request: RoutingRequest, group: Group, work_ms: float, now_s: float) -> float:
        """Return the queued prefill work that would be admitted before a new request with this much work.

        It counts higher priorities and the request's own tenant. The work of other tenants with the same priority
        depends on what they had before, and is not counted.
        """
        own_key, ahead_ms = (request.priority, request.tenant), 0.0
        for key, tenant in self.tenants.items():
            if key[0] >= request.priority and key != own_key:
                continue
            sample_ms = 0.0
            for queued in islice(tenant.waiting.values(), WORK_SAMPLE):
                price = queued.decision.price
                if price is None or queued.group is not group:
                    continue
                age_ms = (now_s - queued.pending.request.arrived_s) * 1000.0
                if key != own_key or price.prefill - AGE_BONUS * age_ms <= work_ms:
                    sample_ms += price.prefill
            ahead_ms += sample_ms * max(1.0, len(tenant.waiting) / WORK_SAMPLE)
        return ahead_ms

    def heads(self, now_s: float) -> dict[str, tuple[int, float]]:
        """Return, by node, the priority and the score of the first request that waits for it."""
        heads: dict[str, tuple[int, float]] = {}
        for key, tenant in self.tenants.items():
            for node, queued in tenant.by_node():
                head = (key[0], min(one.score(now_s) for one in queued))
                if node.name not in heads or head < heads[node.name]:
                    heads[node.name] = head
        return heads

    # Order.

    def tenants_in_order(self, now_s: float, without_low: bool) -> list[tuple[Key, TenantQueue]]:
        """Return the tenants by priority, then by admitted work; every LONGEST_WAITING_TURN-th time by waiting time."""
        tenants = list(self.tenants.items())
        if without_low:
            tenants = [item for item in tenants if item[0][0] != LOW]
        if tenants and self._admitted % LONGEST_WAITING_TURN == LONGEST_WAITING_TURN - 1:
            since_s = {key: next(iter(tenant.waiting.values())).pending.request.arrived_s for key, tenant in tenants}
            if now_s - min(since_s.values()) > LONG_WAIT_S:
                return sorted(tenants, key=lambda item: since_s[item[0]])
        return sorted(tenants, key=lambda item: (item[0][0], item[1].work_ms))

    def charge(self, key: Key, tenant: TenantQueue, work_ms: float) -> None:
        """Charge a tenant for the request that is admitted next."""
        self._work_level[key[0]] = max(self._work_level[key[0]], tenant.work_ms)
        tenant.work_ms += work_ms

    def charge_unqueued(self, request: RoutingRequest, work_ms: float) -> None:
        """Charge a tenant for a request that was admitted at once while others waited."""
        key = (request.priority, request.tenant)
        tenant = self.tenants.get(key)
        if tenant is not None:
            tenant.work_ms += work_ms
        else:
            before_ms = max(self._work_level[request.priority], self.past_work_ms.get(key, 0.0))
            self.past_work_ms[key] = before_ms + work_ms

    def admit(self, key: Key, pending: PendingRequest) -> None:
        self.remove(key, pending)
        self._admitted += 1
