"""A world in virtual time: simulated engines under the production router core (Fleet, Router, policies, Ticket), with a
network between them.

The life of a request here is that of edge/exchange.py: decide, open a ticket, send; a node that fails before the first
token leads to the next fallback, after it to a broken answer; the ticket is closed however it ends. Every event touches
one node only; nothing here grows with the fleet but the router's own decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import msgspec

from warmroute.config import Config, Health, NodeConfig
from warmroute.fake_engine.core.request import EngineOutput, EngineRequest, Finished, FirstToken, RequestTooLong
from warmroute.fleet.fleet import Fleet
from warmroute.fleet.node import Node, Outcome
from warmroute.index.cache_view import CacheView
from warmroute.replay.workloads.prompt import Prompt
from warmroute.replay.world.calendar import Calendar
from warmroute.replay.world.clients import Clients
from warmroute.replay.world.conditions import Conditions, NodeSpec
from warmroute.replay.world.flight import Flight
from warmroute.replay.world.kv_events import KvEventsToIndex
from warmroute.replay.world.kv_feed import KvFeed
from warmroute.replay.world.listener import Listener
from warmroute.replay.world.node import Life, SimNode
from warmroute.replay.world.polls import Polls
from warmroute.replay.world.simulated_request import MODEL, SimLookup, SimulatedRequest
from warmroute.replay.world.tally import Tally
from warmroute.routing.admission import Admission
from warmroute.routing.decision import Decision, Policy
from warmroute.routing.dispatch import Dispatch
from warmroute.routing.refusals import Undecided
from warmroute.routing.router import Router
from warmroute.routing.routes import Routes

PATH = "/v1/chat/completions"
"""What simulated clients ask for, as routes see it."""
NOWHERE = "local"
"""The island of every node, where the router is told of none."""
TICK_MS = 50.0
"""How often admission looks by itself at who waits, as in service.py."""
_PRIORITIES = {"high": -1, "normal": 0, "low": 1}


class World:
    def __init__(
        self,
        specs: Iterable[NodeSpec],
        conditions: Conditions | None = None,
        config: Config | None = None,
        *,
        policy: Policy | None = None,
        listener: Listener | None = None,
        health: Health | None = None,
    ) -> None:
        """`config` is the router's own; `policy` takes the place of the one that it names."""
        self.conditions = conditions = conditions or Conditions()
        self.calendar = Calendar()
        self.tally = Tally()
        health = health or Health()
        self.fleet = Fleet(health)
        # A seed of 0 would make production's router take one from the system.
        config = config or Config()
        self.fleet.islands.reconfigure(config.islands, config.crossing)
        self.cache_view = CacheView(config.index)
        routing = msgspec.structs.replace(config.routing, seed=config.routing.seed or conditions.seed * 2 + 1)
        self.router = Router(self.fleet, self.cache_view, routing, config.price, config.routes)
        if policy is not None:
            self.router.policy = policy
        self.admission = Admission(self.router, config.admission, config.routes)
        self._routes = Routes(config.routes)
        if listener is None and (self.router.policy.wants_tokens or (config.routes and config.uses_events)):
            listener = KvEventsToIndex(self.cache_view, events=config.uses_events)
        self.nodes: dict[str, SimNode] = {}
        """The fleet's nodes by name."""
        self.gone: list[SimNode] = []
        """Nodes that have left, for their books."""
        self._listener = listener
        self._feed = KvFeed(self.calendar, conditions, listener) if listener and listener.wants_kv_events else None
        self._polls = Polls(self, conditions, health)
        self._clients: Clients | None = None
        self._arrivals = 0
        self._warm_up = -1
        self._measured_ms: float | None = None
        self._ticking = False
        self._prefills = 0
        self._prefilling: dict[str, Callable[[], object]] = {}
        """What is to happen when they are done, by the name of the request."""
        self.inflight = 0
        """Requests that have arrived and not ended."""
        for spec in specs:
            self.fleet.check_passed(self.add(spec).node, 0.0)

    # The fleet and what happens to it.

    def add(self, spec: NodeSpec) -> SimNode:
        """A node joins, its engine up; it serves when its first health check has passed."""
        config = NodeConfig(
            url=f"http://{spec.name}:8000",
            name=spec.name,
            models=(MODEL, *spec.adapters),
            island=spec.island if self.conditions.told_islands else NOWHERE,
            gpu=spec.profile.name,
            usd_per_hour=spec.usd_per_hour,
        )
        node = self.fleet.add(config)
        if spec.adapters:
            cards: list[dict[str, object]] = [{"id": MODEL}]
            cards += [{"id": name, "parent": MODEL} for name in spec.adapters]
            self.fleet.saw_models(node, config.models, cards)
        sim = SimNode(spec, node, self.conditions.island(spec.island).one_way_ms, self.calendar.now_ms)
        self.nodes[spec.name] = sim
        sim.start(self._feed.sink(sim) if self._feed else None)
        if self._listener is not None:
            self._listener.node_joined(node, spec.block_size, sim.engine.config.num_blocks)
        self._polls.begin(sim)
        return sim

    def provision(self, spec: NodeSpec, delay_s: float) -> None:
        """Asks for a node that joins after its provisioning delay."""
        self.calendar.after(delay_s * 1000.0, self.add, spec)

    def drain(self, name: str, then: Callable[[SimNode], object] | None = None) -> None:
        """No new requests; when the running ones have finished, the node leaves."""
        self.fleet.drain(name)
        self._leave_when_empty(self.nodes[name], then)

    def _leave_when_empty(self, sim: SimNode, then: Callable[[SimNode], object] | None) -> None:
        if sim.node.inflight:
            self.calendar.after(100.0, self._leave_when_empty, sim, then)
            return
        if sim.node.name in self.nodes:
            self.remove(sim.node.name)
        if then is not None:
            then(sim)

    def remove(self, name: str) -> None:
        """Takes a node out at once; what runs there finishes."""
        sim = self.nodes.pop(name)
        self.fleet.remove(name)
        sim.left(self.calendar.now_ms)
        self.gone.append(sim)
        if self._listener is not None:
            self._listener.node_left(sim.node)

    def fail(self, name: str) -> None:
        """The node's process dies with everything it had."""
        sim = self.nodes[name]
        sim.life = Life.DEAD
        sim.wakes_at_ms = math.inf
        lost, sim.flights = sim.flights, {}
        for flight in lost.values():
            self.calendar.after(sim.one_way_ms, self._broke, flight, flight.tried, "the node died")

    def hang(self, name: str) -> None:
        """The node answers nothing any more, and takes everything."""
        sim = self.nodes[name]
        sim.life = Life.HANGING
        sim.wakes_at_ms = math.inf
        lost, sim.flights = sim.flights, {}
        for flight in lost.values():
            self._give_up_later(flight)

    def slow(self, name: str, times: float) -> None:
        """All that the node's process does takes so many times as long from now on."""
        sim = self.nodes[name]
        sim.engine.change_timing(sim.spec.profile.timing.slower(times), self.calendar.now_ms)
        self._arm(sim)

    def restart(self, name: str) -> None:
        """A new process in the node's place, its cache empty."""
        sim = self.nodes[name]
        if sim.life is Life.SERVING:
            self.fail(name)
        sim.start(self._feed.sink(sim) if self._feed else None)

    # Time.

    def run(
        self,
        prompts: Iterator[Prompt],
        *,
        concurrency: int | None = None,
        limit: int | None = None,
        duration_s: float | None = None,
        warm_up: int = 0,
    ) -> None:
        """Lives until every request of the workload has ended. The first `warm_up` of them do not count."""
        self._warm_up = self._arrivals + warm_up if warm_up else -1
        self._measured_ms = None if duration_s is None else duration_s * 1000.0
        clients = self._clients = Clients(self, prompts, concurrency, limit)
        if not warm_up:
            self._end_measuring_later()
        clients.begin()
        self.calendar.run_while(lambda: self.inflight > 0 or clients.expected > 0)

    def measure_from_now(self) -> None:
        """What came before was to warm up: requests that arrived before now do not count."""
        ceiling_ms = self.tally.ceiling_ms
        self.tally = Tally(self.calendar.now_ms)
        self.tally.ceiling_ms = ceiling_ms
        for sim in self.nodes.values():
            sim.measure_from(self.calendar.now_ms)
        self._end_measuring_later()

    def _end_measuring_later(self) -> None:
        if self._clients is not None and self._measured_ms is not None:
            self._clients.until_ms = self.calendar.now_ms + self._measured_ms

    def polled(self, node: Node, incarnation: float, now_s: float) -> None:
        if self._listener is not None:
            self._listener.polled(node, incarnation, now_s)

    # A request's way.

    def arrive(self, prompt: Prompt) -> Flight | None:
        """A request reaches the router. None where it was refused at once."""
        now_ms = self.calendar.now_ms
        number = self._arrivals
        if number == self._warm_up:
            self.measure_from_now()
        self._arrivals += 1
        self.inflight += 1
        self.tally.arrived(prompt, now_ms)
        request = SimulatedRequest(prompt, number, self.conditions.form)
        if self._routes:
            route = self._routes.pick(MODEL, PATH, request.tenant, lambda _name: b"")
            if route is not None:
                priority = request.priority  # a simulated client always says its own
                route.apply(request, now_ms / 1000.0)
                request.priority = priority
        wanted = (
            self.router.policy_of(request).wants_tokens and request.prompt_tokens >= self.cache_view.config.min_tokens
        )
        lookup = SimLookup(request) if wanted else None
        flight = Flight(prompt, request, lookup, now_ms, self.tally, self._go, self._refuse)
        try:
            self.admission.enter(flight, now_ms / 1000.0)
        except Undecided:
            self._refuse(flight)
            return None
        if prompt.patience_ms is not None:
            self.calendar.after(prompt.patience_ms, self._lose_patience, flight)
        if self.admission.waiting and not self._ticking:
            self._ticking = True
            self.calendar.after(TICK_MS, self._tick)
        return flight

    def _go(self, flight: Flight, decision: Decision) -> None:
        flight.decision = decision
        self._try(flight, decision.node)

    def _refuse(self, flight: Flight) -> None:
        self._end(flight, Tally.rejected)

    def _tick(self) -> None:
        self._ticking = self.admission.waiting > 0 or self.fleet.islands.has_lines
        if self._ticking:
            self.admission.tick((sim.node for sim in list(self.nodes.values())), self.calendar.now_s)
            self.calendar.after(TICK_MS, self._tick)

    def _freed(self, node: Node) -> None:
        if self.admission.waiting:
            self.admission.freed(node, self.calendar.now_s)

    def _try(self, flight: Flight, node: Node) -> None:
        now_ms = self.calendar.now_ms
        sim = self.nodes[node.name]
        sim.load_changes(now_ms)
        sim.requests += 1
        flight.tried += 1
        flight.node = sim
        flight.ticket = self.router.dispatch(flight.decision, node, now_ms / 1000.0)
        if self._listener is not None:
            self._listener.sent(flight.request, node, now_ms / 1000.0)
        self.calendar.at(now_ms + sim.one_way_ms, self._reach, flight, flight.tried)

    def _reach(self, flight: Flight, tried: int) -> None:
        """The request is at the node."""
        if flight.done or flight.tried != tried:
            return
        sim = flight.node
        if sim.life is Life.DEAD:
            self.calendar.after(sim.one_way_ms, self._refused, flight, tried)
            return
        if sim.life is Life.HANGING:
            self._give_up_later(flight)
            return
        prompt = flight.prompt
        request = EngineRequest(
            flight.request_id,
            prompt.prompt_tokens,
            prompt.output_tokens,
            prompt.blocks.content(sim.spec.block_size),
            _PRIORITIES[prompt.priority],
            prompt.lora_name,
            prompt.cache_salt,
        )
        try:
            sim.engine.submit(request, self.calendar.now_ms)
        except RequestTooLong:
            self.calendar.after(sim.one_way_ms, self._too_long, flight)
            return
        sim.flights[flight.request_id] = flight
        self._arm(sim)

    def advance(self, sim: SimNode) -> None:
        """Lets an engine live up to now, and sends what came out on its way back."""
        outputs = sim.engine.advance(self.calendar.now_ms)
        if outputs:
            one_way_ms, at = sim.one_way_ms, self.calendar.at
            flights = sim.flights
            for output in outputs:
                if output.request_id not in flights:
                    self._prefilled(output)
                elif isinstance(output, FirstToken):
                    flight = flights[output.request_id]
                    at(output.at_ms + one_way_ms, self._first_token, flight, flight.tried, output.cached_tokens)
                elif isinstance(output, Finished):
                    flight = flights.pop(output.request_id)
                    at(output.at_ms + one_way_ms, self._answered, flight, flight.tried)
        self._arm(sim)

    def prefill(self, sim: SimNode, prompt: Prompt, tokens: int, then: Callable[[], object]) -> None:
        """Puts the beginning of a prompt into a node's cache; nobody's request."""
        self._prefills += 1
        request_id = f"prefill {self._prefills}"
        content = prompt.blocks.content(sim.spec.block_size)
        self._prefilling[request_id] = then
        sim.engine.submit(EngineRequest(request_id, tokens, 1, content), self.calendar.now_ms)
        self._arm(sim)

    def _prefilled(self, output: EngineOutput) -> None:
        if isinstance(output, Finished):
            then = self._prefilling.pop(output.request_id, None)
            if then is not None:
                self.calendar.at(max(output.at_ms, self.calendar.now_ms), then)

    def _arm(self, sim: SimNode) -> None:
        """Enters the moment at which the engine has to be looked at next."""
        at_ms = sim.engine.next_event_at()
        if at_ms is None:
            sim.wakes_at_ms = math.inf
        elif at_ms != sim.wakes_at_ms:
            sim.wakes_at_ms = at_ms
            self.calendar.at_end_of(max(at_ms, self.calendar.now_ms), self._wake, sim, at_ms)

    def _wake(self, sim: SimNode, at_ms: float) -> None:
        if sim.wakes_at_ms == at_ms:
            sim.wakes_at_ms = -1.0
            self.advance(sim)

    # Back at the router.

    def _first_token(self, flight: Flight, tried: int, cached_tokens: int) -> None:
        if flight.done or flight.tried != tried:
            return
        now_ms = self.calendar.now_ms
        flight.first_ms = now_ms
        flight.cached_tokens = cached_tokens
        flight.ticket.first_byte(now_ms / 1000.0)
        flight.tally.first_token(flight.prompt, flight.arrived_ms, cached_tokens, now_ms)
        if self._listener is not None:
            self._listener.first_token(flight.request, flight.node.node, cached_tokens, now_ms / 1000.0)
        self._freed(flight.node.node)

    def _answered(self, flight: Flight, tried: int) -> None:
        if flight.done or flight.tried != tried:
            return
        ticket = flight.ticket
        if isinstance(ticket, Dispatch):
            prompt = flight.prompt
            cached = prompt.prompt_tokens if "usage" in flight.node.spec.lies else flight.cached_tokens
            ticket.answered(prompt.prompt_tokens, cached, prompt.output_tokens, self.calendar.now_s)
        self._close(flight, Outcome.OK)
        self._end(flight, None)

    def _too_long(self, flight: Flight) -> None:
        if not flight.done:
            self._close(flight, Outcome.REJECTED)
            self._end(flight, Tally.rejected)

    def _refused(self, flight: Flight, tried: int) -> None:
        if not flight.done and flight.tried == tried:
            self.fleet.check_refused(flight.node.node, self.calendar.now_s, "connection refused")
            self._broke(flight, tried, "connection refused")

    def _give_up_later(self, flight: Flight) -> None:
        timeout_ms = self.conditions.first_byte_timeout_s * 1000.0
        self.calendar.after(timeout_ms, self._broke, flight, flight.tried, "the node does not answer")

    def _broke(self, flight: Flight, tried: int, reason: str) -> None:
        """A node failed a request: the next one may do better, unless the client has a part of the answer."""
        if flight.done or flight.tried != tried:
            return
        if flight.first_ms is not None:
            self._close(flight, Outcome.BROKEN, reason)
            self._end(flight, Tally.failed)
            return
        self._close(flight, Outcome.FAILED, reason)
        if flight.fallbacks is None:
            flight.fallbacks = flight.decision.fallbacks()
            flight.fallbacks.reverse()
        while flight.fallbacks and flight.tried < self.conditions.attempts:
            node = flight.fallbacks.pop()
            if node.draining or node.health.certain_open or node.name not in self.nodes:
                continue
            flight.tally.retries += 1
            self._try(flight, node)
            return
        self._end(flight, Tally.failed)

    def _lose_patience(self, flight: Flight) -> None:
        if flight.done or flight.first_ms is not None:
            return
        if not flight.tried:
            self.admission.leave(flight)
            self._end(flight, Tally.left)
            return
        sim = flight.node
        self._close(flight, Outcome.LEFT)
        self._end(flight, Tally.left)
        self.calendar.after(sim.one_way_ms, self._abort, flight, sim)

    def _abort(self, flight: Flight, sim: SimNode) -> None:
        if sim.flights.get(flight.request_id) is flight:
            sim.engine.abort(flight.request_id, self.calendar.now_ms)
            self._arm(sim)

    def _close(self, flight: Flight, outcome: Outcome, reason: str = "") -> None:
        now_s = self.calendar.now_s
        flight.node.load_changes(self.calendar.now_ms)
        self.fleet.close_ticket(flight.ticket, outcome, now_s, reason)
        if self._listener is not None:
            self._listener.ended(flight.request, flight.node.node, now_s)
        self._freed(flight.node.node)

    def _end(self, flight: Flight, refusal: Callable[[Tally, Prompt, float], None] | None) -> None:
        """A request has ended: with an answer (None), or as the tally's method says."""
        flight.done = True
        self.inflight -= 1
        now_ms = self.calendar.now_ms
        if refusal is None:
            assert flight.first_ms is not None
            flight.tally.finished(flight.prompt, flight.arrived_ms, flight.first_ms, now_ms)
        else:
            refusal(flight.tally, flight.prompt, now_ms)
        if self._clients is not None:
            self._clients.ended(flight.prompt, answered=refusal is None)
