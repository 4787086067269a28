"""A simulated fleet in virtual time: nodes, clients and faults around the production router core."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random
from typing import Any

import msgspec

from warmroute.config import Config, Health, NodeConfig
from warmroute.core.messages import CLOSED
from warmroute.core.policy import Policy
from warmroute.core.queue_order import QueueOrder
from warmroute.lab.engine.blocks import KvEvent, KvEventSink, SharedStore
from warmroute.lab.engine.values import EngineOutput, EngineRequest, Finished, FirstToken
from warmroute.lab.request_flow import MODEL, RequestResults, SimulatedExchange
from warmroute.lab.simulated_cluster import SimulatedCluster
from warmroute.lab.simulated_node import Calendar, Conditions, NodeSpec, ProcessState, SimulatedNode
from warmroute.lab.simulated_router import PolicyListener, Replica
from warmroute.lab.workloads.workload_prompt import WorkloadPrompt

# The simulated clients.
#
#     open      Requests are sent at the workload's arrival times, whatever has been answered.
#     turns     The same, but a turn of a conversation waits for the answer of the turn before it and for a think time.
#               A trace's turn is sent at its own time or then, whichever is later. Agents and chats do this, and it
#               is the default: in a workload without conversations it is the open loop.
#     clients   A number of clients; each sends its next request when the last one is answered.
#
# A generator's conversations always wait: their next turn contains the answer.


class Clients:
    """Sends at most `limit` requests, none after `until_ms`. `concurrency`: number of clients that send one request
    after the other; None: the workload's arrival times. `waits`: whether turns of a trace wait for answers."""

    def __init__(
        self,
        world: World,
        prompts: Iterator[WorkloadPrompt],
        concurrency: int | None,
        limit: int | None,
        *,
        waits: bool = True,
    ) -> None:
        self._world = world
        self._prompts = prompts
        self._concurrency = concurrency
        self._remaining = limit if limit is not None else -1
        self._waits = waits and concurrency is None
        self._unanswered: dict[int, list[WorkloadPrompt]] = {}
        """Requests of a trace that have arrived and not ended, by number, and the turns that wait for them."""
        self.turns = 0
        """Requests that are a further turn of a conversation."""
        self.until_ms: float | None = None
        self.scheduled = 0
        """Requests in the calendar that are not yet sent."""

    @property
    def closed(self) -> bool:
        """Whether clients wait for answers: they are numbered, or the workload has conversations."""
        return self._concurrency is not None or self.turns > 0

    def limit_to(self, limit: int | None) -> None:
        """Send at most this many requests from now on."""
        self._remaining = limit if limit is not None else -1

    def start(self) -> None:
        for _ in range(self._concurrency or 1):
            self._send_next()

    def request_ended(self, prompt: WorkloadPrompt, answered: bool) -> None:
        """Send the conversation's next turn, or the client's next request."""
        world = self._world
        for turn in self._unanswered.pop(prompt.number, ()):
            self._schedule(world.calendar.now_ms + turn.think_ms, turn, arrival=False, counted=True)
        follow_up = prompt.next_turn() if answered and prompt.next_turn is not None else None
        if follow_up is not None:
            self.turns += 1
            self._schedule(world.calendar.now_ms + follow_up.think_ms, follow_up.prompt, arrival=False)
        elif self._concurrency is not None:
            if answered:
                self._send_next()
            else:
                self.scheduled += 1
                world.calendar.after(world.conditions.refused_pause_ms, self._retry_after_refusal)

    def _retry_after_refusal(self) -> None:
        self.scheduled -= 1
        self._send_next()

    def _send_next(self) -> None:
        if self._remaining == 0:
            return
        prompt = next(self._prompts, None)
        if prompt is not None:
            now_ms = self._world.calendar.now_ms
            at_ms = max(now_ms, prompt.at_ms) if self._concurrency is None else now_ms
            self._schedule(at_ms, prompt, arrival=True)

    def _schedule(self, at_ms: float, prompt: WorkloadPrompt, arrival: bool, *, counted: bool = False) -> None:
        """`counted`: the request counts towards the limit already."""
        if self.until_ms is None or at_ms < self.until_ms:
            self.scheduled += 1
            self._world.calendar.at(at_ms, self._send, prompt, arrival, counted)

    def _send(self, prompt: WorkloadPrompt, arrival: bool, counted: bool) -> None:
        self.scheduled -= 1
        if not counted:
            if self._remaining == 0:
                return
            self._remaining -= 1
        if arrival and self._concurrency is None:
            self._send_next()
            if prompt.number >= 0 and self._waits:
                self._unanswered[prompt.number] = []
                if prompt.follows >= 0:
                    self.turns += 1
                    if (waiting := self._unanswered.get(prompt.follows)) is not None:
                        waiting.append(prompt)
                        return
        self._world.arrive(prompt)


