"""A simulated request: what the edge would do, with the network's delays, and what is measured of it."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

import msgspec

from warmroute.config.routing import NORMAL, PRIORITY_NUMBERS, Route, Routes
from warmroute.core.admission import TICK_S
from warmroute.core.brain import Dispatcher
from warmroute.core.calls import Attempts
from warmroute.core.demand import good_ttft_ms
from warmroute.core.messages import Lookup, Outcome, RoutingRequest
from warmroute.core.node import Node, Ticket
from warmroute.core.overdue import CHECK_S
from warmroute.core.prefill_work import work
from warmroute.core.rejections import AllNodesFailed, RoutingError
from warmroute.lab.engine.values import EngineRequest, RequestTooLong
from warmroute.lab.simulated_node import ProcessState, SimulatedNode
from warmroute.lab.workloads.workload_prompt import Form, WorkloadPrompt, leading_text

if TYPE_CHECKING:
    from warmroute.lab.simulated_router import Replica
    from warmroute.lab.world import World


# A simulated request: the router's RoutingRequest, filled from a workload's prompt instead of from HTTP bytes.

MODEL = "sim"
"""The model that every simulated node serves."""


class SimulatedLookup(Lookup, kw_only=True):
    """A lookup by the engine's own block hashes, because simulated prompts have no tokens."""

    request: SimulatedRequest

    @property
    def prompt(self) -> WorkloadPrompt:
        return self.request.prompt

    def prefix(self, tokens: int) -> SimulatedLookup:
        return self

    def blocks(self, model: str, lora: str, block_size: int) -> bytes:
        key = (model, lora, block_size)
        found = self._chains.get(key)
        if found is None:
            found = self._chains[key] = array("Q", self.request.blocks(block_size)).tobytes()
        return found


