"""Who is admitted, waits or is rejected: eligible nodes, overdue turns, and requests that no node can serve yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Final

from warmroute.config import Admission, RouteConfig
from warmroute.config.routing import HIGH, LOW
from warmroute.core.cluster.turns import Turns
from warmroute.core.decision import Decision, check_deadlines, max_ttft_ms, missed
from warmroute.core.demand import UNMEASURED_S
from warmroute.core.group import Group
from warmroute.core.messages import Lookup, RoutingRequest
from warmroute.core.node import Node
from warmroute.core.queue import LONG_WAIT_S, AdmissionQueue, Key, QueueLimits
from warmroute.core.queue_order import GRACE_S, QueuedRequest, QueueOrder
from warmroute.core.rejections import (
    Displaced,
    HeldTooLong,
    NodeQueuesFull,
    NodesFull,
    NoNodeAvailable,
    NotAdmitted,
    QueueFull,
    QueueTimeout,
    RoutingError,
    WouldQueue,
)
from warmroute.core.router import Router

if TYPE_CHECKING:
    from warmroute.core.calls import Call

# Checks whether a decision's node is eligible for the request, and decides again among the nodes that are.
#
# A node is not eligible if its own queue is too long, or if it would miss the request's deadline.

SOME_FULL: Final = "other nodes are at max_inflight"
"""Reason of a decision for a node that was not full, where a better one was."""
SOME_BUSY: Final = "other nodes are at their learned concurrency limit"
ALL_BUSY: Final = "every node is at its learned concurrency limit"
ALL_FULL: Final = "every node is at max_inflight"
"""Reason of a decision for a full node: the request waits for it."""


def eligible(router: Router, request: RoutingRequest, decision: Decision, threshold: int, now_s: float) -> Decision:
    """Return a decision for a node whose queue is short enough and that meets the deadlines. Raises NotAdmitted."""
    if threshold:
        decision = below_queue_threshold(router, request, decision, threshold)
    if not request.may_queue:
        decision = without_queue(router, decision)
    if request.deadline_s or request.total_deadline_s:
        decision = within_deadlines(router, request, decision, now_s)
    return decision


def queue_limit(request: RoutingRequest, threshold: int) -> float:
    """Return the length of a node's own queue from which on the request may not go there."""
    return threshold / 2 if request.priority == LOW else threshold


def is_over_threshold(request: RoutingRequest, node: Node, threshold: int) -> bool:
    """Return whether the node's own queue is too long for the request."""
    return bool(threshold) and request.priority != HIGH and node.queued >= queue_limit(request, threshold)


def below_queue_threshold(router: Router, request: RoutingRequest, decision: Decision, threshold: int) -> Decision:
    """Return a decision for a node whose own queue is below the threshold. Raises NodeQueuesFull if there is none."""
    limit = queue_limit(request, threshold)
    if decision.node.queued < limit:
        return decision
    found = _among(router, decision, lambda node: node.queued < limit, "other nodes are over the queue threshold")
    if found is None and request.priority != HIGH:
        raise NodeQueuesFull(_queue_s(decision, limit))
    return found or decision


def below_limits(
    router: Router, request: RoutingRequest, decision: Decision, threshold: int, now_s: float, *, counts_learned: bool
) -> Decision:
    """Return a decision for nodes with fewer requests than their `max_inflight` and, if that counts, their learned
    concurrency limit. If there is none, or none that meets the request's deadlines, return the same decision."""
    some, all_ = (SOME_FULL, ALL_FULL) if decision.is_full else (SOME_BUSY, ALL_BUSY)

    def has_place(node: Node) -> bool:
        return not (
            node.is_full_for(request)
            or (counts_learned and node.at_concurrency_limit)
            or is_over_threshold(request, node, threshold)
            or (node.waiting and not request.may_queue)
        )  # fmt: skip

    found = _among(router, decision, has_place, some)
    has_deadline = request.deadline_s or request.total_deadline_s
    if found is None or found.is_full or (has_deadline and check_deadlines(request, found, now_s) is not None):
        decision.reason = all_
        return decision
    return found