# A simulated fleet in virtual time: fake engines behind production's core.
#
# This file holds the fleet, its faults and the clock. request_flow.py holds the life of a request. Every event touches
# one node; only the router's own decision looks at the whole fleet.

DEFAULT_ISLAND = "local"
"""The island of every node if the router does not know islands."""


class World:
    def __init__(
        self,
        specs: Iterable[NodeSpec],
        conditions: Conditions | None = None,
        config: Config | None = None,
        *,
        policy: Policy | None = None,
        listener: PolicyListener | None = None,
        health: Health | None = None,
        more_peers: Sequence[Any] = (),
        queue_order: QueueOrder | None = None,
    ) -> None:
        """`config` is the router's configuration. `policy` replaces the policy that it names. `more_peers` has an entry
        for each further router: its policy and listener, or None. `queue_order`: requests of any policy wait in the
        admission queue, in this order; None if only those of `price` do."""
        self.conditions = conditions = conditions or Conditions()
        self.calendar = Calendar()
        self.results = RequestResults()
        health, config = health or Health(), config or Config()
        self.config = config
        self.is_own_policy = policy is None
        """Whether the router has a policy of its own, and not another router's."""
        self.nodes: dict[str, SimulatedNode] = {}
        """The fleet's nodes by name."""
        self.numbered: dict[int, SimulatedNode] = {}
        """The nodes of the fleet and those that have left, by the number that every router gives them."""
        self.stores: dict[str, SharedStore] = {}
        """Shared KV stores by name."""
        self.departed: list[SimulatedNode] = []
        """Nodes that have left. Their results still count."""
        first = Replica(self, 0, config, health, policy, listener, queue_order)
        more = [Replica(self, 1 + at, config, health, peer, peer, queue_order) for at, peer in enumerate(more_peers)]
        self.replicas = (first, *more)
        """The routers. The attributes below are those of the first one."""
        self.fleet, self.cache_view, self.router = first.fleet, first.cache_view, first.router
        self.admission, self.listener, self.requests = first.admission, first.listener, first.requests
        self.cluster = SimulatedCluster(self) if more and conditions.shares and policy is None else None
        self._replica_random = Random(f"{conditions.seed} replicas")
        self.arrivals = 0
        self.on_arrival: Callable[[WorkloadPrompt], object] | None = None
        """Called with each prompt that reaches a router."""
        self._clients: Clients | None = None
        self._warm_up = -1
        self.is_measuring = True
        """Whether the warm-up is over."""
        self._measured_ms: float | None = None
        self._prefills = 0
        self._prefilling: dict[str, Callable[[], object]] = {}
        """What to call when a prefill is done, by request id."""
        for spec in specs:
            for replica, node in zip(self.replicas, self.add(spec).views, strict=True):
                replica.fleet.check_passed(node, 0.0)

    # The fleet and its faults.

    def add(self, spec: NodeSpec) -> SimulatedNode:
        """Add a node whose engine is up. It gets requests once its first health check has passed."""
        config = NodeConfig(
            url=f"http://{spec.name.replace(' ', '-')}:8000",
            name=spec.name,
            models=(MODEL, *spec.adapters),
            island=spec.island if self.conditions.router_knows_islands else DEFAULT_ISLAND,
            gpu=spec.profile.name,
            usd_per_hour=spec.usd_per_hour,
            role=spec.role,
            max_inflight=spec.max_inflight,
            kv_store=spec.kv_store,
            engine="vllm",
        )
        views = tuple([replica.add(config, spec.adapters) for replica in self.replicas])
        sim = SimulatedNode(spec, views, self.conditions.island(spec.island).one_way_ms, self.calendar.now_ms)
        self.nodes[spec.name] = self.numbered[sim.node.number] = sim
        if spec.kv_connector:
            for replica, node in zip(self.replicas, views, strict=True):
                node.kv_connector = True
                replica.fleet.transfers_changed(node)
        sim.start(self._kv_event_sink(sim), self._store(sim.spec))
        for replica, node in zip(self.replicas, views, strict=True):
            replica.listener.node_joined(node, spec.block_size, sim.engine.config.num_blocks)
            replica.polls.begin(sim)
        return sim

    def _store(self, spec: NodeSpec) -> SharedStore | None:
        """Return the KV store that the node shares with others."""
        config = next((one for one in self.conditions.kv_stores if one.name == spec.kv_store), None)
        if config is None:
            return None
        store = self.stores.get(config.name)
        if store is None:
            store = SharedStore(config, spec.block_size, spec.profile.kv_bytes_per_token)
            self.stores[config.name] = store
        return store

    def _kv_event_sink(self, sim: SimulatedNode) -> KvEventSink | None:
        """Return where the node's next incarnation publishes its events: to every router that follows them."""
        sinks = [replica.feed.sink(sim, replica.index) for replica in self.replicas if replica.feed is not None]
        if len(sinks) < 2:
            return sinks[0] if sinks else None

        def publish(at_ms: float, events: list[KvEvent]) -> None:
            for sink in sinks:
                sink(at_ms, events)

        return publish

    def provision(self, spec: NodeSpec, delay_s: float) -> None:
        """Add a node after its provisioning delay."""
        self.calendar.after(delay_s * 1000.0, self.add, spec)

    def drain(self, name: str) -> None:
        """Send the node no new requests, and remove it when the running ones have finished."""
        for replica in self.replicas:
            replica.fleet.drain(name)
        self._leave_when_empty(self.nodes[name])

    def _leave_when_empty(self, sim: SimulatedNode) -> None:
        if sim.inflight:
            self.calendar.after(100.0, self._leave_when_empty, sim)
        elif sim.node.name in self.nodes:
            self.remove(sim.node.name)

    def remove(self, name: str) -> None:
        """Remove a node at once. Its running requests finish, except those without a first token: they move."""
        sim = self.nodes.pop(name)
        for replica in self.replicas:
            replica.fleet.remove(name)
            replica.requests.fleet_changed()
        sim.record_departure(self.calendar.now_ms)
        self.departed.append(sim)
        for replica, node in zip(self.replicas, sim.views, strict=True):
            replica.listener.node_left(node)

    def fail(self, name: str) -> None:
        """Kill the node's process: its requests and its cache are lost."""
        one_way_ms = self.nodes[name].one_way_ms
        for one in self.nodes[name].stop(ProcessState.DEAD):
            self.calendar.after(one_way_ms, one.flow.failed, one, CLOSED, "the node died")

    def hang(self, name: str) -> None:
        """Let the node accept connections and answer nothing."""
        for one in self.nodes[name].stop(ProcessState.HANGING):
            one.flow.time_out_later(one)

    def slow(self, name: str, times: float) -> None:
        """Make everything on the node take `times` as long from now on."""
        sim = self.nodes[name]
        sim.engine.change_timing(sim.spec.profile.timing.slowed_by(times), self.calendar.now_ms)
        self.arm(sim)

    def restart(self, name: str) -> None:
        """Start a new process with an empty cache in the node's place."""
        sim = self.nodes[name]
        if sim.state is ProcessState.SERVING:
            self.fail(name)
        sim.start(self._kv_event_sink(sim), self._store(sim.spec))

    # Time.

    def run(
        self,
        prompts: Iterator[WorkloadPrompt],
        *,
        concurrency: int | None = None,
        limit: int | None = None,
        duration_s: float | None = None,
        warm_up: int = 0,
        warm_up_s: float = 0.0,
        waits: bool = True,
    ) -> None:
        """Run until every request of the workload has ended. The first `warm_up` requests are not measured, or those of
        the first `warm_up_s`; then `limit` requests are."""
        self._warm_up = self.arrivals + warm_up if warm_up else -1
        self._measured_ms = None if duration_s is None else duration_s * 1000.0
        self.is_measuring = not warm_up and not warm_up_s
        first_limit = limit + warm_up if limit is not None and not warm_up_s else None
        clients = self._clients = Clients(self, prompts, concurrency, first_limit, waits=waits)
        if self.is_measuring:
            self._end_measuring_later()
        elif warm_up_s:
            self.calendar.after(1000.0 * warm_up_s, self._end_warm_up, limit)
        clients.start()
        self.calendar.run(lambda: self.inflight > 0 or clients.scheduled > 0)

    def measure_from_now(self) -> None:
        """End the warm-up: requests that arrived before now are not measured."""
        self.is_measuring = True
        ceiling_ms = self.results.ceiling_ms
        self.results = RequestResults(self.calendar.now_ms)
        self.results.ceiling_ms = ceiling_ms
        for sim in self.nodes.values():
            sim.measure_from(self.calendar.now_ms)
        self._end_measuring_later()

    def _end_warm_up(self, limit: int | None) -> None:
        assert self._clients is not None
        self._clients.limit_to(limit)
        self.measure_from_now()

    def _end_measuring_later(self) -> None:
        if self._clients is not None and self._measured_ms is not None:
            self._clients.until_ms = self.calendar.now_ms + self._measured_ms

    # Requests.

    def arrive(self, prompt: WorkloadPrompt) -> SimulatedExchange | None:
        """A request reaches the router. Return None where it is rejected at once."""
        if self.arrivals == self._warm_up:
            self.measure_from_now()
        self.arrivals += 1
        if self.on_arrival is not None:
            self.on_arrival(prompt)
        if len(self.replicas) == 1:
            return self.requests.arrive(prompt)
        return self._replica_random.choice(self.replicas).requests.arrive(prompt)

    @property
    def loop(self) -> str:
        """`closed` if clients waited for answers before they sent their next request, else `open`."""
        return "closed" if self._clients is not None and self._clients.closed else "open"

    @property
    def inflight(self) -> int:
        """Requests that have arrived and not ended."""
        return sum(replica.requests.inflight for replica in self.replicas)

    def request_sent(self, exchange: SimulatedExchange, sim: SimulatedNode) -> None:
        """A router sent a request to a node. Experiments override this."""

    def request_ended(self, exchange: SimulatedExchange, answered: bool) -> None:
        if self._clients is not None:
            self._clients.request_ended(exchange.prompt, answered=answered)

    # Engines.

    def advance(self, sim: SimulatedNode) -> None:
        """Run the engine up to now, and send its outputs back over the network."""
        outputs = sim.engine.advance(self.calendar.now_ms)
        if outputs:
            one_way_ms, at, now_ms = sim.one_way_ms, self.calendar.at, self.calendar.now_ms
            tries = sim.tries
            for output in outputs:
                # A waiting request that shares a block which decoding has just filled starts earlier than the engine
                # could foresee: its output may be older than now.
                at_ms = max(output.at_ms + one_way_ms, now_ms)
                if output.request_id not in tries:
                    self._prefilled(output)
                elif isinstance(output, FirstToken):
                    one, cached = tries[output.request_id], output.cached_tokens
                    at(at_ms, one.flow.first_token, one, cached)
                elif isinstance(output, Finished):
                    one = tries.pop(output.request_id)
                    at(at_ms, one.flow.answered, one)
        self.arm(sim)

    def prefill(self, sim: SimulatedNode, prompt: WorkloadPrompt, tokens: int, then: Callable[[], object]) -> None:
        """Prefill the first `tokens` of a prompt on a node, outside of any client's request."""
        self._prefills += 1
        request_id = f"prefill {self._prefills}"
        content = prompt.blocks.content(sim.spec.block_size)
        self._prefilling[request_id] = then
        sim.engine.submit(EngineRequest(request_id, tokens, 1, content), self.calendar.now_ms)
        self.arm(sim)

    def _prefilled(self, output: EngineOutput) -> None:
        if isinstance(output, Finished):
            then = self._prefilling.pop(output.request_id, None)
            if then is not None:
                self.calendar.at(max(output.at_ms, self.calendar.now_ms), then)

    def arm(self, sim: SimulatedNode) -> None:
        """Schedule the engine's next event."""
        at_ms = sim.engine.next_event_at()
        if at_ms is None:
            sim.wakes_at_ms = math.inf
        elif at_ms != sim.wakes_at_ms:
            sim.wakes_at_ms = at_ms
            self.calendar.at_end_of(max(at_ms, self.calendar.now_ms), self._wake, sim, at_ms)

    def _wake(self, sim: SimulatedNode, at_ms: float) -> None:
        if sim.wakes_at_ms == at_ms:
            sim.wakes_at_ms = -1.0
            self.advance(sim)


