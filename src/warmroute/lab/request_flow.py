"""A simulated request: the edge's messages with network delays, and what is measured of it.

The lab is an edge in virtual time. It tells the core what happens to a request, and does what the core commands: over
the network to a node, through its engine, and back. Which node comes next, tickets and usage are the core's business
(core/calls.py).
"""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

import msgspec

from warmroute.config.routing import NORMAL, PRIORITY_NUMBERS, Route, Routes
from warmroute.core.admission import TICK_S
from warmroute.core.brain import Brain
from warmroute.core.demand import good_ttft_ms
from warmroute.core.messages import (
    CLOSED,
    MOVES,
    OVERDUE,
    QUEUE,
    REFUSED,
    SILENT,
    Arrive,
    Cancel,
    Command,
    Due,
    Ended,
    Event,
    Failed,
    FirstToken,
    Left,
    Lookup,
    Prefilled,
    Reject,
    Role,
    RoutingRequest,
    Send,
    Started,
    Withdraw,
    Withdrawn,
)
from warmroute.core.overdue import CHECK_S
from warmroute.core.prefill_work import work
from warmroute.core.traffic import Counters
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
        found = self.chains.get(key)
        if found is None:
            found = self.chains[key] = array("Q", self.request.blocks(block_size)).tobytes()
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


# A simulated request on its way.


class SimulatedTry:
    """One sending of a simulated request: its way to one node and back."""

    __slots__ = ("cached_tokens", "engine_id", "exchange", "flow", "live", "node", "number", "prefills", "source")

    def __init__(self, exchange: SimulatedExchange, command: Send, node: SimulatedNode) -> None:
        self.exchange = exchange
        self.flow = exchange.flow
        self.number = command.try_
        self.engine_id = f"{exchange.id} {command.try_}"
        """How the node's engine names the request. One node may get it several times."""
        self.node = node
        self.prefills = command.role is Role.PREFILL
        """Whether the node only prefills, for another one."""
        self.source = exchange.tries[command.kv_from] if command.role is Role.DECODE else None
        """The try whose KV cache the node fetches."""
        self.cached_tokens = 0
        """Prompt tokens that the node had cached."""
        self.live = True
        """Cleared when the try has ended. What still comes back from the node is ignored."""


class SimulatedExchange:
    """One simulated request, and what its client has seen of the answer."""

    __slots__ = (
        "arrived_ms", "cached_tokens", "ended", "first_ms", "flow", "prompt", "request", "results", "tries",
    )  # fmt: skip

    def __init__(
        self, flow: RequestFlow, prompt: WorkloadPrompt, request: SimulatedRequest, results: RequestResults
    ) -> None:
        self.flow = flow
        self.prompt = prompt
        self.request = request
        self.arrived_ms = flow.calendar.now_ms
        self.results = results
        self.tries: dict[int, SimulatedTry] = {}
        """All tries of the request by their number, ended ones included."""
        self.first_ms: float | None = None
        """When the client had the first token."""
        self.cached_tokens = 0
        self.ended = False

    @property
    def id(self) -> int:
        return self.request.number


PATH = "/v1/chat/completions"
"""The path of every simulated request, as routes see it."""
TICK_MS = 1000.0 * TICK_S
CHECK_MS = 1000.0 * CHECK_S
Record = Callable[[RequestResults, WorkloadPrompt, float], None]