def without_queue(router: Router, decision: Decision) -> Decision:
    """Return a decision for a node without a queue of its own. Raises WouldQueue if there is none."""
    if not decision.node.waiting:
        return decision
    found = _among(router, decision, lambda node: not node.waiting, "other nodes have a queue")
    if found is None:
        raise WouldQueue(_queue_s(decision, 1.0))
    return found


def within_deadlines(router: Router, request: RoutingRequest, decision: Decision, now_s: float) -> Decision:
    """Return a decision for a node that meets the request's deadlines. Raises DeadlineUnreachable if there is none."""
    missed = check_deadlines(request, decision, now_s)
    if missed is None:
        return decision
    prices, query = decision.prices, decision.query
    if prices is not None and query is not None:
        index = prices.cheapest_within(max_ttft_ms(request, decision, now_s))
        if index >= 0 and decision.candidates[index] is not decision.node:
            other = router.decide_among((decision.candidates[index],), query)
            other.reason = "other nodes would miss its deadline"
            if check_deadlines(request, other, now_s) is None:
                return other
    raise missed


def check_deadlines_behind_queue(
    queue: AdmissionQueue, request: RoutingRequest, decision: Decision, now_s: float
) -> None:
    """Raise DeadlineUnreachable if the request would miss a deadline because of the requests queued ahead of it.

    The nodes of the model share the work of those requests.
    """
    price, query = decision.price, decision.query
    if price is None or query is None:
        return
    queue_ms = queue.work_ahead_ms(request, query.group, price.prefill, now_s) / len(query.candidates)
    missed = check_deadlines(request, decision, now_s, queue_ms=queue_ms)
    if missed is not None:
        raise missed


def _queue_s(decision: Decision, limit: float) -> float:
    """Return after how long the first node's own queue is shorter than `limit`. By Little's law, a node ends as many
    requests per second as it has, divided by how long one takes."""
    query = decision.query
    assert query is not None
    return min(
        (node.latency_ms / 1000.0 * (node.queued + 1.0 - limit) / (node.running + node.queued)
         if node.latency_ms and node.queued else UNMEASURED_S)
        for node in query.candidates.nodes
    )  # fmt: skip


def _among(router: Router, decision: Decision, eligible: Callable[[Node], bool], reason: str) -> Decision | None:
    query = decision.query
    assert query is not None
    nodes = [node for node in query.candidates.nodes if eligible(node)]
    if not nodes:
        return None
    found = router.decide_among(nodes, query)
    found.reason = reason
    return found


# Requests that wait although no node can serve them: for the first node of an autoscaled fleet, or for the first
# health check of a new node. Those that wait for room on a node are with the `Admitter`.

FIRST_CHECK_WAIT_S: Final = 5.0
"""How long a request waits for the first health check of a new node while no other node can serve it."""


class WithoutNode:
    def __init__(self, queue: AdmissionQueue, router: Router) -> None:
        self._queue = queue
        self._router = router
        self.first_node_wait_s = 0.0
        """How long a request waits for a first node, if the fleet is autoscaled; 0: it is rejected at once."""

    def wait_s(self, request: RoutingRequest) -> float:
        """How long a request waits while no node can serve it. 0: it is rejected at once."""
        return self.first_node_wait_s or (FIRST_CHECK_WAIT_S if self._router.awaits_first_check(request.model) else 0.0)

    def why_not_longer(
        self,
        call: Call,
        waits_s: dict[str, float],
        max_wait_s: float,
        margin_s: float,
        now_s: float,
        no_node: RoutingError,
    ) -> RoutingError | None:
        """Return why a call for which there is still no node waits no longer; None if it waits on. `waits_s`: by model,
        as far as known."""
        request = call.request
        if request.model not in waits_s:
            waits_s[request.model] = self.wait_s(request)
        wait_s = waits_s[request.model]
        since_s = request.arrived_s if self.first_node_wait_s else self._queue.without_node_since_s[call.id]
        until_s = min(since_s + wait_s, request.arrived_s + (max_wait_s or inf))
        due_s = min(request.deadline_s or inf, request.total_deadline_s or inf) - margin_s
        if wait_s and now_s <= until_s and now_s <= due_s:
            return None
        if not wait_s:
            return no_node
        return QueueTimeout() if now_s <= due_s else missed(request, now_s)


# Which overdue request gets a node that has room (see queue_order.py). No I/O.

