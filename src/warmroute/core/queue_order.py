"""Lists of queued requests, in the order of a key."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from itertools import islice

from warmroute.fleet.group import Group
from warmroute.fleet.node import Node
from warmroute.routing.queued_request import CREDIT_S, WAITING_CREDIT, QueuedRequest, QueueOrder


def _list_key(queued: QueuedRequest) -> float:
    if queued.gains_credit:
        return queued.key + 1000.0 * WAITING_CREDIT * queued.pending.request.arrived_s
    return queued.key


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

    def head_for(self, node: Node) -> QueuedRequest | None:
        """Return the first request for this node."""
        on_node = self._by_node.get(node)
        return on_node.first if on_node is not None else None

    def all_for(self, node: Node) -> Iterable[QueuedRequest]:
        """Return the requests for this node."""
        return self._by_node.get(node, ())

    def first_ones(self, node: Node, count: int) -> list[QueuedRequest]:
        """Return the first requests, then the first ones whose decision is this node: `count` of each."""
        found, on_node = self.all.first_ones(count), self._by_node.get(node)
        if on_node is not None:
            found += [queued for queued in on_node.first_ones(count) if queued not in found]
        return found


class RequestsByWork:
    """The queued requests of one tenant by their effective work.

    All requests that still gain credit gain it at the same rate. So the order among them never changes, and neither
    does the order among those that have their whole credit: each kind has its own list.
    """

    __slots__ = ("_gaining", "_settled", "_until")

    def __init__(self) -> None:
        self._gaining = RequestsByNode()
        """By prefill time + WAITING_CREDIT × the time of arrival."""
        self._settled = RequestsByNode()
        """By prefill time. All requests, if the order is not GUARANTEED."""
        self._until: dict[int, QueuedRequest] = {}
        """Those in `_gaining`, by number: in the order in which they were queued."""

    def add(self, queued: QueuedRequest) -> None:
        queued.gains_credit = queued.order is QueueOrder.GUARANTEED
        if queued.gains_credit:
            self._until[queued.number] = queued
        self._list_of(queued).add(_list_key(queued), queued)

    def remove(self, queued: QueuedRequest, node: Node) -> None:
        """`node`: that of its decision when it was added or last changed."""
        self._list_of(queued).remove(_list_key(queued), queued, node)
        if queued.gains_credit:
            del self._until[queued.number]

    def change(self, queued: QueuedRequest, key: float, from_node: Node) -> None:
        """Its work has changed to `key`, and perhaps its node."""
        waiting = self._list_of(queued)
        waiting.remove(_list_key(queued), queued, from_node)
        queued.key = key
        waiting.add(_list_key(queued), queued)

    def move(self, queued: QueuedRequest, from_node: Node) -> None:
        """Its decision has changed from this node to another one."""
        self._list_of(queued).move(_list_key(queued), queued, from_node)

    def _list_of(self, queued: QueuedRequest) -> RequestsByNode:
        return self._gaining if queued.gains_credit else self._settled

    def settle(self, now_s: float) -> None:
        """Find the requests that have their whole credit now."""
        until = self._until
        while until:
            number, queued = next(iter(until.items()))
            if now_s - queued.pending.request.arrived_s < CREDIT_S:
                return
            self._gaining.remove(_list_key(queued), queued, queued.decision.entry_node)
            del until[number]
            queued.gains_credit = False
            self._settled.add(_list_key(queued), queued)

    def heads(self) -> Iterator[QueuedRequest]:
        """Yield the first request for each node: of those that gain credit, and of the others."""
        yield from self._gaining.heads()
        yield from self._settled.heads()

    def heads_for(self, node: Node) -> list[QueuedRequest]:
        """Return the first request for this node: of those that gain credit, and of the others."""
        return [head for head in (self._gaining.head_for(node), self._settled.head_for(node)) if head is not None]

    def all_for(self, node: Node) -> list[QueuedRequest]:
        """Return the requests for this node: those that gain credit, then the others, the first ones first."""
        return [*self._gaining.all_for(node), *self._settled.all_for(node)]

    def first_ones(self, node: Node, count: int) -> list[QueuedRequest]:
        """Return the first requests, and the first ones whose decision is this node: `count` of each."""
        if not self._gaining.all:
            return self._settled.first_ones(node, count)
        if not self._settled.all:
            return self._gaining.first_ones(node, count)
        half = max(1, count // 2)
        return [*self._gaining.first_ones(node, half), *self._settled.first_ones(node, half)]

    def work_before_ms(self, work_ms: float, now_s: float, size: int, group: Group) -> float:
        """Estimate, from `size` of them, the prefill time of this group's requests that come before a new one with
        this prefill time."""
        credit_ms = 1000.0 * WAITING_CREDIT
        return _estimated_ms(self._gaining.all, work_ms + credit_ms * now_s, size, group) + _estimated_ms(
            self._settled.all, work_ms + credit_ms * CREDIT_S, size, group
        )


def _estimated_ms(waiting: SortedRequests, up_to: float, size: int, group: Group) -> float:
    count = waiting.count_up_to(up_to)
    sample = waiting.sample(count, size)
    if not sample:
        return 0.0
    return sum(queued.prefill_ms for queued in sample if queued.group is group) * count / len(sample)
