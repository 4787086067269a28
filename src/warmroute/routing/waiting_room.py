"""The waiting room: who waits for a node, and whose turn is next. It decides nothing about nodes; no I/O.

Higher priority goes first, then the tenant that has had the least work done. One turn in EVERY is for whoever has
waited longest, so that nobody waits for ever behind higher priorities. Those for whom there is no node at all (the
waiting_for_first_node) wait apart, until there is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final, Protocol

from warmroute.fleet.group import Group
from warmroute.fleet.node import Node
from warmroute.index.lookup import Lookup
from warmroute.prompt.routing_request import LOW, RoutingRequest
from warmroute.routing.decision import Decision
from warmroute.routing.refusals import Undecided

EVERY: Final = 16
STARVING_S: Final = 10.0
"""Of those who have waited so long, the longest waiting have one turn in EVERY, whatever their priority."""

AGE_BONUS: Final = 0.1
"""Having waited for 10 ms counts as much as 1 ms less work."""
COUNTED: Final = 64
"""Of those of a tenant who wait, so many are looked at to tell how much work they all are."""

Key = tuple[int, str]
"""Priority and tenant."""


class PendingRequest(Protocol):
    """A request that asks for a node."""

    @property
    def request(self) -> RoutingRequest: ...
    @property
    def lookup(self) -> Lookup | None: ...
    @property
    def arrived_s(self) -> float: ...

    def go(self, decision: Decision) -> None:
        """To that node, now."""

    def refuse(self, why: Undecided) -> None:
        """Nobody will take it."""


class Waiting:
    """A guest, and what was last thought of it."""

    __slots__ = ("as_of", "decision", "group", "guest")

    def __init__(self, guest: PendingRequest, decision: Decision, group: Group) -> None:
        self.guest = guest
        self.group = group
        """The group that counts it as waiting."""
        self.decision = decision
        self.as_of = 0
        """The change up to which that counts everything."""

    def may_go_to(self, node: Node) -> bool:
        query = self.decision.query
        return query is not None and node.name in query.candidates.by_name


class Tenant:
    __slots__ = ("_of_node", "done", "waiting")

    def __init__(self, done: float) -> None:
        self.waiting: dict[int, Waiting] = {}
        """In the order of their arrival, by the guest's id()."""
        self._of_node: dict[Node, dict[int, Waiting]] = {}
        """The same, by the node that each would go to as last thought of."""
        self.done = done
        """Prefill work that was let through, in milliseconds."""

    def add(self, waiting: Waiting) -> None:
        key = id(waiting.guest)
        self.waiting[key] = waiting
        self._of_node.setdefault(waiting.decision.node, {})[key] = waiting
        waiting.group.waiting += 1

    def remove(self, guest: PendingRequest) -> bool:
        waiting = self.waiting.pop(id(guest), None)
        if waiting is None:
            return False
        self._leave_node(waiting)
        waiting.group.waiting -= 1
        return True

    def decided(self, waiting: Waiting, decision: Decision) -> None:
        """Thought of anew. A model whose nodes were all gone has another group than before."""
        query = decision.query
        if query is not None and query.group is not waiting.group:
            waiting.group.waiting -= 1
            waiting.group = query.group
            waiting.group.waiting += 1
        if decision.node is not waiting.decision.node:
            self._leave_node(waiting)
            self._of_node.setdefault(decision.node, {})[id(waiting.guest)] = waiting
        waiting.decision = decision

    def _leave_node(self, waiting: Waiting) -> None:
        node = waiting.decision.node
        there = self._of_node[node]
        del there[id(waiting.guest)]
        if not there:
            del self._of_node[node]

    def looked_at(self, node: Node, most: int) -> Iterator[list[Waiting]]:
        """Those who came first. Then, where none of them may go to that node at all, those who wait for it: however
        many wait for other models or islands, they hide nobody. Where they might go there and would rather not, the
        turn is another tenant's."""
        first = list(islice(self.waiting.values(), most))
        yield first
        if len(self.waiting) > most and not any(waiting.may_go_to(node) for waiting in first):
            yield list(islice(self._of_node.get(node, {}).values(), most))