EXAMINED_OVERDUE: Final = 4
"""How many of the oldest overdue requests are examined, and how many of the oldest that wait for this node."""
OVERDUE: Final = "its waiting guarantee came due"
"""Reason of a decision by which an overdue request gets its node."""


class OverdueTurns:
    def __init__(
        self,
        queue: AdmissionQueue,
        router: Router,
        is_current: Callable[[Key, QueuedRequest, float], bool],
        over_threshold: Callable[[RoutingRequest, Node], bool],
    ) -> None:
        """`is_current` updates the decision of a queued request, and returns False if it does not wait any more.
        `over_threshold`: whether the node's own queue is too long for the request."""
        self._queue = queue
        self._router = router
        self._is_current = is_current
        self._over_threshold = over_threshold

    def next_for(self, node: Node, without_low: bool, now_s: float) -> tuple[Key, QueuedRequest] | None:
        """Return the overdue request that gets this node by its guarantee."""
        guarantee = self._queue.guarantee
        if guarantee.credit_ms(node) < 0.0:
            return None
        for queued in guarantee.oldest_overdue(node, EXAMINED_OVERDUE):
            request = queued.call.request
            key = (request.priority, request.tenant)
            if (without_low and key[0] == LOW) or not self._is_current(key, queued, now_s):
                continue
            if queued.decision.is_full:
                continue
            waits_for_it = queued.decision.entry_node is node
            if not (waits_for_it or queued.may_go_to(node)) or self._over_threshold(request, node):
                continue
            if waits_for_it:
                queued.decision.reason = OVERDUE
                return key, queued
            return (key, queued) if self._credit_pays_for(node, key, queued) else None
        return None

    def _credit_pays_for(self, node: Node, key: Key, queued: QueuedRequest) -> bool:
        """Decide for this node if its credit pays for the whole prefill, although another node is cheaper."""
        query, credit_ms = queued.decision.query, self._queue.guarantee.credit_ms(node)
        if query is None or credit_ms <= 0.0:
            return False
        decision = self._router.decide_among((node,), query)
        if (
            decision.entry_node is not node
            or decision.is_full
            or decision.price is None
            or decision.price.prefill > credit_ms
        ):
            return False
        decision.reason, decision.query = OVERDUE, query
        self._queue.update_decision(key, queued, decision)
        return True

    def oldest_of(self, key: Key, node: Node, now_s: float) -> QueuedRequest | None:
        """Return the oldest overdue request of this tenant whose cheapest node this is, if it is among the oldest."""
        for queued in self._queue.guarantee.oldest_overdue(node, EXAMINED_OVERDUE):
            request = queued.call.request
            if (request.priority, request.tenant) != key or not self._is_current(key, queued, now_s):
                continue
            decision = queued.decision
            if decision.entry_node is node and not decision.is_full and not self._over_threshold(request, node):
                return queued
        return None


# Sends a request to its node now, queues it at the router, or rejects it. Takes events and a clock; no I/O.
#
# A request whose cheapest node has room goes there at once. Otherwise it waits in the admission queue and not in the
# engine's: until its turn comes, its cached prefix may be evicted, or another node may become cheaper. When a node has
# room again, admission decides again for the first queued requests, in the queue's order (queue.py).
#
# A node's room also grows with time. So a new request that finds room may find requests that wait for it, too: those of
# them that come before it in the queue's order go first.
#
# Admission rejects a request that cannot meet its deadline, that finds the queue full (queue.py), or that must not
# queue.
#
# Nothing here calls the calls: admission returns which of them go where, and lists those that it has rejected.

EXAMINED_PER_TENANT: Final = 8
"""Queued requests of each tenant that admission examines when a node has room: this number of those that wait for
the node, as many of all, and half as many of those with the oldest decisions."""
EXAMINED: Final = 64
"""The same for all tenants together. Of each tenant it examines at least one of each kind."""
TICK_S: Final = 0.05
"""Time between two calls of `tick`. A request is rejected this much before it would miss its deadline."""
FULL_CHECK_TICKS: Final = 20
"""Number of ticks in which admission checks each queued request once, even if no event calls for it."""
HITS_VALID_S: Final = 0.25
"""Time for which the looked-up hits of a queued request are used again."""
DECISION_VALID_S: Final = 0.003
"""A queued request that would not go first keeps its decision for this long."""