# The fault schedule: failures and fleet changes at given times of a run.
#
# Each is one line: TIME_S ACTION NODE [NUMBER].
#
#     60 fail node-3             the process dies
#     60 hang node-2             the process accepts requests and answers nothing
#     60 slow node-2 5           everything it does takes 5 times as long
#     90 restart node-3          a new process with an empty cache
#     120 drain node-1           no new requests; the node leaves when the running ones have finished
#     120 remove node-1          the node leaves at once
#     30 provision node-9 120    a node like the first one is requested, and joins 120 s later

ACTIONS = ("fail", "hang", "restart", "drain", "remove", "slow", "provision")


class BadFault(ValueError):
    """What is wrong with a line of the fault schedule."""


class ScheduledFault(msgspec.Struct, frozen=True):
    at_s: float
    action: str
    node: str
    number: float = 0.0
    """The number behind the action: the delay in seconds for `provision`, the factor for `slow`."""


def parse_fault(line: str) -> ScheduledFault:
    words = line.split()
    try:
        if not 3 <= len(words) <= 4 or words[1] not in ACTIONS:
            raise ValueError
        at_s, number = float(words[0]), float(words[3]) if len(words) == 4 else 0.0
        if not (math.isfinite(at_s) and math.isfinite(number) and at_s >= 0 and number >= 0):
            raise ValueError
        if words[1] == "slow" and not number:
            raise ValueError
        return ScheduledFault(at_s, words[1], words[2], number)
    except ValueError:
        raise BadFault(f"{line!r} is not like '60 fail node-3'; actions: {', '.join(ACTIONS)}") from None


def schedule_fault(world: World, fault: ScheduledFault, template: NodeSpec) -> None:
    """Put the fault into the world's calendar. A provisioned node is a copy of `template`."""
    at_ms = fault.at_s * 1000.0
    if fault.action == "provision":
        spec = msgspec.structs.replace(template, name=fault.node)
        world.calendar.at(at_ms, world.provision, spec, fault.number)
    elif fault.node not in world.nodes:
        raise BadFault(f"there is no node {fault.node}; the nodes are {', '.join(list(world.nodes)[:8])}…")
    elif fault.action == "slow":
        world.calendar.at(at_ms, world.slow, fault.node, fault.number)
    else:
        world.calendar.at(at_ms, getattr(world, fault.action), fault.node)
