"""Which node a call is sent to after one has failed, and which error its client gets if all have. No I/O.

    order   the decision's fallbacks; then nodes that came up meanwhile; then those that are only suspected to be down
    never   nodes outside the request's subset, draining nodes, nodes that are confirmed down, nodes that failed at this
            call before, nodes that need a prefill node if the request may not be split, and nodes with `max_inflight`
            requests: the client then gets 429 if no other node is left

A node that is busy (429 or 503) is asked last for as long as its `Retry-After` says, or for one second. After
MAX_BUSY_ANSWERS busy answers, a call asks no node that is still asked last: an overloaded fleet must not get every
request once for each node.

A call is poison if two nodes answered it with 5xx that serve other requests: then the request itself is at fault. It is
sent to no further node, and its failures count for no node's health. So a failure of a node that serves other requests
is judged only once the call has been answered elsewhere, or has failed. This file says which failures may be poison;
`Calls.close` (core/calls.py) holds them back, and `Calls._judge` counts them later with `Fleet.count_failure`
(core/fleet.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from warmroute.core.decision import Decision
from warmroute.core.health import HealthState
from warmroute.core.messages import LOCAL, NOT_ASKED, Lookup, Outcome, RoutingRequest
from warmroute.core.node import Node
from warmroute.core.rejections import (
    AllNodesBusy,
    AllNodesFailed,
    AllNodesUnavailable,
    FailedOnEveryNode,
    NoNodeAvailable,
    OutOfResources,
    RoutingError,
)
from warmroute.core.router import Router

MAX_BUSY_ANSWERS: Final = 3
SERVES_S: Final = 5.0
"""A node serves other requests if it served one no longer than this before it failed."""
REST_S: Final = 1
"""How long a busy node is asked last if it does not say when to come back."""


class ServerError(msgspec.Struct, eq=False):
    """What a node answered that serves other requests: 5xx, but not that it is busy. Not judged yet."""

    node: Node
    failed_s: float
    reason: str


class Failover:
    """Created when the first try of a call fails."""

    decision: Decision
    """The one that the next node is taken from."""
    failed: list[Node]
    """Nodes that the call was sent to in vain, busy ones included."""
    at_fault: list[Node]
    """Those of them for whose health the try counts as a failure."""
    server_errors: list[ServerError]
    """Those that are not judged."""
    _fallbacks: list[Node] | None = None
    """The best one last."""
    _busy: int = 0
    _unavailable: int = 0
    _local: int = 0
    _unasked: int = 0
    _retry_after_s: int | None = None
    _skipped_full: bool = False
    """Whether a node that was not tried has as many requests as it may have."""

    def __init__(self, decision: Decision) -> None:
        self.decision = decision
        self.failed = []
        self.at_fault = []
        self.server_errors = []

    # What the nodes answered.

    def add(self, node: Node, outcome: Outcome) -> None:
        """The call's try on this node ended without a response."""
        self.failed.append(node)
        if outcome is Outcome.FAILED:
            self.at_fault.append(node)

    def answered(self, node: Node, outcome: Outcome, status: int, retry_after_s: int | None, now_s: float) -> None:
        """Note what a failed try says about the next one. `status`: of HTTP, or a sign of the connection."""
        if status in NOT_ASKED:
            self._unasked += 1
        elif status == LOCAL:
            self._local += 1
        elif outcome is Outcome.BUSY:
            if status == 429 or retry_after_s is not None:
                self._busy += 1
                if retry_after_s is not None:
                    retry_after_s = max(1, retry_after_s)
                    self._retry_after_s = min(self._retry_after_s or retry_after_s, retry_after_s)
            else:
                self._unavailable += 1
            if status:
                node.busy_until_s = now_s + (retry_after_s or REST_S)

    def may_be_poison(self, node: Node, failed_s: float, reason: str) -> bool:
        """A node that serves other requests answered with 5xx: the request may be at fault. Return False if the node
        did that before."""
        errors = self.server_errors
        if any(error.node is node for error in errors):
            return False
        errors.append(ServerError(node, failed_s, reason))
        return True

    @property
    def is_poison(self) -> bool:
        return len(self.server_errors) > 1

    def error(self) -> RoutingError:
        """Return why the call gets no node."""
        if self.is_poison:
            return FailedOnEveryNode(len({error.node for error in self.server_errors} | set(self.failed)))
        retry_after_s, tried = self._retry_after_s, len(self.failed) - self._unasked
        if not tried and not self._skipped_full:
            return NoNodeAvailable()
        if self._local and self._local == tried:
            return OutOfResources()
        if self._busy == tried or self._skipped_full:
            return AllNodesBusy(retry_after_s or 1)
        if self._busy + self._unavailable + self._local == tried:
            return AllNodesUnavailable(retry_after_s or 1)
        return AllNodesFailed(tried, retry_after_s or 1 if self._busy else None)

    # The next node.

    def next_node(self, router: Router, request: RoutingRequest, lookup: Lookup | None, now_s: float) -> Node | None:
        """Return None if no eligible node is left, or if the request's deadline has passed."""
        self._skipped_full = False  # `other_node` may have met a node that was full then
        if is_late(request, now_s):
            return None
        fallbacks = self._fallbacks
        if fallbacks is None:
            fallbacks = self._fallbacks = self.decision.fallbacks()
            fallbacks.sort(key=lambda node: node.busy_until_s > now_s)
            fallbacks.reverse()
        while fallbacks:
            node = fallbacks.pop()
            if node.health.state is HealthState.UP and self._may_try(node, request, now_s):
                return node
        return self._from_new_decision(router, request, lookup, now_s)

    def _from_new_decision(
        self, router: Router, request: RoutingRequest, lookup: Lookup | None, now_s: float
    ) -> Node | None:
        last = [node for node in router.usable_nodes(request) if self._may_try(node, request, now_s)]
        if not last:
            return None
        try:
            decision = self.decision = router.decide(request, now_s, lookup)
        except RoutingError:
            return None
        for node in (decision.node, *decision.fallbacks()):
            if self._may_try(node, request, now_s):
                return node
        return last[0]

    def other_node(
        self, router: Router, request: RoutingRequest, lookup: Lookup | None, now_s: float,
        accepts: Callable[[Node], bool],
    ) -> Node | None:  # fmt: skip
        """Return a node that is up and that the call was not sent to, by a new decision; None if there is none."""

        def may_try(node: Node) -> bool:
            return node.health.state is HealthState.UP and self._may_try(node, request, now_s) and accepts(node)

        if is_late(request, now_s) or not any(map(may_try, router.usable_nodes(request))):
            return None
        try:
            decision = router.decide(request, now_s, lookup)
        except RoutingError:
            return None
        node = next(filter(may_try, (decision.node, *decision.fallbacks())), None)
        if node is not None:
            self.decision, self._fallbacks = decision, None
        return node

    def _may_try(self, node: Node, request: RoutingRequest, now_s: float) -> bool:
        if node.draining or node.health.confirmed_down or node in self.failed:
            return False
        if request.subset is not None and node.name not in request.subset:
            return False
        if node.is_full_for(request):
            self._skipped_full = True
            return False
        return (request.may_split or not node.needs_partner) and (
            self._busy + self._unavailable < MAX_BUSY_ANSWERS or node.busy_until_s <= now_s
        )


def is_late(request: RoutingRequest, now_s: float) -> bool:
    """Return whether a deadline of the request has passed."""
    return bool(request.deadline_s and now_s >= request.deadline_s) or bool(
        request.total_deadline_s and now_s >= request.total_deadline_s
    )
