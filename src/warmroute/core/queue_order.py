"""Which waiting request comes first, and the guarantee that none waits for ever."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from enum import Enum
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Final

from warmroute.core.decision import Decision
from warmroute.core.group import Group
from warmroute.core.node import Node
from warmroute.core.prefill_work import work

if TYPE_CHECKING:
    from warmroute.core.calls import Call

# A request in the admission queue.
#
# The order of a tenant's requests is that of their effective work: the prefill time, less WAITING_CREDIT × the time
# that the request has waited, for at most CREDIT_S. So a request with somewhat more work is not overtaken again and
# again while the queue is short, and a long queue is still served by work.

WAITING_CREDIT: Final = 0.15
CREDIT_S: Final = 5.0
"""How long a request gains credit. It then counts WAITING_CREDIT × CREDIT_S less than its prefill time."""


class QueueOrder(Enum):
    """The order of one tenant's requests. Replay compares the default with the others."""

    GUARANTEED = "least prefill work first, with a credit for waiting, and a guarantee"
    SHORTEST = "least prefill work first"
    FIRST_COME = "first come, first served"


class QueuedRequest:
    """A call in the queue, and the decision it would get."""

    call: Call
    decision: Decision
    group: Group
    """The group that counts the request as waiting."""
    number: int
    """In the order in which requests were queued."""
    order: QueueOrder
    version: int = 0
    """The version of the Admitter's state that the decision is based on."""
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

    def __init__(self, call: Call, decision: Decision, group: Group, number: int, order: QueueOrder) -> None:
        self.call = call
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
        request = self.call.request
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

    def work_ms(self) -> float:
        """Return the prefill work of the present decision, or the arrival where requests are served in that order."""
        return self.prefill_ms if self.order is not QueueOrder.FIRST_COME else self.call.request.arrived_s

    def ranked_ms(self, now_s: float) -> float:
        """Return the work less what waiting has earned: of one tenant's requests, the lowest is first."""
        ranked_ms = self.work_ms()
        if self.order is QueueOrder.GUARANTEED:
            ranked_ms -= 1000.0 * WAITING_CREDIT * min(max(0.0, now_s - self.call.request.arrived_s), CREDIT_S)
        return ranked_ms

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


# Lists of queued requests, in the order of a key.


def _list_key(queued: QueuedRequest) -> float:
    if queued.gains_credit:
        return queued.key + 1000.0 * WAITING_CREDIT * queued.call.request.arrived_s
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
            if now_s - queued.call.request.arrived_s < CREDIT_S:
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


# The guarantee of queued requests: none waits for ever, whatever its length and whatever else waits.
#
# A request whose prefill takes w is due GRACE_S + DUE_PER_PREFILL × w after its arrival. If it still waits then, it is
# overdue. Overdue requests get, in the order of their arrival, at least OVERDUE_SHARE_OF_PREFILL of the prefill time of
# each node. So a request waits at most
#
#     GRACE_S + DUE_PER_PREFILL × w + (L + P / n) / OVERDUE_SHARE_OF_PREFILL
#
# P is the prefill time of the requests that waited when it arrived, of all priorities and tenants, n the number of
# nodes that may serve it, and L the longest prefill of a single request. Requests that arrive later cannot delay it
# further.
#
# Each node has a credit, in ms of prefill. Every request that the node gets adds OVERDUE_SHARE_OF_PREFILL of its
# prefill. A request that is admitted by its guarantee takes its prefill away, in equal parts from all nodes that may
# serve it. A node gives the oldest overdue request that it may serve its turn
#
# - while its credit is not negative, if the node is the cheapest for this request;
# - when its credit pays for the whole prefill on this node, although another node is cheaper.
#
# Without overdue requests no credit is above zero.

GRACE_S: Final = 10.0
"""Time that every request may wait before it can be overdue: a queue of seconds is served by work alone."""
DUE_PER_PREFILL: Final = 2.0
"""A request is due this many times its own prefill later: a long one has to expect a longer wait."""
OVERDUE_SHARE_OF_PREFILL: Final = 0.15
"""Overdue requests get at least this share of each node's prefill time. The rest goes by work, which keeps TTFT low."""