class RequestFlow:
    """The edge of one simulated router."""

    def __init__(self, world: World, replica: Replica, routes: Routes) -> None:
        self._world = world
        self.replica = replica
        self.calendar = world.calendar
        self._routes = routes
        self.counters = Counters()
        self.brain = Brain(
            replica.fleet, replica.router, replica.admission, self.counters, max_attempts=world.conditions.attempts,
            hedging=replica.hedging, keeps_tickets=True,
        )  # fmt: skip
        self._exchanges: dict[int, SimulatedExchange] = {}
        """Requests that have arrived and not ended, by number."""
        self._queued: dict[int, SimulatedExchange] = {}
        """Requests in the own queue of another router's policy."""
        self._ticks = self._checks = False
        """Whether the next look at the queue, or at overdue requests, is in the calendar."""

    @property
    def inflight(self) -> int:
        """Requests that have arrived and not ended."""
        return len(self._exchanges)

    # What the core is told, and what it commands.

    def tell(self, event: Event) -> None:
        """Tell the core what happened, and do what it commands. What obeying a command causes at once is told before
        the next command is obeyed."""
        brain, now_s = self.brain, self.calendar.now_s
        commands: deque[Command] = deque()
        ticket_closed = False
        news: Event | None = event
        while news is not None or commands:
            if news is None:
                news = self._obey(commands.popleft())
                continue
            commands.extendleft(reversed(brain.handle(news, now_s)))
            news = None
            if brain.last_error is not None:
                raise RuntimeError("the core failed at a request") from brain.last_error
            ticket_closed |= self.hear()
        if ticket_closed:
            self._leave_queue()

    def hear(self) -> bool:
        """Tell the policy which tickets the core has opened and closed. Return whether one was closed."""
        log, closed = self.brain.ticket_log, False
        if not log:
            return False
        nodes, now_ms, replica = self._world.numbered, self.calendar.now_ms, self.replica
        for call, ticket, opened in log:
            request, sim = call.request, nodes[ticket.node.number]
            assert isinstance(request, SimulatedRequest)
            sim.account_inflight(now_ms)
            replica.tell_policy("request_sent" if opened else "request_ended", request, sim)
            closed |= not opened
        log.clear()
        return closed

    def fleet_changed(self) -> None:
        """The health of a node has changed, or a node left or has room: requests may move."""
        if self.brain.due_now:
            self.tell(Due(MOVES))

    def _obey(self, command: Command) -> Event | None:
        """Do what the core commands. Return what comes of it at once."""
        exchange = self._exchanges.get(command.id)
        if exchange is None:
            return None
        if isinstance(command, Send):
            self._send(exchange, command)
        elif isinstance(command, Withdraw):
            self._withdraw(exchange.tries[command.try_])
            return Withdrawn(command.id, command.try_)
        elif isinstance(command, Reject):
            self._withdraw_all(exchange)
            self._end(exchange, RequestResults.failed if command.status == 502 else RequestResults.rejected)
        else:
            self._withdraw_all(exchange)
            self._end(exchange, RequestResults.rejected)
            return Cancel(command.id, Left.CUT)
        return None

    def _send(self, exchange: SimulatedExchange, command: Send) -> None:
        world, now_ms = self._world, self.calendar.now_ms
        sim = world.numbered[command.node]
        one = exchange.tries[command.try_] = SimulatedTry(exchange, command, sim)
        sim.account_inflight(now_ms)
        sim.requests += 1
        if not one.prefills and self.brain.open[exchange.id].tried > 1:
            exchange.results.retries += 1
        if one.source is None:
            world.request_sent(exchange, sim)
        self.calendar.at(now_ms + sim.one_way_ms, self._reach, one)

    def _withdraw(self, one: SimulatedTry) -> None:
        """The router gave up this try: the engine stops when it learns of it."""
        if one.live:
            one.live = False
            self.calendar.after(one.node.one_way_ms, self._abort, one)

    def _withdraw_all(self, exchange: SimulatedExchange, but: SimulatedTry | None = None) -> None:
        for one in exchange.tries.values():
            if one is not but:
                self._withdraw(one)

    # At the router.

    def arrive(self, prompt: WorkloadPrompt) -> SimulatedExchange | None:
        """A request reaches the router. Return None where it is rejected at once."""
        world, now_ms = self._world, self.calendar.now_ms
        number = world.arrivals - 1
        world.results.arrived(prompt, now_ms)
        conditions = world.conditions
        isolated = f"tenant-{number % conditions.tenants}" if conditions.tenants else ""
        route = self._routes.pick(MODEL, PATH, isolated or prompt.tenant, lambda _name: b"") if self._routes else None
        request = simulated_request(
            prompt, number, conditions.form, route, now_ms / 1000.0, isolated, conditions.streams
        )
        exchange = self._exchanges[number] = SimulatedExchange(self, prompt, request, world.results)
        if self.replica.listener.queues(request, now_ms / 1000.0):
            self._queued[number] = exchange
        else:
            self._enter(exchange)
            if exchange.ended:
                return None
        if prompt.patience_ms is not None:
            self.calendar.after(prompt.patience_ms, self._lose_patience, exchange)
        if not self._ticks and self.brain.queue_due_s < inf:
            self._ticks = True
            self.calendar.after(TICK_MS, self._tick)
        if not self._checks:
            self._checks = True
            self.calendar.after(CHECK_MS, self._check)
        return exchange

    def _enter(self, exchange: SimulatedExchange) -> None:
        """Ask the core for a node."""
        request, replica = exchange.request, self.replica
        wanted = (
            replica.router.policy_of(request).wants_tokens
            and request.prompt_tokens >= replica.cache_view.config.min_prompt_tokens
        )
        lookup = request.lookup() if wanted else None
        self.tell(Arrive(exchange.id, b"%d" % exchange.id, request, lookup, request.prompt_tokens))

    def _leave_queue(self) -> None:
        """Send what the policy lets out of its own queue."""
        while self._queued and (request := self.replica.listener.next_queued(self.calendar.now_s)) is not None:
            self._enter(self._queued.pop(request.number))

    def _tick(self) -> None:
        self.tell(Due(QUEUE))
        self._ticks = self.brain.queue_due_s < inf
        if self._ticks:
            self.calendar.after(TICK_MS, self._tick)

    def _check(self) -> None:
        self.tell(Due(OVERDUE))
        self._checks = self.brain.overdue_due_s < inf
        if self._checks:
            self.calendar.after(CHECK_MS, self._check)

    def _lose_patience(self, exchange: SimulatedExchange) -> None:
        if exchange.ended or exchange.first_ms is not None:
            return
        if self._queued.pop(exchange.id, None) is not None:
            self.replica.listener.client_left(exchange.request)
        else:
            self._withdraw_all(exchange)
            self.tell(Cancel(exchange.id, Left.LEFT))
        self._end(exchange, RequestResults.left)

    # At the node.

    def _reach(self, one: SimulatedTry) -> None:
        if not one.live:
            return
        sim = one.node
        if sim.state is ProcessState.DEAD:
            self.calendar.after(sim.one_way_ms, self.failed, one, REFUSED, "connection refused")
        elif sim.state is ProcessState.HANGING:
            self.time_out_later(one)
        elif one.source is not None:
            self._transfer(one, one.source)
        else:
            self._submit(one, 0)

    def _transfer(self, one: SimulatedTry, prefill: SimulatedTry) -> None:
        """Fetch the KV tokens that the node lacks from its prefill node, after the transfers that began before."""
        sim, source, conditions = one.node, prefill.node, self._world.conditions
        prompt, now_ms = one.exchange.prompt, self.calendar.now_ms
        if source.state is not ProcessState.SERVING:
            self.calendar.after(sim.one_way_ms, self.failed, one, 500, "the KV cache is gone")
            return
        block_size = sim.spec.block_size
        hashes = one.exchange.request.blocks(block_size)
        cached = len(sim.engine.scheduler.pool.match(hashes, len(hashes))) * block_size
        missing = max(0, prompt.prompt_tokens - cached)
        megabytes = missing * sim.spec.profile.kv_bytes_per_token / 1e6
        source.link_free_ms = max(source.link_free_ms, now_ms) + megabytes / conditions.kv_gigabytes_per_s
        self.calendar.at(source.link_free_ms + conditions.kv_latency_ms, self._submit, one, prompt.prompt_tokens)

    def _submit(self, one: SimulatedTry, remote_tokens: int) -> None:
        """Give a request to its engine. `remote_tokens`: those that it does not have to prefill."""
        exchange, sim = one.exchange, one.node
        if not one.live:
            return
        if sim.state is not ProcessState.SERVING:  # it stopped during the transfer
            self.calendar.after(sim.one_way_ms, self.failed, one, CLOSED, "the node died")
            return
        prompt = exchange.prompt
        request = EngineRequest(
            one.engine_id,
            prompt.prompt_tokens,
            1 if one.prefills else prompt.output_tokens,
            prompt.blocks.content(sim.spec.block_size),
            exchange.request.priority - NORMAL,
            prompt.lora_name,
            prompt.cache_salt,
            remote_tokens=remote_tokens,
        )
        try:
            sim.engine.submit(request, self.calendar.now_ms)
        except RequestTooLong:
            self.calendar.after(sim.one_way_ms, self._too_long, one)
            return
        sim.tries[one.engine_id] = one
        self._world.arm(sim)

    def _abort(self, one: SimulatedTry) -> None:
        sim = one.node
        if sim.tries.get(one.engine_id) is one:
            sim.engine.abort(one.engine_id, self.calendar.now_ms)
            self._world.arm(sim)

    # Back at the router.

    def first_token(self, one: SimulatedTry, cached_tokens: int) -> None:
        if not one.live:
            return
        exchange = one.exchange
        one.cached_tokens = cached_tokens
        if one.prefills:
            self.replica.tell_policy("first_token", exchange.request, one.node, cached_tokens)
            return
        exchange.cached_tokens = cached_tokens if one.source is None else one.source.cached_tokens
        if exchange.request.streams:
            self._response_started(one)

    def _response_started(self, one: SimulatedTry) -> None:
        """The client has the first token, or the whole answer if it is not streamed."""
        exchange, now_ms = one.exchange, self.calendar.now_ms
        self._withdraw_all(exchange, but=one)
        exchange.first_ms = now_ms
        exchange.results.first_token(exchange.prompt, exchange.arrived_ms, exchange.cached_tokens, now_ms)
        self.replica.tell_policy("first_token", exchange.request, one.node, exchange.cached_tokens)
        # One after the other: where a hedge has won, its node's rival may go down, and other requests leave it first.
        self.tell(Started(exchange.id, one.number, 200))
        self.tell(FirstToken(exchange.id, one.number, 200))
        self._leave_queue()

    def answered(self, one: SimulatedTry) -> None:
        if not one.live:
            return
        exchange = one.exchange
        prompt, now_s = exchange.prompt, self.calendar.now_s
        if one.prefills:
            one.live = False
            usage = (prompt.prompt_tokens, one.cached_tokens, 1)
            self.tell(Prefilled(exchange.id, one.number, True, False, usage))
            return
        if not exchange.request.streams:
            self._response_started(one)
        one.live = False
        cached = prompt.prompt_tokens if "usage" in one.node.spec.misreports else exchange.cached_tokens
        self.tell(Ended(exchange.id, one.number, 200, now_s, (prompt.prompt_tokens, cached, prompt.output_tokens)))
        self._end(exchange, None)

    def _too_long(self, one: SimulatedTry) -> None:
        """The engine rejects the request. Of a pair, the decode node then gets it alone."""
        if one.prefills or one.source is not None:
            self.failed(one, 400, "the prompt is too long")
        elif one.live:
            exchange = one.exchange
            one.live = False
            self._withdraw_all(exchange)
            self.tell(Ended(exchange.id, one.number, 400, self.calendar.now_s, None))
            self._end(exchange, RequestResults.rejected)

    def time_out_later(self, one: SimulatedTry) -> None:
        timeout_ms = self._world.conditions.first_byte_timeout_s * 1000.0
        self.calendar.after(timeout_ms, self.failed, one, SILENT, "the node does not answer")

    def failed(self, one: SimulatedTry, status: int, reason: str) -> None:
        if one.live:
            one.live = False
            exchange = one.exchange
            broke = exchange.first_ms is not None
            self.tell(Failed(exchange.id, one.number, status, reason, broke=broke))
            if broke:
                self._end(exchange, RequestResults.failed)

    def _end(self, exchange: SimulatedExchange, record: Record | None) -> None:
        """The request has ended: with an answer (None), or as `record` says."""
        del self._exchanges[exchange.id]
        exchange.ended = True
        now_ms = self.calendar.now_ms
        if record is None:
            assert exchange.first_ms is not None
            exchange.results.finished(exchange.prompt, exchange.arrived_ms, exchange.first_ms, now_ms)
        else:
            record(exchange.results, exchange.prompt, now_ms)
        self._world.request_ended(exchange, answered=record is None)
