"""Admission: who goes to a node now, who waits here, who is refused. Takes events and a clock; no I/O.

A request whose cheapest node has room goes there at once. Otherwise it waits here and not in the engine's queue, where
it could no longer change its mind: what it hopes to find in the cache may be gone by its turn, and another node may be
free before. When a node has room again, those that are cheapest there are looked at: higher priority first, then the
tenant that has had the least work done, then the least work, with a bonus for waiting.

Whoever is let through or refused may come back at once, from within the call: with another request, or with a node that
is free again. So nothing is looked at after such a call that was looked up before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final, Protocol

from warmroute.config import Admission as AdmissionConfig
from warmroute.fleet.arrivals import Arrivals
from warmroute.fleet.group import Group
from warmroute.fleet.node import Node
from warmroute.index.lookup import Lookup
from warmroute.prompt.ask import HIGH, LOW, Ask
from warmroute.routing.decision import Decision
from warmroute.routing.router import Router, Undecided

LOOKED_AT: Final = 64
"""Of those who wait, so many of each tenant are looked at when a node has room."""
AGE_BONUS: Final = 0.1
"""Having waited for 10 ms counts as much as 1 ms less work."""
HITS_KEPT_S: Final = 0.25
"""How long what nodes hold of a waiting prompt is taken as known."""


class Guest(Protocol):
    """A request that asks for a node."""

    @property
    def ask(self) -> Ask: ...
    @property
    def lookup(self) -> Lookup | None: ...
    @property
    def arrived_s(self) -> float: ...

    def go(self, decision: Decision) -> None:
        """To that node, now."""

    def refuse(self, why: Undecided) -> None:
        """Nobody will take it."""


class Shed(Undecided):
    """Too many requests wait already."""

    def __init__(self, retry_after_s: int) -> None:
        self.retry_after_s = retry_after_s


class WaitedTooLong(Undecided):
    """No node had room for it in time."""


class _Waiting:
    """A guest, and what was last thought of it."""

    __slots__ = ("as_of", "decision", "group", "guest")

    def __init__(self, guest: Guest, decision: Decision, group: Group) -> None:
        self.guest = guest
        self.group = group
        """The group that counts it as waiting."""
        self.decision = decision
        self.as_of = 0
        """The change up to which that counts everything."""


class _Tenant:
    __slots__ = ("done", "waiting")

    def __init__(self, done: float) -> None:
        self.waiting: dict[int, _Waiting] = {}
        """In the order of their arrival, by the guest's id()."""
        self.done = done
        """Prefill work that was let through, in milliseconds."""