class Admitter:
    def __init__(
        self,
        router: Router,
        config: Admission,
        routes: Sequence[RouteConfig] = (),
        order: QueueOrder = QueueOrder.GUARANTEED,
    ) -> None:
        self._router = router
        self.queue = AdmissionQueue(order)
        self._limits = QueueLimits(self.queue)
        self._overdue_turns = OverdueTurns(self.queue, router, self._is_current, self._over_threshold)
        self.without_node = WithoutNode(self.queue, router)
        self.rejected: list[tuple[Call, Exception]] = []
        """Calls that left the queue without a node, and why, until somebody tells their clients."""
        self._version = 0
        """Incremented when something may have changed. A decision of the same version need not be made again."""
        self.turns: Turns | None = None
        """Whose turn it is among several processes; None if this is the only one."""
        self.reconfigure(config, routes)

    def reconfigure(self, config: Admission, routes: Sequence[RouteConfig] = ()) -> None:
        self.config = config
        self._limits.max_waiting = config.max_waiting
        self._ticks = -1  # the next tick checks each queued request
        self._by_route = {route.name: own for route in routes if (own := route.admission(config)) != config}
        """Settings of the routes that have their own."""
        self._has_threshold = any(one.queue_threshold for one in (config, *self._by_route.values()))

    def _config_of(self, request: RoutingRequest) -> Admission:
        return self._by_route.get(request.route, self.config) if self._by_route else self.config

    # New requests.

    def place(self, call: Call, now_s: float, again: bool = False) -> Decision | QueuedRequest | None:
        """Return the decision by which a call is sent at once; or a queued call that goes first: send that one, and ask
        again; or None if the call waits. Raises RoutingError if it is rejected."""
        request, queue = call.request, self.queue
        demand_meter, decision = self._router.demand_meter, None
        try:
            decision = self._router.decide(request, now_s, call.lookup)
            if demand_meter is not None and not again:
                demand_meter.arrived += 1
            node = decision.node
            if (
                not (node.is_limited or queue.waiting or self._has_threshold)
                and request.may_queue and decision.pair is None and self.turns is None
                and not (request.deadline_s or request.total_deadline_s)
                and (not node.inflight or decision.index < 0 or self.has_room(node, now_s))
            ):  # fmt: skip
                return decision  # no call waits and no limit applies, so only the room on the node counts
            decision, has_room = self._check_room(request, decision, now_s)
            if has_room and queue.tenants and self._comes_after(request, decision, now_s):
                first = self._first_for(decision.entry_node, now_s)
                if first is not None and not queue.goes_before(request, decision, *first, now_s):
                    if self._has_turn(decision.entry_node, *first, now_s):
                        return self._take(*first, now_s)
                    has_room = False
        except NoNodeAvailable:
            if demand_meter is not None and decision is None and not again:
                demand_meter.arrived += 1
            if not self.without_node.wait_s(request) or not request.may_queue:
                raise
            displaced = self._check_queue_limit(request, None, now_s)
            queue.add_without_node(call, now_s)
            if displaced is not None:
                self._displace(displaced, now_s)
            return None
        if has_room and self._is_ours(request, decision, now_s):
            if queue.tenants and decision.price is not None:  # a trial request or another policy has no price
                queue.charge_unqueued(request, decision.entry_node, decision.price.prefill)
            return decision
        displaced = self._check_may_queue(request, decision, now_s)
        queue.add(call, decision)
        if self.turns is not None:
            self.turns.queued()
        if displaced is not None:
            self._displace(displaced, now_s)
        return None

    def dry_run(self, request: RoutingRequest, lookup: Lookup | None, now_s: float) -> tuple[Decision, bool]:
        """Return what `place` would decide, and whether it would queue the request. Raises RoutingError."""
        router, self._router = self._router, self._router.snapshot()
        try:
            decision, has_room = self._check_room(request, self._router.decide(request, now_s, lookup), now_s)
            has_room = has_room and self._has_room_after_others(request, decision, now_s)
            if has_room and self._is_ours(request, decision, now_s):
                return decision, False
            self._check_may_queue(request, decision, now_s)
            return decision, True
        finally:
            self._router = router

    def _check_room(self, request: RoutingRequest, decision: Decision, now_s: float) -> tuple[Decision, bool]:
        """Return a decision for an eligible node, and whether that has room for the request. Raises NotAdmitted."""
        if self._has_threshold or not request.may_queue or request.deadline_s or request.total_deadline_s:
            decision = self._eligible(request, decision, now_s)
        if decision.is_limited and (decision.is_full or decision.entry_node.at_concurrency_limit):
            decision = self.below_limits(request, decision, now_s)
            if decision.is_full and not self._queues(request):
                raise self.nodes_full(decision)
        if request.priority == LOW and self._has_to_queue(request, decision, now_s):
            return decision, False
        return decision, self._fits(request, decision, now_s)

    def _comes_after(self, request: RoutingRequest, decision: Decision, now_s: float) -> bool:
        """Return whether a queued request that waits for the same node comes before this new one."""
        return decision.index >= 0 and self._queues(request) and self.queue.comes_after(request, decision, now_s)

    def _has_room_after_others(self, request: RoutingRequest, decision: Decision, now_s: float) -> bool:
        """Return whether the node has room for this new request once those have it that come before it."""
        node, work_ms = decision.entry_node, 0.0
        if self._comes_after(request, decision, now_s):
            for queued in self.queue.waiting_before(request, decision, now_s):
                work_ms += queued.prefill_ms if not self._over_threshold(queued.call.request, node) else 0.0
        return not work_ms or self.has_room(node, now_s, work_ms)

    def _fits(self, request: RoutingRequest, decision: Decision, now_s: float) -> bool:
        if decision.is_limited and decision.is_full:
            return False
        return decision.index < 0 or not self._queues(request) or self.has_room(decision.entry_node, now_s)

    def below_limits(self, request: RoutingRequest, decision: Decision, now_s: float) -> Decision:
        """Return a decision for a node with fewer requests than it may have, if there is one."""
        if not decision.is_full and not self._queues(request):
            return decision  # a learned limit is no reason to reject a request
        threshold = self._config_of(request).queue_threshold if self._has_threshold else 0
        return below_limits(self._router, request, decision, threshold, now_s, counts_learned=self._queues(request))

    def _is_ours(self, request: RoutingRequest, decision: Decision, now_s: float) -> bool:
        """Return False if the room is a peer's."""
        turns = self.turns
        if turns is None or not turns.is_contended:
            return True
        price = decision.price
        if price is None or not self._queues(request):
            return True
        node, own = decision.entry_node, (request.priority, price.prefill, price.prefill)
        return turns.is_ours(node, own, self._limit_ms(node), now_s)

    def has_room(self, node: Node, now_s: float, more_ms: float = 0.0) -> bool:
        """Return whether the node has fewer requests than it may have, and little prefill work left, with this much
        more. An idle node has room."""
        if node.is_limited:
            if node.is_full_for(None):
                return False
            if node.at_concurrency_limit:
                node.concurrency.was_hit = True
                return False
        if (not node.inflight and not more_ms) or node.is_blocked(now_s):
            return not node.inflight
        turns = self.turns
        work = node.remaining_work(now_s) if turns is None else turns.work_left(node, now_s)
        has_room = work * node.speed.ms_per_token + more_ms <= self._limit_ms(node)
        if turns is not None and not has_room and not more_ms:
            turns.no_room(node)
        return has_room

    def _limit_ms(self, node: Node) -> float:
        """Return the prefill work up to which a node has room. Work in transit keeps no GPU busy, and a distant node
        has more of it."""
        return self.config.max_node_backlog_ms + node.round_trip_ms

    def _queues(self, request: RoutingRequest) -> bool:
        """Return whether the request waits at the router while its node has no room."""
        return self._config_of(request).queue_at_router and self._router.policy_of(request).queues_at_router

    def _eligible(self, request: RoutingRequest, decision: Decision, now_s: float) -> Decision:
        """Return a decision for a node whose queue is short enough and that meets the deadlines. Raises NotAdmitted."""
        threshold = self._config_of(request).queue_threshold if self._has_threshold else 0
        try:
            return eligible(self._router, request, decision, threshold, now_s)
        except NodeQueuesFull as full:
            raise self._shed(full) from None

    # Limits of the queue.

    def _has_to_queue(self, request: RoutingRequest, decision: Decision, now_s: float) -> bool:
        """Return whether a low-priority request must not be sent at once, because the queue is half full and others
        wait for the same model. Raises QueueFull if it cannot queue."""
        query = decision.query
        assert query is not None
        if not self._limits.half_full or not query.group.waiting:
            return False
        if decision.index < 0 or not self._queues(request):
            raise self._shed(QueueFull(self._limits.retry_after_s(query.group, LOW, now_s)))
        return True

    def _check_may_queue(self, request: RoutingRequest, decision: Decision, now_s: float) -> Call | None:
        """Return the queued request that this one displaces; None if it displaces none. Raises NotAdmitted."""
        group = decision.query.group if decision.query is not None else None
        if not request.may_queue:
            wait_s = decision.price.wait / 1000.0 if decision.price is not None else 1.0
            if group is not None and group.waiting:
                wait_s = max(wait_s, self._limits.retry_after_s(group, request.priority, now_s))
            raise WouldQueue(wait_s)
        if (request.deadline_s or request.total_deadline_s) and self.queue.tenants:
            check_deadlines_behind_queue(self.queue, request, decision, now_s)
        return self._check_queue_limit(request, group, now_s)

    def _check_queue_limit(self, request: RoutingRequest, group: Group | None, now_s: float) -> Call | None:
        """Return the queued request that this one displaces; None if it displaces none. Raises QueueFull."""
        try:
            return self._limits.to_displace(request, group, now_s)
        except QueueFull as full:
            raise self._shed(full) from None

    def _shed(self, error: NotAdmitted) -> NotAdmitted:
        if self._router.demand_meter is not None:
            self._router.demand_meter.shed += 1
        return error

    def nodes_full(self, decision: Decision) -> NotAdmitted:
        return self._shed(NodesFull(decision.node.latency_ms / 1000.0 / max(1, decision.node.inflight)))

    def _displace(self, call: Call, now_s: float) -> None:
        queued, priority = self.queue.find(call), call.request.priority
        group = queued.group if queued is not None else None
        error = self._shed(Displaced(self._limits.retry_after_s(group, priority, now_s)))
        self.queue.cancel(call)
        self.rejected.append((call, error))

    def held_too_long(self, call: Call, now_s: float) -> NotAdmitted:
        """Take a queued call out of the queue that its caller does not hold any longer. Return why it is rejected."""
        queued = self.queue.find(call)
        group = queued.group if queued is not None else None
        error = self._shed(HeldTooLong(self._limits.retry_after_s(group, call.request.priority, now_s)))
        self.queue.cancel(call)
        return error

    # Queued calls.

    def changed(self) -> None:
        """Something may have changed for those that wait: they are decided again."""
        self._version += 1

    def next_for(self, nodes: dict[Node, None], now_s: float) -> QueuedRequest | None:
        """Return the next queued call that goes to one of these nodes; send it, and ask again. Nodes that have no room,
        or that no call waits for, leave `nodes`."""
        while nodes:
            node = next(iter(nodes))
            if self.queue.tenants and self.has_room(node, now_s):
                first = self._first_for(node, now_s)
                if first is not None and self._has_turn(node, *first, now_s):
                    return self._take(*first, now_s)
            del nodes[node]
        return None

    def _has_turn(self, node: Node, key: Key, queued: QueuedRequest, by_guarantee: bool, now_s: float) -> bool:
        """Return False if a peer's request comes before this one."""
        turns = self.turns
        if turns is None or by_guarantee or not turns.is_contended:
            return True
        own = (key[0], queued.ranked_ms(now_s), queued.prefill_ms)
        return turns.is_ours(node, own, self._limit_ms(node), now_s)

    def _take(self, key: Key, queued: QueuedRequest, by_guarantee: bool, now_s: float) -> QueuedRequest:
        """Take a call out of the queue: it goes to the node of its decision."""
        self.queue.charge(key, queued, now_s, by_guarantee)
        self.queue.remove(key, queued.call)
        self._version += 1
        return queued

    def _first_for(self, node: Node, now_s: float) -> tuple[Key, QueuedRequest, bool] | None:
        """Return the first request for this node, or a trial request for a half-open node; whether by its guarantee."""
        queue = self.queue
        without_low = self._limits.half_full and queue.has_higher_priority
        has_overdue = queue.guarantee.find_overdue(now_s)
        overdue = self._overdue_turns.next_for(node, without_low, now_s) if has_overdue else None
        if overdue is not None:
            return overdue[0], overdue[1], True
        tenants = queue.tenants_in_order(without_low)
        limit = min(EXAMINED_PER_TENANT, max(1, EXAMINED // max(1, len(tenants))))
        for key, tenant in tenants:
            best = self._best_for(node, key, tenant.candidates_for(node, limit, now_s), now_s)
            if best is not None and best.is_overdue and now_s > best.cheaper_s + GRACE_S:
                best = self._overdue_turns.oldest_of(key, node, now_s) or best
            if best is not None and queue.contains(key, best):
                return key, best, False
        return None

    def _is_current(self, key: Key, queued: QueuedRequest, now_s: float) -> bool:
        """Update the decision of a queued request. Return False if it does not wait any more."""
        if not self.queue.contains(key, queued) or not self._decide_again(key, queued, now_s):
            return False
        request = queued.call.request
        has_deadline = request.deadline_s or request.total_deadline_s
        return not (has_deadline and self._reject_if_late(key, queued, now_s))

    def _best_for(self, node: Node, key: Key, examined: list[QueuedRequest], now_s: float) -> QueuedRequest | None:
        best: QueuedRequest | None = None
        lowest = inf
        for queued in examined:
            is_recent = best is not None and queued.decided_since(now_s - DECISION_VALID_S)
            if is_recent and queued.ranked_ms(now_s) >= lowest:
                continue
            if not self._is_current(key, queued, now_s):
                continue
            decision = queued.decision
            if decision.is_full:
                continue
            if decision.price is None:
                return queued
            if decision.entry_node is not node or self._over_threshold(queued.call.request, node):
                continue
            key_now = queued.ranked_ms(now_s)
            if best is None or key_now < lowest:
                best, lowest = queued, key_now
        return best

    def _over_threshold(self, request: RoutingRequest, node: Node) -> bool:
        if not self._has_threshold:
            return False
        return is_over_threshold(request, node, self._config_of(request).queue_threshold)

    def _decide_again(self, key: Key, queued: QueuedRequest, now_s: float) -> bool:
        """Update the decision of a queued request. Return False if no node is available any more."""
        if queued.version == self._version:
            return True
        queued.version = self._version
        query = queued.decision.query
        call = queued.call
        try:
            if query is not None and now_s - query.looked_up_s < HITS_VALID_S:
                decision = self._router.decide_again(query, now_s)
            else:
                decision = self._router.decide(call.request, now_s, call.lookup)
        except Exception as error:  # it ends this call, and no other
            if isinstance(error, NoNodeAvailable) and self.without_node.wait_s(call.request):
                self.queue.last_node_left(key, call, now_s)
            else:
                self.queue.remove(key, call)
                self.rejected.append((call, error))
            return False
        if self._has_threshold and (threshold := self._config_of(call.request).queue_threshold):
            with suppress(NodeQueuesFull):  # it continues to wait
                decision = below_queue_threshold(self._router, call.request, decision, threshold)
        if decision.is_limited and (decision.is_full or decision.entry_node.at_concurrency_limit):
            decision = self.below_limits(call.request, decision, now_s)
        self.queue.update_decision(key, queued, decision)
        return True

    # Periodic work.

    def tick(self, nodes: dict[Node, None], now_s: float) -> Iterator[tuple[Call, Decision]]:
        """Call this every TICK_S. It finds nodes that have room without an event, and rejects calls that have waited
        too long, will miss their deadline, or wait for a node that is gone. Yields those that are sent."""
        for node in nodes:
            if node.unstreamed_prefills:
                node.assume_prefilled(now_s)
        if self.queue.waiting_for_first_node:
            yield from self._check_without_node(now_s)
        if self._router.island_choice.tracks_queues:
            self._router.island_choice.update_queues(queued.decision for _, queued in self.queue.all_queued())
        if not self.queue.tenants:
            return
        self._version += 1
        yield from self._check_queued(now_s)
        while (queued := self.next_for(nodes, now_s)) is not None:
            yield queued.call, queued.decision

    def _check_without_node(self, now_s: float) -> Iterator[tuple[Call, Decision]]:
        """Continue with the calls whose first node has joined, and reject those that waited too long for it, or that
        would miss a deadline."""
        queue = self.queue
        waits_s: dict[str, float] = {}
        for number, call in list(queue.waiting_for_first_node.items()):
            if number not in queue.waiting_for_first_node:
                continue
            try:
                decision, goes_at_once = self._find_place(call, now_s)
            except NoNodeAvailable as no_node:
                max_wait_s = self._config_of(call.request).max_wait_s
                why = self.without_node.why_not_longer(call, waits_s, max_wait_s, TICK_S, now_s, no_node)
                if why is not None:
                    queue.remove_without_node(call)
                    self.rejected.append((call, why))
            except Exception as error:  # it ends this call, and no other
                queue.remove_without_node(call)
                self.rejected.append((call, error))
            else:
                if goes_at_once:
                    queue.remove_without_node(call)
                    yield call, decision
                else:
                    queue.first_node_joined(call, decision)

    def _find_place(self, call: Call, now_s: float) -> tuple[Decision, bool]:
        """Decide for a request that had no node. Return whether it goes at once. Raises RoutingError."""
        request = call.request
        decision = self._eligible(request, self._router.decide(request, now_s, call.lookup), now_s)
        if decision.is_full or decision.entry_node.at_concurrency_limit:
            decision = self.below_limits(request, decision, now_s)
        return decision, self._fits(request, decision, now_s) and self._is_ours(request, decision, now_s)

    def _check_queued(self, now_s: float) -> Iterator[tuple[Call, Decision]]:
        queue = self.queue
        default_max_wait_s = self.config.max_wait_s
        default_queues = self.config.queue_at_router and self._router.policy.queues_at_router
        self._ticks += 1
        if not self._ticks % FULL_CHECK_TICKS:
            queue.guarantee.forget_removed_nodes()
        all_at_once = (
            not (self._ticks and default_queues) or default_max_wait_s or self._by_route or queue.with_deadline
        )
        if not all_at_once and not self._limits.half_full and not any(head.node_is_gone for head in queue.heads()):
            checked = queue.part_of_all(self._ticks, FULL_CHECK_TICKS)
        else:
            checked = queue.all_queued()
        for key, queued in checked:
            if not queue.contains(key, queued):
                continue
            call = queued.call
            request = call.request
            max_wait_s = self._config_of(request).max_wait_s if request.route else default_max_wait_s
            waited_s = now_s - request.arrived_s
            if max_wait_s and waited_s > max_wait_s:
                wait_s = self._limits.retry_after_s(queued.group, request.priority, now_s)
                queue.remove(key, call)
                self.rejected.append((call, QueueTimeout(wait_s)))
            elif key[0] == LOW and waited_s > LONG_WAIT_S and self._limits.half_full and queue.has_higher_priority:
                wait_s = self._limits.retry_after_s(queued.group, LOW, now_s)
                error = self._shed(Displaced(wait_s))  # its turn would not come
                queue.remove(key, call)
                self.rejected.append((call, error))
            elif not (self._queues(request) if request.route else default_queues):  # the configuration has changed
                if self._decide_again(key, queued, now_s) and not queued.decision.is_full:
                    queue.remove(key, call)
                    yield call, queued.decision
            elif queued.node_is_gone:
                self._decide_again(key, queued, now_s)
            elif (
                (request.deadline_s or request.total_deadline_s)
                and check_deadlines(request, queued.decision, now_s, TICK_S)
                and self._decide_again(key, queued, now_s)  # its decision may be old
            ):
                self._reject_if_late(key, queued, now_s, TICK_S)

    def _reject_if_late(self, key: Key, queued: QueuedRequest, now_s: float, margin_s: float = 0.0) -> bool:
        """Return whether the request was rejected because it would miss a deadline."""
        call = queued.call
        error = check_deadlines(call.request, queued.decision, now_s, margin_s)
        if error is None:
            return False
        self.queue.remove(key, call)
        self.rejected.append((call, error))
        return True
