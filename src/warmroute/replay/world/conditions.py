"""The conditions of a simulated world: networks, polls and events that are late or lost. One default for each value."""

from __future__ import annotations

from typing import Literal

import msgspec

from warmroute.fake_engine.core.config import EngineConfig
from warmroute.fake_engine.profiles import Profile
from warmroute.replay.workloads.text import Form


class Island(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Nodes that share a network, seen from the router."""

    round_trip_ms: float = 0.5
    """There and back, without the engine's time. The default is one data centre."""

    @property
    def one_way_ms(self) -> float:
        return self.round_trip_ms / 2


class Conditions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    seed: int = 1
    form: Form = "chat"
    """How clients send their prompts: what the router can see of them."""
    islands: dict[str, Island] = {}
    """Islands by name; one that is not here is as `Island()`."""
    told_islands: bool = True
    """Whether the router knows which island a node stands on."""
    poll_interval_s: float = 1.0
    """Time between two looks at a node's health and metrics."""
    poll_jitter: float = 0.2
    """A pause is the interval × 1 ± this, by chance, as in engines/watch.py."""
    poll_lag_ms: float = 0.0
    """How old a node's metrics are when they arrive, beyond the way back."""
    poll_loss: float = 0.0
    """Share of polls whose answer never arrives."""
    stale_s: float = 5.0
    """Age after which a node's metrics no longer count."""
    kv_lag_ms: float = 2.0
    """From a KV event to its listener, beyond the way back."""
    kv_loss: float = 0.0
    """Share of KV event batches that never arrive. Their sequence numbers are used up: the listener can see the gap."""
    attempts: int = 3
    """Nodes tried for one request."""
    first_byte_timeout_s: float = 600.0
    """How long the router waits for a node that hangs."""
    refused_pause_ms: float = 1000.0
    """How long a client of a closed loop waits after a refusal: the router's Retry-After."""

    def island(self, name: str) -> Island:
        return self.islands.get(name) or Island()


class NodeSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One simulated node."""

    name: str
    profile: Profile
    island: str = "local"
    blocks: int | None = None
    """KV blocks; None for what the profile's GPUs hold."""
    block_size: int = 16
    cpu_blocks: int = 0
    by_priority: bool = False
    usd_per_hour: float = 0.0
    adapters: tuple[str, ...] = ()
    """LoRA adapters that it serves beside the model."""
    max_loras: int = 1
    lora_load_ms: float = 200.0
    lies: tuple[Literal["cache", "usage", "load"], ...] = ()
    """What it does not tell the truth about. cache: it tells of blocks and computes everything anew; usage: answers say
    that all of the prompt was cached; load: its metrics are those of an idle node."""

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
            reuses="cache" not in self.lies,
        )