class Admission:
    def __init__(self, router: Router, config: AdmissionConfig) -> None:
        self._router = router
        self._tenants: dict[tuple[int, str], _Tenant] = {}
        """By priority and name, those with somebody waiting."""
        self._had: dict[tuple[int, str], float] = {}
        """What others have had of late, so that nobody is the first each time because only one of theirs waits."""
        self._level = [0.0] * 3
        """For each priority: what the tenant whose turn it was had had. Where those begin who come later."""
        self._freed: dict[Node, None] = {}
        """Nodes that are being filled."""
        self._changes = 0
        """Times that something may have changed: until the next one, what was thought of those who wait stands."""
        self._going = Arrivals()
        """Those who waited and were let through."""
        self.waiting = 0
        self.held = 0
        """Requests that had to wait, ever."""
        self.reconfigure(config)

    def reconfigure(self, config: AdmissionConfig) -> None:
        self.config = config

    # Coming in.

    def enter(self, guest: Guest, now_s: float) -> None:
        """Calls guest.go, now or later, or guest.refuse later. Raises Undecided where it is refused at once."""
        decision = self._router.decide(guest.ask, now_s, guest.lookup)
        assert decision.query is not None
        decision.query.group.arrivals.saw(now_s)
        if decision.price is None or self._takes_more(decision.node):  # without a price: a trial, or another policy
            guest.go(decision)
            return
        self._check_room_here(guest.ask.priority, now_s)
        self._keep(guest, decision)

    def _check_room_here(self, priority: int, now_s: float) -> None:
        limit = self.config.max_waiting
        if priority != HIGH and self.waiting >= (limit // 2 if priority == LOW else limit):
            per_s = self._going.rate(now_s) * 1000.0
            raise Shed(int(min(60.0, max(1.0, self.waiting / per_s if per_s else 60.0))))

    def _keep(self, guest: Guest, decision: Decision) -> None:
        key = (guest.ask.priority, guest.ask.tenant)
        tenant = self._tenants.get(key)
        if tenant is None:
            tenant = self._tenants[key] = _Tenant(max(self._level[key[0]], self._had.pop(key, 0.0)))
        query = decision.query
        assert query is not None
        tenant.waiting[id(guest)] = _Waiting(guest, decision, query.group)
        self.held += 1
        self.waiting += 1
        query.group.waiting += 1

    def leave(self, guest: Guest) -> None:
        """It waits no longer: its client has gone."""
        self._drop((guest.ask.priority, guest.ask.tenant), guest)

    def _drop(self, key: tuple[int, str], guest: Guest) -> bool:
        """False where it does not wait any more."""
        tenant = self._tenants.get(key)
        waiting = tenant.waiting.pop(id(guest), None) if tenant is not None else None
        if tenant is None or waiting is None:
            return False
        self.waiting -= 1
        waiting.group.waiting -= 1
        if not tenant.waiting:
            self._had[key] = tenant.done
            del self._tenants[key]
            if not self._tenants:
                self._had.clear()
                self._level = [0.0] * 3
        return True

    # Going out.

    def freed(self, node: Node, now_s: float) -> None:
        """A node may have more room than before."""
        self._changes += 1
        self._fill_all((node,), now_s)

    def _fill_all(self, nodes: Iterable[Node], now_s: float) -> None:
        filling = bool(self._freed)
        self._freed.update(dict.fromkeys(nodes))
        if filling:  # by one who was let through just now: the loop below comes to it
            return
        try:
            while self._freed:
                node = next(iter(self._freed))
                self._fill(node, now_s)
                del self._freed[node]
        finally:
            self._freed.clear()

    def _fill(self, node: Node, now_s: float) -> None:
        while self._tenants and self._takes_more(node):
            chosen = self._next_for(node, now_s)
            if chosen is None:
                return
            key, waiting = chosen
            self._drop(key, waiting.guest)
            self._going.saw(now_s)
            waiting.guest.go(waiting.decision)
            self._changes += 1

    def tick(self, nodes: Iterable[Node], now_s: float) -> None:
        """Now and then: for nodes whose room has changed by itself, and for those who have waited too long, or for a
        node that is no more."""
        if not self._tenants:
            return
        if self.config.max_wait_s:
            self._refuse_late(now_s - self.config.max_wait_s)
        self._changes += 1
        self._turn_away(now_s)
        self._fill_all(nodes, now_s)

    def _refuse_late(self, since_s: float) -> None:
        for key, waiting in self._everybody():
            if waiting.guest.arrived_s < since_s and self._drop(key, waiting.guest):
                waiting.guest.refuse(WaitedTooLong())

    def _turn_away(self, now_s: float) -> None:
        """From nodes that take nobody any more: to others, or, where there are none, for good."""
        for key, waiting in self._everybody():
            query = waiting.decision.query
            assert query is not None
            name, group = waiting.decision.node.name, query.group
            if name not in group.up.by_name and name not in group.at_need.by_name and self._waits(key, waiting):
                self._think_again(key, waiting, now_s)

    def _everybody(self) -> list[tuple[tuple[int, str], _Waiting]]:
        return [(key, waiting) for key, tenant in self._tenants.items() for waiting in tenant.waiting.values()]

    def _waits(self, key: tuple[int, str], waiting: _Waiting) -> bool:
        tenant = self._tenants.get(key)
        return tenant is not None and tenant.waiting.get(id(waiting.guest)) is waiting

    def _next_for(self, node: Node, now_s: float) -> tuple[tuple[int, str], _Waiting] | None:
        """Who goes to this node next, if anybody is to. Whoever is to try out a node on trial goes there meanwhile."""
        for key, tenant in sorted(self._tenants.items(), key=lambda item: (item[0][0], item[1].done)):
            best: _Waiting | None = None
            best_score = best_work = 0.0
            for waiting in list(islice(tenant.waiting.values(), LOOKED_AT)):
                if not self._waits(key, waiting) or not self._think_again(key, waiting, now_s):
                    continue
                decision = waiting.decision
                if decision.price is None:
                    return key, waiting
                if decision.node is not node:
                    continue
                work = decision.price.prefill
                score = work - AGE_BONUS * (now_s - waiting.guest.arrived_s) * 1000.0
                if best is None or score < best_score:
                    best, best_score, best_work = waiting, score, work
            if best is not None and self._waits(key, best):
                self._level[key[0]] = max(self._level[key[0]], tenant.done)
                tenant.done += best_work
                return key, best
        return None

    def _think_again(self, key: tuple[int, str], waiting: _Waiting, now_s: float) -> bool:
        """Decides anew for one who waits; False where nobody can take it any more."""
        if waiting.as_of == self._changes:
            return True
        waiting.as_of = self._changes
        query = waiting.decision.query
        guest = waiting.guest
        try:
            if query is not None and now_s - query.looked_up_s < HITS_KEPT_S:
                waiting.decision = self._router.decide_again(query, now_s)
            else:
                waiting.decision = self._router.decide(guest.ask, now_s, guest.lookup)
        except Undecided as why:
            self._drop(key, guest)
            guest.refuse(why)
            return False
        return True

    def _takes_more(self, node: Node) -> bool:
        """Whether little enough prefill work is queued there; an idle node always takes one more."""
        if not node.inflight or not (self.config.hold and self._router.policy.holds):
            return True
        return node.pending_work * node.speed.ms_per_token <= self.config.ahead_ms