class SimulatedRequest(RoutingRequest, kw_only=True):
    prompt: WorkloadPrompt
    number: int
    """The request's number in this run, which identifies it everywhere."""
    form: Form = "chat"
    _hashes: dict[int, list[int]] = msgspec.field(default_factory=dict)
    """The result of `blocks`, by block size."""

    def lookup(self) -> SimulatedLookup:
        return SimulatedLookup(b"", self.prompt_tokens, self.prompt_tokens, cache_group=self.cache_group, request=self)

    def prefix_key(self) -> bytes | None:
        self.first_user_text()
        return super().prefix_key()

    def first_user_text(self) -> bytes:
        """Return the leading text of the first user message. It is generated on first use: few policies need it."""
        if self.user is None:
            self.system, self.user = leading_text(self.prompt, self.form)
        return self.user

    @property
    def prompt_tokens(self) -> int:
        return self.prompt.prompt_tokens

    def blocks(self, block_size: int) -> list[int]:
        """Return the hashes of the prompt's full blocks, as in an engine with this block size."""
        chain = self._hashes.get(block_size)
        if chain is None:
            content = self.prompt.blocks.content(block_size)
            chain = self._hashes[block_size] = content.hashes(0, self.prompt.prompt_tokens // block_size)
        return chain


def simulated_request(
    prompt: WorkloadPrompt, number: int, form: Form = "chat", route: Route | None = None, now_s: float = 0.0,
    isolated_tenant: str = "", streams: bool = True,
) -> SimulatedRequest:  # fmt: skip
    """A simulated client always states its priority, so a route does not set it. `isolated_tenant` sends the request
    instead of the prompt's own tenant, and shares no knowledge of caches with others."""
    return SimulatedRequest(
        prompt.lora_name or MODEL,
        session=prompt.session,
        tenant=isolated_tenant or prompt.tenant,
        cache_group=f"only {isolated_tenant}" if isolated_tenant else "",
        priority=PRIORITY_NUMBERS[prompt.priority],
        arrived_s=now_s,
        route=route.name if route is not None else "",
        deadline_s=now_s + route.ttft_s if route is not None and route.ttft_s else 0.0,
        total_deadline_s=now_s + route.total_s if route is not None and route.total_s else 0.0,
        ends_late=route is not None and route.ends_late and bool(route.ttft_s or route.total_s),
        streams=streams,
        prompt=prompt,
        number=number,
        form=form,
        may_split=True,
    )


# The results of a simulation's requests: counts, sums, and the times that percentiles need.
#
# Memory grows by four floats a request. The timeline has a bounded length.

TIMELINE_SPANS = 240


class Timeline:
    """Sums over equal spans of time. A span doubles whenever the run needs more than TIMELINE_SPANS of them."""

    FIELDS = ("arrived", "prompt_tokens", "cached_tokens", "ttft_ms", "first_tokens", "over_ceiling")

    def __init__(self) -> None:
        self.span_ms = 1000.0
        self.sums: list[list[float]] = []

    def at(self, at_ms: float) -> list[float]:
        """Return the sums of the span that contains this time; the caller adds to them."""
        sums = self.sums
        while (span := int(at_ms / self.span_ms)) >= TIMELINE_SPANS:
            self.span_ms *= 2
            paired = [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(sums[::2], sums[1::2], strict=False)]
            self.sums = sums = paired + (sums[-1:] if len(sums) % 2 else [])
        while len(sums) <= span:
            sums.append([0.0] * len(self.FIELDS))
        return sums[span]


@dataclass(slots=True)
class PriorityResults:
    """Counts and TTFTs of the requests of one priority."""

    arrived: int = 0
    finished: int = 0
    rejected: int = 0
    failed: int = 0
    left: int = 0
    ttft_ms: array[float] = field(default_factory=lambda: array("d"))


class RequestResults:
    def __init__(self, start_ms: float = 0.0) -> None:
        self._start_ms = start_ms
        self.by_priority: defaultdict[str, PriorityResults] = defaultdict(PriorityResults)
        self.timeline = Timeline()
        self.ttft_ms = array("d")
        self.prefill_work = array("d")
        """The prefill work of each request in `ttft_ms`: its uncached tokens, in tokens of a short prompt."""
        self.inter_token_ms = array("d")
        """The mean time between tokens of each request."""
        self.latency_ms = array("d")
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.retries = 0
        self.good_first_tokens = 0
        self.first_ms: float | None = None
        self.last_ms = 0.0
        self.ceiling_ms = inf
        """The timeline counts first tokens that take longer than this."""

    def arrived(self, prompt: WorkloadPrompt, now_ms: float) -> None:
        self.by_priority[prompt.priority].arrived += 1
        self.timeline.at(now_ms - self._start_ms)[0] += 1
        if self.first_ms is None:
            self.first_ms = now_ms

    def first_token(self, prompt: WorkloadPrompt, arrived_ms: float, cached_tokens: int, now_ms: float) -> None:
        ttft_ms = now_ms - arrived_ms
        self.ttft_ms.append(ttft_ms)
        self.prefill_work.append(work(prompt.prompt_tokens - cached_tokens, cached_tokens))
        self.good_first_tokens += ttft_ms <= good_ttft_ms(prompt.prompt_tokens)
        self.by_priority[prompt.priority].ttft_ms.append(ttft_ms)
        self.prompt_tokens += prompt.prompt_tokens
        self.cached_tokens += cached_tokens
        span = self.timeline.at(arrived_ms - self._start_ms)
        span[1] += prompt.prompt_tokens
        span[2] += cached_tokens
        span[3] += ttft_ms
        span[4] += 1
        span[5] += ttft_ms > self.ceiling_ms

    def finished(self, prompt: WorkloadPrompt, arrived_ms: float, first_ms: float, now_ms: float) -> None:
        self.by_priority[prompt.priority].finished += 1
        self.output_tokens += prompt.output_tokens
        self.latency_ms.append(now_ms - arrived_ms)
        if prompt.output_tokens > 1:
            self.inter_token_ms.append((now_ms - first_ms) / (prompt.output_tokens - 1))
        self.last_ms = now_ms

    def rejected(self, prompt: WorkloadPrompt, now_ms: float) -> None:
        self.by_priority[prompt.priority].rejected += 1
        self.last_ms = now_ms

    def failed(self, prompt: WorkloadPrompt, now_ms: float) -> None:
        self.by_priority[prompt.priority].failed += 1
        self.last_ms = now_ms

    def left(self, prompt: WorkloadPrompt, now_ms: float) -> None:
        """The client gave up before the first token."""
        self.by_priority[prompt.priority].left += 1
        self.last_ms = now_ms

    def total(self, what: str) -> int:
        """Return one count, by its name, summed over all priorities."""
        return sum(getattr(one, what) for one in self.by_priority.values())

    @property
    def ended(self) -> int:
        return sum(one.finished + one.rejected + one.failed + one.left for one in self.by_priority.values())


# A simulated request, and its attempts: which node each of them goes to.


class Leg:
    """One attempt of a simulated request: its way to one node and back."""

    __slots__ = ("flight", "flow", "live", "node", "prefill_leg", "prefills")

    def __init__(
        self, flight: Flight, node: SimulatedNode, prefills: bool = False, prefill_leg: Leg | None = None
    ) -> None:
        """`prefills`: the node only prefills, for another one. `prefill_leg`: whose KV cache the node fetches."""
        self.prefills = prefills
        self.prefill_leg = prefill_leg
        self.flight = flight
        self.flow = flight.flow
        self.node = node
        self.live = True
        """Cleared when the attempt has ended. What still comes back from the node is ignored."""


class Flight:
    """One simulated request, which drives its attempts in virtual time."""

    __slots__ = (
        "arrived_ms", "attempts", "cached_tokens", "first_ms", "flow", "hedge", "leg", "prefill", "prefill_cached",
        "prompt", "request", "request_id", "results",
    )  # fmt: skip

    def __init__(
        self, flow: RequestFlow, prompt: WorkloadPrompt, request: SimulatedRequest, results: RequestResults
    ) -> None:
        # for its whole life
        self.flow = flow
        self.prompt = prompt
        self.request = request
        self.request_id = str(request.number)
        self.arrived_ms = flow.calendar.now_ms
        self.results = results
        self.attempts = Attempts(flow.dispatcher, self, request, self.request_id.encode())
        # at the current node
        self.leg: Leg
        self.hedge: Leg | None = None
        self.prefill: Leg | None = None
        self.prefill_cached = 0
        """Tokens that the prefill node had cached."""
        self.first_ms: float | None = None
        self.cached_tokens = 0

    @property
    def node(self) -> SimulatedNode:
        return self.leg.node

    # The driver of its attempts.

    def send(self, node: Node) -> None:
        self.leg = self.flow.sent(self, node)

    def withdraw(self) -> None:
        self.flow.withdrawn(self.leg)

    def send_prefill(self, prefill_node: Node, node: Node) -> None:
        self.leg = self.prefill = self.flow.sent_prefill(self, prefill_node, node)

    def withdraw_prefill(self) -> None:
        prefill, self.prefill = self.prefill, None
        if prefill is not None:
            self.flow.withdrawn(prefill)

    def send_hedge(self, node: Node) -> None:
        self.hedge = self.flow.sent(self, node)

    def withdraw_hedge(self) -> None:
        hedge, self.hedge = self.hedge, None
        if hedge is not None:
            self.flow.withdrawn(hedge)

    def promote_hedge(self) -> None:
        assert self.hedge is not None
        self.leg, self.hedge = self.hedge, None

    def reject(self, why: RoutingError) -> int:
        self.flow.rejected(self, why)
        return 0

    def cut(self, why: RoutingError) -> bool:
        self.flow.withdrawn(self.leg)
        self.flow.rejected(self, why)
        return True

    def internal_error(self, error: Exception) -> None:
        raise error


# The life of a simulated request: over the network to the router, to a node, through its engine, and back.
#
# Retries, tickets and usage are production's (core/calls.py). Here is only what happens when in virtual time.

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
        self._freed: dict[Node, None] = {}
        """Nodes that may have room for queued requests since the callback began that runs now."""
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

    def node_freed(self, node: Node, _now_s: float) -> None:
        """Look at the queue once for all that happens now, when a request that failed has its next node."""
        if not self._freed:
            self.calendar.afterwards(self._fill)
        self._freed[node] = None

    def _fill(self) -> None:
        freed, self._freed = self._freed, {}
        if self.replica.admission.queue.waiting:
            self.replica.admission.nodes_freed(freed, self.calendar.now_s)

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
