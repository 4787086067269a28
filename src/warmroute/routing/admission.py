"""Admission: who goes to a node now, who waits here, who is refused. Takes events and a clock; no I/O.

A request whose cheapest node has room goes there at once. Otherwise it waits here and not in the engine's queue, where
it could no longer change its mind: what it hopes to find in the cache may be gone by its turn, and another node may be
free before. When a node has room again, those that are cheapest there are looked at: higher priority first, then the
tenant that has had the least work done, then the least work, with a bonus for waiting.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

from warmroute.config import Admission as AdmissionConfig
from warmroute.fleet.arrivals import Arrivals
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

    __slots__ = ("decision", "guest")

    def __init__(self, guest: Guest, decision: Decision) -> None:
        self.guest = guest
        self.decision = decision


class _Tenant:
    __slots__ = ("done", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[int, _Waiting] = {}
        """In the order of their arrival, by the guest's id()."""
        self.done = 0.0
        """Work that was let through, in tokens."""


class Admission:
    def __init__(self, router: Router, config: AdmissionConfig) -> None:
        self._router = router
        self._tenants: dict[tuple[int, str], _Tenant] = {}
        """By priority and name, those with somebody waiting."""
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
        if not (self.config.hold and self._router.policy.holds) or self._takes_more(decision.node):
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
            tenant = self._tenants[key] = _Tenant()
            tenant.done = min((one.done for other, one in self._tenants.items() if other[0] == key[0]), default=0.0)
        tenant.waiting[id(guest)] = _Waiting(guest, decision)
        self.held += 1
        self._count(1)

    def leave(self, guest: Guest) -> None:
        """It waits no longer: its client has gone."""
        self._drop((guest.ask.priority, guest.ask.tenant), guest)

    def _drop(self, key: tuple[int, str], guest: Guest) -> None:
        tenant = self._tenants.get(key)
        if tenant is not None and tenant.waiting.pop(id(guest), None) is not None:
            self._count(-1)
            if not tenant.waiting:
                del self._tenants[key]

    def _count(self, change: int) -> None:
        self.waiting += change
        self._router.waiting = self.waiting

    # Going out.

    def freed(self, node: Node, now_s: float) -> None:
        """A node may have more room than before."""
        while self._tenants and self._takes_more(node):
            chosen = self._next_for(node, now_s)
            if chosen is None:
                return
            key, waiting = chosen
            self._drop(key, waiting.guest)
            self._going.saw(now_s)
            waiting.guest.go(waiting.decision)

    def tick(self, nodes: Iterable[Node], now_s: float) -> None:
        """Now and then: for nodes whose room has changed by itself, and for those who have waited too long."""
        if not self._tenants:
            return
        if self.config.max_wait_s:
            self._refuse_late(now_s - self.config.max_wait_s)
        for node in nodes:
            self.freed(node, now_s)

    def _refuse_late(self, since_s: float) -> None:
        late = [
            (key, waiting.guest)
            for key, tenant in self._tenants.items()
            for waiting in tenant.waiting.values()
            if waiting.guest.arrived_s < since_s
        ]
        for key, guest in late:
            self._drop(key, guest)
            guest.refuse(WaitedTooLong())

    def _next_for(self, node: Node, now_s: float) -> tuple[tuple[int, str], _Waiting] | None:
        """Who goes to this node next, if anybody is to."""
        for key, tenant in sorted(self._tenants.items(), key=lambda item: (item[0][0], item[1].done)):
            best: _Waiting | None = None
            best_score = 0.0
            for number, waiting in enumerate(list(tenant.waiting.values())):
                if number == LOOKED_AT:
                    break
                if not self._think_again(key, waiting, now_s) or waiting.decision.node is not node:
                    continue
                price = waiting.decision.price
                assert price is not None
                age_ms = (now_s - waiting.guest.arrived_s) * 1000.0
                score = price.prefill - AGE_BONUS * age_ms
                if best is None or score < best_score:
                    best, best_score = waiting, score
            if best is not None:
                price = best.decision.price
                assert price is not None
                tenant.done += price.prefill
                return key, best
        return None

    def _think_again(self, key: tuple[int, str], waiting: _Waiting, now_s: float) -> bool:
        """Decides anew for one who waits; False where nobody can take it any more."""
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
        return waiting.decision.price is not None

    def _takes_more(self, node: Node) -> bool:
        """Whether little enough prefill work is queued there; an idle node always takes one more."""
        return not node.inflight or node.pending_work * node.speed.ms_per_token <= self.config.ahead_ms