class WaitingRoom:
    def __init__(self) -> None:
        self.tenants: dict[Key, Tenant] = {}
        """Those with somebody waiting."""
        self.had: dict[Key, float] = {}
        """What others have had of late, so that nobody is the first each time because only one of theirs waits."""
        self._level = [0.0] * 3
        """For each priority: what the tenant whose turn it was had had. Where those begin who come later."""
        self.waiting_for_first_node: dict[int, PendingRequest] = {}
        """Those for whom there is no node at all, in the order of their arrival, by id()."""
        self._low_homeless = 0
        self._turns = 0
        """Those who waited and were let through, ever."""
        self.waiting = 0
        """All of them."""
        self.held = 0
        """Requests that had to wait, ever."""

    # Coming and leaving.

    def keep(self, guest: PendingRequest, decision: Decision) -> None:
        """It waits for room on its node."""
        self.held += 1
        self._add(guest, decision)

    def keep_homeless(self, guest: PendingRequest) -> None:
        """It waits for a first node to come."""
        self.held += 1
        self._add_homeless(guest)

    def lost_home(self, key: Key, guest: PendingRequest) -> None:
        """The last node that could have taken it is gone: it is the same wait."""
        self.drop(key, guest)
        self._add_homeless(guest)

    def found_home(self, guest: PendingRequest, decision: Decision) -> None:
        """There is a node for it, which has no room yet: it is the same wait."""
        self.drop_homeless(guest)
        self._add(guest, decision)

    def leave(self, guest: PendingRequest) -> None:
        """It waits no longer, if it did: its client has gone."""
        if not self.drop_homeless(guest):
            self.drop((guest.request.priority, guest.request.tenant), guest)

    def drop(self, key: Key, guest: PendingRequest) -> bool:
        """False where it does not wait any more."""
        tenant = self.tenants.get(key)
        if tenant is None or not tenant.remove(guest):
            return False
        self.waiting -= 1
        if not tenant.waiting:
            self.had[key] = tenant.done
            del self.tenants[key]
            if not self.tenants:
                self.had.clear()
                self._level = [0.0] * 3
        return True

    def drop_homeless(self, guest: PendingRequest) -> bool:
        """False where it is none, or no more."""
        if self.waiting_for_first_node.pop(id(guest), None) is None:
            return False
        self.waiting -= 1
        self._low_homeless -= guest.request.priority == LOW
        return True

    def _add(self, guest: PendingRequest, decision: Decision) -> None:
        key = (guest.request.priority, guest.request.tenant)
        tenant = self.tenants.get(key)
        if tenant is None:
            tenant = self.tenants[key] = Tenant(max(self._level[key[0]], self.had.pop(key, 0.0)))
        query = decision.query
        assert query is not None
        tenant.add(Waiting(guest, decision, query.group))
        self.waiting += 1

    def _add_homeless(self, guest: PendingRequest) -> None:
        self.waiting_for_first_node[id(guest)] = guest
        self.waiting += 1
        self._low_homeless += guest.request.priority == LOW

    def decided(self, key: Key, waiting: Waiting, decision: Decision) -> None:
        self.tenants[key].decided(waiting, decision)

    # Who is there.

    def everybody(self) -> list[tuple[Key, Waiting]]:
        """All but the waiting_for_first_node."""
        return [(key, waiting) for key, tenant in self.tenants.items() for waiting in tenant.waiting.values()]

    def waits(self, key: Key, waiting: Waiting) -> bool:
        tenant = self.tenants.get(key)
        return tenant is not None and tenant.waiting.get(id(waiting.guest)) is waiting

    @property
    def low_ones_wait(self) -> bool:
        return self._low_homeless > 0 or any(key[0] == LOW for key in self.tenants)

    @property
    def others_wait(self) -> bool:
        """Whether anybody waits for room who is not low."""
        return any(key[0] != LOW for key in self.tenants)

    def last_low(self) -> PendingRequest | None:
        """Who makes room: the last that came, of the tenant that has the most of them; else the last waiting_for_first_node."""
        low = [(len(tenant.waiting), key) for key, tenant in self.tenants.items() if key[0] == LOW]
        if low:
            return next(reversed(self.tenants[max(low)[1]].waiting.values())).guest
        return next(
            (guest for guest in reversed(self.waiting_for_first_node.values()) if guest.request.priority == LOW), None
        )

    def ahead_ms(self, request: RoutingRequest, group: Group, work_ms: float, now_s: float) -> float:
        """Prefill work that goes before one that came now, with so much work: of those with a higher priority, and of
        its own tenant. How much other tenants' goes before it depends on what they have had: it is not counted."""
        mine, ahead_ms = (request.priority, request.tenant), 0.0
        for key, tenant in self.tenants.items():
            if key[0] >= request.priority and key != mine:
                continue
            found_ms = 0.0
            for waiting in islice(tenant.waiting.values(), COUNTED):
                price = waiting.decision.price
                if price is None or waiting.group is not group:
                    continue
                older_ms = (now_s - waiting.guest.arrived_s) * 1000.0
                if key != mine or price.prefill - AGE_BONUS * older_ms <= work_ms:
                    found_ms += price.prefill
            ahead_ms += found_ms * max(1.0, len(tenant.waiting) / COUNTED)
        return ahead_ms

    # Whose turn it is.

    def in_turn(self, now_s: float, without_low: bool) -> list[tuple[Key, Tenant]]:
        """Tenants by priority, then by what they have had; now and then those first who have waited the longest."""
        tenants = list(self.tenants.items())
        if without_low:
            tenants = [item for item in tenants if item[0][0] != LOW]
        if tenants and self._turns % EVERY == EVERY - 1:
            since_s = {key: next(iter(tenant.waiting.values())).guest.arrived_s for key, tenant in tenants}
            if now_s - min(since_s.values()) > STARVING_S:
                return sorted(tenants, key=lambda item: since_s[item[0]])
        return sorted(tenants, key=lambda item: (item[0][0], item[1].done))

    def chosen(self, key: Key, tenant: Tenant, work_ms: float) -> None:
        """One of this tenant's goes next, with so much work."""
        self._level[key[0]] = max(self._level[key[0]], tenant.done)
        tenant.done += work_ms

    def let_through(self, key: Key, guest: PendingRequest) -> None:
        self.drop(key, guest)
        self._turns += 1

    def note_work(self, request: RoutingRequest, work_ms: float) -> None:
        """Work that is let through at once while others wait: it is its tenant's, too."""
        key = (request.priority, request.tenant)
        tenant = self.tenants.get(key)
        if tenant is not None:
            tenant.done += work_ms
        else:
            self.had[key] = max(self._level[request.priority], self.had.get(key, 0.0)) + work_ms
