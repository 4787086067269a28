"""The queue of admission: tenants, priorities and nodes, and how many requests may wait.

`retry_after_s` computes after how long a rejected request would get a node: it is the number in `Retry-After`, before
core/rejections.py bounds and rounds it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from math import inf
from typing import TYPE_CHECKING, Final

from warmroute.config.routing import HIGH, LOW, PRIORITY_NAMES
from warmroute.core.cluster.turns import Head
from warmroute.core.decision import Decision
from warmroute.core.demand import UNMEASURED_S, ServiceRate
from warmroute.core.group import Group
from warmroute.core.messages import RoutingRequest
from warmroute.core.node import Node
from warmroute.core.queue_order import (
    OVERDUE_SHARE_OF_PREFILL,
    QueuedRequest,
    QueueOrder,
    RequestsByWork,
    WaitingGuarantee,
)
from warmroute.core.rejections import QueueFull

if TYPE_CHECKING:
    from warmroute.core.calls import Call

# The admission queue: requests that wait at the router for a node, and whose turn is next. No I/O.
#
# Order: higher priority first, then the tenant with the least admitted work, then the request with the least effective
# work (queue_order.py). If that one is overdue, the tenant's oldest overdue request goes instead. Overdue requests
# have a guarantee, whatever their priority, tenant and work (queue_order.py). Requests for which no node exists at
# all wait separately (`waiting_for_first_node`).

LONG_WAIT_S: Final = 10.0
"""Low-priority requests that waited for so long are rejected if the queue is half full."""
FAIR_LEAD: Final = 2
"""A tenant has to make room for another one of the same priority if it has this many queued requests more."""
KEY_TOLERANCE: Final = 0.02
"""A request keeps its place in the order if its work changes by less than this fraction."""
WORK_SAMPLE: Final = 64
"""Requests of each tenant from which `work_ahead_ms` estimates the work of all."""

Key = tuple[int, str]
"""Priority and tenant."""


def _key(call: Call) -> Key:
    return call.request.priority, call.request.tenant


def _sharing_nodes(decision: Decision) -> tuple[Node, ...]:
    """Return the nodes that share the prefill time of overdue requests like this one."""
    query = decision.query
    if query is None:
        return ()
    if decision.pair is not None:
        return query.group.prefill_nodes.nodes or (decision.entry_node,)
    return query.candidates.nodes


class TenantQueue:
    """The queued requests of one tenant and priority."""

    def __init__(self, work_ms: float) -> None:
        self.work_ms = work_ms
        """Prefill work that was admitted."""
        self.waiting: dict[int, QueuedRequest] = {}
        """In order of arrival, by number."""
        self.by_work = RequestsByWork()
        self._by_decision: OrderedDict[int, QueuedRequest] = OrderedDict()
        """The same as `waiting`, the oldest decision first."""

    def add(self, queued: QueuedRequest) -> None:
        self.waiting[queued.call.id] = self._by_decision[queued.call.id] = queued
        queued.key = queued.work_ms()
        queued.note_work(queued.call.request.arrived_s)
        self.by_work.add(queued)
        queued.group.waiting += 1

    def remove(self, call: Call) -> QueuedRequest | None:
        queued = self.waiting.pop(call.id, None)
        if queued is not None:
            del self._by_decision[call.id]
            self.by_work.remove(queued, queued.decision.entry_node)
            queued.group.waiting -= 1
        return queued

    def update_decision(self, queued: QueuedRequest, decision: Decision) -> None:
        """The group changes, too, if all nodes of the model left and others joined."""
        query, before, number = decision.query, queued.decision.entry_node, queued.call.id
        if query is not None and query.group is not queued.group:
            queued.group.waiting -= 1
            queued.group = query.group
            queued.group.waiting += 1
        self._by_decision.move_to_end(number)
        queued.decision = decision
        queued.note_work(query.now_s if query is not None else 0.0)
        key = queued.work_ms()
        if abs(key - queued.key) > KEY_TOLERANCE * queued.key:
            self.by_work.change(queued, key, before)
        elif decision.entry_node is not before:
            self.by_work.move(queued, before)

    def candidates_for(self, node: Node, limit: int, now_s: float) -> list[QueuedRequest]:
        """Return the requests with the least work, those with the least work whose decision is this node, and those
        with the oldest decisions: their work may have become less."""
        self.by_work.settle(now_s)
        found = dict.fromkeys(self.by_work.first_ones(node, limit))
        stale = max(1, limit // 2)
        for queued in self._by_decision.values():
            if not stale:
                break
            stale -= 1
            found[queued] = None
        return list(found)


class AdmissionQueue:
    def __init__(self, order: QueueOrder = QueueOrder.GUARANTEED) -> None:
        self._order = order
        self.guarantee = WaitingGuarantee(OVERDUE_SHARE_OF_PREFILL if order is QueueOrder.GUARANTEED else 0.0)
        self.tenants: dict[Key, TenantQueue] = {}
        """Those with queued requests."""
        self.past_work_ms: dict[Key, float] = {}
        """Work of the other tenants while the queue was not empty: a tenant that sends one request at a time has to
        wait its turn, too."""
        self._work_level = [0.0] * len(PRIORITY_NAMES)
        """By priority: admitted work of the tenant whose turn was last. New tenants start there."""
        self.waiting_for_first_node: dict[int, Call] = {}
        """Requests for which no node exists, in order of arrival, by number."""
        self.without_node_since_s: dict[int, float] = {}
        """When they began to wait without a node, by number."""
        self._number = 0
        """Of the request that was queued last."""
        self._counts: Counter[Key] = Counter()
        """Queued requests of each tenant, including those that wait for a first node."""
        self.waiting = 0
        """Number of queued requests, including those that wait for a first node."""
        self.waiting_for: dict[Node, dict[Key, int]] = {}
        """Queued requests by the node of their decision and by tenant, without zeros."""
        self.with_deadline = 0
        """Those of them that wait for room and have a deadline."""
        self.queued_total = 0
        """Requests that were ever queued."""
        self.service = ServiceRate()
        """How fast the requests that wait for room get nodes. Each group has the rate of its own."""
        self.admitted_by_work = 0
        self.admitted_by_guarantee = 0

    # Adding and removing.

    def add(self, call: Call, decision: Decision) -> None:
        """Queue a request until its node has room."""
        self.queued_total += 1
        self._add(call, decision)

    def add_without_node(self, call: Call, now_s: float) -> None:
        """Queue a request until a first node joins."""
        self.queued_total += 1
        self._add_without_node(call, now_s)

    def last_node_left(self, key: Key, call: Call, now_s: float) -> None:
        """A queued request continues to wait for a first node."""
        self.remove(key, call)
        self._add_without_node(call, now_s)

    def first_node_joined(self, call: Call, decision: Decision) -> None:
        """A request that waited for a first node continues to wait for room on it."""
        self.remove_without_node(call)
        self._add(call, decision)

    def cancel(self, call: Call) -> None:
        """Remove a request if it is queued."""
        if not self.remove_without_node(call):
            self.remove(_key(call), call)

    def remove(self, key: Key, call: Call) -> bool:
        """Return False if the request was not queued."""
        tenant = self.tenants.get(key)
        if tenant is None or (queued := tenant.remove(call)) is None:
            return False
        self.guarantee.remove(queued)
        self._count_for_node(queued.decision.entry_node, key, -1)
        self.with_deadline -= queued.has_deadline
        self._count_removed(key)
        if queued.group.waiting <= queued.group.peer_waiting:
            queued.group.service.end()
        if not tenant.waiting:
            self.past_work_ms[key] = tenant.work_ms
            del self.tenants[key]
            if not self.tenants:
                self.guarantee.queue_is_empty()
                self.service.end()
                self.past_work_ms.clear()
                self._work_level = [0.0] * len(PRIORITY_NAMES)
        return True

    def remove_without_node(self, call: Call) -> bool:
        """Return False if the request did not wait for a first node."""
        if self.waiting_for_first_node.pop(call.id, None) is None:
            return False
        del self.without_node_since_s[call.id]
        self._count_removed(_key(call))
        return True

    def _count_removed(self, key: Key) -> None:
        self.waiting -= 1
        self._counts[key] -= 1
        if not self._counts[key]:
            del self._counts[key]

    def _add(self, call: Call, decision: Decision) -> None:
        key = _key(call)
        query = decision.query
        assert query is not None
        if not self.tenants:
            self.service.begin(query.now_s)
        if query.group.waiting <= query.group.peer_waiting:
            query.group.service.begin(query.now_s)
        tenant = self.tenants.get(key)
        if tenant is None:
            work_ms = max(self._work_level[key[0]], self.past_work_ms.pop(key, 0.0))
            tenant = self.tenants[key] = TenantQueue(work_ms)
        self._number += 1
        queued = QueuedRequest(call, decision, query.group, self._number, self._order)
        tenant.add(queued)
        self.guarantee.add(queued)
        self._count_for_node(decision.entry_node, key, 1)
        self.with_deadline += queued.has_deadline
        self.waiting += 1
        self._counts[key] += 1

    def _count_for_node(self, node: Node, key: Key, change: int) -> None:
        tenants = self.waiting_for.setdefault(node, {})
        tenants[key] = tenants.get(key, 0) + change
        if not tenants[key]:
            del tenants[key]
            if not tenants:
                del self.waiting_for[node]

    def _add_without_node(self, call: Call, now_s: float) -> None:
        self.waiting_for_first_node[call.id] = call
        self.without_node_since_s[call.id] = now_s
        self.waiting += 1
        self._counts[_key(call)] += 1

    def update_decision(self, key: Key, queued: QueuedRequest, decision: Decision) -> None:
        before = queued.decision.entry_node
        self.tenants[key].update_decision(queued, decision)
        if decision.entry_node is not before:
            self._count_for_node(before, key, -1)
            self._count_for_node(decision.entry_node, key, 1)
            self.guarantee.decision_changed(queued, before)

    # Contents.

    def all_queued(self) -> list[tuple[Key, QueuedRequest]]:
        """Return all requests, except those that wait for a first node."""
        return [(key, queued) for key, tenant in self.tenants.items() for queued in tenant.waiting.values()]

    def part_of_all(self, part: int, parts: int) -> list[tuple[Key, QueuedRequest]]:
        """Return one of several parts of them. A request is always in the same part."""
        part %= parts
        return [
            (key, queued)
            for key, tenant in self.tenants.items()
            for queued in tenant.waiting.values()
            if queued.number % parts == part
        ]

    def find(self, call: Call) -> QueuedRequest | None:
        """Return None if the request does not wait for room."""
        tenant = self.tenants.get(_key(call))
        return tenant.waiting.get(call.id) if tenant is not None else None

    def contains(self, key: Key, queued: QueuedRequest) -> bool:
        tenant = self.tenants.get(key)
        return tenant is not None and tenant.waiting.get(queued.call.id) is queued

    @property
    def has_higher_priority(self) -> bool:
        """Whether a request above low priority waits for room."""
        return any(key[0] != LOW for key in self.tenants)

    def next_to_displace(self, request: RoutingRequest) -> Call | None:
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

    def _newest(self, key: Key) -> Call:
        tenant = self.tenants.get(key)
        if tenant is not None:
            return next(reversed(tenant.waiting.values())).call
        return next(call for call in reversed(self.waiting_for_first_node.values()) if _key(call) == key)

    def work_ahead_ms(self, request: RoutingRequest, group: Group, work_ms: float, now_s: float) -> float:
        """Return the queued prefill work that would be admitted before a new request with this much work.

        It counts higher priorities and the request's own tenant. The work of other tenants with the same priority
        depends on what they had before, and is not counted.
        """
        own_key, ahead_ms = (request.priority, request.tenant), 0.0
        for key, tenant in self.tenants.items():
            if key[0] >= request.priority and key != own_key:
                continue
            up_to_ms = work_ms if key == own_key else inf
            ahead_ms += tenant.by_work.work_before_ms(up_to_ms, now_s, WORK_SAMPLE, group)
        return ahead_ms

    def heads(self) -> Iterator[QueuedRequest]:
        """Yield the first requests of each tenant for each node."""
        for tenant in self.tenants.values():
            yield from tenant.by_work.heads()

    def first_waiting(self, now_s: float) -> tuple[dict[str, Head], dict[str, Head]]:
        """Return the first request that waits for each node; and, by model, the first that would go to any node with
        room."""
        by_node: dict[str, Head] = {}
        by_model: dict[str, Head] = {}
        for queued in self.heads():
            head = queued.call.request.priority, queued.ranked_ms(now_s), queued.prefill_ms
            name, model = queued.decision.entry_node.name, queued.group.model
            if name not in by_node or head < by_node[name]:
                by_node[name] = head
            if (model not in by_model or head < by_model[model]) and queued.goes_anywhere:
                by_model[model] = head
        return by_node, by_model

    # Order.

    def tenants_in_order(self, without_low: bool) -> list[tuple[Key, TenantQueue]]:
        """Return the tenants by priority, then by admitted work."""
        tenants = [item for item in self.tenants.items() if not without_low or item[0][0] != LOW]
        if len(tenants) > 1:
            tenants.sort(key=lambda item: (item[0][0], item[1].work_ms))
        return tenants

    def comes_after(self, request: RoutingRequest, decision: Decision, now_s: float) -> bool:
        """Return whether a request that waits for the decision's node goes there before a new one."""
        node = decision.entry_node
        tenants = self.waiting_for.get(node)
        if tenants is None:
            return False
        if self.guarantee.next_overdue(node) is not None:
            return True
        own_key = (request.priority, request.tenant)
        own_work_ms = self._admitted_work_ms(own_key)
        for key in tenants:
            if key[0] > request.priority:
                continue
            if key[0] < request.priority or (key != own_key and own_work_ms >= self.tenants[key].work_ms):
                return True
            if key == own_key:
                for head in self.tenants[key].by_work.heads_for(node):
                    if not self._is_before(request, decision, key, head, now_s):
                        return True
        return False

    def waiting_before(self, request: RoutingRequest, decision: Decision, now_s: float) -> Iterator[QueuedRequest]:
        """Yield the requests that wait for the decision's node and go there before a new one."""
        node, own_key = decision.entry_node, (request.priority, request.tenant)
        own_work_ms = self._admitted_work_ms(own_key)
        overdue = self.guarantee.next_overdue(node)
        if overdue is not None:
            yield overdue
        for key in self.waiting_for.get(node, ()):
            if key[0] > request.priority:
                continue
            tenant = self.tenants[key]
            work_ms = tenant.work_ms  # it grows with each request that goes
            for queued in tenant.by_work.all_for(node):
                if queued is overdue:
                    continue
                if key == own_key and self._is_before(request, decision, key, queued, now_s):
                    continue
                if key != own_key and key[0] == request.priority and work_ms > own_work_ms:
                    break
                work_ms += queued.prefill_ms
                yield queued

    def goes_before(
        self,
        request: RoutingRequest,
        decision: Decision,
        key: Key,
        queued: QueuedRequest,
        by_guarantee: bool,
        now_s: float,
    ) -> bool:
        """Return whether a new request goes before the first queued one for its node. `by_guarantee`: that one goes
        first by its guarantee."""
        if by_guarantee:
            return False
        if queued.is_overdue and key == (request.priority, request.tenant):  # it goes instead of one with less work
            return False
        return self._is_before(request, decision, key, queued, now_s)

    def _is_before(
        self, request: RoutingRequest, decision: Decision, key: Key, queued: QueuedRequest, now_s: float
    ) -> bool:
        own_key = (request.priority, request.tenant)
        if own_key == key:
            price = decision.price
            work_ms = price.prefill if price is not None else 0.0
            return (work_ms if self._order is not QueueOrder.FIRST_COME else now_s) < queued.ranked_ms(now_s)
        if request.priority != key[0]:
            return request.priority < key[0]
        return self._admitted_work_ms(own_key) < self.tenants[key].work_ms

    def _admitted_work_ms(self, key: Key) -> float:
        """Return the admitted work of a tenant, also of one without queued requests."""
        tenant = self.tenants.get(key)
        return tenant.work_ms if tenant is not None else max(self._work_level[key[0]], self.past_work_ms.get(key, 0.0))

    def charge(self, key: Key, queued: QueuedRequest, now_s: float, by_guarantee: bool) -> None:
        """Charge a tenant, and the request's node, for the request that is admitted next."""
        self.service.record(now_s)
        queued.group.service.record(now_s)
        tenant, work_ms = self.tenants[key], queued.prefill_ms
        self._work_level[key[0]] = max(self._work_level[key[0]], tenant.work_ms)
        tenant.work_ms += work_ms
        self.guarantee.admitted(queued.decision.entry_node, work_ms)
        self.guarantee.record_wait(queued, now_s)
        if by_guarantee:
            self.guarantee.admitted_overdue(_sharing_nodes(queued.decision), work_ms)
            self.admitted_by_guarantee += 1
        else:
            self.admitted_by_work += 1

    def charge_unqueued(self, request: RoutingRequest, node: Node, work_ms: float) -> None:
        """Charge a tenant, and its node, for a request that was admitted at once while others waited."""
        self.guarantee.admitted(node, work_ms)
        key = (request.priority, request.tenant)
        tenant = self.tenants.get(key)
        if tenant is not None:
            tenant.work_ms += work_ms
        else:
            before_ms = max(self._work_level[request.priority], self.past_work_ms.get(key, 0.0))
            self.past_work_ms[key] = before_ms + work_ms


# How many requests may wait in the admission queue, and which of them makes room for another one. No I/O.
#
# From half of `max_waiting` on, low-priority requests no longer overtake others; if the queue is full, others displace
# them. So no request is rejected in favour of a low-priority one. If the queue is full of requests of the same
# priority, a request displaces one of the tenant that has the most. So no tenant can keep others out by sending many
# requests.


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

    def to_displace(self, request: RoutingRequest, group: Group | None, now_s: float) -> Call | None:
        """Return the queued request that a new one displaces; None if it displaces none. Raises QueueFull."""
        if self._queue.waiting < self._limit(request.priority):
            return None
        displaced = self._queue.next_to_displace(request)
        if displaced is None and request.priority != HIGH:
            raise QueueFull(self.retry_after_s(group, request.priority, now_s))
        return displaced
