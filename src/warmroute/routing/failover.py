"""Which node a request is sent to after one has failed, and which error its client gets if all have. No I/O.

    order   the decision's fallbacks; then nodes that came up meanwhile; then those that are only suspected to be down
    never   draining nodes, nodes that are confirmed down, nodes that failed at this request before, and nodes that
            need a prefill node if the request may not be split, and nodes with `max_inflight` requests: the client then
            gets 429 if no other node is left

A node that is busy (429, or 503 with `Retry-After`) is asked last for as long as its `Retry-After` says. After
MAX_BUSY_ANSWERS such answers to one request it is not asked at all, so that an overloaded fleet does not also get every
request once for each node.

A request is poison if two nodes answered it with 5xx that serve other requests: then it is at fault itself. It is sent
to no further node, and its failures count for no node's health. So a failure of a node that serves other requests is
judged only once the request has been answered elsewhere, or has failed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from warmroute.fleet.health import HealthState
from warmroute.fleet.node import Node, Outcome
from warmroute.index.lookup import Lookup
from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing.decision import Decision
from warmroute.routing.router import Router
from warmroute.routing.routing_errors import (
    AllNodesBusy,
    AllNodesFailed,
    AllNodesUnavailable,
    FailedOnEveryNode,
    RoutingError,
)

MAX_BUSY_ANSWERS: Final = 3
"""After this many busy answers, a request skips nodes that recently answered another request as busy."""


SERVES_S: Final = 5.0
"""A node serves other requests if it served one no longer than this before it failed."""


class ServerError(msgspec.Struct, eq=False):
    """What a node answered that serves other requests: 5xx, but not that it is busy. Not judged yet."""

    node: Node
    failed_s: float
    reason: str


@dataclass(slots=True, eq=False)
class Failover:
    """Created when the first node of a request fails."""

    decision: Decision
    """The one that the next node is taken from."""
    failed: list[Node] = field(default_factory=list)
    """Nodes that the request was sent to in vain, busy ones included."""
    at_fault: list[Node] = field(default_factory=list)
    """Those of them for whose health the attempt counts as a failure."""
    server_errors: list[ServerError] = field(default_factory=list)
    """Those that are not judged."""
    _fallbacks: list[Node] | None = None
    """The best one last."""
    _busy: int = 0
    _unavailable: int = 0
    _retry_after_s: int | None = None
    _skipped_full: bool = False
    """Whether a node that was not tried has as many requests as it may have."""

    # What the nodes answered.

    def add(self, node: Node, outcome: Outcome) -> None:
        """The request's attempt on this node ended without a response."""
        self.failed.append(node)
        if outcome is Outcome.FAILED:
            self.at_fault.append(node)

    def busy(self, node: Node, status: int, retry_after_s: int | None, now_s: float) -> None:
        """The node answered 429 or 503; status 0: the router itself lacks files, ports or memory to connect to it."""
        if status != 429 and retry_after_s is None:
            self._unavailable += 1
            return
        self._busy += 1
        if retry_after_s is not None:
            retry_after_s = max(1, retry_after_s)
            self._retry_after_s = min(self._retry_after_s or retry_after_s, retry_after_s)
        node.busy_until_s = now_s + (retry_after_s or 1)

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
        """Return why the request gets no node."""
        if self.is_poison:
            return FailedOnEveryNode(len({error.node for error in self.server_errors} | set(self.failed)))
        retry_after_s = self._retry_after_s
        if self._busy == len(self.failed) or self._skipped_full:
            return AllNodesBusy(retry_after_s or 1)
        if self._busy + self._unavailable == len(self.failed):
            return AllNodesUnavailable(retry_after_s or 1)
        return AllNodesFailed(len(self.failed), retry_after_s or 1 if self._busy else None)

    # The next node.

    def next_node(self, router: Router, request: RoutingRequest, lookup: Lookup | None, now_s: float) -> Node | None:
        """Return None if no eligible node is left, or if the request's deadline has passed."""
        self._skipped_full = False  # `other_node` may have met a node that was full then
        if self._is_late(request, now_s):
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
        ranked = (node for node in (decision.node, *decision.fallbacks()) if self._may_try(node, request, now_s))
        return next(ranked, last[0])

    def other_node(
        self,
        router: Router,
        request: RoutingRequest,
        lookup: Lookup | None,
        now_s: float,
        accepts: Callable[[Node], bool],
    ) -> Node | None:
        """Return a node that is up and that the request was not sent to, by a new decision; None if there is none."""

        def may_try(node: Node) -> bool:
            return node.health.state is HealthState.UP and self._may_try(node, request, now_s) and accepts(node)

        if self._is_late(request, now_s) or not any(map(may_try, router.usable_nodes(request))):
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
        return (
            not node.draining
            and not node.health.confirmed_down
            and node not in self.failed
            and not self._is_full(node)
            and (request.may_split or not node.needs_partner)
            and (self._busy < MAX_BUSY_ANSWERS or node.busy_until_s <= now_s)
        )

    def _is_full(self, node: Node) -> bool:
        if node.is_full:
            self._skipped_full = True
        return node.is_full

    @staticmethod
    def _is_late(request: RoutingRequest, now_s: float) -> bool:
        return bool(request.deadline_s and now_s >= request.deadline_s) or bool(
            request.total_deadline_s and now_s >= request.total_deadline_s
        )
