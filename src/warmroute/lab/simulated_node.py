"""A simulated node, the conditions around it, and the virtual clock."""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from warmroute.config.nodes import Role
from warmroute.core.node import Node
from warmroute.lab.engine.blocks import KvEventSink, SharedStore, SharedStoreConfig
from warmroute.lab.engine.core import EngineCore
from warmroute.lab.engine.timing import Profile
from warmroute.lab.engine.values import EngineConfig, EngineStats
from warmroute.lab.workloads.workload_prompt import Form

if TYPE_CHECKING:
    from warmroute.lab.request_flow import SimulatedTry


# The conditions of a simulation: network delays, and polls and KV events that are late or lost.


class Island(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A group of nodes that share a network, as seen from the router."""

    round_trip_ms: float = 0.5
    """Network round trip without the engine's time. The default is that of one data centre."""

    @property
    def one_way_ms(self) -> float:
        return self.round_trip_ms / 2


class Conditions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    seed: int = 1
    form: Form = "chat"
    """How clients send prompts, which decides what the router can read of them."""
    tenants: int | None = None
    """Number of tenants that send the requests in turn and share no knowledge of caches. None: the workload's own
    tenants, who share all of it; so does 0, but the report says so."""
    streams: bool = True
    """Whether answers are streamed. If not, a client gets the whole answer at its end, and the engines report how long
    their prefills take."""
    islands: dict[str, Island] = {}
    """Islands by name. An island that is not listed has the defaults of `Island`."""
    router_knows_islands: bool = True
    """Whether the router knows which island each node is on. False: all nodes look like one island."""
    poll_interval_s: float = 1.0
    """Time between two polls of a node's health and metrics."""
    poll_jitter: float = 0.2
    """Random variation of the interval: interval × (1 ± jitter), as in engines/node_watcher.py."""
    poll_lag_ms: float = 0.0
    """Age of a node's metrics when they arrive, in addition to the network delay."""
    poll_loss: float = 0.0
    """Fraction of polls whose response is lost."""
    stale_s: float = 5.0
    """Age after which the router ignores a node's metrics."""
    kv_lag_ms: float = 2.0
    """Delay of KV events, in addition to the network delay."""
    kv_loss: float = 0.0
    """Fraction of KV event batches that are lost. The receiver can see the gap in their sequence numbers."""
    attempts: int = 0
    """Maximum number of nodes tried for one request; 0: every eligible node."""
    first_byte_timeout_s: float = 600.0
    """How long the router waits for a node that does not answer."""
    replicas: int = 1
    """Number of routers. Each request goes to one of them at random."""
    shares: bool = True
    """Whether the routers tell each other what they do."""
    sync_lag_ms: float = 20.0
    """Delay of a message between two routers."""
    sync_loss: float = 0.0
    """Fraction of messages between two routers that are lost."""
    partitions: tuple[tuple[float, float], ...] = ()
    """Times in seconds, from and to, in which no message between routers arrives."""
    kv_gigabytes_per_s: float = 10.0
    """Bandwidth of KV transfers from one prefill node, shared by all of them."""
    kv_latency_ms: float = 5.0
    """Time of a KV transfer in addition to that of its tokens."""
    kv_stores: tuple[SharedStoreConfig, ...] = ()
    """Stores that nodes with this `kv_store` share."""
    refused_pause_ms: float = 1000.0
    """How long a closed-loop client waits after a rejected request: the router's Retry-After."""

    def island(self, name: str) -> Island:
        return self.islands.get(name) or Island()


class NodeSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The configuration of one simulated node."""

    name: str
    profile: Profile
    island: str = "local"
    role: Role = "mixed"
    kv_connector: bool = False
    """Whether a mixed node transfers KV cache, too."""
    kv_store: str = ""
    """Name of its shared KV store."""
    blocks: int | None = None
    """KV cache blocks; None for what fits on the profile's GPUs."""
    block_size: int = 16
    cpu_blocks: int = 0
    by_priority: bool = False
    max_inflight: int = 0
    """Requests that the router sends to the node at the same time; 0: any number."""
    usd_per_hour: float = 0.0
    adapters: tuple[str, ...] = ()
    """LoRA adapters that the node serves in addition to the model."""
    max_loras: int = 1
    lora_load_ms: float = 200.0
    misreports: tuple[Literal["cache", "usage", "load"], ...] = ()
    """What the node reports wrongly. cache: it sends KV events but recomputes every prompt. usage: its responses claim
    that the whole prompt was cached. load: its metrics are those of an idle node."""

    def engine(self) -> EngineConfig:
        profile = self.profile
        return EngineConfig(
            num_blocks=self.blocks or profile.num_blocks(self.block_size),
            block_size=self.block_size,
            max_num_batched_tokens=profile.max_num_batched_tokens,
            max_num_seqs=profile.max_num_seqs,
            cpu_blocks=self.cpu_blocks,
            by_priority=self.by_priority,
            max_loras=self.max_loras,
            lora_load_ms=self.lora_load_ms,
            reuse_cached_blocks="cache" not in self.misreports,
        )


# A simulated node: a fake engine, its node in the router's fleet, and its measurements.


class ProcessState(enum.Enum):
    SERVING = "serving"
    HANGING = "hanging"  # accepts connections and answers nothing
    DEAD = "dead"  # refuses connections


class EngineTotals(NamedTuple):
    """Sums over all incarnations of one node's engine."""

    busy_ms: float = 0.0
    queried_tokens: int = 0
    hit_tokens: int = 0
    prefilled_tokens: int = 0
    preemptions: int = 0


class SimulatedNode:
    def __init__(self, spec: NodeSpec, views: tuple[Node, ...], one_way_ms: float, now_ms: float) -> None:
        self.spec = spec
        self.views = views
        """The node in the fleet of each router."""
        self.node = views[0]
        self.one_way_ms = one_way_ms
        self.joined_ms = now_ms
        # Of the current incarnation:
        self.incarnation = 0
        self.state = ProcessState.DEAD
        self.engine: EngineCore
        self.next_event_sequence = 0
        self.wakes_at_ms = math.inf
        self.tries: dict[str, SimulatedTry] = {}
        """Requests in its engine, by id."""
        self.link_free_ms = 0.0
        """When the last KV transfer from this node ends."""
        # Measured over all incarnations:
        self.incarnation_stats: list[EngineStats] = []
        self.requests = 0
        self.held_ms = 0.0
        """Time in the fleet until it left."""
        self.inflight_ms = 0.0
        """The router's requests in flight on this node, integrated over time."""
        self._inflight = 0
        self._changed_ms = now_ms
        self._discarded = EngineTotals()

    def start(self, kv_events: KvEventSink | None, store: SharedStore | None = None) -> None:
        """Start a new process with an empty cache."""
        self.incarnation += 1
        self.state = ProcessState.SERVING
        self.engine = EngineCore(self.spec.engine(), self.spec.profile.timing, kv_events, store)
        self.incarnation_stats.append(self.engine.stats)
        self.next_event_sequence = 0
        self.wakes_at_ms = math.inf
        self.tries = {}

    def stop(self, state: ProcessState) -> list[SimulatedTry]:
        """Stop the process, and return the requests that it had."""
        tries = list(self.tries.values())
        self.state, self.wakes_at_ms, self.tries = state, math.inf, {}
        return tries

    @property
    def inflight(self) -> int:
        """Requests of all routers on the node."""
        return sum([node.own_inflight for node in self.views])

    def account_inflight(self, now_ms: float) -> None:
        """Update `inflight_ms`. Call this after the router opened or closed a ticket on this node."""
        self.inflight_ms += self._inflight * (now_ms - self._changed_ms)
        self._inflight = self.inflight
        self._changed_ms = now_ms

    def measure_from(self, now_ms: float) -> None:
        """Discard what was measured so far."""
        self.account_inflight(now_ms)
        self.inflight_ms = self.held_ms = 0.0
        self.requests = 0
        self.joined_ms = now_ms
        self._discarded = self._totals()

    @property
    def totals(self) -> EngineTotals:
        """What its engine did since `measure_from`."""
        return EngineTotals._make(now - before for now, before in zip(self._totals(), self._discarded, strict=True))

    def _totals(self) -> EngineTotals:
        all_stats = self.incarnation_stats
        return EngineTotals(
            busy_ms=sum(stats.busy_ms for stats in all_stats),
            queried_tokens=sum(stats.prefix_cache_queries for stats in all_stats),
            hit_tokens=sum(stats.prefix_cache_hits + stats.reloaded_tokens for stats in all_stats),
            prefilled_tokens=sum(stats.prompt_tokens_computed for stats in all_stats),
            preemptions=sum(stats.preemptions for stats in all_stats),
        )

    def record_departure(self, now_ms: float) -> None:
        self.held_ms += now_ms - self.joined_ms
        self.joined_ms = now_ms


# The virtual clock: a calendar of callbacks, each with the time at which it runs.
#
# Callbacks due at the same time run in the order in which they were scheduled. Engine steps run last: a request that
# arrives exactly when a step ends takes part in the next step.

_FIRST, _LAST = 0, 1


class Calendar:
    def __init__(self) -> None:
        self.now_ms = 0.0
        self._count = 0
        self._heap: list[tuple[float, int, int, Callable[..., object], tuple[Any, ...]]] = []

    @property
    def now_s(self) -> float:
        return self.now_ms / 1000.0

    def at(self, at_ms: float, do: Callable[..., object], *args: Any) -> None:
        """Schedule `do(*args)`. Raises ValueError for a time in the past."""
        self._schedule(at_ms, _FIRST, do, args)

    def at_end_of(self, at_ms: float, do: Callable[..., object], *args: Any) -> None:
        """Schedule `do(*args)` after all other callbacks of the same time."""
        self._schedule(at_ms, _LAST, do, args)

    def after(self, delay_ms: float, do: Callable[..., object], *args: Any) -> None:
        self._schedule(self.now_ms + delay_ms, _FIRST, do, args)

    def _schedule(self, at_ms: float, order: int, do: Callable[..., object], args: tuple[Any, ...]) -> None:
        if at_ms < self.now_ms:
            raise ValueError(f"cannot schedule at {at_ms} ms: the clock is at {self.now_ms} ms")
        self._count += 1
        heapq.heappush(self._heap, (at_ms, order, self._count, do, args))

    def run(self, wanted: Callable[[], bool] = lambda: True, until_ms: float = inf) -> None:
        """Run the scheduled callbacks, up to and including `until_ms`, while `wanted()` is true."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= until_ms and wanted():
            at_ms, _, _, do, args = pop(heap)
            self.now_ms = at_ms
            do(*args)
        if until_ms < inf:
            self.now_ms = max(self.now_ms, until_ms)
