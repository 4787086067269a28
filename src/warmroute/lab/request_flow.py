"""The life of a simulated request: over the network to the router, to a node, through its engine, and back.

Retries, tickets and usage are production's (routing/attempts.py). Here is only what happens when in virtual time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from warmroute.config.priority import NORMAL
from warmroute.fake_engine.core.engine_request import EngineRequest, RequestTooLong
from warmroute.fleet.node import Node, Outcome
from warmroute.fleet.ticket import Ticket
from warmroute.replay.simulation.flight import Flight, Leg
from warmroute.replay.simulation.results import RequestResults
from warmroute.replay.simulation.simulated_node import ProcessState
from warmroute.replay.simulation.simulated_request import MODEL, simulated_request
from warmroute.replay.workloads.workload_prompt import WorkloadPrompt
from warmroute.routing.admission import TICK_S
from warmroute.routing.attempts import Attempts
from warmroute.routing.dispatcher import Dispatcher
from warmroute.routing.hedging import CHECK_S
from warmroute.routing.route_matching import Routes
from warmroute.routing.routing_errors import AllNodesFailed, RoutingError

if TYPE_CHECKING:
    from warmroute.replay.simulation.replica import Replica
    from warmroute.replay.simulation.world import World


PATH = "/v1/chat/completions"
"""The path of every simulated request, as routes see it."""
TICK_MS = 1000.0 * TICK_S
CHECK_MS = 1000.0 * CHECK_S


class FlowCounters:
    """Counted over the whole run, warm-up included."""

    def __init__(self) -> None:
        self.responses: Counter[int] = Counter()
        self.split_requests: Counter[str] = Counter()
        self.interrupted = self.disconnects = self.retries = self.hedges = self.hedges_won = 0


class RequestFlow:
    def __init__(self, world: World, replica: Replica, routes: Routes) -> None:
        self._world = world
        self.replica = replica
        self.calendar = world.calendar
        self._routes = routes
        self.counters = FlowCounters()
        self.dispatcher: Dispatcher = Dispatcher(
            replica.fleet, replica.router, replica.admission, self.counters, None, world.conditions.attempts,
            lambda: self.calendar.now_s, self.node_freed, self._ticket_closed, replica.hedging,
        )  # fmt: skip
        self._ticking = self._hedging = False
        self.inflight = 0
        """Requests that have arrived and not ended."""
        self._queued: dict[int, Flight] = {}
        """Requests in the own queue of another router's policy."""

    # At the router.

    def arrive(self, prompt: WorkloadPrompt) -> Flight | None:
        """A request reaches the router. Return None where it is rejected at once."""
        world, replica, now_ms = self._world, self.replica, self.calendar.now_ms
        number = world.arrivals - 1
        self.inflight += 1
        world.results.arrived(prompt, now_ms)
        conditions = world.conditions
        isolated = f"tenant-{number % conditions.tenants}" if conditions.tenants else ""
        route = self._routes.pick(MODEL, PATH, isolated or prompt.tenant, lambda _name: b"") if self._routes else None
        request = simulated_request(
            prompt, number, conditions.form, route, now_ms / 1000.0, isolated, conditions.streams
        )
        flight = Flight(self, prompt, request, world.results)
        if replica.listener.queues(request, now_ms / 1000.0):
            self._queued[request.number] = flight
        elif not self._enter(flight):
            return None
        if prompt.patience_ms is not None:
            self.calendar.after(prompt.patience_ms, self._lose_patience, flight)
        if (replica.admission.queue.waiting or self.dispatcher.deadlines.watched) and not self._ticking:
            self._ticking = True
            self.calendar.after(TICK_MS, self._tick)
        if not self._hedging:
            self._hedging = True
            self.calendar.after(CHECK_MS, self._hedge)
        return flight

    def _enter(self, flight: Flight) -> bool:
        """Ask admission for a node. Return whether the request was not rejected at once."""
        request, replica, now_s = flight.request, self.replica, self.calendar.now_s
        wanted = (
            replica.router.policy_of(request).wants_tokens
            and request.prompt_tokens >= replica.cache_view.config.min_prompt_tokens
        )
        try:
            flight.attempts.enter(request.lookup() if wanted else None, request.prompt_tokens, now_s)
        except RoutingError as why:
            self.rejected(flight, why)
            return False
        return True

    def _leave_queue(self) -> None:
        """Send what the policy lets out of its own queue."""
        while self._queued and (request := self.replica.listener.next_queued(self.calendar.now_s)) is not None:
            self._enter(self._queued.pop(request.number))

    def _hedge(self) -> None:
        self._hedging = bool(self.dispatcher.waiting)
        if self._hedging:
            self.dispatcher.tick(self.calendar.now_s)
            self.calendar.after(CHECK_MS, self._hedge)

    def _tick(self) -> None:
        replica, at = self.replica, self.replica.index
        deadlines = self.dispatcher.deadlines
        self._ticking = bool(replica.admission.queue.waiting or replica.fleet.islands.has_queues or deadlines.watched)
        if self._ticking:
            nodes = (sim.views[at] for sim in list(self._world.nodes.values()))
            replica.admission.tick(nodes, self.calendar.now_s)
            deadlines.check(self.calendar.now_s)
            self.calendar.after(TICK_MS, self._tick)

    def node_freed(self, node: Node, now_s: float) -> None:
        admission = self.replica.admission
        if admission.queue.waiting:
            admission.node_freed(node, now_s)

    def sent(self, flight: Flight, node: Node) -> Leg:
        """The router opened a ticket on the node and sends the request there."""
        world, now_ms = self._world, self.calendar.now_ms
        sim = world.nodes[node.name]
        sim.account_inflight(now_ms)
        sim.requests += 1
        split = flight.attempts.split
        transfers = split is not None and split.prefill_node is not None
        leg = Leg(flight, sim, prefill_leg=flight.prefill if transfers else None)
        if flight.attempts.tried > 1:
            flight.results.retries += 1
        if not transfers:
            world.request_sent(flight, sim)
        self.calendar.at(now_ms + sim.one_way_ms, self._reach, leg)
        return leg

    def sent_prefill(self, flight: Flight, prefill_node: Node, node: Node) -> Leg:
        """The router opened tickets on both nodes, and sends the request to the one that prefills."""
        world, now_ms = self._world, self.calendar.now_ms
        sim = world.nodes[prefill_node.name]
        for one in (sim, world.nodes[node.name]):
            one.account_inflight(now_ms)
            world.request_sent(flight, one)
        sim.requests += 1
        leg = Leg(flight, sim, prefills=True)
        self.calendar.at(now_ms + sim.one_way_ms, self._reach, leg)
        return leg

    def withdrawn(self, leg: Leg) -> None:
        """The router gave up this attempt: the engine stops when it learns of it."""
        if leg.live:
            leg.live = False
            self.calendar.after(leg.node.one_way_ms, self._abort, leg)

    def _ticket_closed(self, attempts: Attempts, ticket: Ticket, now_s: float) -> None:
        flight = attempts.driver
        assert isinstance(flight, Flight)
        world, node = self._world, ticket.node
        sim = flight.node if node in flight.node.views else world.nodes.get(node.name)
        if sim is not None:
            sim.account_inflight(self.calendar.now_ms)
            self.replica.request_ended(flight.request, sim)
        else:
            self.replica.listener.request_ended(flight.request, node, now_s)
        if self._queued:
            self._leave_queue()

    def rejected(self, flight: Flight, why: RoutingError) -> None:
        failed = isinstance(why, AllNodesFailed)
        self._end(flight, RequestResults.failed if failed else RequestResults.rejected)

    # At the node.

    def _reach(self, leg: Leg) -> None:
        if not leg.live:
            return
        sim = leg.node
        if sim.state is ProcessState.DEAD:
            self.calendar.after(sim.one_way_ms, self._connection_refused, leg)
            return
        if sim.state is ProcessState.HANGING:
            self.time_out_later(leg)
            return
        if leg.prefill_leg is not None:
            self._transfer(leg, leg.prefill_leg)
        else:
            self._submit(leg, 0)

    def _transfer(self, leg: Leg, prefill_leg: Leg) -> None:
        """Fetch the KV tokens that the node lacks from its prefill node, after the transfers that began before."""
        sim, source, conditions = leg.node, prefill_leg.node, self._world.conditions
        prompt, now_ms = leg.flight.prompt, self.calendar.now_ms
        if source.state is not ProcessState.SERVING:
            self.calendar.after(sim.one_way_ms, self._transfer_failed, leg)
            return
        block_size = sim.spec.block_size
        hashes = leg.flight.request.blocks(block_size)
        cached = len(sim.engine.scheduler.pool.match(hashes, len(hashes))) * block_size
        missing = max(0, prompt.prompt_tokens - cached)
        megabytes = missing * sim.spec.profile.kv_bytes_per_token / 1e6
        source.link_free_ms = max(source.link_free_ms, now_ms) + megabytes / conditions.kv_gigabytes_per_s
        self.calendar.at(source.link_free_ms + conditions.kv_latency_ms, self._submit, leg, prompt.prompt_tokens)

    def _transfer_failed(self, leg: Leg) -> None:
        split = leg.flight.attempts.split
        if leg.live and split is not None:
            leg.live = False
            split.transfer_failed("the KV cache is gone", self.calendar.now_s)

    def _submit(self, leg: Leg, remote_tokens: int) -> None:
        """Give a request to its engine. `remote_tokens`: those that it does not have to prefill."""
        flight, sim = leg.flight, leg.node
        if not leg.live:
            return
        if sim.state is not ProcessState.SERVING:  # it stopped during the transfer
            self.calendar.after(sim.one_way_ms, self.node_failed, leg, "the node died")
            return
        prompt = flight.prompt
        request_id = f"{flight.request_id} prefill" if leg.prefills else flight.request_id
        request = EngineRequest(
            request_id,
            prompt.prompt_tokens,
            1 if leg.prefills else prompt.output_tokens,
            prompt.blocks.content(sim.spec.block_size),
            flight.request.priority - NORMAL,
            prompt.lora_name,
            prompt.cache_salt,
            remote_tokens=remote_tokens,
        )
        try:
            sim.engine.submit(request, self.calendar.now_ms)
        except RequestTooLong:
            self.calendar.after(sim.one_way_ms, self._too_long, leg)
            return
        sim.flights[request_id] = leg
        self._world.arm(sim)

    # Back at the router.

    def first_token(self, leg: Leg, cached_tokens: int) -> None:
        if not leg.live:
            return
        flight = leg.flight
        if leg.prefills:
            flight.prefill_cached = cached_tokens
            self.replica.first_token(flight.request, leg.node, cached_tokens)
            return
        if leg.prefill_leg is not None:
            cached_tokens = flight.prefill_cached
        flight.cached_tokens = cached_tokens
        if flight.request.streams:
            self._response_started(leg)

    def _response_started(self, leg: Leg) -> None:
        flight, now_ms = leg.flight, self.calendar.now_ms
        cached_tokens = flight.cached_tokens
        if leg is flight.hedge:
            flight.attempts.hedge_started(200, None, now_ms / 1000.0)
        else:
            flight.attempts.response_started(200, None, now_ms / 1000.0)
        flight.first_ms = now_ms
        flight.results.first_token(flight.prompt, flight.arrived_ms, cached_tokens, now_ms)
        self.replica.first_token(flight.request, leg.node, cached_tokens)
        flight.attempts.first_token(now_ms / 1000.0)
        if self._queued:
            self._leave_queue()

    def answered(self, leg: Leg) -> None:
        if not leg.live:
            return
        flight = leg.flight
        prompt = flight.prompt
        if not leg.prefills and not flight.request.streams:
            self._response_started(leg)
        leg.live = False
        if leg.prefills:
            split = flight.attempts.split
            assert split is not None
            split.prefill_ended(True, (prompt.prompt_tokens, flight.prefill_cached, 1), self.calendar.now_s)
            return
        cached = prompt.prompt_tokens if "usage" in leg.node.spec.misreports else flight.cached_tokens
        flight.attempts.response_ended((prompt.prompt_tokens, cached, prompt.output_tokens), self.calendar.now_s)
        self._end(flight, None)

    def _too_long(self, leg: Leg) -> None:
        if leg.live:
            flight, now_s = leg.flight, self.calendar.now_s
            if leg.prefills:
                self._prefill_failed(leg, Outcome.REJECTED, "the prompt is too long")
                return
            if leg is flight.hedge:
                flight.attempts.hedge_started(400, None, now_s)
            else:
                flight.attempts.response_started(400, None, now_s)
            leg.live = False
            flight.attempts.response_ended(None, now_s)
            self._end(flight, RequestResults.rejected)

    def _connection_refused(self, leg: Leg) -> None:
        if leg.live:
            leg.live = False
            flight, refused, now_s = leg.flight, "connection refused", self.calendar.now_s
            if leg.prefills:
                assert flight.attempts.split is not None
                flight.attempts.split.prefill_refused(refused, now_s)
                return
            if flight.attempts.split is not None:
                flight.attempts.split.decode_sent = False
            if leg is flight.hedge:
                flight.hedge = None
                flight.attempts.hedge_refused(refused, now_s)
            else:
                flight.attempts.connection_refused(refused, now_s)

    def time_out_later(self, leg: Leg) -> None:
        timeout_ms = self._world.conditions.first_byte_timeout_s * 1000.0
        self.calendar.after(timeout_ms, self.node_failed, leg, "the node does not answer")

    def node_failed(self, leg: Leg, reason: str) -> None:
        if not leg.live:
            return
        if leg.prefills:
            self._prefill_failed(leg, Outcome.FAILED, reason)
            return
        leg.live = False
        flight, now_s = leg.flight, self.calendar.now_s
        if leg is flight.hedge:
            flight.hedge = None
            flight.attempts.hedge_failed(Outcome.FAILED, reason, now_s)
        elif flight.first_ms is None:
            flight.attempts.node_failed(Outcome.FAILED, reason, now_s)
        else:
            flight.attempts.response_broke(reason, now_s)
            self._end(flight, RequestResults.failed)

    def _prefill_failed(self, leg: Leg, outcome: Outcome, reason: str) -> None:
        leg.live = False
        split = leg.flight.attempts.split
        if split is not None:
            split.prefill_failed(outcome, reason, self.calendar.now_s)

    def _lose_patience(self, flight: Flight) -> None:
        attempts = flight.attempts
        if attempts.done or flight.first_ms is not None:
            return
        if self._queued.pop(flight.request.number, None) is not None:
            self.replica.listener.client_left(flight.request)
            self._end(flight, RequestResults.left)
            return
        attempts.client_left(self.calendar.now_s)
        self._end(flight, RequestResults.left)
        if attempts.tried:
            self.withdrawn(flight.leg)

    def _abort(self, leg: Leg) -> None:
        sim, request_id = leg.node, leg.flight.request_id
        if leg.prefills:
            request_id += " prefill"
        if sim.flights.get(request_id) is leg:
            sim.engine.abort(request_id, self.calendar.now_ms)
            self._world.arm(sim)

    def _end(self, flight: Flight, record: Callable[[RequestResults, WorkloadPrompt, float], None] | None) -> None:
        """The request has ended: with an answer (None), or as `record` says."""
        self.inflight -= 1
        now_ms = self.calendar.now_ms
        if record is None:
            assert flight.first_ms is not None
            flight.results.finished(flight.prompt, flight.arrived_ms, flight.first_ms, now_ms)
        else:
            record(flight.results, flight.prompt, now_ms)
        self._world.request_ended(flight, answered=record is None)
