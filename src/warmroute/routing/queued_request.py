"""A request in the admission queue, and lists of such requests in the order of a key."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from enum import Enum
from itertools import islice
from math import inf
from typing import Protocol

import msgspec

from warmroute.fleet.group import Group
from warmroute.fleet.node import Node
from warmroute.index.lookup import Lookup
from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing.decision import Decision
from warmroute.routing.routing_errors import RoutingError


class QueueOrder(Enum):
    """The order of one tenant's requests. Replay compares the default with the others."""

    GUARANTEED = "least prefill work first, with a guarantee for requests that have waited for long"
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


class QueuedRequest(msgspec.Struct, eq=False):
    """A pending request in the queue, and the decision it would get."""

    pending: PendingRequest
    decision: Decision
    group: Group
    """The group that counts the request as waiting."""
    number: int
    """In the order in which requests were queued."""
    order: QueueOrder = QueueOrder.GUARANTEED
    version: int = 0
    """The version of Admission's state that the decision is based on."""
    key: float = 0.0
    """Its place in lists by work: of one tenant's requests, the lowest key is first."""
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

    @property
    def prefill_ms(self) -> float:
        price = self.decision.price
        return price.prefill if price is not None else 0.0

    @property
    def has_deadline(self) -> bool:
        request = self.pending.request
        return bool(request.deadline_s or request.total_deadline_s)

    def current_key(self) -> float:
        """Return the key of its present decision."""
        return self.prefill_ms if self.order is not QueueOrder.FIRST_COME else self.pending.request.arrived_s

    def note_work(self, now_s: float) -> None:
        """Its decision has changed."""
        work_ms = self.prefill_ms
        if work_ms < 0.5 * self.least_work_ms:
            self.least_work_ms, self.cheaper_s = work_ms, now_s

    def may_go_to(self, node: Node) -> bool:
        query = self.decision.query
        return query is not None and node.name in query.candidates.by_name


class SortedRequests:
    """Queued requests in the order of a key, then in the order in which they were queued.

    A list of 10,000 entries is 80 KB of pointers: to find a place takes a binary search, to insert there about a
    microsecond.
    """

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, QueuedRequest]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[QueuedRequest]:
        return (entry[2] for entry in self._entries)

    def add(self, key: float, queued: QueuedRequest) -> None:
        insort(self._entries, (key, queued.number, queued))

    def remove(self, key: float, queued: QueuedRequest) -> None:
        entries = self._entries
        at = bisect_left(entries, (key, queued.number))
        if at == len(entries) or entries[at][2] is not queued:  # a key is NaN: the list is not in order
            at = next(number for number, entry in enumerate(entries) if entry[2] is queued)
        del entries[at]

    @property
    def first(self) -> QueuedRequest:
        return self._entries[0][2]

    def first_ones(self, count: int) -> list[QueuedRequest]:
        return [entry[2] for entry in self._entries[:count]]

    def count_up_to(self, key: float) -> int:
        """Return how many have at most this key."""
        return bisect_left(self._entries, (key, 1 << 62))

    def sample(self, count: int, size: int) -> list[QueuedRequest]:
        """Return at most `size` of the first `count` requests, evenly spread."""
        return [entry[2] for entry in islice(self._entries, 0, count, max(1, -(-count // size)))]


class RequestsByNode:
    """Queued requests in the order of a key: all of them, and those whose decision is a certain node."""

    __slots__ = ("_by_node", "all")

    def __init__(self) -> None:
        self.all = SortedRequests()
        self._by_node: dict[Node, SortedRequests] = {}

    def add(self, key: float, queued: QueuedRequest) -> None:
        self.all.add(key, queued)
        self._add_to_node(key, queued)

    def remove(self, key: float, queued: QueuedRequest, node: Node) -> None:
        self.all.remove(key, queued)
        self._remove_from_node(key, queued, node)

    def move(self, key: float, queued: QueuedRequest, from_node: Node) -> None:
        """Its decision has changed from this node to another one."""
        self._remove_from_node(key, queued, from_node)
        self._add_to_node(key, queued)

    def _add_to_node(self, key: float, queued: QueuedRequest) -> None:
        node = queued.decision.entry_node
        on_node = self._by_node.get(node)
        if on_node is None:
            on_node = self._by_node[node] = SortedRequests()
        on_node.add(key, queued)

    def _remove_from_node(self, key: float, queued: QueuedRequest, node: Node) -> None:
        on_node = self._by_node[node]
        on_node.remove(key, queued)
        if not on_node:
            del self._by_node[node]

    def heads(self) -> Iterator[QueuedRequest]:
        """Yield the first request for each node."""
        for queued in self._by_node.values():
            yield queued.first

    def first_ones(self, node: Node, count: int) -> list[QueuedRequest]:
        """Return the first requests, then the first ones whose decision is this node: `count` of each."""
        found, on_node = self.all.first_ones(count), self._by_node.get(node)
        if on_node is not None:
            found += [queued for queued in on_node.first_ones(count) if queued not in found]
        return found
