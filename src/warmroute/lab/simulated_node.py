"""The conditions of a simulation: network delays, and polls and KV events that are late or lost."""

from __future__ import annotations

from typing import Literal

import msgspec

from warmroute.config.node_settings import Role
from warmroute.fake_engine.core.engine_config import EngineConfig
from warmroute.fake_engine.core.shared_store import SharedStoreConfig
from warmroute.fake_engine.profiles import Profile
from warmroute.replay.workloads.prompt_text import Form


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