class WaitingGuarantee:
    def __init__(self, share: float = OVERDUE_SHARE_OF_PREFILL) -> None:
        self._share = share
        """0: no guarantee."""
        self._not_due = SortedRequests()
        """In the order in which they become due."""
        self._overdue = RequestsByNode()
        """In the order of their arrival."""
        self._work = 0.0
        """Prefill work of all queued requests, in tokens of a short prompt: the nodes' speeds may not be known yet."""
        self._longest = 0.0
        """Longest prefill of a request that was queued, or sent while others waited, so far; likewise."""
        self._credit_ms: dict[Node, float] = {}
        self.longest_wait_ratio = 0.0
        """Largest wait of an admitted request, relative to its guarantee."""
        self.exceeded = 0
        """Requests that waited longer than their guarantee."""

    # Requests that wait.

    def add(self, queued: QueuedRequest) -> None:
        if not self._share:
            return
        work_ms = queued.prefill_ms
        queued.work = work_ms / queued.decision.node.speed.ms_per_token
        queued.work_ahead, queued.work_on_node = self._work, queued.decision.entry_node.pending_work
        queued.due_s = queued.call.request.arrived_s + GRACE_S + DUE_PER_PREFILL * work_ms / 1000.0
        self._work += queued.work
        self._longest = max(self._longest, queued.work)
        self._not_due.add(queued.due_s, queued)

    def remove(self, queued: QueuedRequest) -> None:
        if not self._share:
            return
        self._work -= queued.work
        if not queued.is_overdue:
            self._not_due.remove(queued.due_s, queued)
            return
        self._overdue.remove(queued.call.request.arrived_s, queued, queued.decision.entry_node)
        if not self._overdue.all:
            self._credit_ms = {node: credit_ms for node, credit_ms in self._credit_ms.items() if credit_ms < 0.0}

    def decision_changed(self, queued: QueuedRequest, from_node: Node) -> None:
        if queued.is_overdue:
            self._overdue.move(queued.call.request.arrived_s, queued, from_node)

    def forget_removed_nodes(self) -> None:
        self._credit_ms = {node: credit_ms for node, credit_ms in self._credit_ms.items() if node.groups}

    def queue_is_empty(self) -> None:
        self._work = 0.0
        self._credit_ms.clear()

    # Turns.

    def find_overdue(self, now_s: float) -> bool:
        """Find the requests that have become overdue. Return whether any request is."""
        not_due = self._not_due
        while not_due and (queued := not_due.first).due_s <= now_s:
            not_due.remove(queued.due_s, queued)
            queued.is_overdue = True
            self._overdue.add(queued.call.request.arrived_s, queued)
        return bool(self._overdue.all)

    def oldest_overdue(self, node: Node, limit: int) -> list[QueuedRequest]:
        """Return the oldest overdue requests, then the oldest ones that wait for this node: `limit` of each."""
        return self._overdue.first_ones(node, limit)

    def next_overdue(self, node: Node) -> QueuedRequest | None:
        """Return the overdue request that waits for this node, if it is its turn."""
        return self._overdue.head_for(node) if self.credit_ms(node) >= 0.0 else None

    def credit_ms(self, node: Node) -> float:
        return self._credit_ms.get(node, 0.0)

    def admitted(self, node: Node, work_ms: float) -> None:
        """A node gets a request with this much prefill."""
        if self._share:
            self._longest = max(self._longest, work_ms / node.speed.ms_per_token)
            credit_ms = self._credit_ms.get(node, 0.0) + self._share * work_ms
            self._credit_ms[node] = credit_ms if self._overdue.all else min(0.0, credit_ms)

    def admitted_overdue(self, nodes: Iterable[Node], work_ms: float) -> None:
        """One of these nodes gets a request with this much prefill by its guarantee."""
        nodes = tuple(nodes)
        for node in nodes:
            self._credit_ms[node] = self._credit_ms.get(node, 0.0) - work_ms / len(nodes)

    def record_wait(self, queued: QueuedRequest, now_s: float) -> None:
        """A request leaves the queue for a node."""
        wait_s = now_s - queued.call.request.arrived_s
        if self._share and wait_s > GRACE_S:
            ratio = wait_s / self._guaranteed_s(queued)
            self.longest_wait_ratio = max(self.longest_wait_ratio, ratio)
            self.exceeded += ratio > 1.0

    def _guaranteed_s(self, queued: QueuedRequest) -> float:
        """Return the request's guarantee at the present speeds of the nodes."""
        query, node = queued.decision.query, queued.decision.node
        nodes = query.candidates.nodes if query is not None else (node,)
        ms_per_token = node.speed.ms_per_token
        all_nodes_ms_per_token = 1.0 / sum(1.0 / one.speed.ms_per_token for one in nodes)
        longest = max(self._longest, queued.work_on_node)
        turn_ms = longest * ms_per_token + queued.work_ahead * all_nodes_ms_per_token
        return GRACE_S + (DUE_PER_PREFILL * queued.work * ms_per_token + turn_ms / self._share) / 1000.0
