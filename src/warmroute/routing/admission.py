"""Admission: who goes to a node now, who waits here, who is refused. Takes events and a clock; no I/O.

A request whose cheapest node has room goes there at once. Otherwise it waits here and not in the engine's queue, where
it could no longer change its mind: what it hopes to find in the cache may be gone by its turn, and another node may be
free before. When a node has room again, those that are cheapest there are looked at, in the order that the waiting room
keeps; of one tenant's those with the least work first, with a bonus for waiting.

Refused is what can't be served in time, what finds too many waiting, and what would rather not wait. From half of
`max_waiting` on, no low one goes before others; where it is full, they make room. So nobody is refused for the sake
of a low one.

Whoever is let through or refused may come back at once, from within the call: with another request, or with a node that
is free again. So nothing is looked at after such a call that was looked up before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from copy import copy
from math import inf
from typing import Final

from warmroute.config import Admission as AdmissionConfig
from warmroute.config import RouteConfig
from warmroute.fleet.arrivals import Arrivals
from warmroute.fleet.demand import DemandMeter
from warmroute.fleet.node import Node
from warmroute.index.lookup import Lookup
from warmroute.prompt.routing_request import HIGH, LOW, RoutingRequest
from warmroute.routing.deadlines import too_late
from warmroute.routing.decision import Decision
from warmroute.routing.eligible_nodes import in_time, in_time_behind, most_queued, under_threshold, without_queue
from warmroute.routing.refusals import (
    Displaced,
    NobodyCanServe,
    NotAdmitted,
    QueuesFull,
    Shed,
    Undecided,
    WaitedTooLong,
    WouldWait,
)
from warmroute.routing.router import Router
from warmroute.routing.waiting_room import AGE_BONUS, STARVING_S, Key, PendingRequest, Waiting, WaitingRoom

LOOKED_AT: Final = 64
"""Of those who wait, so many of each tenant are looked at when a node has room."""
LOOKED_AT_IN_ALL: Final = 256
"""Where there are many tenants, they share these; each has its longest waiting looked at."""
LOOKED_AFTER_S: Final = 0.05
"""How often `tick` is called: whoever waits is refused so much before it would be late."""
HITS_KEPT_S: Final = 0.25
"""How long what nodes hold of a waiting prompt is taken as known."""


class Admission:
    def __init__(self, router: Router, config: AdmissionConfig, routes: Sequence[RouteConfig] = ()) -> None:
        self._router = router
        self.room = WaitingRoom()
        self._freed: dict[Node, None] = {}
        """Nodes that are being filled."""
        self._changes = 0
        """Times that something may have changed: until the next one, what was thought of those who wait stands."""
        self._going = Arrivals()
        """Those who waited and were let through."""
        self.node_wait_s = 0.0
        """How long a request waits for a first node to come, where the fleet is scaled; 0: it is refused at once."""
        self.reconfigure(config, routes)

    def reconfigure(self, config: AdmissionConfig, routes: Sequence[RouteConfig] = ()) -> None:
        self.config = config
        self._by_route: dict[str, AdmissionConfig] = {}
        """Of routes that have settings of their own."""
        for route in routes:
            of_route = route.admission(config)
            if of_route != config:
                self._by_route[route.name] = of_route
        self._thresholds = any(one.queue_threshold for one in (config, *self._by_route.values()))
        """Whether anybody minds the nodes' own queues."""

    @property
    def waiting(self) -> int:
        return self.room.waiting

    @property
    def held(self) -> int:
        """Requests that had to wait, ever."""
        return self.room.held

    def _config_of(self, request: RoutingRequest) -> AdmissionConfig:
        return self._by_route.get(request.route, self.config) if self._by_route else self.config

    # Coming in.

    def enter(self, guest: PendingRequest, now_s: float) -> None:
        """Calls guest.go, now or later, or guest.refuse later. Raises Undecided where it is refused at once."""
        request, room = guest.request, self.room
        demand_meter = self._router.demand_meter
        try:
            decision = self._router.decide(request, now_s, guest.lookup)
        except NobodyCanServe:
            if demand_meter is not None:
                _count(demand_meter, guest)
            if not self.node_wait_s or not request.may_queue:
                raise
            displaces = self._check_room_here(request.priority, now_s)
            room.keep_homeless(guest)
            if displaces:
                self._displace(now_s)
            return
        if demand_meter is not None:
            _count(demand_meter, guest)
        if self._thresholds or not request.may_queue or request.deadline_s or request.total_deadline_s:
            decision = self._admissible(request, decision, now_s)
        if request.priority == LOW:
            self._check_low(decision, now_s)
        if self._goes_at_once(request, decision):
            if room.tenants and decision.price is not None:  # without one: a trial, or another policy
                room.note_work(request, decision.price.prefill)
            guest.go(decision)
            return
        displaces = self._check_may_wait(request, decision, now_s)
        room.keep(guest, decision)
        if displaces:
            self._displace(now_s)

    def leave(self, guest: PendingRequest) -> None:
        """It waits no longer: its client has gone."""
        self.room.leave(guest)

    def rehearse(self, request: RoutingRequest, lookup: Lookup | None, now_s: float) -> tuple[Decision, bool]:
        """What `enter` would decide, and whether it would wait here first. Changes nothing. Raises Undecided."""
        aside = copy(self)
        aside._router = self._router.aside()
        decision = aside._admissible(request, aside._router.decide(request, now_s, lookup), now_s)
        if request.priority == LOW:
            aside._check_low(decision, now_s)
        if self._goes_at_once(request, decision):
            return decision, False
        aside._check_may_wait(request, decision, now_s)
        return decision, True

    def _goes_at_once(self, request: RoutingRequest, decision: Decision) -> bool:
        """Also where no price decided: it is a trial, or another policy's."""
        return decision.at < 0 or self._has_room(decision.node) or not self._holds(request)

    def _has_room(self, node: Node) -> bool:
        """Whether little enough prefill work is queued there; an idle node always takes one more."""
        if not node.inflight:
            return True
        # What is on its way there or back keeps no GPU busy: a far node has more of it.
        return node.pending_work * node.speed.ms_per_token <= self.config.ahead_ms + node.round_trip_ms

    def _holds(self, request: RoutingRequest) -> bool:
        """Whether it waits here where its node has no room."""
        return self._config_of(request).hold and self._router.policy_of(request).holds

    def _admissible(self, request: RoutingRequest, decision: Decision, now_s: float) -> Decision:
        """The decision, or another where its node has too long a queue or is too late. Raises Undecided."""
        if self._thresholds and (threshold := self._config_of(request).queue_threshold):
            try:
                decision = under_threshold(self._router, request, decision, threshold)
            except QueuesFull as full:
                raise self._shed(full) from None
        if not request.may_queue:
            decision = without_queue(self._router, decision)
        if request.deadline_s or request.total_deadline_s:
            decision = in_time(self._router, request, decision, now_s)
        return decision

    # Whether there is room to wait.

    def _check_low(self, decision: Decision, now_s: float) -> None:
        """A low one does not come before others who wait for the same nodes, where many do. Raises Shed."""
        query = decision.query
        assert query is not None
        if self._half_full and query.group.waiting:
            raise self._shed(Shed(self._queue_s(now_s)))

    def _check_may_wait(self, request: RoutingRequest, decision: Decision, now_s: float) -> bool:
        """True where a low one has to make room for it. Raises NotAdmitted."""
        if not request.may_queue:
            raise WouldWait(decision.price.own / 1000.0 if decision.price is not None else 1.0)
        if (request.deadline_s or request.total_deadline_s) and self.room.tenants:
            in_time_behind(self.room, request, decision, now_s)
        return self._check_room_here(request.priority, now_s)

    def _check_room_here(self, priority: int, now_s: float) -> bool:
        """True where a low one has to make room. Raises Shed."""
        limit = self.config.max_waiting
        if self.room.waiting < (limit // 2 if priority == LOW else limit):
            return False
        if priority != LOW and self.room.low_ones_wait:
            return True
        if priority != HIGH:
            raise self._shed(Shed(self._queue_s(now_s)))
        return False

    @property
    def _half_full(self) -> bool:
        return self.room.waiting >= self.config.max_waiting // 2

    def _queue_s(self, now_s: float) -> float:
        """How long those who wait take, at the rate at which they go."""
        per_s = self._going.rate(now_s) * 1000.0
        return self.room.waiting / per_s if per_s else inf

    def _shed(self, why: NotAdmitted) -> NotAdmitted:
        if self._router.demand_meter is not None:
            self._router.demand_meter.shed += 1
        return why

    def _displace(self, now_s: float) -> None:
        """A low one makes room."""
        guest = self.room.last_low()
        if guest is not None:
            why = self._shed(Displaced(self._queue_s(now_s)))
            self.room.leave(guest)
            guest.refuse(why)

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
        while self.room.tenants and self._has_room(node):
            chosen = self._next_for(node, now_s)
            if chosen is None:
                return
            key, waiting = chosen
            self.room.let_through(key, waiting.guest)
            self._going.saw(now_s)
            waiting.guest.go(waiting.decision)
            self._changes += 1

    def _next_for(self, node: Node, now_s: float) -> tuple[Key, Waiting] | None:
        """Who goes to this node next, if anybody is to. Whoever is to try out a node on trial goes there meanwhile."""
        room = self.room
        in_turn = room.in_turn(now_s, without_low=self._half_full and room.others_wait)
        looked_at = min(LOOKED_AT, max(1, LOOKED_AT_IN_ALL // max(1, len(in_turn))))
        for key, tenant in in_turn:
            for some in tenant.looked_at(node, looked_at):
                best = self._best_for(node, key, some, now_s)
                if best is not None and room.waits(key, best):
                    if (price := best.decision.price) is not None:
                        room.chosen(key, tenant, price.prefill)
                    return key, best
        return None

    def _best_for(self, node: Node, key: Key, some: list[Waiting], now_s: float) -> Waiting | None:
        best: Waiting | None = None
        best_score = 0.0
        for waiting in some:
            if not self.room.waits(key, waiting) or not self._think_again(key, waiting, now_s):
                continue
            request = waiting.guest.request
            if (request.deadline_s or request.total_deadline_s) and self._refuse_if_late(key, waiting, now_s):
                continue
            decision = waiting.decision
            if decision.price is None:
                return waiting
            if decision.node is not node or (self._thresholds and self._queue_too_long(request, node)):
                continue
            score = decision.price.prefill - AGE_BONUS * (now_s - waiting.guest.arrived_s) * 1000.0
            if best is None or score < best_score:
                best, best_score = waiting, score
        return best

    def _queue_too_long(self, request: RoutingRequest, node: Node) -> bool:
        threshold = self._config_of(request).queue_threshold
        return bool(threshold) and request.priority != HIGH and node.queued >= most_queued(request, threshold)

    def _think_again(self, key: Key, waiting: Waiting, now_s: float) -> bool:
        """Decides anew for one who waits; False where nobody can take it any more."""
        if waiting.as_of == self._changes:
            return True
        waiting.as_of = self._changes
        query = waiting.decision.query
        guest = waiting.guest
        try:
            if query is not None and now_s - query.looked_up_s < HITS_KEPT_S:
                decision = self._router.decide_again(query, now_s)
            else:
                decision = self._router.decide(guest.request, now_s, guest.lookup)
        except Undecided as why:
            if self.node_wait_s and isinstance(why, NobodyCanServe):
                self.room.lost_home(key, guest)
            else:
                self.room.drop(key, guest)
                guest.refuse(why)
            return False
        if self._thresholds and (threshold := self._config_of(guest.request).queue_threshold):
            with suppress(QueuesFull):  # it waits on
                decision = under_threshold(self._router, guest.request, decision, threshold)
        self.room.decided(key, waiting, decision)
        return True

    # Now and then.

    def tick(self, nodes: Iterable[Node], now_s: float) -> None:
        """Now and then: for nodes whose room has changed by itself, and for those who have waited too long, will be
        late, or wait for a node that is no more."""
        nodes = tuple(nodes)
        for node in nodes:
            if node.unseen:
                node.expect_prefilled(now_s)
        if self.room.waiting_for_first_node:
            self._house(now_s)
        if self._router.crossings.minds_waiting:
            self._router.crossings.saw_waiting(waiting.decision for _, waiting in self.room.everybody())
        if not self.room.tenants:
            return
        self._changes += 1
        self._look_after(now_s)
        self._fill_all(nodes, now_s)

    def _house(self, now_s: float) -> None:
        """Sends those who wait for a first node on, where there is one by now."""
        for key, guest in list(self.room.waiting_for_first_node.items()):
            if key not in self.room.waiting_for_first_node:
                continue
            request = guest.request
            try:
                decision = self._admissible(request, self._router.decide(request, now_s, guest.lookup), now_s)
            except NobodyCanServe:
                most_s = min(self.node_wait_s, self._config_of(request).max_wait_s or inf)
                due_s = min(request.deadline_s or inf, request.total_deadline_s or inf) - LOOKED_AFTER_S
                if now_s - guest.arrived_s > most_s or now_s > due_s:
                    self.room.drop_homeless(guest)
                    guest.refuse(WaitedTooLong())
            except Undecided as why:
                self.room.drop_homeless(guest)
                guest.refuse(why)
            else:
                if self._goes_at_once(request, decision):
                    self.room.drop_homeless(guest)
                    guest.go(decision)
                else:
                    self.room.found_home(guest, decision)

    def _look_after(self, now_s: float) -> None:
        room = self.room
        most_wait_s, holds = self.config.max_wait_s, self.config.hold and self._router.policy.holds
        for key, waiting in room.everybody():
            if not room.waits(key, waiting):
                continue
            guest = waiting.guest
            request = guest.request
            most_s = self._config_of(request).max_wait_s if request.route else most_wait_s
            waited_s = now_s - guest.arrived_s
            if most_s and waited_s > most_s:
                room.drop(key, guest)
                guest.refuse(WaitedTooLong())
            elif key[0] == LOW and waited_s > STARVING_S and self._half_full and room.others_wait:
                why = self._shed(Displaced(self._queue_s(now_s)))  # its turn would not come
                room.drop(key, guest)
                guest.refuse(why)
            elif not (
                self._holds(request) if request.route else holds
            ):  # it was told to wait by settings that are no more
                if self._think_again(key, waiting, now_s):
                    room.drop(key, guest)
                    guest.go(waiting.decision)
            elif self._nobody_there(waiting):
                self._think_again(key, waiting, now_s)
            elif (
                (request.deadline_s or request.total_deadline_s)
                and too_late(request, waiting.decision, now_s, LOOKED_AFTER_S)
                and self._think_again(key, waiting, now_s)  # what was thought of it may be of long ago
            ):
                self._refuse_if_late(key, waiting, now_s, LOOKED_AFTER_S)

    def _nobody_there(self, waiting: Waiting) -> bool:
        """Whether its node takes nobody any more: it has to go to another, or, where there is none, for good."""
        query = waiting.decision.query
        assert query is not None
        name, group = waiting.decision.node.name, query.group
        return name not in group.up.by_name and name not in group.at_need.by_name

    def _refuse_if_late(self, key: Key, waiting: Waiting, now_s: float, margin_s: float = 0.0) -> bool:
        """True where it was: it could only have been served late."""
        guest = waiting.guest
        late = too_late(guest.request, waiting.decision, now_s, margin_s)
        if late is None:
            return False
        self.room.drop(key, guest)
        guest.refuse(late)
        return True


def _count(demand_meter: DemandMeter, guest: PendingRequest) -> None:
    """Work for the fleet. A model that it does not serve is none."""
    guest.request.arrived_s = guest.arrived_s
    demand_meter.arrived += 1
