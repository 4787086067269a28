"""Admission: who goes to a node now, who waits here, who is refused. Takes events and a clock; no I/O.

A request whose cheapest node has room goes there at once. Otherwise it waits here and not in the engine's queue, where
it could no longer change its mind: what it hopes to find in the cache may be gone by its turn, and another node may be
free before. When a node has room again, those that are cheapest there are looked at: higher priority first, then the
tenant that has had the least work done, then the least work, with a bonus for waiting. One turn in EVERY is for whoever
has waited longest, so that nobody waits for ever behind higher priorities.

Refused is what can't be served in time, what finds too many waiting, and what would rather not wait. From half of
`max_waiting` on, no low one goes before others; where it is full, they make room. So nobody is refused for the sake
of a low one.

Whoever is let through or refused may come back at once, from within the call: with another request, or with a node that
is free again. So nothing is looked at after such a call that was looked up before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from itertools import islice
from math import inf
from typing import Final, Protocol

from warmroute.config import Admission as AdmissionConfig
from warmroute.config import RouteConfig
from warmroute.fleet.arrivals import Arrivals
from warmroute.fleet.group import Group
from warmroute.fleet.node import Node
from warmroute.index.lookup import Lookup
from warmroute.prompt.ask import HIGH, LOW, Ask
from warmroute.routing.deadlines import most_own_ms, too_late
from warmroute.routing.decision import Decision
from warmroute.routing.price import Price
from warmroute.routing.refusals import Displaced, NotAdmitted, QueuesFull, Shed, WaitedTooLong, WouldWait
from warmroute.routing.router import NobodyCanServe, Router, Undecided

LOOKED_AT: Final = 64
"""Of those who wait, so many of each tenant are looked at when a node has room."""
AGE_BONUS: Final = 0.1
"""Having waited for 10 ms counts as much as 1 ms less work."""
EVERY: Final = 16
STARVING_S: Final = 10.0
"""Of those who have waited so long, the longest waiting have one turn in EVERY, whatever their priority."""
LOOKED_AFTER_S: Final = 0.05
"""How often `tick` is called: whoever waits is refused so much before it would be late."""
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
    def __init__(self, router: Router, config: AdmissionConfig, routes: Sequence[RouteConfig] = ()) -> None:
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
        self._homeless: dict[int, Guest] = {}
        """Those for whom there is no node at all, in the order of their arrival, by id()."""
        self.node_wait_s = 0.0
        """How long a request waits for a first node to come, where the fleet is scaled; 0: it is refused at once."""
        self._turns = 0
        """Those who waited and were let through, ever."""
        self.waiting = 0
        self.held = 0
        """Requests that had to wait, ever."""
        self.reconfigure(config, routes)

    def reconfigure(self, config: AdmissionConfig, routes: Sequence[RouteConfig] = ()) -> None:
        self.config = config
        self._by_route: dict[str, AdmissionConfig] = {}
        """Of routes that have settings of their own."""
        for route in routes:
            of_route = route.admission(config)
            if of_route != config:
                self._by_route[route.name] = of_route

    def _config_of(self, ask: Ask) -> AdmissionConfig:
        return self._by_route.get(ask.route, self.config) if self._by_route else self.config

    def _holds(self, ask: Ask) -> bool:
        """Whether it waits here where its node has no room."""
        return self._config_of(ask).hold and self._router.policy_of(ask).holds

    # Coming in.

    def enter(self, guest: Guest, now_s: float) -> None:
        """Calls guest.go, now or later, or guest.refuse later. Raises Undecided where it is refused at once."""
        meter = self._router.meter
        if meter is not None:
            guest.ask.arrived_s = guest.arrived_s
            meter.arrived += 1
        ask = guest.ask
        try:
            decision = self._router.decide(ask, now_s, guest.lookup)
        except NobodyCanServe:
            if not self.node_wait_s or not ask.may_queue:
                raise
            displaces = self._check_room_here(ask.priority, now_s)
            self._keep_homeless(guest)
            if displaces:
                self._displace(now_s)
            return
        assert decision.query is not None
        group = decision.query.group
        decision = self._admissible(ask, decision, now_s)
        if ask.priority == LOW and self._half_full and group.waiting:
            raise self._shed(Shed(self._queue_s(now_s)))
        if decision.price is None or self._has_room(decision.node) or not self._holds(ask):
            if self._tenants and decision.price is not None:  # without one: a trial, or another policy
                self._note_work(ask, decision.price)
            guest.go(decision)
            return
        if not ask.may_queue:
            raise WouldWait(decision.price.own / 1000.0)
        displaces = self._check_room_here(ask.priority, now_s)
        self._keep(guest, decision)
        if displaces:
            self._displace(now_s)

    def rehearse(self, ask: Ask, lookup: Lookup | None, now_s: float) -> tuple[Decision, bool]:
        """What `enter` would decide, and whether it would wait here first. Changes nothing. Raises Undecided."""
        aside = copy(self)
        aside._router = self._router.aside()
        decision = aside._admissible(ask, aside._router.decide(ask, now_s, lookup), now_s)
        goes = decision.price is None or self._has_room(decision.node) or not self._holds(ask)
        if not goes and not ask.may_queue and decision.price is not None:
            raise WouldWait(decision.price.own / 1000.0)
        return decision, not goes

    def _admissible(self, ask: Ask, decision: Decision, now_s: float) -> Decision:
        """The decision, or another where its node has too long a queue or is too late. Raises Undecided."""
        config = self.config if not self._by_route else self._config_of(ask)
        if config.queue_threshold:
            decision = self._under_threshold(ask, decision, config.queue_threshold)
        if not ask.may_queue:
            decision = self._without_queue(decision)
        if ask.deadline_s or ask.total_deadline_s:
            decision = self._in_time(ask, decision, now_s)
        return decision

    def _under_threshold(self, ask: Ask, decision: Decision, threshold: int) -> Decision:
        """Nodes with so many in their own queue are passed over, as long as there are others."""
        most = threshold / 2 if ask.priority == LOW else threshold
        if decision.node.queued < most:
            return decision
        found = self._decided_among(decision, lambda node: node.queued < most, "others have too long a queue")
        if found is None and ask.priority != HIGH:
            raise self._shed(QueuesFull(decision.node.latency_ms / 1000.0))
        return found or decision

    def _without_queue(self, decision: Decision) -> Decision:
        """For one that does not want to wait: not on a node either that has a queue of its own."""
        if not decision.node.waiting:
            return decision
        found = self._decided_among(decision, lambda node: not node.waiting, "others have a queue")
        if found is None:
            raise WouldWait(decision.node.latency_ms / 1000.0)
        return found

    def _in_time(self, ask: Ask, decision: Decision, now_s: float) -> Decision:
        """The decision, or that for a node that makes it where the first one does not. Raises TooLate."""
        late = too_late(ask, decision, now_s)
        if late is None:
            return decision
        prices, query = decision.prices, decision.query
        if prices is not None and query is not None:
            at = prices.cheapest_within(most_own_ms(ask, decision, now_s))
            if at >= 0 and decision.candidates[at] is not decision.node:
                other = self._router.decide_among((decision.candidates[at],), query)
                other.reason = "others would be too late for its deadline"
                if too_late(ask, other, now_s) is None:
                    return other
        raise late

    def _decided_among(self, decision: Decision, will_do: Callable[[Node], bool], why: str) -> Decision | None:
        query = decision.query
        assert query is not None
        nodes = [node for node in query.candidates.nodes if will_do(node)]
        if not nodes:
            return None
        found = self._router.decide_among(nodes, query)
        found.reason = why
        return found

    def _note_work(self, ask: Ask, price: Price) -> None:
        """Work that is let through while others wait: it is its tenant's, too."""
        key = (ask.priority, ask.tenant)
        tenant = self._tenants.get(key)
        if tenant is not None:
            tenant.done += price.prefill
        else:
            self._had[key] = max(self._level[ask.priority], self._had.get(key, 0.0)) + price.prefill

    def _check_room_here(self, priority: int, now_s: float) -> bool:
        """True where a low one has to make room. Raises Shed."""
        limit = self.config.max_waiting
        if self.waiting < (limit // 2 if priority == LOW else limit):
            return False
        if priority != LOW and any(key[0] == LOW for key in self._tenants):
            return True
        if priority != HIGH:
            raise self._shed(Shed(self._queue_s(now_s)))
        return False

    @property
    def _half_full(self) -> bool:
        return self.waiting >= self.config.max_waiting // 2

    def _queue_s(self, now_s: float) -> float:
        """How long those who wait take, at the rate at which they go."""
        per_s = self._going.rate(now_s) * 1000.0
        return self.waiting / per_s if per_s else inf

    def _shed(self, why: NotAdmitted) -> NotAdmitted:
        if self._router.meter is not None:
            self._router.meter.shed += 1
        return why

    def _displace(self, now_s: float) -> None:
        """A low one makes room: the last that came, of the tenant that has the most of them."""
        low = [(len(tenant.waiting), key) for key, tenant in self._tenants.items() if key[0] == LOW]
        if low:
            _, key = max(low)
            guest = next(reversed(self._tenants[key].waiting.values())).guest
            why = self._shed(Displaced(self._queue_s(now_s)))
            self._drop(key, guest)
            guest.refuse(why)

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

    def _keep_homeless(self, guest: Guest) -> None:
        self._homeless[id(guest)] = guest
        self.held += 1
        self.waiting += 1

    def leave(self, guest: Guest) -> None:
        """It waits no longer: its client has gone."""
        if self._homeless.pop(id(guest), None) is not None:
            self.waiting -= 1
            return
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
        while self._tenants and self._has_room(node):
            chosen = self._next_for(node, now_s)
            if chosen is None:
                return
            key, waiting = chosen
            self._drop(key, waiting.guest)
            self._going.saw(now_s)
            self._turns += 1
            waiting.guest.go(waiting.decision)
            self._changes += 1

    def tick(self, nodes: Iterable[Node], now_s: float) -> None:
        """Now and then: for nodes whose room has changed by itself, and for those who have waited too long, will be
        late, or wait for a node that is no more."""
        if self._homeless:
            self._house(now_s)
        if self._router.crossings.several:
            self._router.crossings.saw_waiting(waiting.decision for _, waiting in self._everybody())
        if not self._tenants:
            return
        self._changes += 1
        self._look_after(now_s)
        self._fill_all(nodes, now_s)

    def _house(self, now_s: float) -> None:
        """Sends those who wait for a first node on, where there is one by now."""
        for key, guest in list(self._homeless.items()):
            if key not in self._homeless:
                continue
            ask = guest.ask
            most_s = min(self.node_wait_s, self._config_of(ask).max_wait_s or inf)
            due_s = min(ask.deadline_s or inf, ask.total_deadline_s or inf) - LOOKED_AFTER_S
            late = now_s - guest.arrived_s > most_s or now_s > due_s
            try:
                decision = self._router.decide(ask, now_s, guest.lookup)
            except NobodyCanServe:
                if not late:
                    continue
                why: Undecided = WaitedTooLong()
            except Undecided as undecided:
                why = undecided
            else:
                del self._homeless[key]
                self.waiting -= 1
                if decision.price is None or self._has_room(decision.node) or not self._holds(ask):
                    guest.go(decision)
                else:
                    self.held -= 1  # it is the same wait
                    self._keep(guest, decision)
                continue
            del self._homeless[key]
            self.waiting -= 1
            guest.refuse(why)

    def _look_after(self, now_s: float) -> None:
        most_wait_s, holds = self.config.max_wait_s, self.config.hold and self._router.policy.holds
        for key, waiting in self._everybody():
            if not self._waits(key, waiting):
                continue
            guest = waiting.guest
            ask = guest.ask
            most_s = self._config_of(ask).max_wait_s if ask.route else most_wait_s
            waited_s = now_s - guest.arrived_s
            if most_s and waited_s > most_s:
                self._drop(key, guest)
                guest.refuse(WaitedTooLong())
            elif key[0] == LOW and waited_s > STARVING_S and self._half_full and self._others_wait:
                why = self._shed(Displaced(self._queue_s(now_s)))  # its turn would not come
                self._drop(key, guest)
                guest.refuse(why)
            elif not (self._holds(ask) if ask.route else holds):  # it was told to wait by settings that are no more
                if self._think_again(key, waiting, now_s):
                    self._drop(key, guest)
                    guest.go(waiting.decision)
            elif self._nobody_there(waiting):
                self._think_again(key, waiting, now_s)
            elif (
                (ask.deadline_s or ask.total_deadline_s)
                and too_late(ask, waiting.decision, now_s, LOOKED_AFTER_S)
                and self._think_again(key, waiting, now_s)  # what was thought of it may be of long ago
            ):
                self._refuse_if_late(key, waiting, now_s, LOOKED_AFTER_S)

    def _nobody_there(self, waiting: _Waiting) -> bool:
        """Whether its node takes nobody any more: it has to go to another, or, where there is none, for good."""
        query = waiting.decision.query
        assert query is not None
        name, group = waiting.decision.node.name, query.group
        return name not in group.up.by_name and name not in group.at_need.by_name

    def _refuse_if_late(self, key: tuple[int, str], waiting: _Waiting, now_s: float, margin_s: float = 0.0) -> bool:
        """True where it was: it could only have been served late."""
        guest = waiting.guest
        late = too_late(guest.ask, waiting.decision, now_s, margin_s)
        if late is None:
            return False
        self._drop(key, guest)
        guest.refuse(late)
        return True

    def _everybody(self) -> list[tuple[tuple[int, str], _Waiting]]:
        return [(key, waiting) for key, tenant in self._tenants.items() for waiting in tenant.waiting.values()]

    def _waits(self, key: tuple[int, str], waiting: _Waiting) -> bool:
        tenant = self._tenants.get(key)
        return tenant is not None and tenant.waiting.get(id(waiting.guest)) is waiting

    def _next_for(self, node: Node, now_s: float) -> tuple[tuple[int, str], _Waiting] | None:
        """Who goes to this node next, if anybody is to. Whoever is to try out a node on trial goes there meanwhile."""
        for key, tenant in self._in_turn(now_s):
            best: _Waiting | None = None
            best_score = best_work = 0.0
            for waiting in list(islice(tenant.waiting.values(), LOOKED_AT)):
                if not self._waits(key, waiting) or not self._think_again(key, waiting, now_s):
                    continue
                ask = waiting.guest.ask
                if (ask.deadline_s or ask.total_deadline_s) and self._refuse_if_late(key, waiting, now_s):
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

    def _in_turn(self, now_s: float) -> list[tuple[tuple[int, str], _Tenant]]:
        """Tenants by priority, then by what they have had; now and then those first who have waited the longest."""
        tenants = list(self._tenants.items())
        if self._half_full and self._others_wait:
            tenants = [item for item in tenants if item[0][0] != LOW]
        if self._turns % EVERY == EVERY - 1:
            since_s = {key: next(iter(tenant.waiting.values())).guest.arrived_s for key, tenant in tenants}
            if now_s - min(since_s.values()) > STARVING_S:
                return sorted(tenants, key=lambda item: since_s[item[0]])
        return sorted(tenants, key=lambda item: (item[0][0], item[1].done))

    @property
    def _others_wait(self) -> bool:
        """Whether anybody waits who is not low."""
        return any(key[0] != LOW for key in self._tenants)

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
            if self.node_wait_s and isinstance(why, NobodyCanServe):
                self.held -= 1  # it is the same wait
                self._keep_homeless(guest)
            else:
                guest.refuse(why)
            return False
        return True

    def _has_room(self, node: Node) -> bool:
        """Whether little enough prefill work is queued there; an idle node always takes one more."""
        if not node.inflight:
            return True
        # What is on its way there or back keeps no GPU busy: a far node has more of it.
        return node.pending_work * node.speed.ms_per_token <= self.config.ahead_ms + node.round_trip_ms
